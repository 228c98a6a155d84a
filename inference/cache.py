"""One cache for a target and its head: a single allocation, unpatched models write into it as a transformers Cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from heads.cache import Slots


class SlotLayer(CacheLayerMixin):
    """A target layer's view of the slots, in the shape that transformers asks for."""

    is_sliding = False  # every position is kept; a sliding layer's window lives in its mask
    is_compileable = False

    def __init__(self, slots: Slots, layer: int) -> None:
        super().__init__()
        self.slots, self.layer = slots, layer
        self.keys, self.values = slots.storage[layer, 0], slots.storage[layer, 1]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the slots were allocated with the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.slots.append(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.slots.length

    def get_max_length(self) -> int:
        return self.slots.capacity


class KVCache(Cache):
    """The slots of a target's layers and of its head's layers, side by side in one preallocated tensor.

    The target's slot of position t and the head's slot of index t belong together: after each step both hold as many
    tokens as have been verified.
    """

    def __init__(
        self,
        target_shape: tuple[int, int, int],
        head_shape: tuple[int, int, int] | None,
        capacity: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Shapes are (layers, kv_heads, head_dim); `capacity` is in tokens, the nodes of a pending tree included."""
        shapes = [
            (layers, 2, batch, heads, capacity, dim) for layers, heads, dim in (target_shape, head_shape or (0, 0, 0))
        ]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        # Zeros, not empty: a fused kernel may multiply a masked slot by weight 0, and 0 x NaN is NaN.
        self.storage = torch.zeros(sum(sizes), dtype=dtype, device=device)
        target, head = self.storage.split(sizes)
        self.target = Slots(target.view(shapes[0]))
        self.head = Slots(head.view(shapes[1])) if head_shape else None
        super().__init__(layers=[SlotLayer(self.target, layer) for layer in range(target_shape[0])])

    @property
    def num_bytes(self) -> int:
        return self.storage.numel() * self.storage.element_size()
