"""The report's figures: decoding methods compared on the same prompts, run in alternation on the same machine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import AcceptanceRule, BatchSampling, Sampling
from headstart.inference.engine.step import start_history
from headstart.inference.report.methods import Method
from headstart.inference.report.rounds import Round, plain_place, seconds_and_tokens, texts_of
from headstart.inference.targets.model import TargetModel

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
class Divergence:
    """Where a text first differs from plain decoding's, and how close the two tokens were to a tie."""

    prompt: int
    position: int  # new tokens before the first difference
    # The best score minus the lower one of the two tokens: logits, plus the Gumbel noise when sampling. It is the gap
    # between the best two scores, unless one of the tokens is further down.
    margin: float


@dataclass(frozen=True)
class CategoryFigures:
    """The figures of one method on the prompts of one category."""

    prompts: int
    identical: int  # prompts whose text equals plain decoding's
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
    identical: int = 0  # prompts whose text equals plain decoding's, token by token
    prompts: int = 0
    distinct: float = 0.0  # mean over prompts of (distinct tokens / tokens): low for a text that loops
    first_token: float = 0.0  # median seconds until the first token
    per_token: tuple[float, float] = (0.0, 0.0)  # seconds per later token: median and 95th percentile
    speedups: dict[str, Interval] = field(default_factory=dict)  # by the name of the method without our drafters
    by_category: dict[str, CategoryFigures] = field(default_factory=dict)
    shortened: int = 0  # prompts that were too long for the target's positions
    divergences: list[Divergence] = field(default_factory=list)
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
    """Rounds of all methods at one temperature and batch size; plain decoding's texts are the reference."""

    methods: list[Method]
    rounds: Sequence[Round]
    target: TargetModel
    sampling: Sampling
    batch: int

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
            self.sampling.temperature,
            self.batch,
            self.sampling.rule,
            stats,
            new_tokens=sum(run.tokens for run in runs),
            identical=self.num_identical(self.rounds, place),
            prompts=len(prompts),
            distinct=sum(len(set(text)) / len(text) for text in texts) / len(texts),
            first_token=quantile([seconds for run in runs for seconds in run.first_token], 0.5),
            per_token=(quantile(later, 0.5), quantile(later, 0.95)),
            speedups=self.speedups(self.rounds, place),
            by_category={name: self.in_category(name, place) for name in dict.fromkeys(p.category for p in prompts)},
            shortened=sum(prompt.left_out > 0 for prompt in prompts),
            transformers=method.transformers,
        )
        if not outcome.draws_other_random_numbers:
            plain_texts = texts_of(self.rounds, plain_place(self.methods))
            outcome.divergences = [
                divergence(number, prompts[number].tokens, text, plain, self.target, self.sampling)
                for number, (text, plain) in enumerate(zip(texts, plain_texts, strict=True))
                if text != plain
            ]
        return outcome

    def in_category(self, category: str, place: int) -> CategoryFigures:
        """The figures of the method at `place` on the prompts of one category."""
        within = [part for each in self.rounds if (part := each.of_category(category)) is not None]
        stats = DecodeStats.sum_of(stats for part in within for stats in part.runs[place].stats)
        prompts, identical = sum(len(part.prompts) for part in within), self.num_identical(within, place)
        whole = [each for each in self.rounds if each.categories == {category}]
        if sum(len(each.prompts) for each in whole) < prompts:
            return CategoryFigures(prompts, identical, stats.acceptance_length, None, {})
        seconds, tokens = seconds_and_tokens(whole, place)
        rate, speedups = sum(tokens) / sum(seconds), self.speedups(whole, place)
        return CategoryFigures(prompts, identical, stats.acceptance_length, rate, speedups)

    def speedups(self, rounds: Sequence[Round], place: int) -> dict[str, Interval]:
        """The speed-up over each method without our drafters; a question with all of its turns counts as one unit."""
        measured = seconds_and_tokens(rounds, place)
        return {
            method.name: speedup(*measured, *seconds_and_tokens(rounds, other), self.sampling.seed)
            for other, method in enumerate(self.methods)
            if method.drafter is None
        }

    def num_identical(self, rounds: Sequence[Round], place: int) -> int:
        """How many texts equal plain decoding's, token by token."""
        plain = texts_of(rounds, plain_place(self.methods))
        return sum(text == other for text, other in zip(texts_of(rounds, place), plain, strict=True))


@torch.inference_mode()
def divergence(
    number: int, prompt: list[int], text: list[int], plain: list[int], target: TargetModel, sampling: Sampling
) -> Divergence:
    """Score the two tokens at the first difference by one forward over the common text; nan if one text just ends."""
    at = next((i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b), min(len(text), len(plain)))
    if at == min(len(text), len(plain)):
        return Divergence(number, at, float("nan"))
    request = Request(prompt, len(plain), sampling)
    logits = target.forward(torch.tensor([prompt + plain[:at]], device=target.device), last_only=True).logits
    position = torch.tensor([[len(prompt) + at]], device=target.device)
    history = start_history([request], [plain[:at]], target)
    scores = BatchSampling([sampling], target.device).scores(logits, position, history)[0, 0]
    lower = torch.minimum(scores[plain[at]], scores[text[at]])
    return Divergence(number, at, float(scores.max() - lower))


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
