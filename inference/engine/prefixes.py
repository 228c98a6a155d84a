"""The cached prefixes of finished and running texts, kept so that later prompts need not read them again.

Texts are cut into blocks of tokens, and a block is known by its tokens and the block before it. Each keeps the target's
keys and values, those of the drafter, and the tapped hidden states from which the drafter continues. The drafter's slot
of a position depends on the token after it, so a block holds those of its positions but the last, and the one before.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.core.cache import SlotContents

BLOCK = 16  # tokens; a hit ends at a whole block
Key = tuple[int, tuple[int, ...]]  # the number of the block before, 0 for none, and the tokens


@dataclass(frozen=True)
class Cached:
    """The cached states of one block."""

    target: SlotContents
    head: SlotContents | None  # None: the drafter has not read the block
    taps: Float[Tensor, "count tapped"]  # at the last position, or at all positions if the drafter has yet to read them

    @property
    def num_bytes(self) -> int:
        return self.taps.nbytes + sum(states.nbytes for states in (*self.target, *(self.head or ())))


@dataclass(frozen=True)
class Prefix:
    """The cached states of the beginning of a prompt."""

    tokens: int
    blocks: list[Cached]
    start: int  # the first position that the drafter has not read
    taps: Float[Tensor, "count tapped"]  # from there on


def known_tokens(prefix: Prefix | None) -> int:
    return 0 if prefix is None else prefix.tokens


class PrefixIndex:
    """Blocks of texts within a budget of bytes. Those that were used least recently go first."""

    def __init__(self, memory: int, keeps_all_taps: bool) -> None:
        """`keeps_all_taps`: the drafter reads every position, and not only the last one."""
        if memory < 1:
            raise ValueError(f"prefix_memory: {memory} bytes given, 1 or more are allowed; leave it out for no reuse")
        self.memory, self.keeps_all_taps = memory, keeps_all_taps
        self.blocks: OrderedDict[Key, tuple[int, Cached]] = OrderedDict()  # each with its number, the oldest use first
        self.num_bytes = 0
        self.numbered = 0  # blocks so far
        self.queries, self.hits = 0, 0  # tokens of prompts that were looked up, and those that need not be read again

    def clear(self) -> None:
        self.blocks.clear()
        self.num_bytes = 0

    def find(self, prompt: list[int]) -> Prefix | None:
        """The longest known prefix of a prompt; None if there is none. The last token is always read again."""
        found, keys = [], self._known(prompt[:-1])
        for key in keys:
            found.append(self.blocks[key][1])
        if not found:
            return None
        if not self.keeps_all_taps:
            end = len(found) * BLOCK
            return Prefix(end, found, end - 1, found[-1].taps[-1:])
        read = next((i for i, block in enumerate(found) if block.head is None), len(found))
        unread = [found[read - 1].taps[-1:]] if read else []
        start = max(read * BLOCK - 1, 0)
        return Prefix(len(found) * BLOCK, found, start, torch.cat([*unread, *(block.taps for block in found[read:])]))

    def known_tokens(self, prompt: list[int]) -> int:
        """How many tokens of a prompt `find` would find."""
        return len(self._known(prompt[:-1])) * BLOCK

    def use(self, prompt: list[int]) -> Prefix | None:
        """`find`, counted as a query, which makes the blocks the most recently used ones."""
        found = self.find(prompt)
        self.queries += len(prompt)
        self.hits += 0 if found is None else found.tokens
        self._touch(self._known(prompt[:-1]))
        return found

    def add(
        self, tokens: list[int], states: Callable[[int], Cached | None], head: Callable[[int], SlotContents | None]
    ) -> None:
        """Keep the whole blocks of a text.

        `states` gives those of the block that begins at a position, or None if they are not at hand; `head` gives the
        drafter's alone, or None if it has not read the block.
        """
        keys, parent = [], 0
        for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = parent, tuple(tokens[first : first + BLOCK])
            known = self.blocks.get(key)
            made = states(first) if known is None else self._read_meanwhile(known[1], head(first))
            if made is not None:
                known = self._put(key, made)
            if known is None:
                break
            keys.append(key)
            parent = known[0]
        self._touch(keys)
        while self.num_bytes > self.memory:
            self.num_bytes -= self.blocks.popitem(last=False)[1][1].num_bytes

    def _read_meanwhile(self, known: Cached, head: SlotContents | None) -> Cached | None:
        """A block that was kept before the drafter had read it, with what the drafter has of it now."""
        if head is None or known.head is not None:
            return None
        return Cached(known.target, head, known.taps[-1:].clone())

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

    def _touch(self, keys: list[Key]) -> None:
        """Make these the most recently used; a block counts as used after those that follow it, so it outlives them."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)
