"""The report's figures: decoding methods compared on the same prompts, run in alternation on the same machine."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from headstart.inference.decode import start_history
from headstart.inference.report.questions import Prompt
from headstart.inference.report.runs import Method, Run, run_batch
from headstart.inference.report.statistics import Interval, quantile, speedup
from headstart.inference.request import DecodeStats, Request
from headstart.inference.sampling import AcceptanceRule, BatchSampling, Sampling
from headstart.inference.target.model import TargetModel

# The keys of report.json are a file format: they keep their names when fields are renamed.
JSON_KEYS = {"method": "way", "acceptance_length_by_category": "tau_by_category"}


@dataclass(frozen=True)
class Divergence:
    """Where a text first differs from plain decoding's, and how close the two tokens were to a tie."""

    prompt: int
    position: int  # new tokens before the first difference
    margin: float  # score of plain decoding's token minus the other's: logits, plus the Gumbel noise when sampling


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
    acceptance_length_by_category: dict[str, float] = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)
    transformers: bool = False  # written by transformers' `generate`; not part of the JSON

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.stats.seconds

    @property
    def is_lossy(self) -> bool:
        """Typical acceptance takes likely enough draft tokens, so the text is no longer the target's own."""
        return self.rule == "typical" and self.stats.drafted > 0

    @property
    def draws_other_random_numbers(self) -> bool:
        """Is the text sampled with other random numbers than plain decoding's, and so different but equally likely?"""
        others = self.transformers or (self.rule == "rejection" and self.stats.drafted > 0)
        return others and self.temperature > 0

    def as_json(self) -> dict[str, Any]:
        fields = {JSON_KEYS.get(name, name): value for name, value in asdict(self).items() if name != "transformers"}
        derived = {
            "tau": self.stats.acceptance_length,
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
    batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    runs = run_interleaved(methods, target, batches, max_new_tokens, sampling, warmup)
    return summarise_methods(methods, runs, target, prompts, sampling, batch)


def able_to_batch(methods: list[Method], batch: int) -> list[Method]:
    """The methods that can decode `batch` prompts together."""
    return [method for method in methods if batch == 1 or not method.one_prompt_at_a_time]


def run_interleaved(
    methods: list[Method],
    target: TargetModel,
    batches: list[list[Prompt]],
    max_new_tokens: int,
    sampling: Sampling,
    warmup: int,
    after_run: Callable[[Run], None] = lambda run: None,
) -> list[list[Run]]:
    """The runs of each method on each batch of prompts; `after_run` is called between runs.

    Methods alternate batch by batch and take turns at going first, so a slow phase of the machine hits all of them.
    """
    longest = sorted(batches, key=lambda batch: max(len(prompt.tokens) for prompt in batch), reverse=True)
    for method in methods:
        for batch in longest[:warmup]:  # the longest prompts allocate everything that depends on size
            run_batch(method, target, [prompt.tokens for prompt in batch], max_new_tokens, sampling)
    runs: list[list[Run]] = [[] for _ in methods]
    for number, batch in enumerate(batches):
        tokens = [prompt.tokens for prompt in batch]
        for turn in range(len(methods)):
            i = (number + turn) % len(methods)
            runs[i].append(run_batch(methods[i], target, tokens, max_new_tokens, sampling))
            after_run(runs[i][-1])
    return runs


def summarise_methods(
    methods: list[Method],
    runs: list[list[Run]],
    target: TargetModel,
    prompts: list[Prompt],
    sampling: Sampling,
    batch: int,
) -> list[Outcome]:
    """The outcome of each method; plain decoding's texts are the reference."""
    baselines = {method.name: its for method, its in zip(methods, runs, strict=True) if method.drafter is None}
    plain = next(
        its for method, its in zip(methods, runs, strict=True) if method.drafter is None and not method.transformers
    )
    outcomes = [
        summarise(method, its, plain, prompts, target, sampling, batch)
        for method, its in zip(methods, runs, strict=True)
    ]
    for outcome, its in zip(outcomes, runs, strict=True):
        outcome.speedups = {name: speedup_over(base, its, sampling.seed) for name, base in baselines.items()}
    return outcomes


def speedup_over(base: list[Run], runs: list[Run], seed: int) -> Interval:
    """The speed-up over a baseline that ran the same batches."""
    measured = [run.seconds for run in runs], [run.tokens for run in runs]
    return speedup(*measured, [run.seconds for run in base], [run.tokens for run in base], seed)


def summarise(
    method: Method,
    runs: list[Run],
    plain: list[Run],
    prompts: list[Prompt],
    target: TargetModel,
    sampling: Sampling,
    batch: int,
) -> Outcome:
    """The outcome of one method, its texts compared with plain decoding's on the same prompts."""
    outcome = Outcome(
        method.name, sampling.temperature, batch, sampling.rule, prompts=len(prompts), transformers=method.transformers
    )
    texts, plain_texts = ([text for run in each for text in run.texts] for each in (runs, plain))
    by_category: dict[str, DecodeStats] = {}
    for prompt, stats in zip(prompts, (stats for run in runs for stats in run.stats), strict=True):
        outcome.stats.add(stats)
        by_category.setdefault(prompt.category, DecodeStats()).add(stats)
    outcome.stats.seconds = sum(run.seconds for run in runs)
    outcome.new_tokens = sum(run.tokens for run in runs)
    outcome.identical = sum(text == other for text, other in zip(texts, plain_texts, strict=True))
    outcome.distinct = sum(len(set(text)) / len(text) for text in texts) / len(texts)
    outcome.first_token = quantile([seconds for run in runs for seconds in run.first_token], 0.5)
    later = [seconds for run in runs for seconds in run.per_token]
    outcome.per_token = quantile(later, 0.5), quantile(later, 0.95)
    outcome.acceptance_length_by_category = {
        category: stats.acceptance_length for category, stats in by_category.items()
    }
    if not (outcome.is_lossy or outcome.draws_other_random_numbers):
        outcome.divergences = [
            divergence(number, prompts[number].tokens, text, other, target, sampling)
            for number, (text, other) in enumerate(zip(texts, plain_texts, strict=True))
            if text != other
        ]
    return outcome


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
    return Divergence(number, at, float(scores[plain[at]] - scores[text[at]]))
