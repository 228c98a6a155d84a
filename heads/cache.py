"""Where attention finds its earlier keys and values: slots while decoding, the unroll's blocks while training."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from heads.unroll_attention import unroll_attention


@runtime_checkable  # the shape checks of the tests look at instances
class AttentionCache(Protocol):
    """Attention over what came before and the block at hand, which it remembers."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor: ...


def attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys head_dim"],
    mask: Float[Tensor, "*axes queries keys"] | None = None,
) -> Float[Tensor, "batch heads queries head_dim"]:
    """Softmax attention under an additive mask; without one every query sees every key, a square block causally."""
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] > 1 and query.shape[2] == key.shape[2],
        enable_gqa=query.shape[1] != key.shape[1],
    )


class Slots:
    """Key and value slots of a stack of equal layers; one for each token, written in blocks behind `length`.

    A block stays pending until `advance` or `keep` takes it in; whatever is not taken in is overwritten by the next.
    """

    def __init__(self, storage: Float[Tensor, "layers kv batch kv_heads capacity head_dim"]) -> None:
        self.storage = storage
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.storage.shape[4]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a block [batch, kv_heads, nodes, head_dim] behind the length; returns all keys and values up to it."""
        end = self.length + key.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit the cache's {self.capacity} slots; make the cache larger")
        slots = self.storage[layer]
        slots[0, :, :, self.length : end] = key
        slots[1, :, :, self.length : end] = value
        return slots[0, :, :, :end], slots[1, :, :, :end]

    def advance(self, count: int) -> None:
        """Take in the first `count` tokens of the pending block."""
        self.length += count

    def rewind(self, length: int) -> None:
        """Forget everything behind `length`."""
        assert length <= self.length
        self.length = length

    def keep(self, path: list[int]) -> None:
        """Take in the nodes of `path` (ascending indices into the pending block), moved together in every layer."""
        start = self.length
        # Nodes that already lie where they belong stay; the copy is bounded by the path, whatever the context.
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path):
            source = torch.tensor(path[moved:], device=self.storage.device) + start
            self.storage[..., start + moved : start + len(path), :] = self.storage.index_select(4, source)
        self.length = start + len(path)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = self.append(layer, key, value)
        return attention(query, keys, values, mask)


class UnrollCache:
    """The keys of a training-time-test unroll of one layer (EAGLE-3, section 3.2).

    Step 0 is ordinary causal attention. At step k a position sees the step-0 keys up to itself and exactly its own
    index of each step 1..k: just what drafting will see k tokens behind the last verified one.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        assert layer == 0
        assert mask is None
        self.keys.append(key)
        self.values.append(value)
        if len(self.keys) == 1:
            return attention(query, key, value)
        return unroll_attention(query, self.keys, self.values)
