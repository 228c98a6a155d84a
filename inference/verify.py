"""From a tree and the target's choice at every node to the accepted path: pure, and the same for every drafter."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.rejection import rejection_choices, typical_allowed
from inference.sampling import BatchSampling, History
from inference.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """Of one row: the nodes that are taken, root first, the tokens of the path without the root, then the bonus."""

    path: list[int]
    tokens: list[int]
    drafted: int  # nodes that were judged, the root not counted
    choices: list[int] = field(default_factory=list, compare=False)  # the target's, at every node


def accept(tree: Tree, choices: Int[Tensor, "batch nodes"]) -> list[Accepted]:
    """Follow each row's choices from the root; the first one that was not drafted is the bonus token."""
    # One transfer for all: the only host synchronisation of a decode step.
    accepted = []
    for tokens, parents, chosen in torch.stack([tree.tokens, tree.parents, choices], dim=1).tolist():
        child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        path = [0]
        while (node := child.get((path[-1], chosen[path[-1]]))) is not None:
            path.append(node)
        accepted.append(Accepted(path, [chosen[node] for node in path], count_drafted(parents), chosen))
    return accepted


def accept_allowed(
    tree: Tree, choices: Int[Tensor, "batch nodes"], allowed: Bool[Tensor, "batch nodes"]
) -> list[Accepted]:
    """The deepest path of nodes that are all allowed, the first of equally deep ones; lossy (Medusa, section 2.3.1).

    The bonus token is the target's choice at its end.
    """
    accepted = []
    rows = torch.stack([tree.tokens, tree.parents, choices, allowed.long()], dim=1).tolist()
    for tokens, parents, chosen, may in rows:
        depths = [0] + [-1] * (len(tokens) - 1)  # -1: cut off from the root
        for node, parent in enumerate(parents[1:], start=1):
            if parent >= 0 and may[node] and depths[parent] >= 0:
                depths[node] = depths[parent] + 1
        path = [depths.index(max(depths))]
        while path[0]:
            path.insert(0, parents[path[0]])
        taken = [*(tokens[node] for node in path[1:]), chosen[path[-1]]]
        accepted.append(Accepted(path, taken, count_drafted(parents), chosen))
    return accepted


def count_drafted(parents: list[int]) -> int:
    return sum(parent >= 0 for parent in parents)


def judge(
    tree: Tree,
    logits: Float[Tensor, "batch nodes vocab"],
    positions: Int[Tensor, "batch nodes"],
    sampling: BatchSampling,
    history: History | None,
) -> list[Accepted]:
    """What is accepted of each row's tree, by the rule that the rows agree on; `positions` are the choices' own."""
    if history is not None:
        history = history.followed_by(tree.tokens, tree.ancestors)
    if sampling.rule == "rejection" and tree.proposals is not None:
        log_p = sampling.warp(logits, history)
        return accept(tree, rejection_choices(log_p, positions, tree.proposals, sampling))
    choices = sampling.choose(logits, positions, history)
    if sampling.rule == "typical":
        allowed = typical_allowed(sampling.warp(logits, history), tree.tokens, tree.parents, sampling)
        return accept_allowed(tree, choices, allowed)
    return accept(tree, choices)
