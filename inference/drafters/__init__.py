"""Drafters: anything that guesses a tree of next tokens for the one verifier of `inference.decode`."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.cache import KVCache
from inference.sampling import Sampling
from inference.tree import Tree


@dataclass(frozen=True)
class Verified:
    """What the last target step made certain, for a drafter to build on."""

    taps: Float[Tensor, "count tapped"]  # of the newly verified positions
    next_tokens: Int[Tensor, " count"]  # the token behind each of them; the last one is the tree's root
    start: int  # the first of these positions
    room: int  # how many tokens deep a tree may still be of use
    sampling: Sampling


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

    def draft(self, verified: Verified, cache: KVCache) -> Tree: ...


class NoDrafter:
    """Plain decoding: a tree of the root alone."""

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    max_nodes = 1

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        return Tree(verified.next_tokens[-1:], torch.full_like(verified.next_tokens[-1:], -1))
