"""The interface of every drafter: it proposes trees of draft tokens, which `inference.engine.loop` verifies."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.constraint import LevelConstraint, States
from headstart.inference.core.sampling import BatchSampling, History
from headstart.inference.core.tree import Tree, take


@dataclass(frozen=True)
class Verified(ABC):
    """The tokens and hidden states that the last target step made certain in each row. A drafter builds on them.

    Rows differ in how many positions are newly verified, so their tensors are padded on the right. One subclass holds
    its counts on the host; the other serves a captured step, which cannot wait to read counts from the device.
    """

    taps: Float[Tensor, "batch count tapped"]  # at the newly verified positions
    next_tokens: Int[Tensor, "batch count"]  # the token after each of them
    roots: Int[Tensor, "batch 1"]  # the last of these in each row: the root of its next tree
    sampling: BatchSampling
    history: History | None  # counts the tokens before the root, where penalties need it

    @abstractmethod
    def levels(self, most: int) -> int:
        """How many levels to draft: at most `most`, and fewer if no row can use that many draft tokens."""

    @abstractmethod
    def rewind(self, slots: Slots, read: int = 0) -> None:
        """Drop the last tree from a drafter's slots, but keep the first `read` of the newly verified positions."""

    @abstractmethod
    def advance(self, slots: Slots, already: int = 0) -> None:
        """Keep the newly verified positions that were just read into the slots; `already` were there before."""

    @abstractmethod
    def last(self, states: Float[Tensor, "batch count size"]) -> Float[Tensor, "batch 1 size"]:
        """The states at each row's last newly verified position."""

    def constraint(self) -> LevelConstraint | None:
        """The tokens that may follow each row's root; None if no row has a constraint."""
        return None

    @abstractmethod
    def finished(self, level: int) -> Bool[Tensor, " batch"] | None:
        """The rows that can use no draft tokens of this level; None if every row can."""


@dataclass(frozen=True)
class VerifiedOnHost(Verified):
    """All counts are known on the host. Drafters without static shapes only ever get this one."""

    starts: list[int]  # the first newly verified position of each row
    counts: list[int]  # how many positions are newly verified
    drafted: list[int]  # draft tokens of the last tree; 0 after prefill
    remaining: list[int]  # draft tokens that a row can still use
    texts: list[list[int]]  # prompt and output, the root included
    keys: list[int]  # one per row, unique in this process: a drafter keeps a row's state by its key
    choices: list[list[int]] = field(default_factory=list)  # the target's, at each node of the last tree
    last_step: tuple[float, float] | None = None  # time.perf_counter() before and after the last step, if there was one
    constraints: States = ()  # one per row; empty if no row has a constraint

    @property
    def states(self) -> States:
        """Where each row's text stands within its constraint."""
        return self.constraints or [None] * len(self.texts)

    def levels(self, most: int) -> int:
        return min(most, max(self.remaining))

    def constraint(self) -> LevelConstraint | None:
        return LevelConstraint.at_root(self.constraints) if self.constraints else None

    def rewind(self, slots: Slots, read: int = 0) -> None:
        slots.set_lengths([start + read for start in self.starts])

    def advance(self, slots: Slots, already: int = 0) -> None:
        slots.advance([count - already for count in self.counts])

    def last(self, states: Float[Tensor, "batch count size"]) -> Float[Tensor, "batch 1 size"]:
        if len(states) == 1:
            return states[:, self.counts[0] - 1 : self.counts[0]]
        return take(states, torch.tensor(self.counts, device=states.device).unsqueeze(1) - 1)

    def finished(self, level: int) -> Bool[Tensor, " batch"] | None:
        if min(self.remaining) > level:
            return None
        return torch.tensor([left <= level for left in self.remaining], device=self.roots.device)


@dataclass(frozen=True)
class VerifiedOnDevice(Verified):
    """For a captured step, whose shapes never change. The host rewinds the head's slots before the step begins."""

    counts: Int[Tensor, " batch"]  # as in `VerifiedOnHost`
    remaining: Int[Tensor, " batch"]

    def levels(self, most: int) -> int:
        return most

    def rewind(self, slots: Slots, read: int = 0) -> None:
        if read:
            slots.shift(torch.full_like(self.counts, read))

    def advance(self, slots: Slots, already: int = 0) -> None:
        slots.shift(self.counts - already if already else self.counts)  # no kernel for nothing

    def last(self, states: Float[Tensor, "batch count size"]) -> Float[Tensor, "batch 1 size"]:
        return take(states, self.counts.unsqueeze(1) - 1)

    def finished(self, level: int) -> Bool[Tensor, " batch"]:
        return self.remaining <= level


@runtime_checkable  # the shape checks in tests use isinstance
class Drafter(Protocol):
    """Proposes a tree of draft tokens per row. It may read the target's hidden states and keep slots in its cache."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's hidden states that it reads; empty for none."""

    @property
    def cache_shape(self) -> tuple[int, int, int] | None:
        """(layers, kv_heads, head_dim) of the slots that it needs in addition to the target's; None for none."""

    @property
    def max_nodes(self) -> int:
        """Upper bound on the slots that a step needs after the verified tokens, in the target's cache or its own."""

    @property
    def depth(self) -> int:
        """Upper bound on the depth of its trees, so on the draft tokens that one step may accept."""

    @property
    def static_shapes(self) -> bool:
        """Whether `draft` works on tensors alone, with the same shapes every time, so that a CUDA graph may hold it."""

    @property
    def compilable_layers(self) -> Sequence[nn.Module]:
        """Layers of its own that torch.compile may speed up; empty for none."""

    def prefill(self, taps: Float[Tensor, "1 count tapped"], text: Int[Tensor, "1 count+1"], row: KVCache) -> None:
        """Read what the target has just read of a row, all but the last position, into the row's slots.

        `text` begins with the token at the first of these positions, and ends with the token after the last one. A
        prompt may come in pieces: `row` holds the positions before the first, which the piece before this one left.
        """

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        """A tree for each row, its root included; the target, which has read all tokens before the roots, verifies it.

        A drafter may stand behind the target in some rows: positions of its own keys are those of its own slots, while
        Gumbel noise belongs to the positions after the target's.
        """


class NoDrafter:
    """Plain decoding: a tree of the root alone."""

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    max_nodes = 1
    depth = 0
    static_shapes = True
    compilable_layers: Sequence[nn.Module] = ()

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Do nothing: plain decoding keeps nothing of its own."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        return Tree.root_only(verified.roots)


PLAIN = NoDrafter()
