"""The report's figures: decoding methods compared on the same prompts, run in alternation on the same machine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy
from numpy.typing import NDArray

from headstart.inference.core.request import DecodeStats
from headstart.inference.core.sampling import Sampling
from headstart.inference.report.forcing import Forced, Forcing
from headstart.inference.report.methods import Method
from headstart.inference.report.rounds import Round, plain_place, seconds_and_tokens, stats_of, texts_of

BOOTSTRAP_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate and the range in which other prompts of the same kind would put it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Figures:
    """The figures of one method on some prompts."""

    prompts: int
    same: int | None  # texts that equal plain decoding's; None if they were sampled with other random numbers
    forced: Forced | None  # None in addition where a token has the same bits in every pass
    acceptance_length: float
    tokens_per_second: float | None  # of wall time; None if batches mix categories, and so share their time
    speedups: dict[str, Interval]  # over each method without our drafters, by its name; empty if batches mix categories


@dataclass(frozen=True)
class Outcome(Figures):
    """The figures of one method at one temperature and batch size, over all prompts."""

    tokens_per_second: float
    method: str
    temperature: float
    batch: int
    stats: DecodeStats  # its seconds are wall time
    new_tokens: int
    rounding: float  # gaps up to it are near-ties
    distinct: float  # mean over prompts of (distinct tokens / tokens): low for a text that loops
    by_category: dict[str, Figures]
    shortened: int  # prompts that were too long for the target's positions
    published: dict[str, Any]  # `published_figures`

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "acceptance_by_depth": self.stats.acceptance}


@dataclass(frozen=True)
class Comparison:
    """Rounds of all methods at one temperature and batch size."""

    methods: list[Method]
    rounds: Sequence[Round]
    sampling: Sampling
    batch: int
    forcing: Forcing | None = None  # where passes round differently

    def outcomes(self) -> list[Outcome]:
        return [self.outcome(index) for index in range(len(self.methods))]

    def outcome(self, index: int) -> Outcome:
        """The outcome of the method at this index."""
        figures, texts = self.figures(self.rounds, index), texts_of(self.rounds, index)
        by_text = stats_of(self.rounds, index)
        prompts = [prompt for each in self.rounds for prompt in each.prompts]
        categories = [prompt.category for prompt in prompts]
        return Outcome(
            **vars(figures),
            method=self.methods[index].name,
            temperature=self.sampling.temperature,
            batch=self.batch,
            stats=replace(DecodeStats.sum_of(by_text), seconds=sum(each.runs[index].seconds for each in self.rounds)),
            new_tokens=sum(map(len, texts)),
            rounding=0.0 if self.forcing is None else self.forcing.rounding,
            distinct=fmean(len(set(text)) / len(text) for text in texts),
            by_category={name: self.in_category(name, index) for name in dict.fromkeys(categories)},
            shortened=sum(prompt.left_out > 0 for prompt in prompts),
            published=published_figures(by_text, categories),
        )

    def in_category(self, category: str, index: int) -> Figures:
        """The figures of the method at this index on the prompts of one category."""
        figures = self.figures([part for each in self.rounds if (part := each.of_category(category))], index)
        if any({prompt.category for prompt in each.prompts} > {category} for each in self.rounds):
            return replace(figures, tokens_per_second=None, speedups={})
        return figures

    def figures(self, rounds: Sequence[Round], index: int) -> Figures:
        """The figures of the method at this index; a question with all of its turns is one unit of the intervals."""
        measured, (same, forced) = seconds_and_tokens(rounds, index), self.same_and_forced(rounds, index)
        speedups = {
            method.name: speedup(*measured, *seconds_and_tokens(rounds, other), self.sampling.seed)
            for other, method in enumerate(self.methods)
            if method.drafter is None
        }
        length, (seconds, tokens) = DecodeStats.sum_of(stats_of(rounds, index)).acceptance_length, measured
        rate, prompts = sum(tokens) / sum(seconds), sum(len(each.prompts) for each in rounds)
        return Figures(prompts, same, forced, length, rate, speedups)

    def same_and_forced(self, rounds: Sequence[Round], index: int) -> tuple[int | None, Forced | None]:
        """How many texts of a method equal plain decoding's, and how plain passes judge them; None as in Figures."""
        # Texts that transformers sampled with its own random numbers are equally likely, but different.
        if self.methods[index].transformers and self.sampling.temperature != 0:
            return None, None
        texts, plain = texts_of(rounds, index), texts_of(rounds, plain_place(self.methods))
        same = sum(text == own for text, own in zip(texts, plain, strict=True))
        if self.forcing is None:
            return same, None
        prompts = [prompt for each in rounds for prompt in each.prompts]
        return same, Forced.sum_of(self.forcing.judge(*pair) for pair in zip(prompts, texts, strict=True))


def published_figures(by_text: Sequence[DecodeStats], categories: Sequence[str]) -> dict[str, Any]:
    """The figures of texts under the names of SPEED-Bench (specdec_bench in NVIDIA's Model-Optimizer) and of aiperf
    (its tags). Empty if nothing was drafted.

    A length is the number of tokens of a step, the bonus token included; the prefill's token is not a step. A share of
    draft tokens counts all nodes of a tree.
    """
    stats = DecodeStats.sum_of(by_text)
    if not stats.drafted:
        return {}
    joint = [1.0, *stats.acceptance, 0.0]  # the share of steps with at least 1, 2, ... tokens
    steps, lengths = stats.steps - stats.resting_steps, range(1, len(joint))
    by_category: dict[str, list[float]] = {}
    for category, each in zip(categories, by_text, strict=True):
        by_category.setdefault(category, []).append(each.acceptance_length)
    return {
        "Average_AL": fmean(each.acceptance_length for each in by_text),
        "Category_AL": {name: fmean(values) for name, values in by_category.items()},
        "Acceptance_Length_Histogram": {n: round(steps * (joint[n - 1] - joint[n])) for n in lengths},
        "Joint_Acceptance_Rate": {n: joint[n - 1] for n in lengths},
        "Conditional_Acceptance_Rate": {n: joint[n - 1] / joint[max(n - 2, 0)] for n in lengths},
        "spec_decode_token_weighted_acceptance_length": sum(joint),
        "spec_decode_overall_draft_acceptance_rate": 100 * sum(stats.accepted_at_depth) / stats.drafted,
    }


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
    widens the interval of a mean. With one unit its ends are nan, because the spread is unknown.
    """
    measured = numpy.array([tokens, base_seconds, seconds, base_tokens], dtype=float)  # [4, units]
    units = measured.shape[1]
    drawn = numpy.random.default_rng(seed).integers(units, size=(BOOTSTRAP_RESAMPLES, units))
    sums = measured[:, drawn].sum(axis=2)  # [4, resamples]
    value = log_ratio(measured.sum(axis=1))
    if units == 1:
        return Interval(float(numpy.exp(value)), float("nan"), float("nan"))
    # Resampling a small sample underestimates its spread by sqrt((n - 1) / n), and few units have heavy tails.
    wider = (units / (units - 1)) ** 0.5 * student_over_normal(units - 1)
    low, high = numpy.quantile(log_ratio(sums) - value, (0.025, 0.975)) * wider
    return Interval(*(float(numpy.exp(each)) for each in (value, value - high, value - low)))


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
