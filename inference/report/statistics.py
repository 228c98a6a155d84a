"""Statistics of timings: speed-ups with a confidence interval, and quantiles."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate and the range in which other prompts of the same kind would put it."""

    value: float
    low: float
    high: float


def speedup(
    seconds: Sequence[float],
    tokens: Sequence[int],
    base_seconds: Sequence[float],
    base_tokens: Sequence[int],
    seed: int,
) -> Interval:
    """Tokens per second divided by the baseline's, with its 95 % interval, from both methods' runs on the same units.

    A unit is a prompt or a batch of prompts. A paired bootstrap over units (Efron, 1979): what makes a unit slow for
    both methods cancels out. The interval is the basic bootstrap interval of the logarithm, widened as Student's t
    widens the interval of a mean. With one unit its ends are nan, because nothing is known about the spread.
    """
    measured = numpy.array([tokens, base_seconds, seconds, base_tokens], dtype=float)  # [4, units]
    units = measured.shape[1]
    drawn = numpy.random.default_rng(seed).integers(units, size=(RESAMPLES, units))
    sums = measured[:, drawn].sum(axis=2)  # [4, resamples]
    value = log_ratio(measured.sum(axis=1))
    if units == 1:
        return Interval(float(numpy.exp(value)), float("nan"), float("nan"))
    # Resampling a small sample underestimates its spread by sqrt((n - 1) / n), and few units have heavy tails.
    wider = (units / (units - 1)) ** 0.5 * student_over_normal(units - 1)
    low, high = numpy.quantile(log_ratio(sums) - value, (0.025, 0.975)) * wider
    return Interval(*(float(numpy.exp(found)) for found in (value, value - high, value - low)))


def student_over_normal(freedom: int) -> float:
    """The 97.5 % quantile of Student's t over the normal one, by Fisher's expansion in 1 / degrees of freedom."""
    z = 1.96
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms)) / z


def log_ratio(sums: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """log of (tokens / seconds) / (base tokens / base seconds)."""
    tokens, base_seconds, seconds, base_tokens = sums
    return numpy.asarray(numpy.log(tokens * base_seconds / (seconds * base_tokens)))


def quantile(values: Sequence[float], share: float) -> float:
    return float(numpy.quantile(values, share)) if len(values) else float("nan")
