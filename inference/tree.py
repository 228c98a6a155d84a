"""Trees of drafted tokens as plain data, one for each row of a batch, and what attention needs of them."""

from dataclasses import dataclass
from functools import cached_property

import numpy
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from inference.rejection import Proposals

FEW = 64  # nodes of all rows


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
    """mask[b, i, j]: is j node i or one of its ancestors? The root's parent is -1; no node is below `deepest`."""
    if parents.shape[-1] == 1:
        return torch.ones(len(parents), 1, 1, dtype=torch.bool, device=parents.device)
    if parents.device.type == "cpu" and parents.numel() <= FEW:
        return walked_mask(parents)
    return squared_mask(parents, deepest)


def walked_mask(parents: Int[Tensor, "batch nodes"]) -> Bool[Tensor, "batch nodes nodes"]:
    """Node by node on the host, where parents precede their children: of few nodes that takes half the time."""
    mask = numpy.zeros((*parents.shape, parents.shape[-1]), dtype=bool)
    for row, above in zip(mask, parents.tolist(), strict=True):
        for node, parent in enumerate(above):
            if parent >= 0:
                row[node] = row[parent]
            row[node, node] = True
    return torch.from_numpy(mask)


def squared_mask(parents: Int[Tensor, "batch nodes"], deepest: int | None = None) -> Bool[Tensor, "batch nodes nodes"]:
    """By squaring: one step up, then two, four, ... in log2(depth) small products and without synchronisation."""
    nodes = parents.shape[-1]
    columns = torch.arange(nodes, device=parents.device)
    reach = ((parents.unsqueeze(-1) == columns) | (columns[:, None] == columns)).float()
    for _ in range((min(deepest or nodes, nodes) - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    return reach > 0


def take(states: Shaped[Tensor, "batch nodes size"], index: Int[Tensor, "batch chosen"]) -> Tensor:
    """Some nodes of each row."""
    if len(states) == 1:
        return states.index_select(1, index[0])
    return states.gather(1, index.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
