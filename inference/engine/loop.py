"""The decode loop: drafts trees, lets the target verify all of them in one pass, and keeps the accepted paths.

The rows of a batch advance independently. When one ends, the next waiting request takes its place (continuous
batching), and requests may be submitted and cancelled at any time between steps.
"""

import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator

import torch

from headstart.inference.core.drafter import PLAIN, Drafter
from headstart.inference.core.request import GREEDY, EmittedTokens, Generation, Request, Sequence
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.batch import Batch
from headstart.inference.engine.budget import check_request, refuse_more_than_memory
from headstart.inference.engine.prefill import Prefill, PrefillSchedule, PromptChunk
from headstart.inference.engine.speculation import SpeculationByLoad
from headstart.inference.engine.step import DecodeStep
from headstart.inference.kernels import Threads
from headstart.inference.targets.cuda_graph import REACH_MIN
from headstart.inference.targets.model import TargetModel

# Tokens of prompts in a pass. In longer chunks attention within the chunk costs too much; a GPU needs them to be busy.
# The second number holds while rows run, which wait for the pass: on a CPU, about two plain steps.
CHUNKS_CPU, CHUNKS_GPU = (512, 16), (2048, 512)


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
    requests: Collection[Request],
    drafter: Drafter | None = None,
    max_batch: int = 16,
    static: bool | None = None,
) -> list[Generation]:
    """Continue many prompts, at most `max_batch` at a time. Each text is the same as if it were decoded alone.

    `static` gives every tensor the shape of the full capacity, which CUDA graphs need. None means True on CUDA, unless
    several ranks or devices hold the target.
    """
    loop = loop_of(target, requests, drafter, max_batch, static)
    for _ in loop.run():
        pass
    return list(loop.generations.values())


def generate_each(
    target: TargetModel,
    requests: Collection[Request],
    drafter: Drafter | None = None,
    max_batch: int = 16,
    ending: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Generation]]:
    """`generate_batch` that yields (number of the request, its output) as each text ends.

    Once `ending`, it finishes running texts and starts no new ones.
    """
    loop = loop_of(target, requests, drafter, max_batch)
    for _ in loop.run():
        yield from loop.take_ended()
        if loop.waiting and ending():
            loop.waiting = {}


def loop_of(
    target: TargetModel,
    requests: Collection[Request],
    drafter: Drafter | None = None,
    max_batch: int = 16,
    static: bool | None = None,
    speculation: SpeculationByLoad | None = None,
) -> "DecodeLoop":
    """An offline loop with these requests, which are numbered from 0, and with no more rows than they need.

    Free rows are prefilled first, in passes that are the same in every run.
    """
    rows = min(max_batch, max(len(requests), 1))
    loop = DecodeLoop(target, drafter, rows, static, prompts_first=True, speculation=speculation)
    for request in requests:
        loop.submit(request)
    return loop


