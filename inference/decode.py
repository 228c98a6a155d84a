"""The decode loop: draft trees, let the target judge all of them in one pass, keep the paths it would have taken.

Rows of a batch go at their own pace; one that ends makes room for the next request that waits (continuous batching).
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.cache import PAGE
from inference.cuda_graph import StaticStep, size_bucket
from inference.drafter import PLAIN, Drafter, Verified
from inference.sampling import BatchSampling, History, Sampling, check_bias
from inference.stopping import StopStrings, cut_at_end
from inference.target.model import TargetModel
from inference.tree import take
from inference.verify import accept, judge


@dataclass
class DecodeStats:
    """Of one or more generations. tau is the mean number of tokens that a verify step yields, the bonus included."""

    steps: int = 0  # verify steps; the prompt's own pass is not one
    tokens: int = 0  # new tokens out of verify steps
    drafted: int = 0  # nodes judged, roots not counted
    seconds: float = 0.0  # wall time of the whole generation, the prompt included
    bytes_moved: int = 0  # within the cache, to bring accepted nodes together; rows that move and growth not counted
    cache_bytes: int = 0  # of the largest cache, all rows and the head's share included
    accepted_at_depth: list[int] = field(default_factory=list)  # steps whose path went at least this deep, from depth 1

    @property
    def acceptance_length(self) -> float:
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
        self.bytes_moved += other.bytes_moved
        self.cache_bytes = max(self.cache_bytes, other.cache_bytes)
        both = zip_longest(self.accepted_at_depth, other.accepted_at_depth, fillvalue=0)
        self.accepted_at_depth = [mine + its for mine, its in both]


GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop: StopStrings | None = None
    logprobs: bool = False
    end_tokens: tuple[int, ...] | None = None  # None: the target's own


@dataclass
class Generation:
    """What became of a request."""

    tokens: list[int] = field(default_factory=list)  # the new ones, an end token included
    stats: DecodeStats = field(default_factory=DecodeStats)
    logprobs: list[float] | None = None  # of each new token under the target alone, temperature 1, in nats
    finish: Literal["length", "end", "stop"] = "length"


def check_length(target: TargetModel, prompt: list[int], max_new_tokens: int) -> None:
    """Refuse, before any work, what would not fit the positions that the target knows."""
    limit = target.max_positions
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
    static: bool | None = None,
) -> Generation:
    """The target's own continuation of a prompt; a drafter changes how fast it comes, never what it is.

    Raises ValueError when prompt and new tokens exceed the target's positions.
    """
    return generate_batch(target, [Request(prompt, max_new_tokens, sampling or GREEDY)], drafter, 1, static)[0]


def stream(target: TargetModel, request: Request, drafter: Drafter | None = None) -> Iterator[list[int]]:
    """Yield the new tokens as they become certain, a block for each target step."""
    for _, block in DecodeLoop(target, [request], drafter).run():
        yield block


def generate_batch(
    target: TargetModel,
    requests: Sequence[Request],
    drafter: Drafter | None = None,
    max_batch: int = 16,
    static: bool | None = None,
) -> list[Generation]:
    """Continue many prompts, at most `max_batch` at a time; each gets the text that it would get alone.

    `static` keeps all shapes those of the capacity, as a CUDA graph needs them; None is so on CUDA alone, for a target
    that is all on one device.
    """
    loop = DecodeLoop(target, requests, drafter, max_batch, static)
    for _ in loop.run():
        pass
    return loop.generations


@dataclass(eq=False)
class Row:
    """A sequence that is being decoded."""

    number: int  # of its request
    request: Request
    generation: Generation
    started: float
    text: list[int]  # prompt and output; the last token is the root, which the target has not read yet
    start: int  # the first of the newly verified positions
    taps: Float[Tensor, "count tapped"]  # of these positions
    end_tokens: tuple[int, ...]
    drafted: int = 0  # nodes that were judged to find them
    choices: list[int] = field(default_factory=list)  # the target's, at each of these nodes and the root
    ended: bool = False

    @property
    def left(self) -> int:
        return self.request.max_new_tokens - len(self.generation.tokens)

    def take_in(self, tokens: list[int], logprobs: list[float] | None) -> list[int]:
        """Add tokens until the text ends; returns those that were added."""
        kept = cut_at_end(tokens[: self.left], self.end_tokens)
        stop = self.request.stop
        standing = None if stop is None else stop.kept(self.generation.tokens + kept, len(kept))
        kept = kept[:standing]
        self.text += kept
        self.generation.tokens += kept
        if logprobs is not None:
            self.generation.logprobs = (self.generation.logprobs or []) + logprobs[: len(kept)]
        if standing is not None:
            self.generation.finish = "stop"
        elif kept[-1] in self.end_tokens:
            self.generation.finish = "end"
        self.ended = self.left == 0 or self.generation.finish != "length"
        return kept


class DecodeLoop:
    """Requests in, blocks of tokens out; `generations` holds what has come of each request so far."""

    def __init__(
        self,
        target: TargetModel,
        requests: Sequence[Request],
        drafter: Drafter | None = None,
        max_batch: int = 16,
        static: bool | None = None,
    ) -> None:
        """Raises ValueError for a request that does not fit the target or the other requests."""
        self.target, self.drafter = target, drafter or PLAIN
        for request in requests:
            check_length(target, request.prompt, request.max_new_tokens)
            highest = max((token for token, _ in request.sampling.logit_bias), default=0)
            check_bias(highest, target.config.vocab_size)
        self.tap_columns = target.tap_columns(self.drafter.taps)
        if len({request.sampling.rule for request in requests}) > 1:
            raise ValueError("the requests of a batch must agree on decode.acceptance; decode them in separate calls")
        if max_batch < 1:
            raise ValueError(f"max_batch: {max_batch} given, 1 or more is allowed")
        self.waiting = deque(enumerate(requests))
        self.generations = [Generation() for _ in requests]
        self.rows: list[Row] = []
        self.max_batch = min(max_batch, len(requests))
        self.is_static = target.device.type == "cuda" and target.ranks.may_capture if static is None else static
        self.nodes = size_bucket(self.drafter.max_nodes) if self.is_static else self.drafter.max_nodes
        self.limit = max((len(r.prompt) + r.max_new_tokens for r in requests), default=0) + self.nodes
        self.static: StaticStep | None = None

    @torch.inference_mode()
    def run(self) -> Generator[tuple[int, list[int]], None, None]:
        """Yield (number of the request, new tokens) as they become certain; runs once."""
        self._make_cache()
        try:
            while self.waiting or self.rows:
                while self.waiting and len(self.rows) < self.max_batch:
                    row = self.prefill(*self.waiting.popleft())
                    yield row.number, row.text[len(row.request.prompt) :]
                    if row.ended:
                        self.end(row)
                if self.rows:
                    yield from self.step()
        finally:
            if self.static is not None:
                self.static.give_back()

    def _make_cache(self) -> None:
        if self.is_static:
            self.static = StaticStep.borrow(self.target, self.drafter, self.max_batch, self.limit)
            self.cache = self.static.cache
        else:
            longest = max((len(request.prompt) for _, request in self.waiting), default=0)
            capacity = min(longest + self.nodes + PAGE, self.limit)
            self.cache = self.target.new_cache(capacity, self.drafter.cache_shape, self.max_batch)
        self.cache.set_lengths([])

    def prefill(self, number: int, request: Request) -> Row:
        """Read a prompt into a row of its own; its last logits give the first token."""
        started, device = time.perf_counter(), self.target.device
        count = len(request.prompt)
        row_cache = self.cache.row(len(self.rows))
        tokens = torch.tensor([request.prompt], device=device)
        output = self.target.forward(tokens, cache=row_cache, last_only=True)
        taps = self.read_by_drafter(output.taps)
        sampling = BatchSampling([request.sampling], device)
        history = start_history([request], [[]], self.target)
        choice = sampling.choose(output.logits, torch.tensor([[count]], device=device), history)
        self.drafter.prefill(taps, torch.cat([tokens, choice], dim=1), row_cache)

        generation = self.generations[number]
        ends = tuple(self.target.end_tokens) if request.end_tokens is None else request.end_tokens
        row = Row(number, request, generation, started, list(request.prompt), count - 1, taps[0, -1:], ends)
        logprobs = log_probabilities(output.logits[0], choice[0]) if request.logprobs else None
        row.take_in(choice[0].tolist(), logprobs)
        generation.stats.seconds = time.perf_counter() - started
        generation.stats.cache_bytes = self.cache.num_bytes
        self.rows.append(row)
        for slots in self.cache.slots:
            slots.set_lengths([*slots.lengths, count])
        self._rows_changed()
        return row

    def step(self) -> Iterator[tuple[int, list[int]]]:
        """One cycle for all rows: draft, verify, accept."""
        self.cache.make_room(max(self.cache.target.lengths) + self.nodes, self.limit)
        verified = self.verified()
        if self.static is not None and self.static.serves(self.sampling):
            done = self.static(verified)
            logits, taps, accepted = done.logits, done.taps, accept(done.tree, done.choices)
        else:
            tree = self.drafter.draft(verified, self.cache)
            output = self.target.forward_tree(tree, self.cache)
            positions = self.cache.target.starts.unsqueeze(1) + tree.depths + 1
            logits, taps = output.logits, output.taps
            accepted = judge(tree, logits, positions, verified.sampling, self.history)
        moved = self.cache.target.bytes_moved
        self.cache.target.keep([row.path for row in accepted])
        moved = (self.cache.target.bytes_moved - moved) // len(self.rows)

        longest = max(len(found.path) for found in accepted)
        paths = torch.tensor([found.path + [0] * (longest - len(found.path)) for found in accepted])
        paths = paths.to(self.target.device, non_blocking=True)
        path_taps = self.read_by_drafter(take(taps, paths))

        blocks = []
        for index, (row, found) in enumerate(zip(self.rows, accepted, strict=True)):
            count = len(found.path)
            row.start, row.taps, row.drafted = len(row.text) - 1, path_taps[index, :count], found.drafted
            row.choices = found.choices
            logprobs = None
            if row.request.logprobs:
                chosen = torch.tensor(found.tokens, device=paths.device)
                logprobs = log_probabilities(logits[index, paths[index, :count]], chosen)
            if self.history is not None:
                read = torch.tensor([row.text[-1], *found.tokens[:-1]], device=paths.device)
                self.history.counts[index, 0].index_add_(0, read, torch.ones(len(read), device=paths.device))
            kept = row.take_in(found.tokens, logprobs)
            stats = row.generation.stats
            stats.count(len(found.path), len(kept), found.drafted)
            stats.bytes_moved += moved
            stats.cache_bytes = max(stats.cache_bytes, self.cache.num_bytes)
            stats.seconds = time.perf_counter() - row.started
            blocks.append((row.number, kept))
        for row in [row for row in self.rows if row.ended]:
            self.end(row)
        yield from blocks

    def end(self, row: Row) -> None:
        """Take a row out; the last one moves into its place."""
        index = self.rows.index(row)
        for slots in self.cache.slots:
            slots.end_row(index)
        last = self.rows.pop()
        if last is not row:
            self.rows[index] = last
        self._rows_changed()

    def read_by_drafter(self, taps: Float[Tensor, "batch count given"]) -> Float[Tensor, "batch count tapped"]:
        """The drafter's share of what the target gives, which may serve several heads."""
        return taps if self.tap_columns is None else taps.index_select(-1, self.tap_columns)

    def verified(self) -> Verified:
        """What the last step of each row made certain, side by side."""
        rows, device = self.rows, self.target.device
        counts = [len(row.taps) for row in rows]
        longest = max(counts)
        # The newly verified positions' next tokens end with the root.
        tokens = [row.text[row.start + 1 :] + [0] * (longest - len(row.taps)) for row in rows]
        taps = [row.taps if len(row.taps) == longest else fill_up(row.taps, longest) for row in rows]
        next_tokens = torch.tensor(tokens).to(device, non_blocking=True)
        if len(rows) == 1:
            roots = next_tokens[:, -1:]
        else:
            roots = torch.tensor([[row.text[-1]] for row in rows]).to(device, non_blocking=True)
        return Verified(
            taps=taps[0].unsqueeze(0) if len(rows) == 1 else torch.stack(taps),
            next_tokens=next_tokens,
            roots=roots,
            starts=[row.start for row in rows],
            counts=counts,
            drafted=[row.drafted for row in rows],
            remaining=[row.left - 1 for row in rows],  # the bonus token comes for free
            sampling=self.sampling if self.static is not None else self.with_gumbel(),
            history=self.history,
            texts=[row.text for row in rows],
            choices=[row.choices for row in rows],
        )

    def with_gumbel(self) -> BatchSampling:
        """How rows choose, with the noise of every position that this step may look at."""
        positions, count = self.cache.target.starts + 1, self.drafter.depth + 1
        return self.sampling.with_gumbel(positions, count, self.target.config.vocab_size)

    def _rows_changed(self) -> None:
        """What depends on who is in the batch."""
        if self.rows:
            requests = [row.request for row in self.rows]
            self.sampling = BatchSampling([request.sampling for request in requests], self.target.device)
            self.history = start_history(requests, [row.generation.tokens[:-1] for row in self.rows], self.target)


def start_history(requests: list[Request], outputs: list[list[int]], target: TargetModel) -> History | None:
    """What penalties look at: the prompts and what was written so far; None when no request has any."""
    if not any(request.sampling.needs_history for request in requests):
        return None
    history = History.start([request.prompt for request in requests], target.config.vocab_size, target.device)
    for row, output in enumerate(outputs):
        tokens = torch.tensor(output, dtype=torch.long, device=target.device)
        history.counts[row, 0].index_add_(0, tokens, torch.ones(len(output), device=target.device))
    return history


def log_probabilities(logits: Float[Tensor, "nodes vocab"], tokens: Int[Tensor, " nodes"]) -> list[float]:
    found: list[float] = logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    return found


def fill_up(taps: Float[Tensor, "count tapped"], count: int) -> Float[Tensor, "longest tapped"]:
    """Zeros below, up to `count` rows."""
    return torch.cat([taps, taps.new_zeros(count - len(taps), taps.shape[1])])
