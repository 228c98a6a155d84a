"""Triton kernels that join the small operations of a decoder layer on a GPU, where launching them takes longest.

Each computes what its layer's own code computes, in float32, and rounds once: an RMS norm, whose hidden states are
rounded before the weight is applied, as in transformers; SiLU(gate) * up (GLU Variants, Shazeer 2020); and, in one
launch, the norms of queries and keys (Qwen3), their rotary embedding (RoFormer, Su et al. 2021), and the keys and
values written to their slots of the cache. No program reads what belongs to another token.

TRITON_INTERPRET=1, set before the import, runs the kernels on a CPU.
"""

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor
from triton import language as tl

COLUMNS = 1024  # of an activation, in one program


@triton.jit
def normalise(inputs, weight, found, size, eps, WIDTH: tl.constexpr):
    """weight * hidden / sqrt(mean(hidden^2) + eps); grid: tokens."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < size
    hidden = tl.load(inputs + token * size + column, mask=inside, other=0.0).to(tl.float32)
    normed = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / size + eps)
    rounded = normed.to(found.dtype.element_ty).to(tl.float32)
    scaled = rounded * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + token * size + column, scaled.to(found.dtype.element_ty), mask=inside)


@triton.jit
def gate(joint, found, size, WIDTH: tl.constexpr):
    """SiLU of the first half of each token's numbers, times the second half; grid: tokens, blocks of columns."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside, start = column < size, joint + token * 2 * size + column
    opened = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(start + size, mask=inside, other=0.0).to(tl.float32)
    opened = (opened / (1.0 + tl.exp(-opened))).to(found.dtype.element_ty).to(tl.float32)
    tl.store(found + token * size + column, (opened * values).to(found.dtype.element_ty), mask=inside)


@triton.jit
def turned(start, column, size, weight, eps, cosines, sines, HAS_NORM: tl.constexpr):
    """One head's numbers, normalised if it HAS_NORM, and rotated in the half-split convention."""
    inside, other = column < size, tl.where(column < size // 2, column + size // 2, column - size // 2)
    numbers = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(start + other, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        kind = start.dtype.element_ty
        scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
        numbers = (numbers * scale).to(kind).to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0)
        others = (others * scale).to(kind).to(tl.float32) * tl.load(weight + other, mask=inside, other=0.0)
    others = tl.where(column < size // 2, -others, others)
    return numbers * tl.load(cosines + column, mask=inside, other=0.0) + others * tl.load(
        sines + column, mask=inside, other=0.0
    )


@triton.jit(do_not_specialize=["nodes", "pending"])  # else some of their values would be compiled for, in a text
def rotate(
    joint, cosines, sines, query_weight, key_weight, query, key, value, starts,
    heads, key_heads, nodes, size, pending, eps, rotary_row, rotary_node,
    key_row, key_head, key_slot, value_row, value_head, value_slot,
    HAS_NORM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One head of one token, to `query` or its slot; grid: tokens of all rows, heads of queries, keys and values."""
    token, head = tl.program_id(0), tl.program_id(1)
    row, node, column = (token // nodes).to(tl.int64), token % nodes, tl.arange(0, WIDTH)
    start = joint + (token.to(tl.int64) * (heads + 2 * key_heads) + head) * size
    slot, inside = tl.load(starts + row) + pending + node, column < size
    at = row * rotary_row + node * rotary_node
    if head < heads:
        found = turned(start, column, size, query_weight, eps, cosines + at, sines + at, HAS_NORM)
        to = query + ((row * heads + head) * nodes + node) * size + column
        tl.store(to, found.to(query.dtype.element_ty), mask=inside)
    elif head < heads + key_heads:
        found = turned(start, column, size, key_weight, eps, cosines + at, sines + at, HAS_NORM)
        to = key + row * key_row + (head - heads) * key_head + slot * key_slot + column
        tl.store(to, found.to(key.dtype.element_ty), mask=inside)
    else:
        to = value + row * value_row + (head - heads - key_heads) * value_head + slot * value_slot + column
        tl.store(to, tl.load(start + column, mask=inside, other=0.0), mask=inside)


def norm(
    inputs: Float[Tensor, "*axes size"], weight: Float[Tensor, " size"], eps: float
) -> Float[Tensor, "*axes size"]:
    """The RMS norm of each token, rounded to the inputs' dtype before the weight is applied."""
    inputs, size = inputs.contiguous(), len(weight)
    found = torch.empty_like(inputs)
    width = triton.next_power_of_2(size)
    normalise[(inputs.numel() // size,)](inputs, weight, found, size, eps, WIDTH=width, num_warps=warps(width))
    return found


def silu_times(joint: Float[Tensor, "*axes both"]) -> Float[Tensor, "*axes half"]:
    """SiLU(gate) * up, of gate and up side by side."""
    joint, size = joint.contiguous(), joint.shape[-1] // 2
    found = joint.new_empty(*joint.shape[:-1], size)
    gate[found.numel() // size, triton.cdiv(size, COLUMNS)](joint, found, size, WIDTH=COLUMNS)
    return found


def rotate_and_store(
    joint: Float[Tensor, "rows block all_heads"],
    rotary: tuple[Float[Tensor, "_ block head_dim"], Float[Tensor, "_ block head_dim"]],
    norms: tuple[Tensor, Tensor, float] | None,
    slots: tuple[Float[Tensor, "rows kv_heads keys head_dim"], Float[Tensor, "rows kv_heads keys head_dim"]],
    starts: Int[Tensor, " rows"],
    pending: int,
) -> Float[Tensor, "rows heads block head_dim"]:
    """The queries, after the keys and values are in their slots: `starts` + `pending` and those after it.

    `joint` holds the heads of queries, keys and values side by side, `norms` the weights and epsilon of the norms of
    queries and keys. Cosines and sines have one row for all, or one each, and lie in memory number by number.
    """
    (rows, block, total), (keys, values), (cosines, sines) = joint.shape, slots, rotary
    joint = joint.contiguous()
    key_heads, size = keys.shape[1], keys.shape[3]
    heads = total // size - 2 * key_heads
    query = joint.new_empty(rows, heads, block, size)
    query_weight, key_weight, eps = norms or (joint, joint, 0.0)
    rotary_row = 0 if len(cosines) == 1 else cosines.stride(0)
    rotate[rows * block, heads + 2 * key_heads](
        joint, cosines, sines, query_weight, key_weight, query, keys, values, starts,
        heads, key_heads, block, size, pending, eps, rotary_row, cosines.stride(1), *keys.stride()[:3],
        *values.stride()[:3], HAS_NORM=norms is not None, WIDTH=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return query


def warps(width: int) -> int:
    """The warps of a program over this many numbers."""
    return min(max(width // 512, 1), 16)
