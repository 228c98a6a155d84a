"""The report's figures: decoding methods compared on the same prompts, run in alternation on the same machine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import AcceptanceRule, BatchSampling, Sampling
from headstart.inference.engine.step import start_history
from headstart.inference.report.questions import Prompt
from headstart.inference.report.rounds import (
    Round,
    able_to_batch,
    in_order,
    numbered_batches,
    plain_place,
    run_rounds,
    seconds_and_tokens,
    texts_of,
)
from headstart.inference.report.runs import Method
from headstart.inference.report.statistics import Interval, quantile, speedup
from headstart.inference.targets.model import TargetModel

# The keys of report.json are a file format: they keep their names when fields are renamed.
JSON_KEYS = {"method": "way"}


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


def compare(
    methods: list[Method],
    target: TargetModel,
    prompts: list[Prompt],
    max_new_tokens: int,
    sampling: Sampling,
    warmup: int,
    batch: int = 1,
) -> list[Outcome]:
    """Run every method on the same prompts, `batch` of them at a time; plain decoding must be one of the methods.

    Methods that cannot decode batches are left out when `batch` is above 1.
    """
    methods = able_to_batch(methods, batch)
    batches = numbered_batches(prompts, batch)
    rounds = run_rounds(methods, target, batches, max_new_tokens, sampling, warmup)
    return summarise_methods(methods, rounds, target, sampling, batch)


def summarise_methods(
    methods: list[Method], rounds: Sequence[Round], target: TargetModel, sampling: Sampling, batch: int
) -> list[Outcome]:
    """The outcome of each method; plain decoding's texts are the reference."""
    rounds = in_order(rounds)
    baselines = {method.name: place for place, method in enumerate(methods) if method.drafter is None}
    plain = plain_place(methods)
    return [
        summarise(method, place, plain, baselines, rounds, target, sampling, batch)
        for place, method in enumerate(methods)
    ]


def speedups_over(baselines: Mapping[str, int], rounds: Sequence[Round], place: int, seed: int) -> dict[str, Interval]:
    """The speed-up over each baseline; a question counts as one unit with all of its turns."""
    measured = seconds_and_tokens(rounds, place)
    return {name: speedup(*measured, *seconds_and_tokens(rounds, other), seed) for name, other in baselines.items()}


def summarise(
    method: Method,
    place: int,
    plain: int,
    baselines: Mapping[str, int],
    rounds: Sequence[Round],
    target: TargetModel,
    sampling: Sampling,
    batch: int,
) -> Outcome:
    """The outcome of the method at `place`, its texts compared with those of the one at `plain`."""
    runs, prompts = [each.runs[place] for each in rounds], [prompt for each in rounds for prompt in each.prompts]
    outcome = Outcome(
        method.name, sampling.temperature, batch, sampling.rule, prompts=len(prompts), transformers=method.transformers
    )
    texts, plain_texts = texts_of(rounds, place), texts_of(rounds, plain)
    for stats in (stats for run in runs for stats in run.stats):
        outcome.stats.add(stats)
    outcome.stats.seconds = sum(run.seconds for run in runs)
    outcome.new_tokens = sum(run.tokens for run in runs)
    outcome.identical = num_identical(rounds, place, plain)
    outcome.distinct = sum(len(set(text)) / len(text) for text in texts) / len(texts)
    outcome.first_token = quantile([seconds for run in runs for seconds in run.first_token], 0.5)
    later = [seconds for run in runs for seconds in run.per_token]
    outcome.per_token = quantile(later, 0.5), quantile(later, 0.95)
    outcome.shortened = sum(prompt.left_out > 0 for prompt in prompts)
    outcome.speedups = speedups_over(baselines, rounds, place, sampling.seed)
    outcome.by_category = {
        category: category_figures(category, place, plain, baselines, rounds, sampling.seed)
        for category in dict.fromkeys(prompt.category for prompt in prompts)
    }
    if not outcome.draws_other_random_numbers:
        outcome.divergences = [
            divergence(number, prompts[number].tokens, text, other, target, sampling)
            for number, (text, other) in enumerate(zip(texts, plain_texts, strict=True))
            if text != other
        ]
    return outcome


def category_figures(
    category: str, place: int, plain: int, baselines: Mapping[str, int], rounds: Sequence[Round], seed: int
) -> CategoryFigures:
    """The figures of the method at `place` on the prompts of one category."""
    within = [part for each in rounds if (part := each.of_category(category)) is not None]
    stats = DecodeStats.sum_of(stats_of_prompt for part in within for stats_of_prompt in part.runs[place].stats)
    prompts, identical = sum(len(part.prompts) for part in within), num_identical(within, place, plain)
    whole = [each for each in rounds if each.categories == {category}]
    if sum(len(each.prompts) for each in whole) < prompts:
        return CategoryFigures(prompts, identical, stats.acceptance_length, None, {})
    seconds, tokens = seconds_and_tokens(whole, place)
    speedups = speedups_over(baselines, whole, place, seed)
    return CategoryFigures(prompts, identical, stats.acceptance_length, sum(tokens) / sum(seconds), speedups)


def num_identical(rounds: Sequence[Round], place: int, plain: int) -> int:
    """How many texts of two methods are equal, token by token."""
    return sum(text == other for text, other in zip(texts_of(rounds, place), texts_of(rounds, plain), strict=True))


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
