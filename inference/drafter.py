"""Drafters: anything that guesses trees of next tokens for the one verifier of `inference.decode`."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from inference.cache import KVCache
from inference.sampling import BatchSampling, History
from inference.tree import Tree


@dataclass(frozen=True)
class Verified:
    """What the last target step made certain in each row, for a drafter to build on; filled up on the right."""

    taps: Float[Tensor, "batch count tapped"]  # of the newly verified positions
    next_tokens: Int[Tensor, "batch count"]  # the token behind each of them
    roots: Int[Tensor, "batch 1"]  # the last one of each row, where its tree begins
    starts: list[int]  # the first of these positions
    counts: list[int]  # how many there are
    drafted: list[int]  # nodes that were judged to find them; 0 behind a prompt
    remaining: list[int]  # how many tokens deep a tree may still be of use
    sampling: BatchSampling
    history: History | None  # of the tokens before the root, where penalties ask for it
    texts: list[list[int]]  # everything that is certain, the root included; a row's list is one object while it lives
    on_device: "OnDevice | None" = None  # where shapes are static: what to go by instead of the lists
    choices: list[list[int]] = field(default_factory=list)  # the target's, at each node of the last tree; none at first


@dataclass(frozen=True)
class OnDevice:
    """`counts` and `remaining` of Verified for a captured step, which cannot look at lists."""

    counts: Int[Tensor, " batch"]
    remaining: Int[Tensor, " batch"]


@runtime_checkable  # the shape checks of the tests look at instances
class Drafter(Protocol):
    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states of the target that it reads; empty for none."""

    @property
    def cache_shape(self) -> tuple[int, int, int] | None:
        """(layers, kv_heads, head_dim) of the slots that it needs beside the target's."""

    @property
    def max_nodes(self) -> int:
        """Upper bound on the slots that a step needs beyond the verified tokens, target's or its own."""

    @property
    def depth(self) -> int:
        """Upper bound on the depth of its trees, and so on the drafts that one step may accept."""

    @property
    def static_shapes(self) -> bool:
        """Can `draft` run on tensors alone, with shapes that are always the same? Then a CUDA graph may hold it."""

    def prefill(self, taps: Float[Tensor, "1 count tapped"], text: Int[Tensor, "1 count+1"], row: KVCache) -> None:
        """Read a new prompt, into a row of its own; `text` is the prompt and the first new token, the root."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree: ...


class NoDrafter:
    """Plain decoding: a tree of the root alone."""

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    max_nodes = 1
    depth = 0
    static_shapes = True

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Nothing to read."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        return Tree.root_only(verified.roots)


PLAIN = NoDrafter()
