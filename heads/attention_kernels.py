"""Attention kernels that also return log-sum-exps, so that backward passes recompute the probabilities.

Query, out and their gradients are [batch, heads, queries, head_dim]; key and value may have fewer heads, each shared by
a group of query heads; logsumexp is [batch, heads, queries], in float32 or float64. Every backward pass computes the
probabilities as exp(score - logsumexp) and takes its row correction from `out`. Given the `out` and `logsumexp` of a
softmax over more keys, these are therefore the probabilities of that joint softmax, and the result is the exact
gradient for the keys of this kernel. Memory is linear in the sequence length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.heads.frozen import at_least_float32

QUERY_BLOCK = 128  # number of queries that the portable causal kernel scores at once
MASK_DEVICES = ("cpu",)  # devices on which torch's fused kernel takes a mask and returns log-sum-exps
Gradients = tuple[Tensor, Tensor, Tensor]  # the gradients of query, key and value
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Backward = Callable[..., Gradients]  # takes the gradient of out, q, k, v, the joint out and the joint logsumexp


@dataclass(frozen=True)
class Documents:
    """The documents of a batch of packed rows.

    Padding at a row's end counts as a document of its own, so the documents fill the rows completely.
    """

    lengths: tuple[tuple[int, ...], ...]  # length of each document, row by row
    places: Int[Tensor, "batch seq"]  # position of each token within its document
    starts: Int[Tensor, " documents_and_end"]  # where each document starts in the concatenated rows; int32 for kernels

    @classmethod
    def in_rows(cls, rows: list[list[int]], device: torch.device | str = "cpu") -> "Documents":
        """The documents of rows with these document lengths, each row padded to the longest."""
        seq = max(map(sum, rows))
        lengths = tuple(tuple(row) + ((seq - sum(row),) if sum(row) < seq else ()) for row in rows)
        flat = torch.tensor([0, *(length for row in lengths for length in row)])
        starts = flat.cumsum(0)
        places = torch.arange(len(rows) * seq) - starts[:-1].repeat_interleave(flat[1:])
        return cls(lengths, places.view(len(rows), seq).to(device), starts.to(device, torch.int32))

    def to(self, device: torch.device | str) -> "Documents":
        return replace(self, places=self.places.to(device), starts=self.starts.to(device))

    @property
    def longest(self) -> int:
        return max(map(max, self.lengths))

    def spans(self) -> list[tuple[slice, slice]]:
        """The row and the columns of each document."""
        return [
            (slice(row, row + 1), slice(start, end))
            for row, lengths in enumerate(self.lengths)
            for start, end in pairwise(accumulate(lengths, initial=0))
        ]


@dataclass(frozen=True)
class CausalKernel:
    """Causal attention within documents; without documents, every row is one document."""

    forward: Callable[..., tuple[Tensor, Tensor]]  # q, k, v and `documents` to out, logsumexp
    backward: Callable[..., Gradients]  # as a Backward, with the keyword `documents`


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

    def backward_all(*arguments: Tensor, documents: Documents | None) -> Gradients:
        if documents is None:
            return backward(*arguments)
        grad_query, grad_key, grad_value = map(torch.empty_like, arguments[1:4])  # query, key and value
        gradients = grad_query, grad_key, grad_value
        for rows, columns in documents.spans():
            part = rows, slice(None), columns
            for gradient, part_gradient in zip(gradients, backward(*(each[part] for each in arguments)), strict=True):
                gradient[part] = part_gradient
        return gradients

    return CausalKernel(forward_all, backward_all)


def cpu_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal without an additive mask."""
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return run(query, key, value, 0.0, mask is None, attn_mask=mask)


def cpu_backward(*arguments: Tensor, mask: Tensor | None = None) -> Gradients:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return run(*arguments, 0.0, mask is None, attn_mask=mask)


def portable_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    blocks = [
        scored_forward(query[:, :, block], key[:, :, : block.stop], value[:, :, : block.stop], mask)
        for block, mask in causal_blocks(query)
    ]
    outs, logsumexps = zip(*blocks, strict=True)
    return torch.cat(outs, dim=2), torch.cat(logsumexps, dim=2)


def portable_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor
) -> Gradients:
    grad_queries = []
    grad_key, grad_value = (torch.zeros_like(at_least_float32(each)) for each in (key, value))
    for block, mask in causal_blocks(query):
        grads, queries, outs, joint = (each[:, :, block] for each in (grad_out, query, out, logsumexp))
        seen = slice(block.stop)
        grad_query, of_key, of_value = scored_backward(
            grads, queries, key[:, :, seen], value[:, :, seen], outs, joint, mask
        )
        grad_queries.append(grad_query)
        grad_key[:, :, seen] += of_key
        grad_value[:, :, seen] += of_value
    return torch.cat(grad_queries, dim=2), grad_key.to(key.dtype), grad_value.to(value.dtype)


