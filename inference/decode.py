"""The decode loop: draft trees, let the target verify all of them in one pass, and keep the paths that it accepts.

Rows of a batch advance at their own pace. When one ends, the next waiting request takes its place (continuous
batching), and requests may be submitted and cancelled at any time between steps.
"""

import time
from collections.abc import Generator, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.inference.cache import PAGE, KVCache
from headstart.inference.cuda_graph import StaticStep, StepOutput, size_bucket
from headstart.inference.drafter import PLAIN, Drafter, VerifiedOnHost
from headstart.inference.prefill import read_prompts, refuse_nan
from headstart.inference.request import GREEDY, Block, Generation, Request, Row
from headstart.inference.request_checks import check_request
from headstart.inference.sampling import BatchSampling, History, Sampling
from headstart.inference.step_memory import refuse_more_than_memory
from headstart.inference.target.model import TargetModel, TargetOutput
from headstart.inference.tree import take
from headstart.inference.verify import Accepted, accept, verify
from headstart.inference.waiting import Queue

READ_TOGETHER = 512  # tokens of prompts in one prefill pass; of more, every token would look at too many of the others


def generate(
    target: TargetModel,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    drafter: Drafter | None = None,
    static: bool | None = None,
) -> Generation:
    """Continue a prompt as the target alone would. A drafter changes the speed, never the text.

    Raises ValueError when the prompt and the new tokens exceed the target's positions.
    """
    return generate_batch(target, [Request(prompt, max_new_tokens, sampling or GREEDY)], drafter, 1, static)[0]


def generate_batch(
    target: TargetModel,
    requests: Sequence[Request],
    drafter: Drafter | None = None,
    max_batch: int = 16,
    static: bool | None = None,
) -> list[Generation]:
    """Continue many prompts, at most `max_batch` at a time. Each gets the text that it would get alone.

    `static` gives every tensor the shape of the full capacity, as CUDA graphs need it. None means True on CUDA, unless
    several ranks hold the target.
    """
    loop = loop_of(target, requests, drafter, max_batch, static)
    for _ in loop.run():
        pass
    return list(loop.generations.values())


def generate_each(
    target: TargetModel, requests: Sequence[Request], drafter: Drafter | None = None, max_batch: int = 16
) -> Iterator[tuple[int, Generation]]:
    """`generate_batch` that yields (number of the request, its output) as each text ends."""
    loop = loop_of(target, requests, drafter, max_batch)
    for _ in loop.run():
        yield from loop.take_ended()


def loop_of(
    target: TargetModel,
    requests: Sequence[Request],
    drafter: Drafter | None = None,
    max_batch: int = 16,
    static: bool | None = None,
) -> "DecodeLoop":
    """A loop with these requests, which are numbered from 0, and with no more rows than they need."""
    loop = DecodeLoop(target, drafter, min(max_batch, max(len(requests), 1)), static)
    for request in requests:
        loop.submit(request)
    return loop


