"""Triton kernels that join the small operations of a decoder layer on a GPU, where launching them takes longest.

Each computes what its layer's own code computes, in float32, and rounds where that does: an RMS norm, in Llama's form
or, with 1 + weight, in Gemma's; SiLU(gate) * up or GELU(gate) * up (GLU Variants, Shazeer 2020); and, in one launch,
the norms of queries and keys (Qwen3), their rotary embedding (RoFormer, Su et al. 2021), and the keys and values
written to their slots of the cache. No program of these reads what belongs to another token.

Where a measurement at load finds it faster, each starts before the kernel in front of it ends, and then waits for it
(programmatic dependent launch, from Hopper on).

TRITON_INTERPRET=1, set before the import, runs the kernels on a CPU.
"""

from functools import partial
from typing import Any

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from triton import language as tl
from triton.language.extra import cuda

from headstart.inference.kernels.gpu.few_rows import Trials, Work

COLUMNS = 1024  # of an activation, in one program
STARTED: dict[str, Any] = {"EARLY": False}  # how the kernels are launched


@triton.jit
def wait(EARLY: tl.constexpr):
    """First in each kernel: one that started early lets the next one start, and waits until the last one has ended."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def scaled(normed, weight, kind, OFFSET: tl.constexpr):
    """Normed numbers, rounded before the weight is applied, as in Llama; or times OFFSET + weight, as in Gemma."""
    if OFFSET != 0.0:
        return normed * (OFFSET + weight.to(tl.float32))
    return normed.to(kind).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def normalise(
    inputs, residual, weight, summed, found, size, eps,
    IS_SUM: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """weight * hidden / sqrt(mean(hidden^2) + eps); if it IS_SUM, hidden is inputs + residual; grid: tokens."""
    wait(EARLY)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside, at = column < size, token * size + column
    hidden = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
    kind = found.dtype.element_ty
    if IS_SUM:
        hidden = (hidden + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        tl.store(summed + at, hidden.to(kind), mask=inside)
    normed = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / size + eps)
    normed = scaled(normed, tl.load(weight + column, mask=inside, other=0.0), kind, OFFSET)
    tl.store(found + at, normed.to(kind), mask=inside)


@triton.jit
def gate(joint, found, size, IS_GELU: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """SiLU or GELU of each token's first half, times its second half; grid: tokens, blocks of columns."""
    wait(EARLY)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside, start = column < size, joint + token * 2 * size + column
    opened = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(start + size, mask=inside, other=0.0).to(tl.float32)
    # GELU's approximation by tanh is a sigmoid too: (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), with this as 2 z.
    steep = 1.5957691216057308 * (opened + 0.044715 * opened * opened * opened) if IS_GELU else opened
    opened = (opened / (1.0 + tl.exp(-steep))).to(found.dtype.element_ty).to(tl.float32)
    tl.store(found + token * size + column, (opened * values).to(found.dtype.element_ty), mask=inside)


