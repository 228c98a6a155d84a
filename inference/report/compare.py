"""Decode the same prompts in several ways, interleaved, and count: what the report shows."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from inference.decode import DecodeLoop, start_history
from inference.drafter import Drafter
from inference.report.questions import Prompt
from inference.report.statistics import Interval, quantile, speedup
from inference.request import DecodeStats, Request
from inference.sampling import AcceptanceRule, BatchSampling, Sampling
from inference.target.model import TargetModel


@dataclass(frozen=True)
class Way:
    """One way to decode; without a drafter it is plain decoding, or transformers' own `generate`."""

    name: str
    drafter: Drafter | None = None
    transformers: bool = False
    lookup: int | None = None  # tokens that transformers' prompt lookup drafts
    assistant: tuple[TargetModel, int] | None = None  # transformers' assisted generation: a model, and how many tokens

    @property
    def assisted(self) -> bool:
        """Does transformers draft? Then it takes one prompt at a time."""
        return self.lookup is not None or self.assistant is not None


@dataclass
class Run:
    """One way on a few prompts, decoded together."""

    texts: list[list[int]]  # new tokens
    stats: list[DecodeStats]
    seconds: float  # wall time for all
    first: list[float]  # seconds until each text's first token
    gaps: list[float]  # seconds that each further token took: a block's share

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class Divergence:
    """Where a text left plain decoding's, and by how little: near-ties fall either way in low precision."""

    prompt: int
    position: int  # new tokens that are still the same
    margin: float  # of plain decoding's token over the other's, in logits, noise included


@dataclass
class Outcome:
    """One way at one temperature and batch size, over all prompts."""

    way: str
    temperature: float
    batch: int = 1
    rule: AcceptanceRule = "seeded"  # by which drafts were accepted
    stats: DecodeStats = field(default_factory=DecodeStats)  # seconds are wall time
    new_tokens: int = 0
    identical: int = 0  # prompts whose text equals plain decoding's, token by token
    prompts: int = 0
    distinct: float = 0.0  # mean over prompts of (different tokens / tokens): a looping text has few
    first_token: float = 0.0  # seconds, median
    per_token: tuple[float, float] = (0.0, 0.0)  # seconds behind the first token, median and 95th percentile
    speedups: dict[str, Interval] = field(default_factory=dict)  # over plain decoding and transformers' ways, by name
    tau_by_category: dict[str, float] = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)

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


class Watch:
    """A streamer of transformers that only looks at the clock."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.blocks: list[tuple[float, int]] = []  # when tokens came, and how many; the prompt comes first

    def put(self, value: Tensor) -> None:
        self.blocks.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Nothing: the last tokens came with the last `put`."""


