"""Triton kernels that join the small operations of a decoder layer on a GPU, where launching them takes longest.

Each computes what its layer's own code computes, in float32, and rounds where that does: an RMS norm, in Llama's form
or, with 1 + weight, in Gemma's; SiLU(gate) * up or GELU(gate) * up (GLU Variants, Shazeer 2020); and, in one launch,
the norms of queries and keys (Qwen3), their rotary embedding (RoFormer, Su et al. 2021), and the keys and values
written to their slots of the cache. No program of these reads what belongs to another token.

Attention needs no mask over all keys: the held tokens are read in parts that the card's processors share, the block's
own tokens are one more part, and the parts are joined by the sums of their exponentials (Flash-Decoding, Dao et al.
2023).

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

from headstart.inference.core.tree import VisibleKeys
from headstart.inference.kernels.gpu.few_rows import Trials, Work
from headstart.inference.kernels.gpu.ordered import with_keys

BLOCK = 64  # keys that are read together, and queries of a program at most
PARTS_MAX = 16  # of one row's held tokens
PROGRAMS = 256  # enough for all processors of a card
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


@triton.jit(do_not_specialize=["pending", "part_keys"])
def attend(
    query, key, value, starts, visible, firsts, largest_of, total_of, mixed_of,
    key_heads, group, nodes, parts, part_keys, pending, size, value_size, visible_row, scaling,
    query_row, query_head, query_node, key_row, key_head, key_slot, value_row, value_head, value_slot,
    HAS_WINDOW: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One part of the held tokens, or the pending ones; grid: blocks of queries, parts + 1, rows x key heads.

    A query is a node and one of the `group` heads that share a key head.
    """
    wait(EARLY)
    part, pair = tl.program_id(1), tl.program_id(2)
    row, head = (pair // key_heads).to(tl.int64), pair % key_heads
    number = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_query, node, start = number < nodes * group, number // group, tl.load(starts + row)
    inside, of_value = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    at = query + row * query_row + (head * group + number % group)[:, None] * query_head + node[:, None] * query_node
    queries = tl.load(at + inside[None, :], mask=is_query[:, None] & (inside[None, :] < size), other=0.0)
    is_pending = part == parts
    begin = tl.where(is_pending, start, part * part_keys)
    end = tl.where(is_pending, start + pending, tl.minimum(begin + part_keys, start))
    first = tl.zeros((QUERIES,), tl.int64)
    if HAS_WINDOW:
        first = tl.load(firsts + row * nodes + node, mask=is_query, other=0)
        earliest = tl.min(tl.where(is_query, first, end), 0)  # no query of this program attends to earlier tokens
        begin = tl.where(is_pending, begin, begin + tl.maximum(earliest - begin, 0) // BLOCK * BLOCK)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, VALUE_SIZE), tl.float32)
    for block in range(begin, end, BLOCK):
        place = block + tl.arange(0, BLOCK)
        is_key = place < end
        keys = tl.load(
            key + row * key_row + head * key_head + place[:, None].to(tl.int64) * key_slot + inside[None, :],
            mask=is_key[:, None] & (inside[None, :] < size), other=0.0,
        )  # fmt: skip
        values = tl.load(
            value + row * value_row + head * value_head + place[:, None].to(tl.int64) * value_slot + of_value[None, :],
            mask=is_key[:, None] & (of_value[None, :] < value_size), other=0.0,
        )  # fmt: skip
        among = visible + row * visible_row + node[:, None] * pending + (place - start)[None, :]
        sees = tl.load(among, mask=is_query[:, None] & (is_key & (place >= start))[None, :], other=0) != 0
        sees = tl.where((place < start)[None, :], is_key[None, :] & (place[None, :] >= first[:, None]), sees)
        largest, total, mixed = with_keys(queries, keys, values, sees, largest, total, mixed, scaling)
    to = (pair.to(tl.int64) * nodes * group + number) * (parts + 1) + part
    tl.store(largest_of + to, largest, mask=is_query)
    tl.store(total_of + to, total, mask=is_query)
    at = mixed_of + to[:, None] * value_size + of_value[None, :]
    tl.store(at, mixed, mask=is_query[:, None] & (of_value[None, :] < value_size))


@triton.jit
def join_parts(
    largest_of, total_of, mixed_of, found, key_heads, group, nodes, parts, value_size,
    PARTS: tl.constexpr, VALUE_SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of one query; grid: queries of all rows and key heads."""
    wait(EARLY)
    query, part, column = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, VALUE_SIZE)
    at, is_part = query * (parts + 1) + part, part <= parts
    largest = tl.load(largest_of + at, mask=is_part, other=float("-inf"))
    weights = tl.exp(largest - tl.max(largest, 0))  # every token sees itself, so one is finite
    total = tl.sum(weights * tl.load(total_of + at, mask=is_part, other=0.0), 0)
    is_value = is_part[:, None] & (column[None, :] < value_size)
    mixed = tl.load(mixed_of + at[:, None] * value_size + column[None, :], mask=is_value, other=0.0)
    outputs = tl.sum(mixed * weights[:, None], 0) / total
    pair, node, member = query // (nodes * group), query // group % nodes, query % group
    row, head = pair // key_heads, pair % key_heads
    to = found + (((row * nodes + node) * key_heads + head) * group + member) * value_size + column
    tl.store(to, outputs.to(found.dtype.element_ty), mask=column < value_size)


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


def attention(
    query: Float[Tensor, "rows heads block head_dim"],
    key: Float[Tensor, "rows kv_heads slots head_dim"],
    value: Float[Tensor, "rows kv_heads slots value_dim"],
    keys: VisibleKeys,
    scaling: float | None = None,
) -> Float[Tensor, "rows block heads value_dim"]:
    """softmax(query key^T * scaling) value over the visible keys; keys and values as in the cache."""
    (rows, heads, nodes, size), (_, key_heads, slots, value_size) = query.shape, value.shape
    group, pending = heads // key_heads, keys.visible.shape[2]
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    queries = min(max(triton.next_power_of_2(nodes * group), 16), BLOCK)
    blocks = triton.cdiv(nodes * group, queries)
    parts = min(max(PROGRAMS // (rows * key_heads * blocks), 1), PARTS_MAX)
    part_keys = triton.cdiv(slots, parts * BLOCK) * BLOCK
    parts = triton.cdiv(slots, part_keys)
    found = query.new_empty(rows, nodes, heads, value_size)
    largest, total = query.new_empty(2, rows * heads * nodes, parts + 1, dtype=torch.float32)
    mixed = query.new_empty(rows * heads * nodes, parts + 1, value_size, dtype=torch.float32)
    wide = {"VALUE_SIZE": max(triton.next_power_of_2(value_size), 16)}
    sizes = {**wide, "SIZE": max(triton.next_power_of_2(size), 16), "QUERIES": queries, "BLOCK": BLOCK}
    # More stages would need more shared memory than most cards have, and fewer warps more registers.
    sizes |= {"num_stages": 1 if query.dtype == torch.float32 else 2, "num_warps": 8 if queries == BLOCK else 4}
    visible_row = 0 if len(keys.visible) == 1 else keys.visible.stride(0)
    attend[blocks, parts + 1, rows * key_heads](
        query, key, value, keys.starts, keys.visible.view(torch.uint8), keys.firsts, largest, total, mixed,
        key_heads, group, nodes, parts, part_keys, pending, size, value_size, visible_row,
        size**-0.5 if scaling is None else scaling, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        HAS_WINDOW=keys.firsts is not None, **sizes, **STARTED,
    )  # fmt: skip
    shape = key_heads, group, nodes, parts, value_size
    wide["PARTS"] = triton.next_power_of_2(parts + 1)
    join_parts[(rows * heads * nodes,)](largest, total, mixed, found, *shape, num_warps=1, **wide, **STARTED)
    return found


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
