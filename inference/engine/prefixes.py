"""The cached prefixes of finished and running texts, kept so that later prompts need not read them again.

Texts are cut into blocks of tokens, and a block is known by its tokens and the block before it. Each keeps the target's
keys and values, those of the drafter, and the tapped hidden states from which the drafter continues. The drafter's slot
of a position depends on the token after it, so a block holds those of its positions but the last, and the one before.

A target with states that cannot be cut back continues only from where they were copied. So they are kept where a text
ends, within a block if need be; and where a prompt leaves the blocks of another, or before its last message, it is read
in two parts (Marconi, arXiv 2411.19379).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.core.cache import SlotContents
from headstart.inference.core.recurrent import Snapshot, snapshot_bytes

BLOCK = 16  # tokens; a hit ends at a whole block, unless states were kept within one
MESSAGE, LONG = 64, 192  # tokens of a last message whose start is not known, and of what comes before it, at least
Key = tuple[int, tuple[int, ...]]  # the number of the block before, 0 for none, and the tokens


@dataclass(frozen=True)
class Cached:
    """The cached states of one block."""

    target: SlotContents
    head: SlotContents | None  # None: the drafter has not read the block
    taps: Float[Tensor, "count tapped"]  # at the last position, or at all positions if the drafter has yet to read them
    states: Snapshot = None  # at its end, of a target that has any; None: not kept there

    @property
    def num_bytes(self) -> int:
        slots = sum(states.nbytes for states in (*self.target, *(self.head or ())))
        return self.taps.nbytes + slots + snapshot_bytes(self.states)


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


def known_tokens(prefix: Prefix | None) -> int:
    return 0 if prefix is None else prefix.tokens


class PrefixIndex:
    """Blocks of texts within a budget of bytes. Those that were used least recently go first."""

    def __init__(self, memory: int, keeps_all_taps: bool, has_states: bool = False, ends: Collection[int] = ()) -> None:
        """`keeps_all_taps`: the drafter reads every position, and not only the last one. `has_states`: the target's.
        `ends`: the tokens with which messages end."""
        if memory < 1:
            raise ValueError(f"prefix_memory: {memory} bytes given, 1 or more are allowed; leave it out for no reuse")
        self.memory, self.keeps_all_taps, self.has_states, self.ends = memory, keeps_all_taps, has_states, ends
        self.blocks: OrderedDict[Key, tuple[int, Cached]] = OrderedDict()  # each with its number, the oldest use first
        self.num_bytes = 0
        self.numbered = 0  # blocks so far
        self.queries, self.hits = 0, 0  # tokens of prompts that were looked up, and those that need not be read again

    def clear(self) -> None:
        self.blocks.clear()
        self.num_bytes = 0

    def _prefix(self, keys: list[Key]) -> Prefix | None:
        found, ends = [self.blocks[key][1] for key in keys], [*accumulate(len(tokens) for _, tokens in keys)]
        if not found:
            return None
        if not self.keeps_all_taps:
            return Prefix(ends, found, ends[-1] - 1, found[-1].taps[-1:])
        read = next((i for i, block in enumerate(found) if block.head is None), len(found))
        unread = [found[read - 1].taps[-1:]] if read else []
        start = ends[read - 1] - 1 if read else 0
        return Prefix(ends, found, start, torch.cat([*unread, *(block.taps for block in found[read:])]))

    def known_tokens(self, prompt: list[int]) -> int:
        """The length of a prompt's longest known prefix."""
        return sum(len(tokens) for _, tokens in self._usable(prompt[:-1]))

    def copies_at(self, prompt: list[int]) -> int:
        """After how many tokens of a prompt the target's states are worth a copy, before its end; 0 for nowhere.

        That is where it leaves the blocks of others, if states are missing for more than a block before that; else,
        in a long prompt, before its last message, or before what is probably that.
        """
        if not self.has_states:
            return 0
        known, usable = len(self._known(prompt[:-1])) * BLOCK, self.known_tokens(prompt)
        if known - usable > BLOCK:
            return known
        ends = [place for place, token in enumerate(prompt, start=1) if token in self.ends]
        places = [*ends[-2:-1], (len(prompt) - MESSAGE) // BLOCK * BLOCK]
        return next((place for place in places if place - usable > LONG), 0)

    def use(self, prompt: list[int]) -> Prefix | None:
        """The longest known prefix of a prompt; None if there is none. The last token is always read again.

        It counts as a query, and its blocks are the most recently used ones.
        """
        keys = self._usable(prompt[:-1])
        found = self._prefix(keys)
        self.queries += len(prompt)
        self.hits += known_tokens(found)
        self._touch(keys)
        return found

    def add(
        self,
        tokens: list[int],
        states: Callable[[int, int], Cached | None],
        head: Callable[[int, int], SlotContents | None],
        at: int = 0,
        copied: Callable[[], Snapshot] = lambda: None,
    ) -> None:
        """Keep the whole blocks of a text.

        `states` gives those of the block between two positions, or None if they are not at hand; `head` gives the
        drafter's alone, or None if it has not read the block. `copied` gives a copy of the target's states after `at`
        tokens, where it has any.
        """
        keys, parent, above = [], 0, 0
        for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = parent, tuple(tokens[first : first + BLOCK])
            known = self.blocks.get(key)
            span = first, first + BLOCK
            made = states(*span) if known is None else self._read_meanwhile(known[1], head(*span))
            if made is not None:
                known = self._put(key, made)
            if known is None:
                break
            keys.append(key)
            parent = known[0]
            if span[1] <= at:
                above = parent
        rest = at % BLOCK
        if self.has_states and at and len(keys) >= at // BLOCK:
            key = (above, tuple(tokens[at - rest : at])) if rest else keys[at // BLOCK - 1]
            known = self.blocks.get(key)
            made = states(at - rest, at) if known is None else known[1]
            if made is not None and made.states is None:
                self._put(key, replace(made, states=copied()))
            if rest and key in self.blocks:
                keys.insert(at // BLOCK, key)
        self._touch(keys)
        while self.num_bytes > self.memory:
            self.num_bytes -= self.blocks.popitem(last=False)[1][1].num_bytes

    def _read_meanwhile(self, known: Cached, head: SlotContents | None) -> Cached | None:
        """A block that was kept before the drafter had read it, with what the drafter has of it now."""
        if head is None or known.head is not None:
            return None
        return replace(known, head=head, taps=known.taps[-1:].clone())

    def _put(self, key: Key, made: Cached) -> tuple[int, Cached]:
        if key in self.blocks:
            number, before = self.blocks[key]
            self.num_bytes -= before.num_bytes
        else:
            self.numbered += 1
            number = self.numbered
        self.blocks[key] = number, made
        self.num_bytes += made.num_bytes
        return number, made

    def _known(self, tokens: list[int]) -> list[Key]:
        """The keys of the longest known beginning."""
        keys: list[Key] = []
        parent = 0
        for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = parent, tuple(tokens[first : first + BLOCK])
            if key not in self.blocks:
                break
            keys.append(key)
            parent = self.blocks[key][0]
        return keys

    def _usable(self, tokens: list[int]) -> list[Key]:
        """The keys of the longest beginning from which the target can continue."""
        keys = self._known(tokens)
        while self.has_states:
            parent, first = self.blocks[keys[-1]][0] if keys else 0, len(keys) * BLOCK
            within = ((parent, tuple(tokens[first : first + count])) for count in range(BLOCK - 1, 0, -1))
            found = next((key for key in within if key in self.blocks), None)
            if found is not None:
                return [*keys, found]
            if not keys or self.blocks[keys[-1]][1].states is not None:
                break
            keys.pop()
        return keys

    def _touch(self, keys: list[Key]) -> None:
        """Make these the most recently used; a block counts as used after those that follow it, so it outlives them."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)
