"""Where attention finds its earlier keys and values: slots while decoding, the unroll's blocks while training."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from heads.documents import Documents
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
    """Key and value slots of a stack of equal layers; row b of the batch holds `lengths[b]` tokens.

    A block is written behind the length and the pending blocks before it, and stays pending until `advance` or `keep`
    takes it in; what is not taken in is overwritten by the next one. With `static` every shape is that of the capacity
    and every offset is read on the device, so that a CUDA graph can replay a step.
    """

    def __init__(
        self, storage: Float[Tensor, "layers kv batch kv_heads capacity head_dim"], rows: int = 1, static: bool = False
    ) -> None:
        self.storage, self.static = storage, static
        self.lengths = [0] * rows  # of the rows in use, the first ones of the storage
        # One buffer for good: a captured graph reads its numbers where they were when it was captured.
        self._starts = torch.zeros(storage.shape[2], dtype=torch.long, device=storage.device)
        self.starts = self._starts[:rows]  # the lengths, on the device
        self.pending = 0
        self.bytes_moved = 0  # by `keep`, so far
        self._index: tuple[Tensor, Tensor] | None = None  # where the pending block goes, for all layers alike

    @property
    def capacity(self) -> int:
        return self.storage.shape[4]

    @property
    def even(self) -> bool:
        """May offsets be plain numbers, the same for all rows?"""
        return not self.static and (len(self.lengths) == 1 or min(self.lengths) == max(self.lengths))

    def num_keys(self, block: int) -> int:
        """Keys that a block of so many tokens is scored against."""
        return self.capacity if self.static else max(self.lengths) + self.pending + block

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a block [batch, kv_heads, nodes, head_dim]; returns all keys and values up to its end."""
        block = key.shape[2]
        end = max(self.lengths) + self.pending + block
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit the cache's {self.capacity} slots; make the cache larger")
        slots = self.storage[layer, :, : len(self.lengths)]
        if self.even:
            start = end - block
            slots[0, :, :, start:end] = key
            slots[1, :, :, start:end] = value
        else:
            rows, columns = self._places(block)
            slots[0][rows, :, columns] = key.transpose(1, 2).to(slots.dtype)
            slots[1][rows, :, columns] = value.transpose(1, 2).to(slots.dtype)
        if self.static:
            return slots[0], slots[1]
        return slots[0, :, :, :end], slots[1, :, :, :end]

    def _places(self, block: int) -> tuple[Tensor, Tensor]:
        """Row and slot of each token of the pending block, [batch, 1] and [batch, block]."""
        if self._index is None or self._index[1].shape[1] != block:
            device = self.storage.device
            columns = self.starts[:, None] + self.pending + torch.arange(block, device=device)
            self._index = torch.arange(len(self.lengths), device=device)[:, None], columns
        return self._index

    def hold(self, count: int) -> None:
        """Leave the block just written pending and put the next one behind it."""
        self.pending += count
        self._index = None

    def set_lengths(self, lengths: list[int]) -> None:
        """Say which rows are in use and how many tokens each holds; everything behind is forgotten."""
        if lengths != self.lengths or self.static:  # `shift` may have moved on what the device knows
            if len(lengths) == len(self.starts) == 1 and not self.static:
                self.starts.fill_(lengths[0])
            else:
                self._starts[: len(lengths)].copy_(torch.tensor(lengths, dtype=torch.long), non_blocking=True)
        self.lengths = list(lengths)
        self.reset()

    def reset(self) -> None:
        """Forget what is pending."""
        if self.static or len(self.starts) != len(self.lengths):
            self.starts = self._starts[: len(self.lengths)]
        self.pending, self._index = 0, None

    def advance(self, counts: list[int]) -> None:
        """Take in the first `counts[b]` pending tokens of each row b."""
        self.set_lengths([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def shift(self, counts: Int[Tensor, " rows"]) -> None:
        """`advance` by numbers that only the device knows; until `set_lengths`, `lengths` lags behind."""
        assert self.static
        self.starts = self.starts + counts
        self.pending, self._index = 0, None

    def keep(self, paths: list[list[int]]) -> None:
        """Take in, for each row, the nodes of its path (ascending indices into the pending block), moved together.

        All layers move in one copy, which is bounded by the paths and not by the context.
        """
        longest = max(map(len, paths))
        # Nodes that already lie where they belong stay.
        first = min((i for path in paths for i, node in enumerate(path) if node != i), default=longest)
        if first < longest and len(paths) == 1:  # where rows do not differ, indices are far cheaper
            start, row = self.lengths[0], self.storage[:, :, 0]
            source = torch.tensor([start + node for node in paths[0][first:]]).to(row.device, non_blocking=True)
            moved = row.index_select(3, source)  # [layers, 2, kv_heads, moved, head_dim]
            row[..., start + first : start + longest, :] = moved
            self.bytes_moved += moved.nbytes
        elif first < longest:
            padded = torch.tensor([[*path, *range(len(path), longest)] for path in paths])[:, first:]
            source = self.starts[:, None] + padded.to(self.starts.device, non_blocking=True)
            goal = self.starts[:, None] + torch.arange(first, longest, device=self.starts.device)
            rows = torch.arange(len(paths), device=self.starts.device)[:, None]
            moved = self.storage[:, :, rows, :, source]  # [batch, moved, layers, 2, kv_heads, head_dim]
            self.storage[:, :, rows, :, goal] = moved
            self.bytes_moved += moved.nbytes
        self.advance([len(path) for path in paths])

    def row(self, number: int) -> "Slots":
        """One row by itself, empty, in the same storage, whether it is in use or not; its shapes are never static."""
        return Slots(self.storage[:, :, number : number + 1])

    def end_row(self, number: int) -> None:
        """Take a row out of use; the last one moves into its place, with the slot behind its length."""
        lengths = list(self.lengths)
        last = lengths.pop()
        if number < len(lengths):
            held = slice(last + 1)  # a draft model's root has been written there, and is read from on the next step
            self.storage[:, :, number, :, held] = self.storage[:, :, len(lengths), :, held]
            lengths[number] = last
        self.set_lengths(lengths)

    def grown(self, storage: Tensor) -> "Slots":
        """The same content in a larger storage, with the slot behind each row's length, as in `end_row`."""
        held = min(max(self.lengths, default=0) + 1, self.capacity)
        storage[:, :, : len(self.lengths), :, :held] = self.storage[:, :, : len(self.lengths), :, :held]
        slots = Slots(storage, len(self.lengths), self.static)
        slots.set_lengths(self.lengths)
        slots.bytes_moved = self.bytes_moved
        return slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = self.append(layer, key, value)
        return attention(query, keys, values, mask)


class UnrollCache:
    """The keys of a training-time-test unroll of one layer (EAGLE-3, section 3.2).

    Step 0 is ordinary causal attention. At step k a position sees the step-0 keys up to itself and exactly its own
    index of each step 1..k: just what drafting will see k tokens behind the last verified one. In packed rows, all of
    that within its document.
    """

    def __init__(
        self, keys: Sequence[Tensor] = (), values: Sequence[Tensor] = (), documents: Documents | None = None
    ) -> None:
        """`keys` and `values` of the steps so far, [batch, kv_heads, seq, head_dim] each."""
        self.keys, self.values, self.documents = list(keys), list(values), documents

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        assert layer == 0
        assert mask is None
        self.keys.append(key)
        self.values.append(value)
        return unroll_attention(query, self.keys, self.values, self.documents)
