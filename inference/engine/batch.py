"""The sequences that decode together: their places in one cache, and what is kept of their prefixes."""

import sys
import time
from dataclasses import dataclass

import torch

from headstart.inference.core.cache import PAGE_TOKENS, KVCache, SlotContents
from headstart.inference.core.cache_memory import free_memory, takes_memory_lazily
from headstart.inference.core.constraint import GuardedState
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.recurrent import WINDOW, Snapshot
from headstart.inference.core.request import Generation, Request, Sequence, Trace, Unread
from headstart.inference.core.tree import size_bucket
from headstart.inference.engine.budget import CacheBudget
from headstart.inference.engine.prefixes import BLOCK, Cached, Prefix, PrefixIndex
from headstart.inference.targets.cuda_graph import StaticStep
from headstart.inference.targets.model import TargetModel

CATCH_UP = 256  # positions that a drafter reads before a step, of those that it missed while drafts did not pay


@dataclass
class Reading:
    """A prompt that is read chunk by chunk while other rows decode."""

    row: Sequence  # its text is the prompt
    place: int  # in the cache, after those of the running rows
    count: int  # tokens of the prompt that the cache holds
    stop: int = 0  # tokens after which the target's states are copied for other prompts; 0: nowhere


class Batch:
    """Rows in the first places of one cache. A prompt may be read chunk by chunk in a place after theirs."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        max_rows: int,
        static: bool | None,
        memory: int | None,
        prefix_memory: int | None,
        traces: bool = False,
    ) -> None:
        """`static`, `memory` and `prefix_memory` are those of the decode loop. `traces`: rows keep their states."""
        self.target, self.drafter, self.max_rows, self.traces = target, drafter, max_rows, traces
        self.tap_columns = target.tap_columns(drafter.taps)
        self.is_static = target.may_capture if static is None else static and target.passes.verifies_trees
        self.nodes = size_bucket(drafter.max_nodes) if self.is_static else drafter.max_nodes
        if target.passes.layout.is_recurrent:
            self.nodes += WINDOW  # a row with a shorter window than another's is filled up
        self.is_lazy = takes_memory_lazily(target.device, self.is_static, max_rows)
        shapes = [shape for shape in (target.passes.layout.shapes, drafter.cache_shape) if shape is not None]
        devices, states = {*target.passes.layout.devices}, target.passes.layout.state_bytes
        self.budget = CacheBudget(memory, shapes, target.dtype, devices, max_rows, self.is_lazy, states)
        self.prefixes = (
            None
            if prefix_memory is None
            else PrefixIndex(
                prefix_memory, drafter.cache_shape is not None, target.passes.layout.is_recurrent, target.end_tokens
            )
        )
        self.rows: list[Sequence] = []
        self.changes = 0  # how often `rows` changed
        self.reading: Reading | None = None
        self.catching_up = False  # whether the drafter has yet to read what was written while drafts did not pay
        self.limit = 0  # slots that the longest request so far may need
        self.cache: KVCache  # while the batch is open: from the first prompt until `close`
        self.is_open = False
        self.static: StaticStep | None = None

    @property
    def members(self) -> list[Sequence]:
        """The rows, and the one whose prompt is being read."""
        return self.rows if self.reading is None else [*self.rows, self.reading.row]

    @property
    def held_after_rows(self) -> list[int]:
        """Tokens in each place after the rows', up to that of the prompt that is being read."""
        reading = self.reading
        return [] if reading is None else [*[0] * (reading.place - len(self.rows)), reading.count]

    def new_row(self, number: int, request: Request, generation: Generation) -> Sequence:
        """A row for a request whose prompt is to be read next."""
        ends = tuple(self.target.end_tokens) if request.end_tokens is None else request.end_tokens
        unread = Unread(torch.zeros(0, 0, device=self.target.device), 0)
        row = Sequence(number, request, generation, ends, list(request.prompt), unread, time.perf_counter())
        if self.traces:
            row.trace = Trace()
        if request.constraint is not None:
            row.constraint = GuardedState(request.constraint, self.target.config.vocab_size)
        return row

    def take_place(self, row: Sequence, place: int, prefix: Prefix | None) -> None:
        """Copy to a row's place what the cache keeps of a prefix of its prompt."""
        if prefix is None:
            return
        for first, block in zip([0, *prefix.ends], prefix.blocks, strict=False):
            self.cache.target.write(place, first, block.target)
            if self.cache.head is not None and block.head is not None:
                self.cache.head.write(place, max(first - 1, 0), block.head)
        if self.cache.recurrent is not None:
            self.cache.recurrent.write(place, prefix.blocks[-1].states)
        row.unread = Unread(prefix.taps, prefix.start)
        row.kept_from = row.generation.cached_tokens = prefix.tokens
        if row.trace is not None:
            row.trace.start = prefix.tokens
        self.catching_up = self.catching_up or len(prefix.taps) > CATCH_UP  # it was written without the drafter

    def join(self, rows: list[Sequence]) -> None:
        """Let rows decode whose prompts were read, in the places after the running ones."""
        self.rows += rows
        for slots in self.cache.slots:
            slots.set_lengths([*slots.lengths, *(len(row.request.prompt) for row in rows)])
        self.changes += 1

    def end(self, row: Sequence) -> None:
        """Take a row out, or stop reading its prompt; others move into its place."""
        if self.reading is not None and row is self.reading.row:
            self.remember(row, self.reading.place, self.reading.count, self.reading.count)
            self.reading = None
        else:
            place = self.rows.index(row)
            self.remember_row(row, place)
            for source, goal in self.cache.end_row(place):
                self.rows[goal] = self.rows[source]
            self.rows.pop()
            self.changes += 1

    def feed(self, row: Sequence, place: int, most: int = sys.maxsize) -> int:
        """Let the drafter read up to `most` unread positions of a row; returns how many it read.

        The last position is left: it is read with the row's next draft.
        """
        unread = row.unread
        unread.gather()
        count = min(len(unread.taps) - 1, most)
        if row.request.speculative:
            cache, text = self.cache.row(place), row.text[unread.start : unread.start + count + 2]
            cache.set_lengths([unread.start])
            taps = unread.taps[: count + 1].unsqueeze(0)
            self.drafter.prefill(taps, torch.tensor([text], device=self.target.device), cache)
        unread.has_read(count)
        return count

    def remember_row(self, row: Sequence, place: int) -> None:
        """Keep what the cache holds of a running row's text for prompts that share it as a prefix."""
        held, states = self.cache.target.lengths[place], self.cache.recurrent
        self.remember(row, place, held, 0 if states is None else held - len(states.window(place)))

    def remember(self, row: Sequence, place: int, held: int, at: int = 0) -> None:
        """Keep the first `held` cached tokens of a row's text for prompts that share them as a prefix.

        The target's states, if it has any and they are to be kept, are those after `at` tokens.
        """
        if self.prefixes is None:
            return
        # The drafter of a row without drafts reads nothing.
        read = row.unread.start if row.request.speculative else 0
        taps = torch.cat(row.kept)

        def head(first: int, end: int) -> SlotContents | None:
            slots = self.cache.head
            return slots.copy_kv(place, max(first - 1, 0), end - 1) if slots is not None and end - 1 <= read else None

        def states(first: int, end: int) -> Cached | None:
            of_head = head(first, end)
            is_read = of_head is not None or self.cache.head is None
            if (end - 1 if is_read else first) < row.kept_from:
                return None
            own = taps[(end - 1 if is_read else first) - row.kept_from : end - row.kept_from].clone()
            return Cached(self.cache.target.copy_kv(place, first, end), of_head, own)

        held, at = min(held, len(row.text)) // BLOCK * BLOCK, at if at <= len(row.text) else 0
        self.prefixes.add(row.text[: max(held, at)], states, head, at, lambda: self._copied_states(place))
        if held > row.kept_from:  # these taps are in the index now
            row.kept, row.kept_from = [taps[held - row.kept_from :].clone()], held

    def _copied_states(self, place: int) -> Snapshot:
        assert self.cache.recurrent is not None
        return self.cache.recurrent.snapshot(place)

    def fits(self, requests: list[Request]) -> bool:
        """Whether the cache has memory for these requests in addition to those that it holds."""
        held = [row.request for row in self.members]
        return self.budget.fits([request.length + self.nodes for request in [*held, *requests]])

    @property
    def cache_usage(self) -> float:
        """The share of the cache's memory that the texts have reserved up to their longest possible ends."""
        slots = [row.request.length + self.nodes for row in self.members]
        return self.budget.used(slots, self.target.max_positions + self.nodes)

    def close(self) -> None:
        """Free the cache. The batch may be used again."""
        assert not self.members
        if self.static is not None:
            self.static.give_back()
            self.static = None
        if self.is_open:
            del self.cache
            self.is_open = False
        if self.prefixes is not None:
            self.prefixes.clear()

    def make_room(self, capacity: int) -> None:
        """Make sure that each row can hold `capacity` tokens, a tree included."""
        if not self.is_open:
            self._open(capacity)
        elif self.cache.target.capacity < (self.limit if self.is_static or self.is_lazy else capacity):
            running = list(self.cache.target.lengths)
            # Growing copies what the rows in use hold, the head's slots with the target's.
            self.cache.set_lengths([*running, *self.held_after_rows])
            self._grow(capacity)
            self.cache.set_lengths(running)

    def open_for_any(self) -> None:
        """Open the cache with room for the longest texts, as far as half of the memory that is left has it."""
        memory = self.budget.memory or free_memory(self.target.device) // 2
        longest = min(self.target.max_positions + self.nodes, memory // (self.budget.rows * self.budget.slot))
        self.limit = max(self.limit, longest, 2 * self.nodes)
        self.make_room(self.limit)

    def _open(self, capacity: int) -> None:
        """Allocate the cache, or borrow that of an earlier run with its captured step."""
        if self.is_static:
            self.static = StaticStep.borrow(self.target, self.drafter, self.max_rows, self.limit)
            self.cache = self.static.cache
        else:
            # Where unwritten slots cost nothing, no text of these lengths will ever have to be copied.
            capacity = self.limit if self.is_lazy else min(capacity + PAGE_TOKENS, self.limit)
            self.cache = self.target.passes.new_cache(capacity, self.drafter.cache_shape, self.max_rows)
        self.cache.set_lengths([])
        self.is_open = True

    def _grow(self, capacity: int) -> None:
        wanted = max(self.limit, min(2 * self.cache.target.capacity, self.target.max_positions + self.nodes))
        if self.static is None:
            self.cache.make_room(*((self.limit, wanted) if self.is_lazy else (capacity, self.limit)))
            return
        # A captured step cannot grow its cache: take the rows to one with room for the longest request.
        larger = StaticStep.borrow(self.target, self.drafter, self.max_rows, wanted)
        for slots, source in zip(larger.cache.slots, self.cache.slots, strict=True):
            slots.take_over(source)
        self.static.give_back()
        self.static, self.cache = larger, larger.cache
