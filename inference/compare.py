"""Decode the same prompts in several ways, interleaved, and count: what the report shows."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from inference.decode import DecodeStats, generate
from inference.drafters import Drafter
from inference.sampling import Rule, Sampling
from inference.target import TargetModel


@dataclass(frozen=True)
class Way:
    """One way to decode; without a drafter it is plain decoding, or transformers' own `generate`."""

    name: str
    drafter: Drafter | None = None
    transformers: bool = False


@dataclass
class Outcome:
    """One way at one temperature, over all prompts."""

    way: str
    temperature: float
    rule: Rule = "seeded"  # by which drafts were accepted
    stats: DecodeStats = field(default_factory=DecodeStats)
    new_tokens: int = 0
    identical: int = 0  # prompts whose text equals plain decoding's, token by token
    prompts: int = 0
    distinct: float = 0.0  # mean over prompts of (different tokens / tokens): a looping text has few

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.stats.seconds

    def as_json(self) -> dict[str, Any]:
        derived = {"tau": self.stats.tau, "tokens_per_second": self.tokens_per_second}
        return {**asdict(self), **derived}


def run_way(
    way: Way, target: TargetModel, prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> tuple[list[int], DecodeStats]:
    """New tokens of one prompt and what they took."""
    if not way.transformers:
        generation = generate(target, prompt, max_new_tokens, sampling, way.drafter)
        return generation.tokens, generation.stats
    started = time.perf_counter()
    tokens = target.generate([prompt], max_new_tokens, sampling)[0]
    # The first token comes from the prompt's own pass, as in our loop.
    stats = DecodeStats(steps=len(tokens) - 1, tokens=len(tokens) - 1, seconds=time.perf_counter() - started)
    return tokens, stats


def compare(
    ways: list[Way], target: TargetModel, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling, warmup: int
) -> list[Outcome]:
    """Every way on every prompt, taking turns prompt by prompt so that a machine's moods hit all alike.

    The reference text is plain decoding's, so the ways must hold one without drafter.
    """
    outcomes = [Outcome(way.name, sampling.temperature, sampling.rule) for way in ways]
    reference = next(i for i, way in enumerate(ways) if way.drafter is None and not way.transformers)
    for way in ways:
        for prompt in sorted(prompts, key=len, reverse=True)[:warmup]:  # what is set up by size is set up by then
            run_way(way, target, prompt, max_new_tokens, sampling)
    for number, prompt in enumerate(prompts):
        texts: dict[int, list[int]] = {}
        for turn in range(len(ways)):
            i = (number + turn) % len(ways)
            texts[i], stats = run_way(ways[i], target, prompt, max_new_tokens, sampling)
            outcomes[i].stats.add(stats)
        for i, tokens in texts.items():
            outcomes[i].prompts += 1
            outcomes[i].new_tokens += len(tokens)
            outcomes[i].identical += tokens == texts[reference]
            outcomes[i].distinct += len(set(tokens)) / len(tokens) / len(prompts)
    return outcomes
