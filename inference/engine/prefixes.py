"""The cached prefixes of finished and running texts, kept so that later prompts need not be prefilled in full.

Texts are cut into blocks of tokens. A block is identified by its tokens and the block before it. It keeps the target's
keys and values, the drafter's, and the tapped hidden states from which the drafter continues. The drafter's slot of a
position depends on the token after it, so a block holds the slots of all its positions except the last, and the one
before the block.

A target with recurrent states can only continue from where they were copied. So they are kept where a text ends, within
a block if need be. A prompt is prefilled in two parts, with a copy in between, where it leaves the blocks of another
text or before its last message (Marconi, arXiv 2411.19379).
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.core.cache import KVCache, SlotContents
from headstart.inference.core.recurrent import Snapshot, snapshot_bytes
from headstart.inference.core.request import Images

BLOCK = 16  # tokens; a hit ends with a full block, unless states were kept within one
LAST_MESSAGE = 64  # tokens that the last message is taken to have where its start is not known
MIN_TOKENS_BEFORE_COPY = 192  # of a prompt before its last message
# The number of the block before, and the tokens. Before the first block: 0, or the digest of the prompt's images.
Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Cached:
    """The cached states of one block."""

    target: SlotContents
    head: SlotContents | None  # None: the drafter has not read the block
    taps: Float[Tensor, "count tapped"]  # at the last position, or at all positions if the drafter has yet to read them
    states: Snapshot = None  # the target's recurrent states at its end; None: not kept there
    offset: int = 0  # of later positions, as in `Slots.offsets`

    @property
    def num_bytes(self) -> int:
        return snapshot_bytes(self)


@dataclass(frozen=True)
class Prefix:
    """The cached states of the beginning of a prompt."""

    ends: list[int]  # of its blocks, in tokens
    blocks: list[Cached]
    start: int  # the first position that the drafter has not read
    taps: Float[Tensor, "count tapped"]  # from there on

    @property
    def tokens(self) -> int:
        return self.ends[-1]


@dataclass(frozen=True)
class CachedRow:
    """What the cache holds of one row's text, to be copied block by block."""

    cache: KVCache
    place: int  # the row's, in the cache
    tokens: list[int]  # as far as they are cached
    taps: Float[Tensor, "count tapped"]  # the hidden states from position `taps_from` on
    taps_from: int
    drafter_read: int  # positions that the drafter has read
    states_at: int = 0  # tokens after which the target's states stand; 0: they are not to be kept
    images: Images | None = None
    offset: int = 0

    def drafter_slots(self, first: int, end: int) -> SlotContents | None:
        """The drafter's slots of the block between two positions; None if it has not read the block."""
        slots = self.cache.head
        if slots is None or end - 1 > self.drafter_read:
            return None
        return slots.copy_kv(self.place, max(first - 1, 0), end - 1)

    def block(self, first: int, end: int) -> Cached | None:
        """The block between two positions; None without the hidden states that it needs."""
        head = self.drafter_slots(first, end)
        taps_first = first if head is None and self.cache.head is not None else end - 1
        if taps_first < self.taps_from:
            return None
        taps = self.taps[taps_first - self.taps_from : end - self.taps_from].clone()
        return Cached(self.cache.target.copy_kv(self.place, first, end), head, taps, offset=self.offset)

    def states(self) -> Snapshot:
        assert self.cache.recurrent is not None
        return self.cache.recurrent.snapshot(self.place)


def start_of(images: Images | None) -> int:
    """What stands for the block before the first one."""
    return 0 if images is None else images.digest


