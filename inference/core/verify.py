"""Verification: find the accepted path of a tree from the target's choice at every node. Pure functions."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.inference.core.rejection import rejection_choices
from headstart.inference.core.sampling import BatchSampling, History
from headstart.inference.core.tree import Tree

BONUS = 0  # in place of a draft depth: the token that the target adds after the accepted draft tokens


@dataclass(frozen=True)
class Accepted:
    """The path of one row's tree that the target accepts."""

    path: list[int]  # the accepted nodes, root first
    tokens: list[int]  # the path's tokens without the root, then the bonus token
    drafted: int  # draft tokens that were verified
    choices: list[int] = field(default_factory=list, compare=False)  # the target's, at every node
    nodes: list[int] = field(default_factory=list, compare=False)  # the token of every node, padding included
    parents: list[int] = field(default_factory=list, compare=False)  # one per node; -1 for the root and for padding

    @property
    def depths(self) -> list[int | None]:
        """The draft depth of each token, BONUS for the last; None for all if nothing was drafted."""
        return [*range(1, len(self.tokens)), BONUS] if self.drafted else [None] * len(self.tokens)


def verify(
    tree: Tree,
    logits: Float[Tensor, "batch nodes vocab"],
    roots: Int[Tensor, " batch"],
    sampling: BatchSampling,
    history: History | None,
) -> list[Accepted]:
    """Accept a path of each row's tree, by the acceptance rule that the rows share.

    `logits` are the target's at each node, `roots` the positions of the roots, and `history` covers the tokens before
    them.
    """
    positions = roots.unsqueeze(1) + tree.depths + 1  # where the choices go
    if history is not None:
        history = history.followed_by(tree.tokens, tree.ancestors)
    if sampling.rule == "rejection" and tree.proposals is not None:
        log_p = sampling.warp(logits, history)
        return accept(tree, rejection_choices(log_p, positions, tree.proposals, sampling))
    return accept(tree, sampling.choose(logits, positions, history))


def accept(tree: Tree, choices: Int[Tensor, "batch nodes"]) -> list[Accepted]:
    """Follow each row's choices from the root; the first choice that was not drafted is the bonus token."""
    # One transfer for everything: the only time that a decode step must wait for the device.
    accepted = []
    for tokens, parents, chosen in torch.stack([tree.tokens, tree.parents, choices], dim=1).tolist():
        child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        path = [0]
        while (node := child.get((path[-1], chosen[path[-1]]))) is not None:
            path.append(node)
        taken = [chosen[node] for node in path]
        accepted.append(Accepted(path, taken, count_drafted(parents), chosen, tokens, parents))
    return accepted


def count_drafted(parents: list[int]) -> int:
    """Draft tokens in a row: neither the root nor padding has a parent."""
    return sum(parent >= 0 for parent in parents)