class DecodeLoop:
    """Decodes requests, which may come and go while it runs, and hands out their tokens in blocks.

    `generations` holds the output of each request so far. A loop is not thread-safe: one thread owns it, together with
    its target and drafter, and calls `submit`, `cancel` and `step` in turn. Requests decode in the order of their
    priority, those of one priority in the order in which they came.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter | None = None, max_batch: int = 16, static: bool | None = None
    ) -> None:
        """At most `max_batch` requests decode together; the others wait. `static` is that of `generate_batch`."""
        if max_batch < 1:
            raise ValueError(f"max_batch: {max_batch} given, 1 or more is allowed")
        self.target, self.drafter, self.max_batch = target, drafter or PLAIN, max_batch
        self.tap_columns = target.tap_columns(self.drafter.taps)
        self.is_static = target.device.type == "cuda" and target.ranks.may_capture if static is None else static
        self.nodes = size_bucket(self.drafter.max_nodes) if self.is_static else self.drafter.max_nodes
        self.generations: dict[int, Generation] = {}
        self.waiting = Queue()
        self.rows: list[Row] = []
        self.ended: list[int] = []  # requests whose text has ended since `take_ended` was last called
        self.submitted = 0
        self.limit = 0  # slots that the longest request so far may need
        self.cache: KVCache  # while the loop is open: from the first prompt until `close`
        self.is_open = False
        self.static: StaticStep | None = None
        self.last_step: tuple[float, float] | None = None  # time.perf_counter() before and after it

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until another request is submitted."""
        return not (self.waiting or self.rows)

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number. Raises ValueError for one that does not fit the target or the others."""
        check_request(self.target, request)
        self._refuse_other_rule(request)
        length = len(request.prompt) + request.max_new_tokens
        if not self.is_open or length + self.nodes > self.limit:
            rows = min(self.max_batch, len(self.waiting) + len(self.rows) + 1)
            refuse_more_than_memory(self.target, rows, self.nodes, max(length, self.limit - self.nodes))
        self.limit = max(self.limit, length + self.nodes)
        number, self.submitted = self.submitted, self.submitted + 1
        self.generations[number] = Generation()
        self.waiting.add(number, request)
        return number

    @torch.inference_mode()
    def cancel(self, number: int) -> None:
        """End a request wherever it is; its row is free at once. Nothing happens if its text has ended."""
        row = next((row for row in self.rows if row.number == number), None)
        if row is not None:
            self.end(row)
        elif self.waiting.remove(number):
            self.ended.append(number)
        else:
            return
        self.generations[number].finish = "cancelled"

    def forget(self, number: int) -> None:
        """Drop the output of a request whose text has ended, so that memory stays flat while a loop runs for long."""
        if number in self.waiting or any(row.number == number for row in self.rows):
            raise ValueError(f"request {number} has not ended, only one that has is allowed here; cancel it first")
        self.generations.pop(number, None)
        self.ended = [ended for ended in self.ended if ended != number]

    def take_ended(self) -> list[tuple[int, Generation]]:
        """The requests that have ended since the last call, cancelled ones too, with their output."""
        numbers, self.ended = self.ended, []
        return [(number, self.generations[number]) for number in numbers]

    def run(self) -> Generator[Block, None, None]:
        """Do all there is to do, and yield the blocks as they become certain. Closing the iterator closes the loop."""
        try:
            while not self.idle:
                yield from self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what has not ended, and free the cache. The loop may be used again."""
        for number in [*self.waiting.numbers, *(row.number for row in self.rows)]:
            self.cancel(number)
        if self.static is not None:
            self.static.give_back()
            self.static = None
        if self.is_open:
            del self.cache
            self.is_open = False

    @torch.inference_mode()
    def step(self) -> list[Block]:
        """One piece of work: read prompts while a row is free for them, or one cycle of all rows; nothing if idle.

        No block is empty. The first block of a request is its first token.
        """
        if self.waiting and len(self.rows) < self.max_batch:
            return self.prefill(self.waiting.take(self.max_batch - len(self.rows), READ_TOGETHER))
        return self.cycle() if self.rows else []

    def cycle(self) -> list[Block]:
        """For all rows: draft a tree, run the target on it, verify, compact the cache, record."""
        started = time.perf_counter()
        self.make_room(max(self.cache.target.lengths) + self.nodes)
        verified = self.verified()
        output: StepOutput | TargetOutput
        if self.static is not None and self.static.serves(self.sampling):
            output = self.static(verified)  # drafts, runs the target and lets it choose, as one captured graph
            accepted = accept(output.tree, output.choices)
        else:
            tree = self.drafter.draft(verified, self.cache)
            output = self.target.forward_tree(tree, self.cache)
            accepted = verify(tree, output.logits, self.cache.target.starts, verified.sampling, self.history)
        bytes_moved = self.cache.target.keep([found.path for found in accepted])
        blocks = self.record(accepted, output, bytes_moved)
        self.last_step = started, time.perf_counter()
        self._end_rows()
        return blocks

    def prefill(self, requests: list[tuple[int, Request]]) -> list[Block]:
        """Read prompts in one pass, each into a row of its own; their last logits give the first new tokens."""
        started, device = time.perf_counter(), self.target.device
        prompts = [request.prompt for _, request in requests]
        self.make_room(max(map(len, prompts)) + self.nodes)
        row_caches = [self.cache.row(len(self.rows) + place) for place in range(len(prompts))]
        output = read_prompts(self.target, prompts, row_caches)
        refuse_nan(output.logits, self.target)
        taps = self.drafter_taps(output.taps)[0].split([len(prompt) for prompt in prompts])
        logits = output.logits.transpose(0, 1)  # [prompts, 1, vocab]
        sampling = BatchSampling([request.sampling for _, request in requests], device)
        history = start_history([request for _, request in requests], [[]] * len(requests), self.target)
        positions = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        choices = sampling.choose(logits, positions, history)
        rows, blocks = [], []
        for place, (number, request) in enumerate(requests):
            text = torch.cat([torch.tensor(request.prompt, device=device), choices[place]])
            self.drafter.prefill(taps[place].unsqueeze(0), text.unsqueeze(0), row_caches[place])
            rows.append(self.start_row(number, request, taps[place], started))
            logprobs = log_probabilities(logits[place], choices[place]) if request.logprobs else None
            blocks.append(Block(number, rows[-1].add_tokens(choices[place].tolist(), logprobs), [None]))
        self.rows += rows
        for slots in self.cache.slots:
            slots.set_lengths([*slots.lengths, *map(len, prompts)])
        self._rows_changed()
        self._end_rows()
        return blocks

    def start_row(self, number: int, request: Request, taps: Float[Tensor, "count tapped"], started: float) -> Row:
        """A row whose prompt was read; `taps` are those of the prompt."""
        ends = tuple(self.target.end_tokens) if request.end_tokens is None else request.end_tokens
        generation, prompt = self.generations[number], request.prompt
        generation.stats.cache_bytes = self.cache.num_bytes
        return Row(number, request, generation, ends, list(prompt), taps[-1:], len(prompt) - 1, started)

    def verified(self) -> VerifiedOnHost:
        """The tokens and hidden states that the last step made certain in each row, as a batch."""
        rows, device = self.rows, self.target.device
        counts = [len(row.taps) for row in rows]
        longest = max(counts)
        # The token after the last newly verified position is the root.
        tokens = [row.text[row.start + 1 :] + [0] * (longest - len(row.taps)) for row in rows]
        taps = [row.taps if len(row.taps) == longest else pad_right(row.taps, longest) for row in rows]
        next_tokens = torch.tensor(tokens).to(device, non_blocking=True)
        if len(rows) == 1:
            roots = next_tokens[:, -1:]
        else:
            roots = torch.tensor([[row.text[-1]] for row in rows]).to(device, non_blocking=True)
        return VerifiedOnHost(
            taps=taps[0].unsqueeze(0) if len(rows) == 1 else torch.stack(taps),
            next_tokens=next_tokens,
            roots=roots,
            sampling=self.sampling if self.static is not None else self.with_gumbel(),
            history=self.history,
            starts=[row.start for row in rows],
            counts=counts,
            drafted=[row.drafted for row in rows],
            remaining=[row.left - 1 for row in rows],  # one token is left for the bonus token
            texts=[row.text for row in rows],
            choices=[row.choices for row in rows],
            last_step=self.last_step,
        )

    def record(self, accepted: list[Accepted], output: StepOutput | TargetOutput, bytes_moved: int) -> list[Block]:
        """Add what was accepted to each row."""
        device = self.target.device
        longest = max(len(found.path) for found in accepted)
        paths = torch.tensor([found.path + [0] * (longest - len(found.path)) for found in accepted])
        paths = paths.to(device, non_blocking=True)
        path_taps = self.drafter_taps(take(output.taps, paths))  # [batch, longest, tapped]
        blocks = []
        for index, (row, found) in enumerate(zip(self.rows, accepted, strict=True)):
            count = len(found.path)
            if self.history is not None:
                self.history.count(index, [row.text[-1], *found.tokens[:-1]])
            logprobs = None
            if row.request.logprobs:
                chosen = torch.tensor(found.tokens, device=device)
                logprobs = log_probabilities(output.logits[index, paths[index, :count]], chosen)
            blocks.append(row.record_step(found, path_taps[index, :count], logprobs))
            row.generation.stats.bytes_moved += bytes_moved // len(self.rows)
            row.generation.stats.cache_bytes = max(row.generation.stats.cache_bytes, self.cache.num_bytes)
        return blocks

    def _refuse_other_rule(self, request: Request) -> None:
        if self.idle:
            return
        other = self.rows[0].request if self.rows else self.waiting.first
        if request.sampling.rule != other.sampling.rule:  # all others agree already
            raise ValueError("the requests of a batch must agree on decode.acceptance; decode them in separate calls")

    def end(self, row: Row) -> None:
        """Take a row out of the batch; others move into its place."""
        self.ended.append(row.number)
        for source, goal in self.cache.end_row(self.rows.index(row)):
            self.rows[goal] = self.rows[source]
        self.rows.pop()
        self._rows_changed()

    def drafter_taps(self, taps: Float[Tensor, "batch count given"]) -> Float[Tensor, "batch count tapped"]:
        """The hidden states that this drafter reads; the target may give more, for other heads."""
        return taps if self.tap_columns is None else taps.index_select(-1, self.tap_columns)

    def with_gumbel(self) -> BatchSampling:
        """How rows sample, with the Gumbel noise of every position that this step may reach."""
        positions, count = self.cache.target.starts + 1, self.drafter.depth + 1
        return self.sampling.with_gumbel(positions, count, self.target.config.vocab_size)

    def make_room(self, capacity: int) -> None:
        """Make sure that each row can hold `capacity` tokens, a tree included."""
        if not self.is_open:
            self._open(capacity)
        elif not self.is_static:
            self.cache.make_room(capacity, self.limit)
        elif self.cache.target.capacity < self.limit:
            self._move_to_larger_step()

    def _open(self, capacity: int) -> None:
        """Allocate the cache, or borrow that of an earlier run with its captured step."""
        if self.is_static:
            self.static = StaticStep.borrow(self.target, self.drafter, self.max_batch, self.limit)
            self.cache = self.static.cache
        else:
            capacity = min(max(capacity, self.waiting.longest_prompt + self.nodes) + PAGE, self.limit)
            self.cache = self.target.new_cache(capacity, self.drafter.cache_shape, self.max_batch)
        self.cache.set_lengths([])
        self.is_open = True

    def _move_to_larger_step(self) -> None:
        """Take the rows to a step with room for the longest request: a captured step cannot grow its cache."""
        assert self.static is not None
        wanted = min(2 * self.cache.target.capacity, self.target.max_positions + self.nodes)
        larger = StaticStep.borrow(self.target, self.drafter, self.max_batch, max(self.limit, wanted))
        for slots, source in zip(larger.cache.slots, self.cache.slots, strict=True):
            slots.take_over(source)
        self.static.give_back()
        self.static, self.cache = larger, larger.cache

    def _end_rows(self) -> None:
        """Take the rows out whose text has ended."""
        for row in [row for row in self.rows if row.ended]:
            self.end(row)

    def _rows_changed(self) -> None:
        """Rebuild what depends on which rows are in the batch."""
        if self.rows:
            requests = [row.request for row in self.rows]
            self.sampling = BatchSampling([request.sampling for request in requests], self.target.device)
            self.history = start_history(requests, [row.generation.tokens[:-1] for row in self.rows], self.target)


def start_history(requests: list[Request], outputs: list[list[int]], target: TargetModel) -> History | None:
    """The tokens that penalties count: prompts and outputs so far. None if no request has a penalty."""
    if not any(request.sampling.needs_history for request in requests):
        return None
    history = History.start([request.prompt for request in requests], target.config.vocab_size, target.device)
    for row, output in enumerate(outputs):
        history.count(row, output)
    return history


def log_probabilities(logits: Float[Tensor, "nodes vocab"], tokens: Int[Tensor, " nodes"]) -> list[float]:
    """The target's own log-probability of each token, in nats."""
    found: list[float] = logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    return found


def pad_right(taps: Float[Tensor, "count tapped"], count: int) -> Float[Tensor, "longest tapped"]:
    """Zeros after the taps, up to `count` positions."""
    return torch.cat([taps, taps.new_zeros(count - len(taps), taps.shape[1])])
