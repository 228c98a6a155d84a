"""How sure a head's scores are: fitted after training, stored with the head, used to rank the nodes of a tree."""

from dataclasses import dataclass
from typing import Any

from heads.static_tree import StaticTree


@dataclass(frozen=True)
class Calibration:
    """By depth, what scores are multiplied with before the softmax, so that it estimates the chance of acceptance.

    A head learns the target's whole distribution; what counts is which token the target takes. Greedily that is the
    likeliest, which the head then underrates. With shared noise the scores already contain the noise, and what is left
    unknown is the head's own error, which a temperature divides along with the logits: `sampled` are for temperature 1
    and multiplied by others.

    The noise counts in full where the head knows the target's distribution. Where the target is sure of its next token
    and the head is not, noise hardly moves the target's choice but would reorder the head's guesses: `noise` is what it
    is multiplied with beside log q.
    """

    greedy: tuple[float, ...] = (1.0,)
    sampled: tuple[float, ...] = (1.0,)
    noise: tuple[float, ...] = (1.0,)
    tree: StaticTree | None = None  # the best one of fixed shape, for greedy and for sampled text together

    @classmethod
    def from_config(cls, found: dict[str, Any] | None) -> "Calibration":
        if found is None:
            return cls()
        tree = StaticTree.from_config(found["tree"]) if "tree" in found else None
        return cls(tuple(found["greedy"]), tuple(found["sampled"]), tuple(found.get("noise", (1.0,))), tree)

    def to_config(self) -> dict[str, Any]:
        multipliers = {"greedy": self.greedy, "sampled": self.sampled, "noise": self.noise}
        rounded = {kind: [round(value, 4) for value in values] for kind, values in multipliers.items()}
        return rounded if self.tree is None else {**rounded, "tree": self.tree.to_config()}

    def at(self, level: int) -> tuple[float, float, float]:
        """For greedy rows, for sampled ones and for their noise; beyond what was fitted the deepest one holds."""
        return value_at(self.greedy, level), value_at(self.sampled, level), value_at(self.noise, level)


def value_at(values: tuple[float, ...], level: int) -> float:
    return values[min(level, len(values) - 1)]