@triton.jit
def turned(start, column, size, weight, eps, cosines, sines, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr):
    """One head's numbers, normalised if it HAS_NORM, and rotated in the half-split convention."""
    inside, other = column < size, tl.where(column < size // 2, column + size // 2, column - size // 2)
    numbers = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(start + other, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        kind = start.dtype.element_ty
        scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
        numbers = scaled(numbers * scale, tl.load(weight + column, mask=inside, other=0.0), kind, OFFSET)
        others = scaled(others * scale, tl.load(weight + other, mask=inside, other=0.0), kind, OFFSET)
    others = tl.where(column < size // 2, -others, others)
    return numbers * tl.load(cosines + column, mask=inside, other=0.0) + others * tl.load(
        sines + column, mask=inside, other=0.0
    )


@triton.jit(do_not_specialize=["nodes", "pending"])  # else some of their values would be compiled for, in a text
def rotate(
    joint, cosines, sines, query_weight, key_weight, query, key, value, starts,
    heads, key_heads, nodes, size, pending, eps, rotary_row, rotary_node,
    key_row, key_head, key_slot, value_row, value_head, value_slot,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one token, to `query` or its slot; grid: tokens of all rows, heads of queries, keys and values."""
    wait(EARLY)
    token, head = tl.program_id(0), tl.program_id(1)
    row, node, column = (token // nodes).to(tl.int64), token % nodes, tl.arange(0, WIDTH)
    start = joint + (token.to(tl.int64) * (heads + 2 * key_heads) + head) * size
    slot, inside = tl.load(starts + row) + pending + node, column < size
    at = row * rotary_row + node * rotary_node
    if head < heads:
        found = turned(start, column, size, query_weight, eps, cosines + at, sines + at, HAS_NORM, OFFSET)
        to = query + ((row * heads + head) * nodes + node) * size + column
        tl.store(to, found.to(query.dtype.element_ty), mask=inside)
    elif head < heads + key_heads:
        found = turned(start, column, size, key_weight, eps, cosines + at, sines + at, HAS_NORM, OFFSET)
        to = key + row * key_row + (head - heads) * key_head + slot * key_slot + column
        tl.store(to, found.to(key.dtype.element_ty), mask=inside)
    else:
        to = value + row * value_row + (head - heads - key_heads) * value_head + slot * value_slot + column
        tl.store(to, tl.load(start + column, mask=inside, other=0.0), mask=inside)


def norm(
    inputs: Float[Tensor, "*axes size"], weight: Float[Tensor, " size"], eps: float, offset: float = 0.0
) -> Float[Tensor, "*axes size"]:
    """The RMS norm of each token; with an `offset`, which is added to the weight, it is rounded at the end alone."""
    return _normed(inputs, None, weight, eps, offset)[1]


def add_and_norm(
    inputs: Float[Tensor, "*axes size"],
    residual: Float[Tensor, "*axes size"],
    weight: Float[Tensor, " size"],
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*axes size"], Float[Tensor, "*axes size"]]:
    """inputs + residual, and their `norm`."""
    return _normed(inputs, residual.contiguous(), weight, eps, offset)


def _normed(
    inputs: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    inputs, size = inputs.contiguous(), len(weight)
    summed, found, width = torch.empty_like(inputs), torch.empty_like(inputs), triton.next_power_of_2(size)
    normalise[(inputs.numel() // size,)](
        inputs, inputs if residual is None else residual, weight, summed, found, size, eps,
        IS_SUM=residual is not None, OFFSET=offset, WIDTH=width, num_warps=warps(width), **STARTED,
    )  # fmt: skip
    return summed, found


def gated(joint: Float[Tensor, "*axes both"], is_gelu: bool = False) -> Float[Tensor, "*axes half"]:
    """SiLU(gate) * up, or GELU(gate) * up as tanh approximates it, of gate and up side by side."""
    joint, size = joint.contiguous(), joint.shape[-1] // 2
    found = joint.new_empty(*joint.shape[:-1], size)
    grid = found.numel() // size, triton.cdiv(size, COLUMNS)
    gate[grid](joint, found, size, IS_GELU=is_gelu, WIDTH=COLUMNS, **STARTED)
    return found


def rotate_and_store(
    joint: Float[Tensor, "rows block all_heads"],
    rotary: tuple[Float[Tensor, "_ block head_dim"], Float[Tensor, "_ block head_dim"]],
    norms: tuple[Tensor, Tensor, float, float] | None,
    slots: tuple[Float[Tensor, "rows kv_heads keys head_dim"], Float[Tensor, "rows kv_heads keys head_dim"]],
    starts: Int[Tensor, " rows"],
    pending: int,
) -> Float[Tensor, "rows heads block head_dim"]:
    """The queries, after the keys and values are in their slots: `starts` + `pending` and those after it.

    `joint` holds the heads of queries, keys and values side by side, `norms` the weights, epsilon and offset of the
    norms of queries and keys. Cosines and sines have one row for all, or one each, and lie in memory number by number.
    """
    (rows, block, total), (keys, values), (cosines, sines) = joint.shape, slots, rotary
    joint = joint.contiguous()
    key_heads, size = keys.shape[1], keys.shape[3]
    heads = total // size - 2 * key_heads
    query = joint.new_empty(rows, heads, block, size)
    query_weight, key_weight, eps, offset = norms or (joint, joint, 0.0, 0.0)
    rotary_row = 0 if len(cosines) == 1 else cosines.stride(0)
    rotate[rows * block, heads + 2 * key_heads](
        joint, cosines, sines, query_weight, key_weight, query, keys, values, starts,
        heads, key_heads, block, size, pending, eps, rotary_row, cosines.stride(1), *keys.stride()[:3],
        *values.stride()[:3],
        HAS_NORM=norms is not None, OFFSET=offset, WIDTH=triton.next_power_of_2(size), num_warps=1,
        **STARTED,
    )  # fmt: skip
    return query


def warps(width: int) -> int:
    """The warps of a program over this many numbers."""
    return min(max(width // 512, 1), 16)


def start(early: bool) -> None:
    STARTED.clear()
    STARTED.update({"EARLY": True, "launch_pdl": True} if early else {"EARLY": False})


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def start_early_if_faster(device: torch.device, dtype: torch.dtype, trials: Trials) -> str:
    """Measure a chain of small kernels and products with early starts; returns whether they stay."""
    if capability(device) < (9, 0):
        return "none, as the card has no early starts"
    weight = torch.arange(2048 * 1024, device=device).view(2048, 1024).sin().to(dtype)

    def chain(early: bool) -> Tensor:
        start(early)
        hidden = weight[:1]
        for _ in range(16):
            _, normal = add_and_norm(hidden, hidden, weight[1], eps=1e-6)
            hidden = gated(functional.linear(normal, weight))
        return hidden

    works: dict[bool | None, Work] = {None: partial(chain, False), True: partial(chain, True)}
    is_faster = trials.fastest("a chain of small kernels, started early", works) is True
    start(is_faster)
    return trials.line(int(is_faster), "1 chain")
