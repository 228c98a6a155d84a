"""The sequences that decode together: their slots in one cache, and the prefixes that are kept of them."""

import sys
import time
from dataclasses import dataclass

import torch

from headstart.inference.core.cache import PAGE_TOKENS, KVCache
from headstart.inference.core.cache_memory import free_memory, takes_memory_lazily
from headstart.inference.core.constraint import GuardedState
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.recurrent import WINDOW
from headstart.inference.core.request import Generation, Request, Sequence, StateTrace, Unread
from headstart.inference.core.tree import size_bucket
from headstart.inference.engine.budget import CacheBudget
from headstart.inference.engine.prefixes import BLOCK, CachedRow, PrefixIndex
from headstart.inference.targets.cuda_graph import StaticStep
from headstart.inference.targets.model import TargetModel

CATCH_UP_POSITIONS = 256  # missed positions that a drafter reads before a step, once drafts pay again


@dataclass
class PartialPrompt:
    """A prompt that is prefilled chunk by chunk while other rows decode."""

    row: Sequence  # its text is the prompt
    place: int  # in the cache, after the running rows
    cached: int  # tokens of the prompt
    states_at: int = 0  # tokens after which the target's states are copied for other prompts; 0: nowhere


class Batch:
    """Rows in the first places of one cache, and a prompt that is prefilled chunk by chunk in a later place."""

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
        """`static`, `memory` and `prefix_memory` as in `DecodeLoop`. `traces`: rows keep their hidden states."""
        self.target, self.drafter, self.max_rows, self.traces = target, drafter, max_rows, traces
        self.tap_columns = target.tap_columns(drafter.taps)
        self.is_static = target.may_capture if static is None else static and target.passes.verifies_trees
        self.nodes = size_bucket(drafter.max_nodes) if self.is_static else drafter.max_nodes
        if target.passes.layout.is_recurrent:
            self.nodes += WINDOW  # rows with a shorter window than others are padded
        self.is_lazy = takes_memory_lazily(target.device, self.is_static, max_rows)
        layout, has_slots = target.passes.layout, drafter.cache_shape is not None
        shapes = [shape for shape in (layout.shapes, drafter.cache_shape) if shape is not None]
        devices, states = {*layout.devices}, layout.state_bytes
        self.budget = CacheBudget(memory, shapes, target.dtype, devices, max_rows, self.is_lazy, states)
        self.prefixes: PrefixIndex | None = None
        if prefix_memory is not None:
            self.prefixes = PrefixIndex(prefix_memory, has_slots, layout.is_recurrent, target.end_tokens)
        self.rows: list[Sequence] = []
        self.changes = 0  # how often `rows` changed
        self.partial: PartialPrompt | None = None
        self.catching_up = False  # whether the drafter has yet to read tokens written while drafts did not pay
        self.limit = 0  # tokens, a tree included, that the longest request so far may need
        self.cache: KVCache  # while the batch is open: from the first prompt until `close`
        self.is_open = False
        self.static: StaticStep | None = None

    @property
    def members(self) -> list[Sequence]:
        """The rows, and the one in prefill."""
        return self.rows if self.partial is None else [*self.rows, self.partial.row]

    @property
    def held_after_rows(self) -> list[int]:
        """Cached tokens of each place after the rows, up to and including the prompt in prefill."""
        partial = self.partial
        return [] if partial is None else [*[0] * (partial.place - len(self.rows)), partial.cached]

    def new_row(self, number: int, request: Request, generation: Generation) -> Sequence:
        """A row for a request whose prompt is prefilled next."""
        ends = tuple(self.target.end_tokens) if request.end_tokens is None else request.end_tokens
        row = Sequence(number, request, generation, ends, list(request.prompt), Unread([], 0), time.perf_counter())
        if self.traces:
            row.trace = StateTrace()
        if request.constraint is not None:
            row.constraint = GuardedState(request.constraint, self.target.config.vocab_size)
        return row

    def take_place(self, row: Sequence, place: int) -> int:
        """Copy the longest cached prefix of a row's prompt to the row's place; returns its number of tokens."""
        prefix = None
        if self.prefixes is not None and not row.request.prompt_logprobs:
            prefix = self.prefixes.use(row.text, row.request.images)
        row.offset = 0 if prefix is None else prefix.blocks[-1].offset
        self.cache.target.set_offset(place, row.offset)
        if prefix is None:
            return 0
        for first, block in zip([0, *prefix.ends], prefix.blocks, strict=False):
            self.cache.target.write(place, first, block.target)
            if self.cache.head is not None and block.head is not None:
                self.cache.head.write(place, max(first - 1, 0), block.head)
        if self.cache.recurrent is not None:
            self.cache.recurrent.write(place, prefix.blocks[-1].states)
        row.unread = Unread([prefix.taps], prefix.start)
        row.kept_from = row.generation.cached_tokens = prefix.tokens
        if row.trace is not None:
            row.trace.start = prefix.tokens
        # A longer one was written without the drafter.
        self.catching_up = self.catching_up or len(prefix.taps) > CATCH_UP_POSITIONS
        return prefix.tokens

    def join(self, rows: list[Sequence]) -> None:
        """Let rows decode after their prefill, in the places after the running rows."""
        self.rows += rows
        for slots in self.cache.slots:
            slots.set_lengths([*slots.lengths, *(len(row.request.prompt) for row in rows)])
        self.changes += 1

    def end(self, row: Sequence) -> None:
        """Take a row out, or stop its prefill; others move into its place."""
        if self.partial is not None and row is self.partial.row:
            self.remember(row, self.partial.place, self.partial.cached, self.partial.cached)
            self.partial = None
        else:
            place = self.rows.index(row)
            self.remember_row(row, place)
            self.cache.end_row(place)
            self.rows[place] = self.rows[-1]
            self.rows.pop()
            self.changes += 1

    def feed(self, row: Sequence, place: int, most: int = sys.maxsize) -> int:
        """Let the drafter read up to `most` unread positions of a row; returns how many it read.

        The last position is left for the row's next draft.
        """
        unread = row.unread
        count = min(unread.count - 1, most)
        if row.request.speculative:
            cache, text = self.cache.row(place), row.text[unread.start : unread.start + count + 2]
            cache.set_lengths([unread.start])
            taps = unread.taps[: count + 1].unsqueeze(0)
            self.drafter.prefill(taps, torch.tensor([text], device=self.target.device), cache)
        unread.has_read(count)
        return count

    def remember_row(self, row: Sequence, place: int) -> None:
        """Keep the cached part of a running row's text for prompts that share it as a prefix."""
        held, states = self.cache.target.lengths[place], self.cache.recurrent
        self.remember(row, place, held, 0 if states is None else held - len(states.window(place)))

    def remember(self, row: Sequence, place: int, held: int, states_at: int = 0) -> None:
        """Keep the first `held` cached tokens of a row's text for prompts that share them as a prefix.

        `states_at`: the target's states, if they are to be kept, are those after this many tokens.
        """
        if self.prefixes is None:
            return
        held, states_at = min(held, len(row.text)) // BLOCK * BLOCK, states_at if states_at <= len(row.text) else 0
        # The drafter reads nothing of a row without drafts.
        read = row.unread.start if row.request.speculative else 0
        tokens, taps = row.text[: max(held, states_at)], torch.cat(row.kept)
        images, offset = row.request.images, row.offset
        self.prefixes.add(CachedRow(self.cache, place, tokens, taps, row.kept_from, read, states_at, images, offset))
        if held > row.kept_from:  # these taps are in the index now
            row.kept, row.kept_from = [taps[held - row.kept_from :].clone()], held

    def fits(self, requests: list[Request]) -> bool:
        """Whether the cache has memory for these requests in addition to the present ones."""
        held = [row.request for row in self.members]
        return self.budget.fits([request.length + self.nodes for request in [*held, *requests]])

    @property
    def cache_usage(self) -> float:
        """The share of the cache's memory that is reserved for the longest possible texts of all members."""
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
            # Growing copies the rows in use, the head's part with the target's.
            self.cache.set_lengths([*running, *self.held_after_rows])
            self._grow(capacity)
            self.cache.set_lengths(running)

    def open_for_any(self) -> None:
        """Open the cache for the longest texts that fit into half of the free memory."""
        memory = self.budget.memory or free_memory(self.target.device) // 2
        longest = min(self.target.max_positions + self.nodes, memory // (self.budget.rows * self.budget.slot))
        self.limit = max(self.limit, longest, 2 * self.nodes)
        self.make_room(self.limit)

    def _open(self, capacity: int) -> None:
        """Allocate the cache, or borrow an earlier run's together with its captured step."""
        if self.is_static:
            self.static = StaticStep.borrow(self.target, self.drafter, self.max_rows, self.limit)
            self.cache = self.static.cache
        else:
            # Where unwritten memory costs nothing, a cache for the longest text never has to be copied.
            capacity = self.limit if self.is_lazy else min(capacity + PAGE_TOKENS, self.limit)
            self.cache = self.target.passes.new_cache(capacity, self.drafter.cache_shape, self.max_rows)
        self.cache.set_lengths([])
        self.is_open = True

    def _grow(self, capacity: int) -> None:
        wanted = max(self.limit, min(2 * self.cache.target.capacity, self.target.max_positions + self.nodes))
        if self.static is None:
            self.cache.make_room(*((self.limit, wanted) if self.is_lazy else (capacity, self.limit)))
            return
        # A captured step cannot grow its cache: move the rows to a larger one.
        larger = StaticStep.borrow(self.target, self.drafter, self.max_rows, wanted)
        for slots, source in zip(larger.cache.slots, self.cache.slots, strict=True):
            slots.take_over(source)
        self.static.give_back()
        self.static, self.cache = larger, larger.cache
