"""The attention of a training unroll: causal over the keys of step 0, plus one key from each later step."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from headstart.heads.attention_kernels import Documents, kernel_for


def unroll_attention(
    query: Float[Tensor, "batch heads seq head_dim"],
    keys: list[Tensor],
    values: list[Tensor],
    documents: Documents | None = None,
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Position t attends, under one softmax, to keys[0][..t] of its document and to keys[j][t] for every j >= 1.

    `keys` and `values` hold one [batch, kv_heads, seq, head_dim] tensor per step. Without `documents`, every row is one
    document. Memory is linear in seq on every device.
    """
    return MergedAttention.apply(documents, query, *keys, *values)


class MergedAttention(torch.autograd.Function):
    """Merges the device's causal kernel with the keys of later steps, using their log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, documents: Documents | None, query: Tensor, *keys_and_values: Tensor) -> Tensor:
        steps = len(keys_and_values) // 2
        (key, *own_keys), (value, *own_values) = keys_and_values[:steps], keys_and_values[steps:]
        out, logsumexp = kernel_for(query).forward(query, key, value, documents)
        weights = logsumexp.new_empty(0, *logsumexp.shape)  # [later steps, batch, heads, seq]
        if own_keys:
            causal, scale = logsumexp, query.shape[-1] ** -0.5
            grouped = group_heads(query, key)
            scores = torch.stack([dot(grouped, own.unsqueeze(2), causal.dtype) for own in own_keys])
            scores = scores.flatten(2, 3) * scale
            logsumexp = torch.logaddexp(causal, scores.logsumexp(0))
            weights = (scores - logsumexp).exp()
            merged = group_heads(out * (causal - logsumexp).exp().unsqueeze(-1), key)
            for weight, own in zip(weights, own_values, strict=True):
                merged.addcmul_(group_heads(weight, key).unsqueeze(-1), own.unsqueeze(2).to(merged.dtype))
            out = merged.flatten(1, 2).to(query.dtype)  # merged has the dtype of the log-sum-exps: float32 or float64
        ctx.documents = documents
        ctx.save_for_backward(query, out, logsumexp, weights, *keys_and_values)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, out, logsumexp, weights, *keys_and_values = ctx.saved_tensors
        steps, scale = len(keys_and_values) // 2, query.shape[-1] ** -0.5
        (key, *own_keys), (value, *own_values) = keys_and_values[:steps], keys_and_values[steps:]
        grad_out = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()  # kernels require this
        inputs = grad_out, query, key, value, out, logsumexp
        grad_query, grad_key, grad_value = kernel_for(query).backward(*inputs, documents=ctx.documents)
        grad_keys, grad_values = [grad_key], [grad_value]
        row = dot(grad_out, out, weights.dtype)  # [batch, heads, seq]: sum over all keys of weight * its gradient
        query_groups, grad_groups = group_heads(query, key), group_heads(grad_out, key)
        for weight, own_key, own_value in zip(weights, own_keys, own_values, strict=True):
            grad_weight = dot(grad_groups, own_value.unsqueeze(2), weights.dtype).flatten(1, 2)
            grad_score = group_heads(weight * (grad_weight - row) * scale, key).unsqueeze(-1).to(query.dtype)
            group_heads(grad_query, key).addcmul_(grad_score, own_key.unsqueeze(2))
            grad_keys.append(sum_groups(grad_score * query_groups))
            grad_values.append(sum_groups(group_heads(weight, key).unsqueeze(-1).to(query.dtype) * grad_groups))
        return None, grad_query, *grad_keys, *grad_values


def group_heads(tensor: Tensor, key: Tensor) -> Tensor:
    """[batch, heads, ...] as [batch, kv_heads, groups, ...]: query heads grouped by the key head that they share."""
    return tensor.unflatten(1, (key.shape[1], -1))


def sum_groups(tensor: Tensor) -> Tensor:
    """Sum over the query heads that share a key head; without sharing, only drop the axis."""
    return tensor.squeeze(2) if tensor.shape[2] == 1 else tensor.sum(2)


def dot(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Dot products over the last axis, accumulated in `dtype`."""
    return (first * second).sum(-1, dtype=dtype)


class UnrollCache:
    """The keys and values of a head's layers during an unroll (training-time test: EAGLE-3, section 3.2).

    Step 0 is ordinary causal attention. At step k, index t sees the step-0 keys up to t and the key at index t of each
    step 1..k. That is exactly what drafting sees k tokens after the last verified one. In packed rows, attention stays
    within each document.
    """

    def __init__(
        self,
        keys: Sequence[Sequence[Tensor]] = (),
        values: Sequence[Sequence[Tensor]] = (),
        documents: Documents | None = None,
    ) -> None:
        """`keys` and `values` are each layer's, of earlier steps, [batch, kv_heads, seq, head_dim] each."""
        self.keys, self.values = [list(layer) for layer in keys], [list(layer) for layer in values]
        self.documents = documents

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """A later step may run for the last indices alone."""
        assert mask is None
        if layer == len(self.keys):
            self.keys.append([])
            self.values.append([])
        left_out = self.keys[layer][0].shape[2] - key.shape[2] if self.keys[layer] else 0
        if left_out:  # the kernels align queries with keys from the first index on
            query, key, value = (functional.pad(each, (0, 0, left_out, 0)) for each in (query, key, value))
        self.keys[layer].append(key)
        self.values[layer].append(value)
        return unroll_attention(query, self.keys[layer], self.values[layer], self.documents)[:, :, left_out:]
