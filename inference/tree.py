"""A tree of drafted tokens as plain data, and what attention and verification need of it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Tokens and parents; node 0 is the root, the last token that is certain, and parents precede their children."""

    tokens: Int[Tensor, " nodes"]
    parents: Int[Tensor, " nodes"]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root_only(cls, token: int, device: torch.device | str = "cpu") -> "Tree":
        return cls(torch.tensor([token], device=device), torch.tensor([-1], device=device))

    @cached_property
    def ancestors(self) -> Bool[Tensor, "nodes nodes"]:
        """ancestors[i, j]: may node i attend to node j? Itself and its ancestors only."""
        return ancestor_mask(self.parents)

    @cached_property
    def depths(self) -> Int[Tensor, " nodes"]:
        """Edges from the root."""
        return self.ancestors.sum(-1) - 1


def ancestor_mask(parents: Int[Tensor, " nodes"]) -> Bool[Tensor, "nodes nodes"]:
    """mask[i, j]: is j node i or one of its ancestors? The root's parent is -1.

    By squaring: one step up, then two, four, ... which takes log2(depth) small products and no synchronisation.
    """
    nodes = len(parents)
    columns = torch.arange(nodes, device=parents.device)
    reach = ((parents[:, None] == columns) | (columns[:, None] == columns)).float()
    for _ in range(max(nodes - 1, 1).bit_length()):
        reach = (reach @ reach).clamp(max=1)
    return reach > 0
