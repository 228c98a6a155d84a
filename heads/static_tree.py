"""The best tree of one shape for every step, from how often guesses of each rank are right (Medusa, section 2.3.3)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

Path = tuple[int, ...]  # which child to take at each step from the root, 0 being the likeliest


@dataclass(frozen=True)
class StaticTree:
    """Nodes in the order of their worth: the first n are the best tree of n nodes."""

    paths: tuple[Path, ...]
    chances: tuple[float, ...]  # that the target goes there

    @classmethod
    def from_config(cls, found: dict[str, Any]) -> "StaticTree":
        return cls(tuple(tuple(path) for path in found["paths"]), tuple(found["chances"]))

    def to_config(self) -> dict[str, Any]:
        return {"paths": [list(path) for path in self.paths], "chances": [round(chance, 5) for chance in self.chances]}

    def best(self, nodes: int) -> tuple[Path, ...]:
        """Raises ValueError where so many were never searched."""
        if nodes > len(self.paths):
            raise ValueError(f"decode.nodes: {nodes} given, 1 to the {len(self.paths)} of the head's tree is allowed")
        return self.paths[:nodes]

    def expected(self, nodes: int) -> float:
        """Tokens that a step yields with the best tree of so many nodes, the bonus included."""
        return 1 + sum(self.chances[:nodes])


def search_tree(accuracies: Float[Tensor, "levels ranks"] | Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree of the largest expected accepted length, where accuracies[level][rank] is the chance that a level's
    guess of this rank is right, given that the ones above it were.

    The expected length is the sum of the nodes' chances, and no node's exceeds its parent's or an earlier sibling's; so
    taking the best of all nodes that could come next, again and again, is optimal for every size.
    """
    # What the head ranks higher is not worse; where a count says so, it is by chance.
    levels = [sorted(map(float, level), reverse=True) for level in accuracies]
    paths: list[Path] = []
    chances: list[float] = []
    candidates: list[tuple[float, Path, float]] = [
        (-levels[0][0], (0,), 1.0)
    ]  # minus the chance, the path, its parent's chance
    while candidates and len(paths) < nodes:
        negative, path, above = heapq.heappop(candidates)
        paths.append(path)
        chances.append(-negative)
        level, rank = len(path) - 1, path[-1]
        if rank + 1 < len(levels[level]):
            heapq.heappush(candidates, (-above * levels[level][rank + 1], (*path[:-1], rank + 1), above))
        if level + 1 < len(levels):
            heapq.heappush(candidates, (negative * levels[level + 1][0], (*path, 0), -negative))
    return StaticTree(tuple(paths), tuple(chances))
