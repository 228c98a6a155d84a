"""The report's figures: decoding methods compared on the same prompts, run in alternation on the same machine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy
from numpy.typing import NDArray

from headstart.inference.core.request import DecodeStats
from headstart.inference.core.sampling import Sampling
from headstart.inference.report.forcing import Forced, Forcing
from headstart.inference.report.methods import Method
from headstart.inference.report.rounds import Round, plain_place, seconds_and_tokens, texts_of

BOOTSTRAP_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate and the range in which other prompts of the same kind would put it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class CategoryFigures:
    """The figures of one method on the prompts of one category."""

    prompts: int
    same: int | None  # as in Outcome
    forced: Forced | None  # as in Outcome
    acceptance_length: float
    tokens_per_second: float | None  # None if batches mix categories, and so share their time
    speedups: dict[str, Interval]  # as in Outcome; empty if batches mix categories


@dataclass(frozen=True)
class Outcome:
    """The figures of one method at one temperature and batch size, over all prompts."""

    method: str
    temperature: float
    batch: int
    stats: DecodeStats  # its seconds are wall time
    new_tokens: int
    same: int | None  # texts that equal plain decoding's; None if they were sampled with other random numbers
    forced: Forced | None  # None in addition where a token has the same bits in every pass
    rounding: float  # gaps up to it are near-ties
    prompts: int
    distinct: float  # mean over prompts of (distinct tokens / tokens): low for a text that loops
    speedups: dict[str, Interval]  # over each method without our drafters, by its name
    by_category: dict[str, CategoryFigures]
    shortened: int  # prompts that were too long for the target's positions
    published: dict[str, Any]  # `published_figures`

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.stats.seconds

    def as_json(self) -> dict[str, Any]:
        derived = {
            "tau": self.stats.acceptance_length,
            "tokens_per_second": self.tokens_per_second,
            "acceptance_by_depth": self.stats.acceptance,
        }
        return {**asdict(self), **derived}


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
        runs, texts = [each.runs[index] for each in self.rounds], texts_of(self.rounds, index)
        prompts = [prompt for each in self.rounds for prompt in each.prompts]
        by_text = [each for run in runs for each in run.stats]
        stats = DecodeStats.sum_of(by_text)
        stats.seconds = sum(run.seconds for run in runs)
        new_tokens, categories = sum(run.tokens for run in runs), [prompt.category for prompt in prompts]
        same, forced = self.same_and_forced(self.rounds, index)
        return Outcome(
            self.methods[index].name,
            self.sampling.temperature,
            self.batch,
            stats,
            new_tokens=new_tokens,
            same=same,
            forced=forced,
            rounding=0.0 if self.forcing is None else self.forcing.rounding,
            prompts=len(prompts),
            distinct=sum(len(set(text)) / len(text) for text in texts) / len(texts),
            speedups=self.speedups(self.rounds, index),
            by_category={name: self.in_category(name, index) for name in dict.fromkeys(categories)},
            shortened=sum(prompt.left_out > 0 for prompt in prompts),
            published=published_figures(by_text, categories, new_tokens / stats.seconds),
        )

    def same_and_forced(self, rounds: Sequence[Round], index: int) -> tuple[int | None, Forced | None]:
        """How many texts of a method equal plain decoding's, and how plain passes judge them; None as in Outcome."""
        # Texts that transformers sampled with its own random numbers are equally likely, but different.
        if self.methods[index].transformers and self.sampling.temperature != 0:
            return None, None
        texts, plain = texts_of(rounds, index), texts_of(rounds, plain_place(self.methods))
        same = sum(text == own for text, own in zip(texts, plain, strict=True))
        if self.forcing is None:
            return same, None
        prompts = [prompt for each in rounds for prompt in each.prompts]
        return same, Forced.sum_of(self.forcing.judge(*pair) for pair in zip(prompts, texts, strict=True))

    def in_category(self, category: str, index: int) -> CategoryFigures:
        """The figures of the method at this index on the prompts of one category."""
        parts = [part for each in self.rounds if (part := each.of_category(category)) is not None]
        stats = DecodeStats.sum_of(stats for part in parts for stats in part.runs[index].stats)
        prompts = sum(len(part.prompts) for part in parts)
        same, forced = self.same_and_forced(parts, index)
        if any({prompt.category for prompt in each.prompts} > {category} for each in self.rounds):
            return CategoryFigures(prompts, same, forced, stats.acceptance_length, None, {})
        seconds, tokens = seconds_and_tokens(parts, index)
        rate, speedups = sum(tokens) / sum(seconds), self.speedups(parts, index)
        return CategoryFigures(prompts, same, forced, stats.acceptance_length, rate, speedups)

    def speedups(self, rounds: Sequence[Round], index: int) -> dict[str, Interval]:
        """The speed-up over each method without our drafters; a question with all of its turns counts as one unit."""
        measured = seconds_and_tokens(rounds, index)
        return {
            method.name: speedup(*measured, *seconds_and_tokens(rounds, other), self.sampling.seed)
            for other, method in enumerate(self.methods)
            if method.drafter is None
        }


def published_figures(by_text: Sequence[DecodeStats], categories: Sequence[str], rate: float) -> dict[str, Any]:
    """The figures of texts, at `rate` tokens/s in all, under the names of SPEED-Bench (specdec_bench in NVIDIA's
    Model-Optimizer) and of aiperf (its tags). Empty if nothing was drafted.

    A length is the number of tokens of a step, the bonus token included; the prefill's token is not a step. A share of
    draft tokens counts all nodes of a tree.
    """
    stats = DecodeStats.sum_of(by_text)
    if not stats.drafted:
        return {}
    joint = [1.0, *stats.acceptance, 0.0]  # the share of steps with at least 1, 2, ... tokens
    steps, lengths = stats.steps - stats.resting_steps, range(1, len(joint))
    of_texts, by_category = [each.acceptance_length for each in by_text], dict[str, list[float]]()
    for category, length in zip(categories, of_texts, strict=True):
        by_category.setdefault(category, []).append(length)
    return {
        "Average_AL": fmean(of_texts),
        "Category_AL": {name: fmean(values) for name, values in by_category.items()},
        "Acceptance_Length_Histogram": {n: round(steps * (joint[n - 1] - joint[n])) for n in lengths},
        "Joint_Acceptance_Rate": {n: joint[n - 1] for n in lengths},
        "Conditional_Acceptance_Rate": {n: joint[n - 1] / joint[max(n - 2, 0)] for n in lengths},
        "Output TPS": rate,
        "spec_decode_acceptance_length": fmean(of_texts),
        "spec_decode_token_weighted_acceptance_length": sum(joint),
        "spec_decode_overall_draft_acceptance_rate": 100 * sum(stats.accepted_at_depth) / stats.drafted,
        "output_token_throughput": rate,
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
