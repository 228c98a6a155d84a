"""From a tree and the target's choice at every node to the accepted path: pure, and the same for every drafter."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from inference.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """The nodes whose tokens the target would have chosen, root first, and the token it chooses after them."""

    path: list[int]
    tokens: list[int]  # of the path without the root, then the bonus token


def accept(tree: Tree, choices: Int[Tensor, " nodes"]) -> Accepted:
    """Follow the target's own choices from the root; the first one that was not drafted is the bonus token."""
    # One transfer for all three: the only host synchronisation of a decode step.
    tokens, parents, chosen = torch.stack([tree.tokens, tree.parents, choices]).tolist()
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    while (node := child.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(node)
    return Accepted(path, [chosen[node] for node in path])