def causal_blocks(query: Tensor) -> Iterator[tuple[slice, Float[Tensor, "queries keys"]]]:
    """Blocks of queries, each with its additive mask over all keys up to the block's end."""
    seq = query.shape[2]
    positions = torch.arange(seq, device=query.device)
    for start in range(0, seq, QUERY_BLOCK):
        block = slice(start, min(start + QUERY_BLOCK, seq))
        future = positions[: block.stop] > positions[block].unsqueeze(1)
        yield block, torch.zeros(future.shape, device=query.device).masked_fill_(future, -torch.inf)


def masked_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Float[Tensor, "queries keys"]
) -> tuple[Tensor, Tensor]:
    """Out and logsumexp under an additive mask, by the fastest kernel for the device."""
    if query.device.type in MASK_DEVICES:
        return cpu_forward(query, key, value, mask.to(query.dtype))
    return scored_forward(query, key, value, mask)


def masked_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor
) -> Gradients:
    if query.device.type in MASK_DEVICES:
        return cpu_backward(grad_out, query, key, value, out, logsumexp, mask=mask.to(query.dtype))
    grad_query, grad_key, grad_value = scored_backward(grad_out, query, key, value, out, logsumexp, mask)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def scored_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Out and logsumexp by plain matrix products in float32 or float64."""
    with torch.autocast(query.device.type, enabled=False):
        scores = masked_scores(query, key, mask)
        logsumexp = scores.logsumexp(-1)  # [batch, kv_heads, groups, queries]
        out = (scores - logsumexp.unsqueeze(-1)).exp() @ at_least_float32(value).unsqueeze(2)
    return out.flatten(1, 2).to(query.dtype), logsumexp.flatten(1, 2)


def scored_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor
) -> Gradients:
    """Gradients by plain matrix products; the gradients of key and value stay in float32 or float64, to be summed."""
    kv_heads, scale = key.shape[1], query.shape[-1] ** -0.5
    with torch.autocast(query.device.type, enabled=False):
        wide_key, wide_value = (at_least_float32(each).unsqueeze(2) for each in (key, value))
        queries, grads, outs = (at_least_float32(each).unflatten(1, (kv_heads, -1)) for each in (query, grad_out, out))
        weights = (masked_scores(query, key, mask) - logsumexp.unflatten(1, (kv_heads, -1)).unsqueeze(-1)).exp()
        grad_weights = grads @ wide_value.mT
        grad_scores = weights * (grad_weights - (grads * outs).sum(-1, keepdim=True)) * scale
        grad_query = (grad_scores @ wide_key).flatten(1, 2)
        grad_key, grad_value = (grad_scores.mT @ queries).sum(2), (weights.mT @ grads).sum(2)
    return grad_query.to(query.dtype), grad_key, grad_value


def masked_scores(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """[batch, kv_heads, groups, queries, keys]"""
    grouped = at_least_float32(query).unflatten(1, (key.shape[1], -1))
    return grouped @ at_least_float32(key).unsqueeze(2).mT * query.shape[-1] ** -0.5 + mask


def cuda_forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Runs all documents in one kernel launch; with `window`, a position sees itself and window - 1 before it."""
    batch, _, seq, _ = query.shape
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *map(flatten_rows, (query, key, value)),
        *document_boundaries(query, documents),
        0.0,
        True,
        False,
        window_size_left=None if window is None else window - 1,
    )  # [batch * seq, heads, head_dim], [heads, batch * seq]
    return out.unflatten(0, (batch, seq)).transpose(1, 2), logsumexp.unflatten(1, (batch, seq)).transpose(0, 1)


def cuda_backward(*arguments: Tensor, documents: Documents | None, window: int | None = None) -> Gradients:
    grad_out, query, key, value, out, logsumexp = arguments
    batch, _, seq, _ = query.shape
    no_dropout = query.new_zeros(2, dtype=torch.uint64), query.new_empty(0)  # random state, unused without dropout
    gradients = torch.ops.aten._flash_attention_backward(
        *map(flatten_rows, (grad_out, query, key, value, out)),
        logsumexp.transpose(0, 1).flatten(1).contiguous(),
        *document_boundaries(query, documents),
        0.0,
        True,
        *no_dropout,
        window_size_left=None if window is None else window - 1,
    )
    grad_query, grad_key, grad_value = (each.unflatten(0, (batch, seq)).transpose(1, 2) for each in gradients)
    return grad_query, grad_key, grad_value


def flatten_rows(tensor: Tensor) -> Tensor:
    """[batch, heads, seq, head_dim] as [batch * seq, heads, head_dim], the memory order that projections produce."""
    return tensor.transpose(1, 2).flatten(0, 1)


def document_boundaries(query: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor, int, int]:
    """Where each document starts in the concatenated rows, and the longest one's length: of queries and of keys."""
    if documents is not None:
        return documents.starts, documents.starts, documents.longest, documents.longest
    batch, _, seq, _ = query.shape
    starts = torch.arange(0, batch * seq + 1, seq, dtype=torch.int32, device=query.device)
    return starts, starts, seq, seq


CPU_FUSED = per_document(cpu_forward, cpu_backward)
PORTABLE = per_document(portable_forward, portable_backward)
CUDA_FUSED = CausalKernel(cuda_forward, cuda_backward)
