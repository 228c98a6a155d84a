"""A head's calibration: multipliers, fitted after training and stored with the head, that turn scores into chances."""

from dataclasses import dataclass
from typing import Any

from headstart.heads.static_tree import StaticTree


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

    greedy: tuple[float, ...] = (1.0,)
    sampled: tuple[float, ...] = (1.0,)
    gumbel_weights: tuple[float, ...] = (1.0,)
    tree: StaticTree | None = None  # the best tree of a fixed shape, for greedy and sampled text together

    @classmethod
    def from_config(cls, found: dict[str, Any] | None) -> "Calibration":
        if found is None:
            return cls()
        tree = StaticTree.from_config(found["tree"]) if found.get("tree") else None
        return cls(tuple(found["greedy"]), tuple(found["sampled"]), tuple(found.get("noise", (1.0,))), tree)

    def to_config(self) -> dict[str, Any]:
        multipliers = {"greedy": self.greedy, "sampled": self.sampled, "noise": self.gumbel_weights}
        rounded = {kind: [round(value, 4) for value in values] for kind, values in multipliers.items()}
        return rounded if self.tree is None else {**rounded, "tree": self.tree.to_config()}

    def at(self, level: int) -> tuple[float, float, float]:
        """The multiplier for greedy rows, the one for sampled rows and the Gumbel weight.

        Levels beyond the fitted ones use the deepest fitted values.
        """
        return value_at(self.greedy, level), value_at(self.sampled, level), value_at(self.gumbel_weights, level)


def value_at(values: tuple[float, ...], level: int) -> float:
    return values[min(level, len(values) - 1)]