class DecodeLoop:
    """Decodes requests, which may come and go while it runs, and hands out their tokens in blocks.

    `generations` holds the output of each request so far. A loop is not thread-safe: one thread owns it, together with
    its target and drafter, and calls `submit`, `cancel` and `step` in turn. Requests start in the order of their
    priority; within one priority, first come, first served.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        max_batch: int = 16,
        static: bool | None = None,
        prefill_chunk: int | None = None,
        prompts_first: bool = False,
        memory: int | None = None,
        prefix_memory: int | None = None,
        speculation: SpeculationByLoad | None = None,
        record: Callable[[Sequence], None] | None = None,
    ) -> None:
        """At most `max_batch` requests decode together; the others wait. `static` as in `generate_batch`.

        One pass prefills at most `prefill_chunk` tokens; None chooses by device. While rows run, prompts are prefilled
        in smaller chunks: in the same passes as the rows' steps, which then draft nothing, or in turn with the steps
        where the target or static shapes require it. With `prompts_first` all free rows are prefilled before the next
        step.

        `memory` is the limit of the cache in bytes. A request waits until its longest possible text fits together with
        the others. On a GPU, and with static shapes, each row has the capacity of the longest text.

        `prefix_memory` is the limit, in bytes, of the prefixes kept of earlier texts, in host or device memory and in
        addition to the cache; None keeps none. A prompt that shares a prefix with one of these texts is prefilled from
        the end of that prefix.

        With `speculation`, steps draft only where that pays; without it they always do.

        `record` is called with each row whose text has ended; the row holds the target's hidden states.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch: {max_batch} given, 1 or more is allowed")
        self.target, self.max_batch = target, max_batch
        if not target.passes.verifies_drafts:  # it continues its states token by token, so prefill is one pass
            prefill_chunk, prompts_first, prefix_memory = target.max_positions, True, None
        self.batch = Batch(target, drafter or PLAIN, max_batch, static, memory, prefix_memory, record is not None)
        self.decode_step, self.prefill = DecodeStep(self.batch, speculation), Prefill(self.batch)
        # Ranks must do the same work at the same time, so no clock may decide what they do.
        alone = target.ranks.count == 1
        prompts_first = prompts_first or not alone
        shares_steps = not prompts_first and not self.batch.is_static and target.passes.allows_side_by_side
        on_cpu = target.device.type == "cpu"
        chunk, with_rows = CHUNKS_CPU if on_cpu else CHUNKS_GPU
        chunk = chunk if prefill_chunk is None else prefill_chunk
        self.schedule = PrefillSchedule(chunk, with_rows, prompts_first, shares_steps)
        self.threads = Threads() if alone and on_cpu else None
        self.record = record
        self.generations: dict[int, Generation] = {}
        self.waiting: dict[int, Request] = {}  # by number: higher priority first, then first come, first served
        self.admits = True  # whether requests that wait may start
        self.ended: list[int] = []  # requests whose text has ended since `take_ended` was last called
        self.submitted = 0

    def capture_ahead(self) -> None:
        """Capture the steps that most texts need before the first request; does nothing where no step is captured."""
        if self.batch.is_static:
            self.batch.open_for_any()
            assert self.batch.static is not None
            left = self.batch.static.capture_ahead(REACH_MIN)
            print(f"capturing {next(left, 0) + 1} decode steps as CUDA graphs", file=sys.stderr, flush=True)
            deque(left, 0)

    @property
    def prefix_counts(self) -> tuple[int, int]:
        """Prompt tokens that were looked up among earlier texts, and how many of them were cached."""
        prefixes = self.batch.prefixes
        return (0, 0) if prefixes is None else (prefixes.queries, prefixes.hits)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until another request is submitted."""
        return not (self.waiting or self.batch.members)

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number. Raises ValueError for one that does not fit the target."""
        check_request(self.target, request)
        batch = self.batch
        batch.budget.refuse_too_long(request, batch.nodes)
        if batch.budget.memory is None and (not batch.is_open or request.length + batch.nodes > batch.limit):
            rows = min(self.max_batch, len(self.waiting) + len(batch.members) + 1)
            refuse_more_than_memory(self.target, rows, batch.nodes, max(request.length, batch.limit - batch.nodes))
        batch.limit = max(batch.limit, request.length + batch.nodes)
        number, self.submitted = self.submitted, self.submitted + 1
        self.generations[number] = Generation()
        last = next(reversed(self.waiting.values()), request)
        self.waiting[number] = request
        if request.priority > last.priority:
            self.waiting = dict(sorted(self.waiting.items(), key=lambda each: (-each[1].priority, each[0])))
        return number

    @torch.inference_mode()
    def cancel(self, number: int) -> None:
        """End a request, waiting or running; its row is free at once. Does nothing if its text has ended."""
        row = next((row for row in self.batch.members if row.number == number), None)
        if row is not None:
            self.decode_step.in_flight = None  # it is run again, without this row
            self._end(row)
        elif self.waiting.pop(number, None) is not None:
            self.ended.append(number)
        else:
            return
        self.generations[number].finish = "cancelled"

    def withdraw(self) -> list[int]:
        """Drop the waiting requests, so that another loop may take them; returns their numbers."""
        numbers, self.waiting = [*self.waiting], {}
        for number in numbers:
            del self.generations[number]
        return numbers

    def forget(self, number: int) -> None:
        """Drop the output of a request whose text has ended, so that a long-running loop does not fill the memory."""
        if number in self.waiting or any(row.number == number for row in self.batch.members):
            raise ValueError(f"request {number} has not ended, only one that has is allowed here; cancel it first")
        self.generations.pop(number, None)
        self.ended = [ended for ended in self.ended if ended != number]

    def take_ended(self) -> list[tuple[int, Generation]]:
        """The requests that have ended since the last call, cancelled ones included, with their output."""
        numbers, self.ended = self.ended, []
        return [(number, self.generations[number]) for number in numbers]

    def run(self) -> Generator[EmittedTokens, None, None]:
        """Run until idle and yield the blocks as they become certain. Closing the iterator closes the loop.

        Raises the error of a text that fails.
        """
        try:
            while not self.idle:
                known = len(self.ended)
                blocks = self.step()
                errors = [self.generations[number].error for number in self.ended[known:]]
                yield from blocks
                for error in filter(None, errors):
                    raise error
        finally:
            self.close()

    def close(self) -> None:
        """Cancel all requests that have not ended, and free the cache. The loop may be used again."""
        for number in [*self.waiting, *(row.number for row in self.batch.members)]:
            self.cancel(number)
        self.batch.close()
        if self.threads is not None:
            self.threads.restore()

    @torch.inference_mode()
    def step(self) -> list[EmittedTokens]:
        """One pass of the target: over prompts, or a step of all rows, or both at once; does nothing if idle.

        No block is empty. The first block of a request is its first token. An error in the work for one row, such as a
        stop string or a constraint, ends that row alone and is kept in `generations`; other errors are raised.
        """
        if self.threads is not None:
            self.threads.follow()
        batch, schedule, blocks = self.batch, self.schedule, list[EmittedTokens]()
        can_read, running = self._can_read(), len(batch.rows)
        reads = can_read and schedule.reads_next(running, self.max_batch - running, len(self.waiting))
        alone = reads and self._next_has_images()  # in turn with the steps
        reads = reads and not (alone and running and schedule.read_last)
        if self.decode_step.in_flight is not None:
            blocks = self.decode_step.follow_flight(may_go_on=not can_read)
            self._end_rows()
            return blocks
        steps = running > 0 and (not reads or (schedule.shares_steps and not alone))
        if steps:
            # First, so that a prompt finds in the cache the prefix that it shares with the others.
            self.decode_step.prepare(may_draft=not reads)
        chunks = self._next_chunks() if reads else []
        try:
            if steps:
                blocks, outputs = self.decode_step.run(self.prefill.parts(chunks), may_run_ahead=not can_read)
            else:
                outputs = self.prefill.run(chunks) if chunks else []
        except Exception as error:
            if steps or chunks[0].images is None:
                raise
            chunks[0].row.fail(error)
            batch.partial = None
            self.ended.append(chunks[0].row.number)
        else:
            speculation = self.decode_step.speculation
            feeds = speculation is None or speculation.is_on
            blocks += self.prefill.finish(chunks, outputs, feeds) if chunks else []
        schedule.read_last = reads and not steps
        self._end_rows()
        return blocks

    def _end_rows(self) -> None:
        for row in [row for row in self.batch.rows if row.ended]:
            self._end(row)

    def _can_read(self) -> bool:
        """Whether a prompt is in prefill, or the next waiting request has a place and memory."""
        if self.batch.partial is not None:
            return True
        has_place = self.admits and bool(self.waiting) and len(self.batch.rows) < self.max_batch
        return has_place and self.batch.fits([self._first_waiting])

    @property
    def _first_waiting(self) -> Request:
        return next(iter(self.waiting.values()))

    def _next_has_images(self) -> bool:
        """Whether the next tokens to prefill hold images."""
        partial = self.batch.partial
        request = self._first_waiting if partial is None else partial.row.request
        return request.images is not None and (partial is None or partial.cached < request.images.end)

    def _next_chunks(self) -> list[PromptChunk]:
        """The waiting prompts that are prefilled next in full, or the next chunk of a long one."""
        batch, most, rows = self.batch, self.schedule.tokens(bool(self.batch.rows)), []
        if batch.partial is None:
            waiting, taken = [*self.waiting.items()][: self.max_batch - len(batch.rows)], list[Request]()
            for number, request in waiting:  # no request overtakes one that may not join
                taken.append(request)
                if len(taken) > 1 and not self.prefill.may_join(taken, most):
                    break
                rows.append(batch.new_row(number, request, self.generations[number]))
                del self.waiting[number]
        return self.prefill.next_chunks(rows, most)

    def _end(self, row: Sequence) -> None:
        self.ended.append(row.number)
        if self.record is not None:
            self.record(row)
        self.batch.end(row)
