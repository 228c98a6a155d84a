"""The report's figures: decoding methods compared on the same prompts, run in alternation on the same machine."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
from numpy.typing import NDArray

from headstart.inference.core.request import DecodeStats
from headstart.inference.core.sampling import AcceptanceRule
from headstart.inference.report.forcing import Forced, Forcing
from headstart.inference.report.methods import Method
from headstart.inference.report.questions import Prompt
from headstart.inference.report.rounds import Round, seconds_and_tokens, texts_of

# The keys of report.json are a file format: they keep their names when fields are renamed.
JSON_KEYS = {"method": "way"}
RESAMPLES = 2000  # draws of the bootstrap


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
    forced: Forced | None  # as in Outcome
    acceptance_length: float
    tokens_per_second: float | None  # None if batches mix categories, and so share their time
    speedups: dict[str, Interval]  # as in Outcome; empty if batches mix categories


@dataclass
class Outcome:
    """The figures of one method at one temperature and batch size, over all prompts."""

    method: str
    temperature: float
    batch: int = 1
    rule: AcceptanceRule = "seeded"  # acceptance rule
    stats: DecodeStats = field(default_factory=DecodeStats)  # its seconds are wall time
    new_tokens: int = 0
    forced: Forced | None = None  # None for texts that were sampled with other random numbers than plain decoding's
    rounding: float = 0.0  # gaps up to it are near-ties
    prompts: int = 0
    distinct: float = 0.0  # mean over prompts of (distinct tokens / tokens): low for a text that loops
    first_token: float = 0.0  # median seconds until the first token
    per_token: tuple[float, float] = (0.0, 0.0)  # seconds per later token: median and 95th percentile
    speedups: dict[str, Interval] = field(default_factory=dict)  # by the name of the method without our drafters
    by_category: dict[str, CategoryFigures] = field(default_factory=dict)
    shortened: int = 0  # prompts that were too long for the target's positions
    transformers: bool = False  # written by transformers' `generate`; not part of the JSON

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.stats.seconds

    @property
    def draws_other_random_numbers(self) -> bool:
        """Is the text sampled with other random numbers than plain decoding's, and so different but equally likely?"""
        others = self.transformers or (self.rule == "rejection" and self.stats.drafted > 0)
        return others and self.temperature > 0

    def as_json(self) -> dict[str, Any]:
        fields = {JSON_KEYS.get(name, name): value for name, value in asdict(self).items() if name != "transformers"}
        derived = {
            "tau": self.stats.acceptance_length,
            "tau_by_category": {name: found.acceptance_length for name, found in self.by_category.items()},
            "tokens_per_second": self.tokens_per_second,
            "acceptance_by_depth": self.stats.acceptance,
        }
        return {**fields, **derived}


@dataclass(frozen=True)
class Comparison:
    """Rounds of all methods at one temperature and batch size."""

    methods: list[Method]
    rounds: Sequence[Round]
    forcing: Forcing
    batch: int
    after_text: Callable[[], None] = lambda: None  # called when a text is judged

    def outcomes(self) -> list[Outcome]:
        return [self.outcome(place) for place in range(len(self.methods))]

    def outcome(self, place: int) -> Outcome:
        """The outcome of the method at `place`."""
        runs = [each.runs[place] for each in self.rounds]
        prompts = [prompt for each in self.rounds for prompt in each.prompts]
        texts = texts_of(self.rounds, place)
        stats = DecodeStats.sum_of(each for run in runs for each in run.stats)
        stats.seconds = sum(run.seconds for run in runs)
        later = [seconds for run in runs for seconds in run.per_token]
        method = self.methods[place]
        outcome = Outcome(
            method.name,
            self.forcing.sampling.temperature,
            self.batch,
            self.forcing.sampling.rule,
            stats,
            new_tokens=sum(run.tokens for run in runs),
            prompts=len(prompts),
            distinct=sum(len(set(text)) / len(text) for text in texts) / len(texts),
            first_token=quantile([seconds for run in runs for seconds in run.first_token], 0.5),
            per_token=(quantile(later, 0.5), quantile(later, 0.95)),
            speedups=self.speedups(self.rounds, place),
            rounding=self.forcing.rounding,
            shortened=sum(prompt.left_out > 0 for prompt in prompts),
            transformers=method.transformers,
        )
        judged = [None] * len(prompts) if outcome.draws_other_random_numbers else self.judged(prompts, texts)
        outcome.forced = in_sum(judged)
        for name in dict.fromkeys(prompt.category for prompt in prompts):
            own = [each for each, prompt in zip(judged, prompts, strict=True) if prompt.category == name]
            outcome.by_category[name] = self.in_category(name, place, in_sum(own))
        return outcome

    def judged(self, prompts: Sequence[Prompt], texts: Sequence[list[int]]) -> list[Forced | None]:
        """What plain passes say about each text."""
        found: list[Forced | None] = []
        for prompt, text in zip(prompts, texts, strict=True):
            found.append(self.forcing.judge(prompt.tokens, text))
            self.after_text()
        return found

    def in_category(self, category: str, place: int, forced: Forced | None) -> CategoryFigures:
        """The figures of the method at `place` on the prompts of one category."""
        within = [part for each in self.rounds if (part := each.of_category(category)) is not None]
        stats = DecodeStats.sum_of(stats for part in within for stats in part.runs[place].stats)
        prompts = sum(len(part.prompts) for part in within)
        whole = [each for each in self.rounds if {prompt.category for prompt in each.prompts} == {category}]
        if sum(len(each.prompts) for each in whole) < prompts:
            return CategoryFigures(prompts, forced, stats.acceptance_length, None, {})
        seconds, tokens = seconds_and_tokens(whole, place)
        rate, speedups = sum(tokens) / sum(seconds), self.speedups(whole, place)
        return CategoryFigures(prompts, forced, stats.acceptance_length, rate, speedups)

    def speedups(self, rounds: Sequence[Round], place: int) -> dict[str, Interval]:
        """The speed-up over each method without our drafters; a question with all of its turns counts as one unit."""
        measured = seconds_and_tokens(rounds, place)
        return {
            method.name: speedup(*measured, *seconds_and_tokens(rounds, other), self.forcing.sampling.seed)
            for other, method in enumerate(self.methods)
            if method.drafter is None
        }


def in_sum(judged: Sequence[Forced | None]) -> Forced | None:
    """All of them together; None if they were not judged."""
    found = [each for each in judged if each is not None]
    return Forced.sum_of(found) if len(found) == len(judged) else None


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
