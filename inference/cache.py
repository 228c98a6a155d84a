"""One cache for a target and its head: a single allocation, unpatched models write into it as a transformers Cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from heads.cache import Slots

PAGE = 256  # tokens; a cache that must grow does so by whole pages
Shape = tuple[int, int, int]  # layers, kv_heads, head_dim


class OpaqueSlots(Slots):
    """Slots that a compiled layer does not look into, as it would be compiled anew for every length."""

    append = torch.compiler.disable(Slots.append)


class SlotLayer(CacheLayerMixin):
    """A target layer's view of the slots, in the shape that transformers asks for."""

    is_sliding = False  # every position is kept; a sliding layer's window lives in its mask
    is_compileable = False

    def __init__(self, cache: KVCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the slots were allocated with the cache."""

    @torch.compiler.disable  # as `OpaqueSlots`
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.target.append(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.target.num_keys(query_length), 0

    def get_seq_length(self) -> int:
        return max(self.cache.target.lengths)

    def get_max_length(self) -> int:
        return self.cache.target.capacity


class KVCache(Cache):
    """The slots of a target's layers and of its head's layers, side by side in one preallocated tensor.

    The target's slot of position t and the head's slot of index t belong together: after each step both hold as many
    tokens as have been verified.
    """

    def __init__(self, target: Slots, head: Slots | None) -> None:
        self.target, self.head = target, head
        super().__init__(layers=[SlotLayer(self, layer) for layer in range(target.storage.shape[0])])

    @classmethod
    def allocate(
        cls,
        target_shape: Shape,
        head_shape: Shape | None,
        capacity: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        static: bool = False,
    ) -> KVCache:
        """Room for `batch` rows of `capacity` tokens each, the nodes of a pending tree included; all rows in use."""
        shapes = [target_shape] if head_shape is None else [target_shape, head_shape]
        sizes = [(layers, 2, batch, heads, capacity, dim) for layers, heads, dim in shapes]
        parts = allocate(sizes, dtype, device, static)
        slots = [OpaqueSlots(part, batch, static) for part in parts]
        return cls(slots[0], slots[1] if head_shape else None)

    @property
    def slots(self) -> list[Slots]:
        return [self.target] if self.head is None else [self.target, self.head]

    @property
    def roots(self) -> Tensor:
        """Each row's position of the token that is certain and not read yet, once its drafter is up to date. [rows]"""
        return (self.target if self.head is None else self.head).starts

    @property
    def num_bytes(self) -> int:
        return sum(slots.storage.nbytes for slots in self.slots)

    def row(self, number: int) -> KVCache:
        """One row by itself, empty: a prompt is read there while the other rows wait."""
        return KVCache(self.target.row(number), None if self.head is None else self.head.row(number))

    def set_lengths(self, lengths: list[int]) -> None:
        """Say which rows are in use and how many tokens each holds."""
        for slots in self.slots:
            slots.set_lengths(lengths)

    def reset(self) -> None:
        """Forget what is pending."""
        for slots in self.slots:
            slots.reset()

    def make_room(self, capacity: int, limit: int) -> None:
        """Grow, if need be, to hold `capacity` tokens a row: by pages and at least to double, but not beyond `limit`.

        What is held is copied then, so seldom that each token is copied about once in all.
        """
        if capacity <= self.target.capacity:
            return
        wanted = max(capacity, min(2 * self.target.capacity, limit))
        wanted = min(-(-wanted // PAGE) * PAGE, max(limit, capacity))
        shapes = [(*s.storage.shape[:4], wanted, s.storage.shape[5]) for s in self.slots]
        parts = allocate(shapes, self.target.storage.dtype, self.target.storage.device, self.target.static)
        grown = [slots.grown(part) for slots, part in zip(self.slots, parts, strict=True)]
        self.target, self.head = grown[0], grown[1] if self.head is not None else None


def allocate(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str, static: bool
) -> list[Tensor]:
    """Tensors side by side in one allocation."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    # A row alone reads no slot that it has not written. Elsewhere masks cover some, and a fused kernel may multiply a
    # masked slot by weight 0, where 0 x NaN is NaN: then it must be zeros.
    alone = shapes[0][2] == 1 and not static
    storage = (torch.empty if alone else torch.zeros)((sum(sizes),), dtype=dtype, device=device)
    return [part.view(shape) for part, shape in zip(storage.split(sizes), shapes, strict=True)]