def run_way(
    way: Way, target: TargetModel, prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> tuple[list[int], DecodeStats]:
    """New tokens of one prompt and what they took."""
    run = run_together(way, target, [prompt], max_new_tokens, sampling)
    return run.texts[0], run.stats[0]


def run_together(
    way: Way, target: TargetModel, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling
) -> Run:
    """A way on prompts side by side."""
    if way.transformers:
        return run_transformers(way, target, prompts, max_new_tokens, sampling)
    requests = [Request(prompt, max_new_tokens, sampling) for prompt in prompts]
    loop = DecodeLoop(target, requests, way.drafter, len(prompts))
    first, gaps, started = [0.0] * len(prompts), [], time.perf_counter()
    last = [started] * len(prompts)
    for number, block in loop.run():
        now = time.perf_counter()
        if last[number] == started:
            first[number] = now - started
        else:
            gaps += [(now - last[number]) / len(block)] * len(block)
        last[number] = now
    texts = [generation.tokens for generation in loop.generations]
    return Run(texts, [generation.stats for generation in loop.generations], max(last) - started, first, gaps)


def run_transformers(
    way: Way, target: TargetModel, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling
) -> Run:
    """`generate`, alone or assisted; every call of the model behind the first is a step."""
    calls: list[int] = []
    hook = target.model.register_forward_pre_hook(lambda *_: calls.append(1))
    watch = Watch() if len(prompts) == 1 else None  # a streamer follows one text
    started = time.perf_counter()
    texts = target.generate(list(prompts), max_new_tokens, sampling, way.lookup, way.assistant, watch)
    seconds = time.perf_counter() - started
    hook.remove()
    # The first token comes from the prompt's own pass, as in our loop; assisted, that pass judges drafts as well.
    pass_counts = int(way.assisted)
    stats = [DecodeStats(len(calls) - 1 + pass_counts, len(text) - 1 + pass_counts, seconds=seconds) for text in texts]
    if watch is None:
        return Run(texts, stats, seconds, [], [])
    times = [(moment - started, count) for moment, count in watch.blocks[1:]]
    gaps = [share for (before, _), (now, count) in pairwise(times) for share in [(now - before) / count] * count]
    return Run(texts, stats, seconds, [times[0][0]], gaps)


def compare(
    ways: list[Way],
    target: TargetModel,
    prompts: list[Prompt],
    max_new_tokens: int,
    sampling: Sampling,
    warmup: int,
    batch: int = 1,
) -> list[Outcome]:
    """Every way on the same prompts, `batch` of them at a time; the ways must hold plain decoding.

    Ways that cannot decode several together are left out.
    """
    ways = in_batches(ways, batch)
    units = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    runs = run_all(ways, target, units, max_new_tokens, sampling, warmup)
    return summarise_all(ways, runs, target, prompts, sampling, batch)


def in_batches(ways: list[Way], batch: int) -> list[Way]:
    """Those that decode so many prompts together."""
    return [way for way in ways if batch == 1 or not way.assisted]


def run_all(
    ways: list[Way],
    target: TargetModel,
    units: list[list[Prompt]],
    max_new_tokens: int,
    sampling: Sampling,
    warmup: int,
) -> list[list[Run]]:
    """Every way on every few prompts, taking turns so that a machine's moods hit all alike; by way, then by unit."""
    longest = sorted(units, key=lambda unit: max(len(prompt.tokens) for prompt in unit), reverse=True)
    for way in ways:
        for unit in longest[:warmup]:  # what is set up by size is set up by then
            run_together(way, target, [prompt.tokens for prompt in unit], max_new_tokens, sampling)
    runs: list[list[Run]] = [[] for _ in ways]
    for number, unit in enumerate(units):
        tokens = [prompt.tokens for prompt in unit]
        for turn in range(len(ways)):
            i = (number + turn) % len(ways)
            runs[i].append(run_together(ways[i], target, tokens, max_new_tokens, sampling))
    return runs


def summarise_all(
    ways: list[Way], runs: list[list[Run]], target: TargetModel, prompts: list[Prompt], sampling: Sampling, batch: int
) -> list[Outcome]:
    """What the runs of each way come to; the reference text is plain decoding's."""
    plain = next(own for way, own in zip(ways, runs, strict=True) if way.drafter is None and not way.transformers)
    outcomes = [
        summarise(way, own, plain, prompts, target, sampling, batch) for way, own in zip(ways, runs, strict=True)
    ]
    baselines = {way.name: own for way, own in zip(ways, runs, strict=True) if way.drafter is None}
    for outcome, own in zip(outcomes, runs, strict=True):
        outcome.speedups = {name: speedup_over(base, own, sampling.seed) for name, base in baselines.items()}
    return outcomes


def speedup_over(base: list[Run], runs: list[Run], seed: int) -> Interval:
    """From both ways' runs on the same prompts."""
    own = [run.seconds for run in runs], [run.tokens for run in runs]
    return speedup(*own, [run.seconds for run in base], [run.tokens for run in base], seed)


def summarise(
    way: Way,
    runs: list[Run],
    plain: list[Run],
    prompts: list[Prompt],
    target: TargetModel,
    sampling: Sampling,
    batch: int,
) -> Outcome:
    """What the runs of one way come to, beside plain decoding's on the same prompts."""
    outcome = Outcome(way.name, sampling.temperature, batch, sampling.rule, prompts=len(prompts))
    texts, wanted = ([text for run in some for text in run.texts] for some in (runs, plain))
    by_category: dict[str, DecodeStats] = {}
    for prompt, stats in zip(prompts, (stats for run in runs for stats in run.stats), strict=True):
        outcome.stats.add(stats)
        by_category.setdefault(prompt.category, DecodeStats()).add(stats)
    outcome.stats.seconds = sum(run.seconds for run in runs)
    outcome.new_tokens = sum(run.tokens for run in runs)
    outcome.identical = sum(text == other for text, other in zip(texts, wanted, strict=True))
    outcome.distinct = sum(len(set(text)) / len(text) for text in texts) / len(texts)
    outcome.first_token = quantile([first for run in runs for first in run.first], 0.5)
    gaps = [gap for run in runs for gap in run.gaps]
    outcome.per_token = quantile(gaps, 0.5), quantile(gaps, 0.95)
    outcome.tau_by_category = {category: stats.acceptance_length for category, stats in by_category.items()}
    if same_noise(outcome, way):
        outcome.divergences = [
            divergence(number, prompts[number].tokens, text, other, target, sampling)
            for number, (text, other) in enumerate(zip(texts, wanted, strict=True))
            if text != other
        ]
    return outcome


def same_noise(outcome: Outcome, way: Way) -> bool:
    """Is the text to be expected to be plain decoding's? transformers and the other rules draw numbers of their own."""
    if outcome.rule == "typical" and outcome.stats.drafted:
        return False
    return outcome.temperature == 0 or not (way.transformers or (outcome.rule == "rejection" and outcome.stats.drafted))


@torch.inference_mode()
def divergence(
    number: int, prompt: list[int], text: list[int], plain: list[int], target: TargetModel, sampling: Sampling
) -> Divergence:
    """How far apart the two tokens are at the first difference, by one pass over what came before."""
    at = next((i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b), min(len(text), len(plain)))
    if at == min(len(text), len(plain)):  # one goes on where the other ended
        return Divergence(number, at, float("nan"))
    request = Request(prompt, len(plain), sampling)
    logits = target.forward(torch.tensor([prompt + plain[:at]], device=target.device), last_only=True).logits
    position = torch.tensor([[len(prompt) + at]], device=target.device)
    history = start_history([request], [plain[:at]], target)
    scores = BatchSampling([sampling], target.device).scores(logits, position, history)[0, 0]
    return Divergence(number, at, float(scores[plain[at]] - scores[text[at]]))
