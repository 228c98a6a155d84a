"""Run one decoding method on a few prompts: plain decoding, a drafter, or transformers' own `generate`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import loop_of
from headstart.inference.targets.model import TargetModel


@dataclass(frozen=True)
class Method:
    """A decoding method of the report; with neither a drafter nor `transformers` it is plain decoding."""

    name: str
    drafter: Drafter | None = None
    transformers: bool = False  # decode with transformers' `generate`
    lookup: int | None = None  # draft tokens per step of transformers' prompt lookup
    assistant: tuple[TargetModel, int] | None = None  # assisted generation: draft model, draft tokens per step

    @property
    def one_prompt_at_a_time(self) -> bool:
        """Does transformers draft? It then refuses batches."""
        return self.lookup is not None or self.assistant is not None


@dataclass
class Run:
    """What one method wrote for a few prompts decoded together, and how long it took."""

    texts: list[list[int]]  # new tokens of each prompt
    stats: list[DecodeStats]
    seconds: float  # wall time of the whole batch
    first_token: list[float]  # seconds until the first token, per prompt
    per_token: list[float]  # seconds of each later token; the tokens of one step share its time equally

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class TokenTimes:
    """A streamer for transformers' `generate` that only notes when tokens arrive."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, int]] = []  # (time, number of tokens); the first block is the prompt

    def put(self, value: Tensor) -> None:
        self.blocks.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Do nothing: the last tokens came with the last `put`."""


def run_method(
    method: Method, target: TargetModel, prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> tuple[list[int], DecodeStats]:
    """Decode one prompt; returns its new tokens and their statistics."""
    run = run_batch(method, target, [prompt], max_new_tokens, sampling)
    return run.texts[0], run.stats[0]


def run_batch(
    method: Method, target: TargetModel, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling
) -> Run:
    """Decode the prompts as one batch."""
    if method.transformers:
        return run_transformers(method, target, prompts, max_new_tokens, sampling)
    requests = [Request(prompt, max_new_tokens, sampling) for prompt in prompts]
    loop = loop_of(target, requests, method.drafter, len(prompts))
    first, later, started = [0.0] * len(prompts), [], time.perf_counter()
    last = [started] * len(prompts)
    for block in loop.run():
        now, number, count = time.perf_counter(), block.number, len(block.tokens)
        if last[number] == started:
            first[number] = now - started
        else:
            later += [(now - last[number]) / count] * count
        last[number] = now
    generations = list(loop.generations.values())
    texts = [generation.tokens for generation in generations]
    return Run(texts, [generation.stats for generation in generations], max(last) - started, first, later)


def run_transformers(
    method: Method, target: TargetModel, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling
) -> Run:
    """Decode with `generate`, alone or assisted; every forward of the model after the first counts as a step."""
    calls: list[int] = []
    hook = target.unpacked.model.register_forward_pre_hook(lambda *_: calls.append(1))
    times = TokenTimes() if len(prompts) == 1 else None  # transformers streams a single text only
    started = time.perf_counter()
    texts = target.generate(list(prompts), max_new_tokens, sampling, method.lookup, method.assistant, times)
    seconds = time.perf_counter() - started
    hook.remove()
    # As in our loop, the first token comes from the prefill, which is no step. Assisted generation already verifies
    # draft tokens in the prefill, so there it counts as one.
    prefill_counts = int(method.one_prompt_at_a_time)
    stats = [
        DecodeStats(len(calls) - 1 + prefill_counts, len(text) - 1 + prefill_counts, seconds=seconds) for text in texts
    ]
    if times is None:
        return Run(texts, stats, seconds, [], [])
    arrivals = [(moment - started, count) for moment, count in times.blocks[1:]]
    later = [share for (before, _), (now, count) in pairwise(arrivals) for share in [(now - before) / count] * count]
    return Run(texts, stats, seconds, [arrivals[0][0]], later)
