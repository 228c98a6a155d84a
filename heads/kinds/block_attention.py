"""The attention of block heads in training: all blocks of a batch at once, in memory linear in the sequence length.

On a GPU one slot of all blocks is computed at a time, by the fused causal kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstart.heads.attention_kernels import (
    CUDA_FUSED,
    Documents,
    flash_attention_takes,
    masked_backward,
    masked_forward,
    scored_backward,
    scored_forward,
)

GROUP_QUERIES = 128  # queries that are computed together; they share the longest prefix among their blocks


@dataclass(frozen=True)
class Reach:
    """The positions and slots that a block's slots see in one layer."""

    window: int | None = None  # positions before the anchor; None is all of them
    causal: bool = False  # only the slots before them in their block, and themselves

    def within(self, size: int, device: torch.device | str = "cpu") -> Bool[Tensor, "size size"]:
        """Which slots of its block each slot sees."""
        everything = torch.ones(size, size, dtype=torch.bool, device=device)
        return everything.tril() if self.causal else everything


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of a batch lie, in the order of rows and columns; plain numbers, so no step waits for a device.

    The anchor is the token before the first one that the block predicts. A block sees the positions before its anchor.
    """

    rows: tuple[int, ...]
    anchors: tuple[int, ...]  # columns
    starts: tuple[int, ...]  # columns at which their documents begin

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def at_every_position(cls, seq: int) -> "Blocks":
        """The blocks of one text that has been verified up to each of its positions, the first one excepted."""
        return cls((0,) * (seq - 1), tuple(range(1, seq)), (0,) * (seq - 1))

    def indices(self, device: torch.device | str) -> tuple[Int[Tensor, " blocks"], Int[Tensor, " blocks"]]:
        """Rows and columns of the anchors."""
        return torch.tensor(self.rows, device=device).long(), torch.tensor(self.anchors, device=device).long()

    def positions(self, device: torch.device | str) -> Int[Tensor, " blocks"]:
        """The anchors' positions within their documents."""
        return self.indices(device)[1] - torch.tensor(self.starts, device=device).long()

    def along(self, batch: int, seq: int, device: torch.device | str) -> "BlockPlaces":
        """The blocks' places in a context of this shape; a document ends where no block sees any more of it."""
        ends = {(row, start): anchor for row, anchor, start in zip(self.rows, self.anchors, self.starts, strict=True)}
        cuts = [{0, seq} for _ in range(batch)]
        for (row, start), end in ends.items():
            cuts[row] |= {start, end}
        documents = Documents.in_rows([[end - start for start, end in pairwise(sorted(cut))] for cut in cuts], device)
        rows, anchors = self.indices(device)
        return BlockPlaces(rows, anchors - 1, documents)

    def groups(self, size: int, window: int | None) -> Iterator["Group"]:
        """Neighbouring blocks of a document, with the columns that at least one of them sees."""
        most, first = max(GROUP_QUERIES // size, 1), 0
        while first < len(self):
            last = first
            while last < len(self) and last - first < most and self.document(last) == self.document(first):
                last += 1
            seen = [self.seen(number, window) for number in range(first, last)]
            columns = slice(min(start for start, _ in seen), max(end for _, end in seen))
            yield Group(slice(first, last), self.rows[first], columns, seen)
            first = last

    def document(self, number: int) -> tuple[int, int]:
        """Row and first column of a block's document."""
        return self.rows[number], self.starts[number]

    def seen(self, number: int, window: int | None) -> tuple[int, int]:
        """The first column that a block sees, and the first that it does not."""
        start, anchor = self.starts[number], self.anchors[number]
        return start if window is None else max(start, anchor - window), anchor


class Group(NamedTuple):
    """Blocks whose attention is computed together."""

    blocks: slice
    row: int
    columns: slice  # the context's columns that at least one of the blocks sees
    seen: list[tuple[int, int]]  # the columns that each block sees: the first, and the first that it does not

    def mask(self, within: Bool[Tensor, "size size"], like: Tensor) -> Float[Tensor, "queries keys"]:
        """Additive mask of the slots over the context's columns, then over the slots of all blocks in the group."""
        size, count = len(within), len(self.seen)
        columns = torch.arange(self.columns.start, self.columns.stop, device=like.device)
        first, end = torch.tensor(self.seen, device=like.device).unsqueeze(-1).unbind(1)  # [count, 1]
        context = ((columns >= first) & (columns < end)).unsqueeze(1).expand(-1, size, -1)
        own = torch.eye(count, dtype=torch.bool, device=like.device)[:, None, :, None] & within.to(like.device)[:, None]
        allowed = torch.cat([context, own.flatten(2)], dim=-1).flatten(0, 1)
        return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill_(~allowed, -torch.inf)


class BlockCache:
    """The context's keys and values of every layer, for the blocks of a training batch.

    Where the fused kernel of GPUs takes them, all blocks attend together, one slot after another; elsewhere group by
    group.
    """

    def __init__(
        self, blocks: Blocks, reaches: tuple[Reach, ...], keys: Sequence[Tensor] = (), values: Sequence[Tensor] = ()
    ) -> None:
        """`keys` and `values` are the context's in the first layers, if they are known."""
        self.blocks, self.reaches = blocks, reaches
        self.keys: list[Float[Tensor, "batch kv_heads seq head_dim"]] = [*keys]
        self.values: list[Float[Tensor, "batch kv_heads seq head_dim"]] = [*values]

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take in the context of the next layer."""
        assert layer == len(self.keys)
        self.keys.append(key)
        self.values.append(value)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Each slot attends to what its block sees of the context and of itself. [blocks, heads, slots, head_dim]"""
        assert mask is None
        reach, dtype = self.reaches[layer], value.dtype
        # On a GPU autocast norms queries and keys in float32.
        given = query.to(dtype), self.keys[layer].to(dtype), self.values[layer], key.to(dtype), value
        if flash_attention_takes(given[0]):
            return SlotAttention.apply(self.places, reach.within(query.shape[2], query.device), reach.window, *given)
        return BlockAttention.apply(self.blocks, reach, *given)

    @cached_property
    def places(self) -> "BlockPlaces":
        batch, _, seq, _ = self.keys[0].shape
        return self.blocks.along(batch, seq, self.keys[0].device)


class BlockAttention(torch.autograd.Function):
    """Keeps queries, keys, values, outputs and log-sum-exps, but no scores; computes one group of blocks at a time."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, reach: Reach, *states: Tensor) -> Tensor:
        query, context_key, context_value, key, value = states
        out = torch.empty_like(query)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        within = reach.within(query.shape[2])
        for group in blocks.groups(query.shape[2], reach.window):
            keys, values = (joined(group, *pair) for pair in ((context_key, key), (context_value, value)))
            queries = together(query[group.blocks])
            found, sums = masked_forward(queries, keys, values, group.mask(within, query))
            out[group.blocks] = apart(found, query.shape[2])
            logsumexp[group.blocks] = sums[0].unflatten(1, (-1, query.shape[2])).transpose(0, 1)
        ctx.blocks, ctx.reach = blocks, reach
        ctx.save_for_backward(*states, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, context_key, context_value, key, value, out, logsumexp = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        wide = logsumexp.dtype  # many groups add up in the context's gradients
        grad_context_key, grad_context_value = (
            torch.zeros_like(each, dtype=wide) for each in (context_key, context_value)
        )
        size, within = query.shape[2], ctx.reach.within(query.shape[2])
        for group in ctx.blocks.groups(size, ctx.reach.window):
            keys, values = (joined(group, *pair) for pair in ((context_key, key), (context_value, value)))
            grads, queries, outs = (together(each[group.blocks]) for each in (gradients[0], query, out))
            sums = logsumexp[group.blocks].transpose(0, 1).flatten(1).unsqueeze(0)
            mask = group.mask(within, query)
            of_query, of_keys, of_values = masked_backward(grads, queries, keys, values, outs, sums, mask)
            grad_query[group.blocks] = apart(of_query, size)
            count = group.columns.stop - group.columns.start
            keys_and_values = (of_keys, grad_key, grad_context_key), (of_values, grad_value, grad_context_value)
            for found, own, context in keys_and_values:
                context[group.row, :, group.columns] += found[0, :, :count]
                own[group.blocks] = apart(found[:, :, count:], size)
        of_context = grad_context_key.to(context_key.dtype), grad_context_value.to(context_value.dtype)
        return None, None, grad_query, *of_context, grad_key, grad_value


def joined(group: Group, context: Tensor, own: Tensor) -> Tensor:
    """The keys (or values) that a group attends to: the context's, then its own. [1, kv_heads, keys, head_dim]"""
    seen = context[group.row : group.row + 1, :, group.columns]
    return torch.cat([seen, together(own[group.blocks])], dim=2)


def together(states: Float[Tensor, "count heads size head_dim"]) -> Float[Tensor, "1 heads queries head_dim"]:
    """The slots of all blocks in a line."""
    return states.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def apart(states: Float[Tensor, "1 heads queries head_dim"], size: int) -> Float[Tensor, "count heads size head_dim"]:
    """The slots block by block again."""
    return states[0].unflatten(1, (-1, size)).transpose(0, 1)


@dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of a batch lie in their context, on the device."""

    rows: Int[Tensor, " blocks"]
    columns: Int[Tensor, " blocks"]  # of the position before each anchor, the last one that the block sees
    documents: Documents

    def spread(self, states: Tensor) -> Tensor:
        """States of one slot, [blocks, heads, ...], at their places in the context, [batch, heads, seq, ...]."""
        context = states.new_zeros(*self.documents.places.shape, *states.shape[1:])
        context[self.rows, self.columns] = states
        return context.transpose(1, 2)

    def gather(self, context: Tensor) -> Tensor:
        """The states at these places of the context: `spread`, undone."""
        return context.transpose(1, 2)[self.rows, self.columns]


class SlotAttention(torch.autograd.Function):
    """Merges attention to the context with that to the block's own slots, using their log-sum-exps.

    The queries of one slot lie in the context at the last position that they see, so causal attention gives them what
    their blocks see. Positions without a block have zeros for query and gradient, and so they add nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, places: BlockPlaces, within: Bool[Tensor, "size size"], window: int | None, *states: Tensor
    ) -> Tensor:
        query, context_key, context_value, key, value = states
        mask = torch.where(within, 0.0, -torch.inf)
        own, of_own = scored_forward(query, key, value, mask)
        out, of_context = torch.empty_like(query), torch.empty_like(of_own)
        for slot in range(query.shape[2]):
            given = places.spread(query[:, :, slot]), context_key, context_value
            found, sums = CUDA_FUSED.forward(*given, documents=places.documents, window=window)
            out[:, :, slot], of_context[:, :, slot] = places.gather(found), places.gather(sums)
        logsumexp = torch.logaddexp(of_own, of_context)  # [blocks, heads, slots]
        share, own_share = ((part - logsumexp).exp().unsqueeze(-1) for part in (of_context, of_own))
        out = (out * share + own * own_share).to(query.dtype)
        ctx.places, ctx.window = places, window
        ctx.save_for_backward(*states, out, logsumexp, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, context_key, context_value, key, value, out, logsumexp, mask = ctx.saved_tensors
        places, along = ctx.places, (gradients[0], query, out, logsumexp)
        grad_query, grad_key, grad_value = scored_backward(gradients[0], query, key, value, out, logsumexp, mask)
        # Many slots add up in the context's gradients.
        of_context = [torch.zeros_like(each, dtype=logsumexp.dtype) for each in (context_key, context_value)]
        for slot in range(query.shape[2]):
            grads, queries, outs, sums = (places.spread(each[:, :, slot]) for each in along)
            given = grads, queries, context_key, context_value, outs, sums
            of_query, *found = CUDA_FUSED.backward(*given, documents=places.documents, window=ctx.window)
            grad_query[:, :, slot] += places.gather(of_query)
            for total, more in zip(of_context, found, strict=True):
                total += more
        grad_context_key, grad_context_value = (each.to(context_key.dtype) for each in of_context)
        own = grad_key.to(key.dtype), grad_value.to(value.dtype)
        return None, None, None, grad_query, grad_context_key, grad_context_value, *own
