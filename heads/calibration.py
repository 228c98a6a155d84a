"""How sure a head's scores are: fitted after training, stored with the head, used to rank the nodes of a tree."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Calibration:
    """By depth, what scores are multiplied with before the softmax, so that it estimates the chance of acceptance.

    A head learns the target's whole distribution; what counts is which token the target takes. Greedily that is the
    likeliest, which the head then underrates; with shared noise the scores already contain the noise.
    """

    greedy: tuple[float, ...] = (1.0,)
    sampled: tuple[float, ...] = (1.0,)

    @classmethod
    def from_config(cls, found: dict[str, list[float]] | None) -> "Calibration":
        return cls() if found is None else cls(tuple(found["greedy"]), tuple(found["sampled"]))

    def to_config(self) -> dict[str, list[float]]:
        return {kind: [round(value, 4) for value in values] for kind, values in asdict(self).items()}

    def at(self, level: int) -> tuple[float, float]:
        """For greedy and for sampled rows; beyond what was fitted the deepest one holds."""
        return self.greedy[min(level, len(self.greedy) - 1)], self.sampled[min(level, len(self.sampled) - 1)]