class PrefixIndex:
    """Blocks of texts within a budget of bytes. The least recently used ones are dropped first."""

    def __init__(self, memory: int, keeps_all_taps: bool, has_states: bool = False, ends: Collection[int] = ()) -> None:
        """`keeps_all_taps`: the drafter reads every position, and not only the last one. `has_states`: the target has
        recurrent states. `ends`: the tokens that end a message."""
        if memory < 1:
            raise ValueError(f"prefix_memory: {memory} bytes given, 1 or more are allowed; leave it out for no reuse")
        self.memory, self.keeps_all_taps, self.has_states, self.ends = memory, keeps_all_taps, has_states, ends
        self.blocks: OrderedDict[Key, tuple[int, Cached]] = OrderedDict()  # each with its number, the oldest use first
        self.num_bytes = 0
        self.numbered = 0  # blocks so far
        self.queries, self.hits = 0, 0  # prompt tokens that were looked up, and those of them that were cached

    def clear(self) -> None:
        self.blocks.clear()
        self.num_bytes = 0

    def _prefix(self, keys: list[Key]) -> Prefix | None:
        blocks, ends = [self.blocks[key][1] for key in keys], [*accumulate(len(tokens) for _, tokens in keys)]
        if not blocks:
            return None
        if not self.keeps_all_taps:
            return Prefix(ends, blocks, ends[-1] - 1, blocks[-1].taps[-1:])
        read = next((i for i, block in enumerate(blocks) if block.head is None), len(blocks))
        unread = [blocks[read - 1].taps[-1:]] if read else []
        start = ends[read - 1] - 1 if read else 0
        return Prefix(ends, blocks, start, torch.cat([*unread, *(block.taps for block in blocks[read:])]))

    def known_tokens(self, prompt: list[int], images: Images | None = None) -> int:
        """The length of a prompt's longest known prefix."""
        return sum(len(tokens) for _, tokens in self._usable(prompt[:-1], images))

    def copies_at(self, prompt: list[int], images: Images | None = None) -> int:
        """After how many tokens of a prompt, before its end, the target's states are worth a copy; 0 for nowhere.

        That is where the prompt leaves the blocks of other texts, if states are missing for more than a block before;
        otherwise, in a long prompt, the start of its last message, or a guess at it.
        """
        if not self.has_states:
            return 0
        known = len(self._known(prompt[:-1], images)) * BLOCK
        usable = self.known_tokens(prompt, images)
        if known - usable > BLOCK:
            return known
        ends = [place for place, token in enumerate(prompt, start=1) if token in self.ends]
        places = [*ends[-2:-1], (len(prompt) - LAST_MESSAGE) // BLOCK * BLOCK]
        first = max(usable + MIN_TOKENS_BEFORE_COPY, images.end if images else 0)
        return next((place for place in places if place > first), 0)

    def use(self, prompt: list[int], images: Images | None = None) -> Prefix | None:
        """The longest cached prefix of a prompt, without its last token; None if no block is cached.

        A prompt with images needs all of them in the prefix. Counts as a query and marks its blocks as used.
        """
        keys = self._usable(prompt[:-1], images)
        prefix = self._prefix(keys)
        self.queries += len(prompt)
        self.hits += 0 if prefix is None else prefix.tokens
        self._touch(keys)
        return prefix

    def add(self, row: CachedRow) -> None:
        """Keep the full blocks of a row's text, and the target's states after `row.states_at` tokens."""
        keys = self._add_blocks(row)
        if self.has_states and row.states_at and len(keys) >= row.states_at // BLOCK:
            self._add_states(row, keys)
        self._touch(keys)
        while self.num_bytes > self.memory:
            self.num_bytes -= self.blocks.popitem(last=False)[1][1].num_bytes

    def _add_blocks(self, row: CachedRow) -> list[Key]:
        """Returns the keys of the blocks that the index holds now, up to the first that is missing."""
        keys: list[Key] = []
        parent = start_of(row.images)
        for first in range(0, len(row.tokens) - BLOCK + 1, BLOCK):
            key = parent, tuple(row.tokens[first : first + BLOCK])
            known = self.blocks.get(key)
            if known is None:
                block = row.block(first, first + BLOCK)
                if block is None:
                    break
                known = self._put(key, block)
            elif known[1].head is None and (head := row.drafter_slots(first, first + BLOCK)) is not None:
                self._put(key, replace(known[1], head=head, taps=known[1].taps[-1:].clone()))
            keys.append(key)
            parent = known[0]
        return keys

    def _add_states(self, row: CachedRow, keys: list[Key]) -> None:
        """Add the target's states to the block that ends there, or to a shorter one, whose key joins the others."""
        count, rest = row.states_at // BLOCK, row.states_at % BLOCK
        parent = self.blocks[keys[count - 1]][0] if count else start_of(row.images)
        key = (parent, tuple(row.tokens[row.states_at - rest : row.states_at])) if rest else keys[count - 1]
        known = self.blocks.get(key)
        block = row.block(row.states_at - rest, row.states_at) if known is None else known[1]
        if block is not None and block.states is None:
            self._put(key, replace(block, states=row.states()))
        if rest and key in self.blocks:
            keys.insert(count, key)

    def _put(self, key: Key, block: Cached) -> tuple[int, Cached]:
        if key in self.blocks:
            number, before = self.blocks[key]
            self.num_bytes -= before.num_bytes
        else:
            self.numbered += 1
            number = self.numbered
        self.blocks[key] = number, block
        self.num_bytes += block.num_bytes
        return number, block

    def _known(self, tokens: list[int], images: Images | None) -> list[Key]:
        """The keys of the longest cached prefix."""
        keys: list[Key] = []
        parent = start_of(images)
        for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = parent, tuple(tokens[first : first + BLOCK])
            if key not in self.blocks:
                break
            keys.append(key)
            parent = self.blocks[key][0]
        return keys

    def _usable(self, tokens: list[int], images: Images | None = None) -> list[Key]:
        """The keys of the longest cached prefix from which the target can continue."""
        keys = self._known(tokens, images)
        while self.has_states:
            parent, first = self.blocks[keys[-1]][0] if keys else start_of(images), len(keys) * BLOCK
            within = ((parent, tuple(tokens[first : first + count])) for count in range(BLOCK - 1, 0, -1))
            last = next((key for key in within if key in self.blocks), None)
            if last is not None:
                keys.append(last)
                break
            if not keys or self.blocks[keys[-1]][1].states is not None:
                break
            keys.pop()
        return keys if images is None or sum(len(tokens) for _, tokens in keys) >= images.end else []

    def _touch(self, keys: list[Key]) -> None:
        """Make these the most recently used; a block counts as used after its successors, so it outlives them."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)
