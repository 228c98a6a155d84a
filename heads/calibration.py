"""A head's calibration: multipliers, fitted after training and stored with the head, that turn scores into chances."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from jaxtyping import Float
from pydantic import Field, TypeAdapter
from torch import Tensor

# A node, by the rank of the guess at each level from the root; rank 0 is the likeliest guess.
Path = Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1)]
Factors = Annotated[tuple[Annotated[float, Field(gt=0, strict=True)], ...], Field(min_length=1)]
Weights = Annotated[tuple[Annotated[float, Field(ge=0, strict=True)], ...], Field(min_length=1)]


@dataclass(frozen=True)
class StaticTree:
    """Draft nodes, best first: the first n form the best tree of n draft tokens."""

    paths: Annotated[tuple[Path, ...], Field(min_length=1)]
    # For each node, the chance that the target accepts the path to it.
    chances: tuple[Annotated[float, Field(ge=0, le=1, strict=True)], ...]

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.chances):
            raise ValueError(f"{len(self.paths)} paths have {len(self.chances)} chances; one for each is allowed")

    def to_config(self) -> dict[str, Any]:
        return {"paths": [list(path) for path in self.paths], "chances": [round(chance, 5) for chance in self.chances]}

    def best(self, nodes: int) -> tuple[Path, ...]:
        """The best tree of this many nodes; raises ValueError if the search stopped at fewer."""
        if nodes > len(self.paths):
            allowed = f"1 to {len(self.paths)} is allowed, the size of the head's tree"
            raise ValueError(f"decode.nodes: {nodes} given, {allowed}")
        return self.paths[:nodes]


@dataclass(frozen=True)
class Calibration:
    """Multipliers for a head's scores at each depth, so that their softmax estimates the chance of acceptance.

    A head learns the target's whole distribution, but acceptance depends only on the token that the target chooses.
    With greedy decoding this is the likeliest token, whose chance the head underestimates: `greedy` corrects that. With
    sampling, the scores already contain the Gumbel noise that the target will use, so the only uncertainty left is the
    head's own error; temperature divides that error along with the logits, so `sampled` is fitted for temperature 1 and
    is multiplied by other temperatures.

    `gumbel_weights` scale the Gumbel noise before it is added to log q. Weight 1 is right if the head knows the
    target's distribution. If the target is confident and the head is not, the noise hardly ever changes the target's
    choice but would reorder the head's guesses, so a smaller weight is better.

    In config.json `gumbel_weights` are stored under the key `noise`.
    """

    greedy: Factors = (1.0,)
    sampled: Factors = (1.0,)
    gumbel_weights: Annotated[Weights, Field(validation_alias="noise")] = (1.0,)
    tree: StaticTree | None = None  # the best tree of a fixed shape, for greedy and sampled text together

    @classmethod
    def from_config(cls, config: dict[str, Any] | None) -> "Calibration":
        return TypeAdapter(cls).validate_python(config or {})

    def to_config(self) -> dict[str, Any]:
        multipliers = {"greedy": self.greedy, "sampled": self.sampled, "noise": self.gumbel_weights}
        rounded = {kind: [round(value, 4) for value in values] for kind, values in multipliers.items()}
        return rounded if self.tree is None else {**rounded, "tree": self.tree.to_config()}

    def at(self, level: int) -> tuple[float, float, float]:
        """The greedy multiplier, the sampled one and the Gumbel weight; beyond the fitted levels, the deepest ones."""
        greedy, sampled, gumbel = (
            values[min(level, len(values) - 1)] for values in (self.greedy, self.sampled, self.gumbel_weights)
        )
        return greedy, sampled, gumbel


def search_tree(accuracies: Float[Tensor, "levels ranks"] | Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree with the largest expected acceptance length.

    accuracies[level][rank] is the chance that the guess of this rank at this level is correct, given a correct prefix.
    The expected acceptance length is 1 plus the sum of the nodes' chances. No node's chance exceeds its parent's
    or an earlier sibling's, so repeatedly adding the best candidate node is optimal for every size.
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
