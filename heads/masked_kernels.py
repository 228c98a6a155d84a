"""Attention under an additive mask that also returns log-sum-exps, so that its backward pass need not keep the scores.

Query, out and their gradients are [1, heads, queries, head_dim]; key and value may have fewer heads, each shared by a
group of query heads; logsumexp is [1, heads, queries], in float32 or float64.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.heads.frozen import at_least_float32

FUSED_DEVICES = ("cpu",)  # devices on which torch's fused kernel takes a mask and returns log-sum-exps


def masked_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Float[Tensor, "queries keys"]
) -> tuple[Tensor, Tensor]:
    """Out and logsumexp."""
    if query.device.type in FUSED_DEVICES:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask.to(query.dtype)
        )
    with torch.autocast(query.device.type, enabled=False):
        wide_value = at_least_float32(value).unsqueeze(2)
        scores = masked_scores(query, key, mask)
        logsumexp = scores.logsumexp(-1)  # [1, kv_heads, groups, queries]
        out = (scores - logsumexp.unsqueeze(-1)).exp() @ wide_value
    return out.flatten(1, 2).to(query.dtype), logsumexp.flatten(1, 2)


def masked_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    if query.device.type in FUSED_DEVICES:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, False, attn_mask=mask.to(query.dtype)
        )
    kv_heads, scale = key.shape[1], query.shape[-1] ** -0.5
    with torch.autocast(query.device.type, enabled=False):
        wide_key, wide_value = (at_least_float32(each).unsqueeze(2) for each in (key, value))
        queries, grads, outs = (at_least_float32(each).unflatten(1, (kv_heads, -1)) for each in (query, grad_out, out))
        weights = (masked_scores(query, key, mask) - logsumexp.unflatten(1, (kv_heads, -1)).unsqueeze(-1)).exp()
        grad_weights = grads @ wide_value.mT
        grad_scores = weights * (grad_weights - (grads * outs).sum(-1, keepdim=True)) * scale
        grad_query = (grad_scores @ wide_key).flatten(1, 2)
        grad_key, grad_value = (grad_scores.mT @ queries).sum(2), (weights.mT @ grads).sum(2)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def masked_scores(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """[1, kv_heads, groups, queries, keys]"""
    grouped = at_least_float32(query).unflatten(1, (key.shape[1], -1))
    return grouped @ at_least_float32(key).unsqueeze(2).mT * query.shape[-1] ** -0.5 + mask
