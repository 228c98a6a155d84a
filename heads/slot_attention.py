"""The attention of block heads in training on a GPU: one slot of all blocks at a time, by the fused causal kernel."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headstart.heads.attention_kernels import CUDA_FUSED, Documents, scored_backward, scored_forward


@dataclass(frozen=True)
class Places:
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
        ctx: Any, places: Places, within: Bool[Tensor, "size size"], window: int | None, *states: Tensor
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
