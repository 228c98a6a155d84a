"""The best draft tree of a fixed shape, found from how often the head's guesses are correct (Medusa, section 2.3.3)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

Path = tuple[int, ...]  # a node, by the rank of the guess at each level from the root; rank 0 is the likeliest guess


@dataclass(frozen=True)
class StaticTree:
    """Draft nodes, best first: the first n form the best tree of n draft tokens."""

    paths: tuple[Path, ...]
    chances: tuple[float, ...]  # for each node, the chance that the target accepts the path to it

    @classmethod
    def from_config(cls, found: dict[str, Any]) -> "StaticTree":
        return cls(tuple(tuple(path) for path in found["paths"]), tuple(found["chances"]))

    def to_config(self) -> dict[str, Any]:
        return {"paths": [list(path) for path in self.paths], "chances": [round(chance, 5) for chance in self.chances]}

    def best(self, nodes: int) -> tuple[Path, ...]:
        """The best tree of this many nodes; raises ValueError if the search stopped at fewer."""
        if nodes > len(self.paths):
            raise ValueError(
                f"decode.nodes: {nodes} given, 1 to {len(self.paths)} is allowed, the size of the head's tree"
            )
        return self.paths[:nodes]

    def expected(self, nodes: int) -> float:
        """Expected acceptance length of the best tree of this many nodes, bonus token included."""
        return 1 + sum(self.chances[:nodes])


def search_tree(accuracies: Float[Tensor, "levels ranks"] | Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree with the largest expected acceptance length.

    accuracies[level][rank] is the chance that the guess of this rank at this level is correct, given a correct prefix.
    The expected acceptance length is 1 plus the sum of the nodes' chances. No node's chance exceeds that of its parent
    or of an earlier sibling, so repeatedly adding the best candidate node is optimal for every size.
    """
    # A higher-ranked guess is at least as good; counts that say otherwise do so by chance.
    levels = [sorted(map(float, level), reverse=True) for level in accuracies]
    paths: list[Path] = []
    chances: list[float] = []
    # A heap of (minus the node's chance, its path, its parent's chance).
    candidates: list[tuple[float, Path, float]] = [(-levels[0][0], (0,), 1.0)]
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
