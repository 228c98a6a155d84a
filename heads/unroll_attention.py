"""Attention of one unroll step: a causal block over the step-0 keys and one key of each later step."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def unroll_attention(
    query: Float[Tensor, "batch heads seq head_dim"], keys: list[Tensor], values: list[Tensor]
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Position t attends to keys[0][..t] and to keys[j][t] for every later j, under one softmax.

    `keys` and `values` hold a [batch, kv_heads, seq, head_dim] of each step. On a CPU the causal block runs in the
    fused kernel with memory linear in seq; elsewhere densely.
    """
    groups = query.shape[1] // keys[0].shape[1]
    if groups > 1:
        keys = [key.repeat_interleave(groups, dim=1) for key in keys]
        values = [value.repeat_interleave(groups, dim=1) for value in values]
    own_keys, own_values = torch.stack(keys[1:]), torch.stack(values[1:])  # [steps, batch, heads, seq, head_dim]
    if query.device.type == "cpu":
        return MergedAttention.apply(query, keys[0], values[0], own_keys, own_values)
    return dense_unroll_attention(query, keys[0], values[0], own_keys, own_values)


def dense_unroll_attention(query: Tensor, key: Tensor, value: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    """The definition, with every score in memory; the merged form is tested against it."""
    scale, seq = query.shape[-1] ** -0.5, query.shape[2]
    future = torch.ones(seq, seq, dtype=torch.bool, device=query.device).triu(1)
    causal = (query @ key.mT * scale).masked_fill(future, float("-inf"))  # [batch, heads, seq, seq]
    own = (query * own_keys).sum(-1).movedim(0, -1) * scale  # [batch, heads, seq, steps]
    weights = torch.cat([causal, own], dim=-1).float().softmax(-1).to(query.dtype)
    own_weights = weights[..., seq:].movedim(-1, 0).unsqueeze(-1)  # [steps, batch, heads, seq, 1]
    return weights[..., :seq] @ value + (own_weights * own_values).sum(0)


class MergedAttention(torch.autograd.Function):
    """The fused causal kernel and the own-index terms merged by log-sum-exp.

    The fused backward recomputes its probabilities as exp(score - logsumexp) and takes its row correction from `out`.
    Given the merged `out` and `logsumexp`, these are the probabilities under the joint softmax, so what it returns is
    the exact gradient of the causal block's share.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
        scale = query.shape[-1] ** -0.5
        causal, causal_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        scores = (query * own_keys).sum(-1) * scale  # [steps, batch, heads, seq]
        lse = torch.logaddexp(causal_lse, scores.logsumexp(0))  # [batch, heads, seq]
        weights = (scores - lse).exp()
        out = causal * (causal_lse - lse).exp().unsqueeze(-1) + (weights.unsqueeze(-1) * own_values).sum(0)
        out = out.to(query.dtype)  # log-sum-exps are float32 at least
        ctx.save_for_backward(query, key, value, own_keys, own_values, out, lse, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, own_keys, own_values, out, lse, weights = ctx.saved_tensors
        grad_out, scale = gradients[0].contiguous(), query.shape[-1] ** -0.5
        grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, True
        )
        row = (grad_out * out).sum(-1)  # [batch, heads, seq]: sum over all keys of weight * d weight
        grad_scores = weights * ((grad_out * own_values).sum(-1) - row) * scale  # [steps, batch, heads, seq]
        grad_query = grad_query + (grad_scores.unsqueeze(-1) * own_keys).sum(0)
        grad_own_keys = grad_scores.unsqueeze(-1) * query
        grad_own_values = weights.unsqueeze(-1) * grad_out
        return grad_query, grad_key, grad_value, grad_own_keys, grad_own_values
