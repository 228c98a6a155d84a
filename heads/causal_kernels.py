"""Causal attention kernels that also return log-sum-exps, so that attention to further keys can be merged in.

Each kernel attends within documents only and needs memory linear in the sequence length. There is one for each kind of
device. Every backward pass recomputes the probabilities as exp(score - logsumexp) and takes its row correction from
`out`. Given the `out` and `logsumexp` of a softmax over more keys, these are therefore the probabilities of that joint
softmax, and the result is the exact gradient for the keys of this kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.frozen import at_least_float32
from headstart.heads.packing import Documents

QUERY_BLOCK = 128  # number of queries that the portable kernel scores at once
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class CausalKernel:
    """Forward and backward of one kernel.

    Query, out and their gradients are [batch, heads, seq, head_dim]; logsumexp is [batch, heads, seq], in float32 or
    float64. Key and value may have fewer heads, each shared by a group of query heads. Without documents, every row is
    one document.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Documents | None], tuple[Tensor, Tensor]]
    """Takes q, k, v; returns out, logsumexp."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Documents | None], tuple[Tensor, Tensor, Tensor]
    ]
    """Takes the gradient of out, q, k, v, the joint out and the joint logsumexp; returns the gradients of q, k, v."""


def kernel_for(query: Tensor) -> CausalKernel:
    """The fastest kernel for this device and dtype."""
    if query.device.type == "cpu":
        return CPU_FUSED
    return CUDA_FUSED if flash_attention_takes(query) else PORTABLE


def flash_attention_takes(query: Tensor) -> bool:
    """Does PyTorch's fused kernel support this GPU, dtype and head size, in the backward pass too?"""
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and torch.version.hip is None  # untested on ROCm
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and size % 8 == 0
        and (size <= 192 or size == 256)
    )


def per_document(forward: Forward, backward: Backward) -> CausalKernel:
    """A CausalKernel that runs functions for single documents on each document in turn."""

    def forward_all(query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
        if documents is None:
            return forward(query, key, value)
        out = torch.empty_like(query)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        for rows, columns in documents.spans():
            part = rows, slice(None), columns
            out[part], logsumexp[part] = forward(query[part], key[part], value[part])
        return out, logsumexp

    def backward_all(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        documents: Documents | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = grad_out, query, key, value, out, logsumexp
        if documents is None:
            return backward(*given)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for rows, columns in documents.spans():
            part = rows, slice(None), columns
            for gradient, found in zip(gradients, backward(*(each[part] for each in given)), strict=True):
                gradient[part] = found
        return gradients

    return CausalKernel(forward_all, backward_all)


def cpu_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)


def cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, True
    )


def portable_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Scores one block of queries at a time, in float32 or float64."""
    key, value = (at_least_float32(each).unsqueeze(2) for each in (key, value))  # [batch, kv_heads, 1, seq, head_dim]
    grouped = query.unflatten(1, (key.shape[1], -1))  # [batch, kv_heads, groups, seq, head_dim]
    outs, logsumexps = [], []
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        scores = block_scores(grouped[..., block, :], key, start)  # [batch, kv_heads, groups, block, keys]
        logsumexp = scores.logsumexp(-1)
        weights = (scores - logsumexp.unsqueeze(-1)).exp()
        outs.append(weights @ value[..., : scores.shape[-1], :])
        logsumexps.append(logsumexp)
    return torch.cat(outs, dim=3).flatten(1, 2).to(query.dtype), torch.cat(logsumexps, dim=3).flatten(1, 2)


def portable_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale, kv_heads = query.shape[-1] ** -0.5, key.shape[1]
    wide_key, wide_value = (at_least_float32(each).unsqueeze(2) for each in (key, value))
    grad_key, grad_value = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
    grad_queries = []
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        given = (each[:, :, block].unflatten(1, (kv_heads, -1)) for each in (query, grad_out, out, logsumexp))
        queries, grads, outs, joint = (at_least_float32(each) for each in given)
        scores = block_scores(queries, wide_key, start)
        seen = slice(scores.shape[-1])
        weights = (scores - joint.unsqueeze(-1)).exp()
        grad_weights = grads @ wide_value[..., seen, :].mT
        grad_scores = weights * (grad_weights - (grads * outs).sum(-1, keepdim=True)) * scale
        grad_queries.append(grad_scores @ wide_key[..., seen, :])
        grad_key[..., seen, :] += (grad_scores.mT @ queries).sum(2, keepdim=True)
        grad_value[..., seen, :] += (weights.mT @ grads).sum(2, keepdim=True)
    grad_query = torch.cat(grad_queries, dim=3).flatten(1, 2)
    return grad_query.to(query.dtype), grad_key.squeeze(2).to(key.dtype), grad_value.squeeze(2).to(value.dtype)


def block_scores(queries: Tensor, key: Tensor, start: int) -> Tensor:
    """Scores of a block of queries that begins at `start`, over all keys up to the block's end. [..., block, keys]"""
    block = queries.shape[-2]
    scores = at_least_float32(queries) @ key[..., : start + block, :].mT * queries.shape[-1] ** -0.5
    future = torch.ones(block, block, dtype=torch.bool, device=queries.device).triu(1)
    scores[..., start:].masked_fill_(future, float("-inf"))
    return scores


def cuda_forward(query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
    """Runs all documents in one kernel launch."""
    batch, _, seq, _ = query.shape
    starts, longest = document_boundaries(query, documents)
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *map(flatten_rows, (query, key, value)), starts, starts, longest, longest, 0.0, True, False
    )  # [batch * seq, heads, head_dim], [heads, batch * seq]
    return out.unflatten(0, (batch, seq)).transpose(1, 2), logsumexp.unflatten(1, (batch, seq)).transpose(0, 1)


def cuda_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, seq, _ = query.shape
    starts, longest = document_boundaries(query, documents)
    no_dropout = query.new_zeros(2, dtype=torch.uint64), query.new_empty(0)  # random state, unused without dropout
    gradients = torch.ops.aten._flash_attention_backward(
        *map(flatten_rows, (grad_out, query, key, value, out)),
        logsumexp.transpose(0, 1).flatten(1).contiguous(),
        starts,
        starts,
        longest,
        longest,
        0.0,
        True,
        *no_dropout,
    )
    grad_query, grad_key, grad_value = (each.unflatten(0, (batch, seq)).transpose(1, 2) for each in gradients)
    return grad_query, grad_key, grad_value


def flatten_rows(tensor: Tensor) -> Tensor:
    """[batch, heads, seq, head_dim] as [batch * seq, heads, head_dim], the memory order that projections produce."""
    return tensor.transpose(1, 2).flatten(0, 1)


def document_boundaries(query: Tensor, documents: Documents | None) -> tuple[Tensor, int]:
    """Where each document starts in the concatenated rows, and the length of the longest document."""
    if documents is not None:
        return documents.starts, documents.longest
    batch, _, seq, _ = query.shape
    return torch.arange(0, batch * seq + 1, seq, dtype=torch.int32, device=query.device), seq


CPU_FUSED = per_document(cpu_forward, cpu_backward)
PORTABLE = per_document(portable_forward, portable_backward)
CUDA_FUSED = CausalKernel(cuda_forward, cuda_backward)
