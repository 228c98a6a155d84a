"""Attention on a CPU whose sums have one order, so that a token's output has the same bits in every pass.

torch's kernels add a query's keys in blocks that depend on the numbers of queries, keys and threads. Here a score is
added along the head, and an output in the order of the slots, of which hidden ones add an exact zero. Accepted tokens
lie in the order of their positions, so neither drafts, nor other rows, nor padding change a sum. See attention.cpp.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.kernels.products import library

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = ctypes.c_int64 * 20


def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `ordered_attention` computes this: on a CPU, in inference, in one of its number formats."""
    return (
        query.is_cpu
        and query.dtype in DTYPES
        and key.dtype == value.dtype == query.dtype
        and not torch.is_grad_enabled()
        and (mask is None or (mask.ndim == 4 and mask.dtype in (query.dtype, torch.bool)))
        and library() is not None
    )


def ordered_attention(
    query: Float[Tensor, "batch num_heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool = True,
    cap: float | None = None,
    sinks: Float[Tensor, " num_heads"] | None = None,
) -> Float[Tensor, "batch seq num_heads value_dim"]:
    """softmax(cap(query key^T * scaling) + mask) value, contiguous.

    `mask` [batch or 1, num_heads or 1, seq, keys] is added, or is true where a key is visible; without one,
    query i of several sees the keys up to i if attention `is_causal`, else all. `cap` is Gemma 2's soft cap of
    scores, cap * tanh(score / cap); `sinks` are gpt-oss's additional scores whose values are zero.
    """
    batch, heads, seq, size = query.shape
    key_heads, keys, value_size = key.shape[1], key.shape[2], value.shape[3]
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    steps = [0, 0, 0]
    if mask is not None:
        mask = mask.as_subclass(Tensor)[..., :keys]
        mask = mask if mask.stride(3) == 1 else mask.contiguous()
        steps = [0 if count == 1 else step for count, step in zip(mask.shape[:3], mask.stride()[:3], strict=True)]
    if sinks is not None:
        sinks = sinks.float().contiguous()
    found = query.new_empty(batch, seq, heads, value_size)
    sizes = SIZES(
        *(batch, heads, key_heads, seq, keys, size, value_size),
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *steps),
        mask is None and is_causal and seq > 1,
    )
    inputs = query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr()
    loaded = library()
    assert loaded is not None
    kernel = getattr(loaded, f"attend_{str(query.dtype).removeprefix('torch.')}")
    kernel(
        ctypes.addressof(sizes),
        *inputs,
        mask is not None and mask.dtype == torch.bool,
        None if sinks is None else sinks.data_ptr(),
        found.data_ptr(),
        size**-0.5 if scaling is None else scaling,
        cap or 0.0,
    )
    return found
