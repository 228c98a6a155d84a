"""Passes of targets whose states cannot be cut back: each row's window, its root and a chain of draft tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from headstart.inference.core.tree import Tree


def first_path(tree: Tree) -> Tree:
    """The chain that begins at each row's root and follows the first child of each node."""
    chains = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        chain, last = tokens[:1], 0
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node and parent == last:
                chain.append(token)
                last = node
        chains.append(chain)
    longest = max(map(len, chains))
    rows = [[*chain, *[0] * (longest - len(chain))] for chain in chains]
    parents = [[*range(-1, len(chain) - 1), *[-1] * (longest - len(chain))] for chain in chains]
    made = torch.tensor([rows, parents]).to(tree.tokens.device, non_blocking=True)
    levels = tree.deepest if tree.levels is None else tree.levels
    return Tree(made[0], made[1], deepest=max(longest - 1, 1), levels=levels)


def after_windows(
    windows: Sequence[list[int]], tokens: Int[Tensor, "rows nodes"]
) -> tuple[Int[Tensor, "rows width"], Int[Tensor, "rows nodes"]]:
    """Each row's window with its tokens after it, filled up on the right, and the places of these tokens."""
    nodes, longest = tokens.shape[1], max(map(len, windows))
    places = torch.tensor([[*range(len(window), len(window) + nodes)] for window in windows]).to(tokens.device)
    filled = [[*window, *[0] * (longest + nodes - len(window))] for window in windows]
    return torch.tensor(filled).to(tokens.device).scatter_(1, places, tokens), places
