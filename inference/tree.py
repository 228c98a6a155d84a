"""Trees of drafted tokens as plain data, one for each row of a batch, and what attention needs of them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from inference.rejection import Proposals


@dataclass(frozen=True)
class Tree:
    """Tokens and parents; node 0 is the root, the last token that is certain, and parents precede their children.

    Rows with fewer nodes than others are filled with nodes that hang nowhere: parent -1, like a root.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    proposals: Proposals | None = None  # how the children were sampled, if drafts are accepted by rejection sampling
    deepest: int | None = None  # no node is farther from the root, if that is known

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and nodes."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @classmethod
    def root_only(cls, roots: Int[Tensor, "batch 1"]) -> "Tree":
        return cls(roots, torch.full_like(roots, -1))

    @cached_property
    def ancestors(self) -> Bool[Tensor, "batch nodes nodes"]:
        """ancestors[b, i, j]: may node i attend to node j? Itself and its ancestors only."""
        return ancestor_mask(self.parents, self.deepest)

    @cached_property
    def depths(self) -> Int[Tensor, "batch nodes"]:
        """Edges from the root."""
        return self.ancestors.sum(-1) - 1


def ancestor_mask(parents: Int[Tensor, "batch nodes"], deepest: int | None = None) -> Bool[Tensor, "batch nodes nodes"]:
    """mask[b, i, j]: is j node i or one of its ancestors? The root's parent is -1; no node is below `deepest`.

    By squaring: one step up, then two, four, ... which takes log2(depth) small products and no synchronisation.
    """
    nodes = parents.shape[-1]
    if nodes == 1:
        return torch.ones(len(parents), 1, 1, dtype=torch.bool, device=parents.device)
    columns = torch.arange(nodes, device=parents.device)
    reach = ((parents.unsqueeze(-1) == columns) | (columns[:, None] == columns)).float()
    for _ in range((min(deepest or nodes, nodes) - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    return reach > 0
