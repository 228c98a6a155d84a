"""The decode loop: draft a tree, let the target judge all of it in one pass, keep the path that it would have taken."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from inference.cache import KVCache
from inference.drafters import Drafter, NoDrafter, Verified
from inference.sampling import Sampling, choice_scores
from inference.target import TargetModel, cut_at_end
from inference.verify import accept


@dataclass
class DecodeStats:
    """Of one or more generations. tau is the mean number of tokens that a verify step yields, the bonus included."""

    steps: int = 0  # verify steps; the prompt's own pass is not one
    tokens: int = 0  # new tokens out of verify steps
    drafted: int = 0  # nodes judged, roots not counted
    seconds: float = 0.0  # wall time of the whole generation, the prompt included
    accepted_at_depth: list[int] = field(default_factory=list)  # steps whose path went at least this deep, from depth 1

    @property
    def tau(self) -> float:
        return self.tokens / max(self.steps, 1)

    @property
    def acceptance(self) -> list[float]:
        """Share of the steps that accepted at least 1, 2, ... drafts."""
        return [count / self.steps for count in self.accepted_at_depth]

    def count(self, path_length: int, kept: int, drafted: int) -> None:
        self.steps += 1
        self.tokens += kept
        self.drafted += drafted
        self.accepted_at_depth.extend([0] * (path_length - 1 - len(self.accepted_at_depth)))
        for depth in range(path_length - 1):
            self.accepted_at_depth[depth] += 1

    def add(self, other: "DecodeStats") -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.drafted += other.drafted
        self.seconds += other.seconds
        both = zip_longest(self.accepted_at_depth, other.accepted_at_depth, fillvalue=0)
        self.accepted_at_depth = [mine + its for mine, its in both]


@dataclass
class Generation:
    tokens: list[int]  # the new ones, an end token included
    stats: DecodeStats


def check_length(target: TargetModel, prompt: list[int], max_new_tokens: int) -> None:
    """Refuse, before any work, what would not fit the positions that the target knows."""
    limit = target.config.max_positions
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} given, 1 or more is allowed")
    if len(prompt) + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the target's {limit} "
            f"positions; shorten the prompt to {max(limit - max_new_tokens, 0)} tokens or lower decode.max_new_tokens"
        )


def generate(
    target: TargetModel,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    drafter: Drafter | None = None,
) -> Generation:
    """The target's own continuation of a prompt; a drafter changes how fast it comes, never what it is.

    Raises ValueError when prompt and new tokens exceed the target's positions.
    """
    stats = DecodeStats()
    started = time.perf_counter()
    tokens = [token for block in stream(target, prompt, max_new_tokens, sampling, drafter, stats) for token in block]
    stats.seconds = time.perf_counter() - started
    return Generation(tokens, stats)


@torch.inference_mode()
def stream(
    target: TargetModel,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    drafter: Drafter | None = None,
    stats: DecodeStats | None = None,
) -> Iterator[list[int]]:
    """Yield the new tokens as they become certain, a block for each target step."""
    check_length(target, prompt, max_new_tokens)
    sampling, stats, drafter = sampling or Sampling(), stats or DecodeStats(), drafter or NoDrafter()
    if drafter.taps not in ((), target.taps):
        raise ValueError(f"the drafter reads taps {list(drafter.taps)}, the target gives {list(target.taps)}")
    cache = target.new_cache(len(prompt) + max_new_tokens + drafter.max_nodes, drafter.cache_shape)

    certain = torch.tensor(prompt, device=target.device)
    output = target.forward(certain.unsqueeze(0), cache=cache, last_only=True)
    cache.target.advance(len(prompt))
    root = choose(output.logits[0], torch.tensor([len(prompt)], device=target.device), sampling)
    block = root.tolist()
    left = max_new_tokens - 1
    verified = Verified(output.taps[0], torch.cat([certain[1:], root]), 0, left - 1, sampling)
    while True:
        yield block
        if left == 0 or block[-1] in target.end_tokens:
            return
        block, verified = step(target, drafter, verified, cache, left, stats)
        left -= len(block)


def step(
    target: TargetModel, drafter: Drafter, verified: Verified, cache: KVCache, left: int, stats: DecodeStats
) -> tuple[list[int], Verified]:
    """One cycle: the tokens that it made certain (at most `left`, none behind an end token) and what to draft from."""
    tree = drafter.draft(verified, cache)
    start = cache.target.length
    output = target.verify(tree, cache)
    choices = choose(output.logits[0], start + 1 + tree.depths, verified.sampling)
    accepted = accept(tree, choices)
    cache.target.keep(accepted.path)
    kept = cut_at_end(accepted.tokens[:left], target.end_tokens)
    stats.count(len(accepted.path), len(kept), len(tree) - 1)
    path = torch.tensor(accepted.path, device=target.device)
    room = left - len(kept) - 1  # the bonus token comes for free, so a deeper tree would be drafted in vain
    return kept, Verified(output.taps[0, path], choices[path], start, room, verified.sampling)


def choose(logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """The target's token for each of `positions`, from logits [rows, vocab]."""
    return choice_scores(logits, positions, sampling).argmax(-1)
