"""Triton kernels for the attention of steps on a GPU, which need no mask over all keys.

The held tokens are read in parts that the card's processors share, and the parts are joined by the sums of their
exponentials (Flash-Decoding, Dao et al. 2023). For `VisibleKeys` the block's own tokens are one more part. For `Places`
all sums have one order, so that a token's numbers have the same bits in every pass: the keys of a token at position p
lie in blocks of 64 positions; blocks that end 64 positions or more before p + 1 are read in order, in parts of 512; the
64 to 127 newest positions are gathered along the token's path through the tree; and all parts are joined in the order
of positions. A position that is hidden adds an exact zero, so neither the tree, nor other rows, nor the size of the
cache change a sum.

TRITON_INTERPRET=1, set before the import, runs the kernels on a CPU.
"""

from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor
from triton import language as tl

from headstart.inference.core.tree import Places, VisibleKeys
from headstart.inference.kernels.gpu.fused import STARTED, wait

BLOCK = 64  # keys that are read together, and queries of a program at most
SPLIT = 8  # blocks in a part by position
PARTS_MAX = 16  # of one row's held tokens
PROGRAMS = 256  # enough for all processors of a card


@triton.jit
def rows_at(start, slot, is_slot, step, size, WIDTH: tl.constexpr):
    """The keys or values of a head in these slots; `start` is its first slot. [slots, WIDTH]"""
    column = tl.arange(0, WIDTH)
    at = start + slot[:, None].to(tl.int64) * step + column[None, :]
    return tl.load(at, mask=is_slot[:, None] & (column[None, :] < size), other=0.0)


@triton.jit
def with_keys(queries, keys, values, visible, largest, total, mixed, scaling):
    """Add one block of keys to a running softmax: the largest score, the sum of exponentials, the weighted values."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
    scores = tl.where(visible, scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(larger == float("-inf"), 0.0, larger)
    weights = tl.where(visible, tl.exp(scores - base[:, None]), 0.0)
    before = tl.exp(largest - base)
    total = total * before + tl.sum(weights, 1)
    mixed = mixed * before[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return larger, total, mixed


@triton.jit(do_not_specialize=["pending", "part_keys"])
def attend(
    query, key, value, starts, visible, depths, firsts, largest_of, total_of, mixed_of,
    key_heads, group, nodes, parts, part_keys, pending, size, value_size, visible_row, depth_row, scaling,
    query_row, query_head, query_node, key_row, key_head, key_slot, value_row, value_head, value_slot,
    BY_POSITION: tl.constexpr, HAS_WINDOW: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of the held tokens, or the pending ones; grid: blocks of queries, parts + 1, rows x key heads.

    A query is a node and one of the `group` heads that share a key head. If BY_POSITION, the held tokens are those in
    the blocks of positions that end 64 or more before a query's own, and no part is for pending ones.
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
    if BY_POSITION:
        position = start + tl.load(depths + row * depth_row + node, mask=is_query, other=0)
        last = tl.where(is_query, tl.maximum(position + 1 - BLOCK, 0) // BLOCK * BLOCK, 0)
        end = tl.minimum(begin + part_keys, tl.max(last, 0))
    first = tl.zeros((QUERIES,), tl.int64)
    if HAS_WINDOW:
        first = tl.load(firsts + row * nodes + node, mask=is_query, other=0)
        earliest = tl.min(tl.where(is_query, first, end), 0)  # no query of this program attends to earlier tokens
        begin = tl.where(is_pending, begin, begin + tl.maximum(earliest - begin, 0) // BLOCK * BLOCK)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, VALUE_SIZE), tl.float32)
    key += row * key_row + head * key_head
    value += row * value_row + head * value_head
    for block in range(begin, end, BLOCK):
        place = block + tl.arange(0, BLOCK)
        is_key = place < end
        keys = rows_at(key, place, is_key, key_slot, size, SIZE)
        values = rows_at(value, place, is_key, value_slot, value_size, VALUE_SIZE)
        sees = is_key[None, :] & (place[None, :] >= first[:, None])
        if BY_POSITION:
            sees = sees & (place[None, :] < last[:, None])
        else:
            among = visible + row * visible_row + node[:, None] * pending + (place - start)[None, :]
            own = tl.load(among, mask=is_query[:, None] & (is_key & (place >= start))[None, :], other=0) != 0
            sees = tl.where((place < start)[None, :], sees, own)
        largest, total, mixed = with_keys(queries, keys, values, sees, largest, total, mixed, scaling)
    kept = parts if BY_POSITION else parts + 1
    to = (pair.to(tl.int64) * nodes * group + number) * kept + part
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


@triton.jit
def merge(largest, total, mixed, other_largest, other_total, other_mixed):
    """Join two parts of a softmax. A part without keys changes no bit."""
    larger = tl.maximum(largest, other_largest)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    one, other = tl.exp(largest - base), tl.exp(other_largest - base)
    return larger, total * one + other_total * other, mixed * one[:, None] + other_mixed * other[:, None]


@triton.jit
def attend_along_path(
    query, key, value, starts, depths, firsts, paths, largest_of, total_of, mixed_of, found,
    key_heads, group, nodes, parts, size, value_size, slots, pending, depth_row, path_row, scaling,
    query_row, query_head, query_node, key_row, key_head, key_slot, value_row, value_head, value_slot,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
):  # fmt: skip
    """The newest positions of one node, after the parts by position of `attend`; grid: nodes, rows x key heads."""
    node, pair = tl.program_id(0), tl.program_id(1)
    row, head = (pair // key_heads).to(tl.int64), pair % key_heads
    start = tl.load(starts + row)
    position = start + tl.load(depths + row * depth_row + node)
    first = tl.load(firsts + row * nodes + node)
    end = tl.maximum(position + 1 - BLOCK, 0) // BLOCK * BLOCK
    member, inside, of_value = tl.arange(0, GROUP), tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    is_query = member < group
    is_value = is_query[:, None] & (of_value[None, :] < value_size)
    at = query + row * query_row + (head * group + member)[:, None] * query_head + node * query_node
    queries = tl.load(at + inside[None, :], mask=is_query[:, None] & (inside[None, :] < size), other=0.0)
    largest = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, VALUE_SIZE), tl.float32)
    key += row * key_row + head * key_head
    value += row * value_row + head * value_head
    for half in range(2):
        place = end + half * BLOCK + tl.arange(0, BLOCK)
        on_path = (place >= start) & (place <= position)
        step = tl.load(paths + row * path_row + node * pending + (place - start), mask=on_path, other=0)
        slot = tl.where(on_path, start + step, place)
        keys = rows_at(key, slot, slot < slots, key_slot, size, SIZE)
        values = rows_at(value, slot, slot < slots, value_slot, value_size, VALUE_SIZE)
        visible = (place[None, :] <= position) & (place[None, :] >= first) & is_query[:, None]
        largest, total, mixed = with_keys(queries, keys, values, visible, largest, total, mixed, scaling)
    whole = tl.full((GROUP,), float("-inf"), tl.float32)
    sums = tl.zeros((GROUP,), tl.float32)
    outputs = tl.zeros((GROUP, VALUE_SIZE), tl.float32)
    for number in range(parts):
        part = (pair.to(tl.int64) * nodes * group + node * group + member) * parts + number
        of_part = tl.load(largest_of + part, mask=is_query, other=float("-inf"))
        sum_of_part = tl.load(total_of + part, mask=is_query, other=0.0)
        mixed_in_part = tl.load(mixed_of + part[:, None] * value_size + of_value[None, :], mask=is_value, other=0.0)
        whole, sums, outputs = merge(whole, sums, outputs, of_part, sum_of_part, mixed_in_part)
    whole, sums, outputs = merge(whole, sums, outputs, largest, total, mixed)
    outputs = outputs / tl.where(sums == 0.0, 1.0, sums)[:, None]
    at = (row * nodes + node) * key_heads * group + head * group + member
    to = found + at[:, None] * value_size + of_value[None, :]
    tl.store(to, outputs.to(found.dtype.element_ty), mask=is_value)


def attention(
    query: Float[Tensor, "rows heads block head_dim"],
    key: Float[Tensor, "rows kv_heads slots head_dim"],
    value: Float[Tensor, "rows kv_heads slots value_dim"],
    keys: VisibleKeys | Places,
    scaling: float | None = None,
) -> Float[Tensor, "rows block heads value_dim"]:
    """softmax(query key^T * scaling) value over the keys that each token sees; keys and values as in the cache."""
    (rows, heads, nodes, size), (_, key_heads, slots, value_size) = query.shape, value.shape
    group, by_position = heads // key_heads, isinstance(keys, Places)
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    # By position, what a program computes does not depend on the number of queries.
    queries = BLOCK if by_position else min(max(triton.next_power_of_2(nodes * group), 16), BLOCK)
    blocks = triton.cdiv(nodes * group, queries)
    parts = min(max(PROGRAMS // (rows * key_heads * blocks), 1), PARTS_MAX)
    part_keys = SPLIT * BLOCK if by_position else triton.cdiv(slots, parts * BLOCK) * BLOCK
    parts = triton.cdiv(slots, part_keys)
    kept = parts if by_position else parts + 1
    found = query.new_empty(rows, nodes, heads, value_size)
    largest, total = query.new_empty(2, rows * heads * nodes, kept, dtype=torch.float32)
    mixed = query.new_empty(rows * heads * nodes, kept, value_size, dtype=torch.float32)
    seen, depths = (keys.paths, keys.depths) if isinstance(keys, Places) else (keys.visible.view(torch.uint8), None)
    seen_row, depth_row = (0 if each is None or len(each) == 1 else each.stride(0) for each in (seen, depths))
    scale, pending = size**-0.5 if scaling is None else scaling, seen.shape[2]
    strides = *query.stride()[:3], *key.stride()[:3], *value.stride()[:3]
    wide = {"VALUE_SIZE": max(triton.next_power_of_2(value_size), 16)}
    sizes: dict[str, Any] = {**wide, "SIZE": max(triton.next_power_of_2(size), 16), "BLOCK": BLOCK}
    # More stages would need more shared memory than most cards have, and fewer warps more registers.
    if query.dtype == torch.float32 or not by_position:
        sizes["num_stages"] = 1 if query.dtype == torch.float32 else 2
    if not by_position:
        sizes["num_warps"] = 8 if queries == BLOCK else 4
    attend[blocks, kept, rows * key_heads](
        query, key, value, keys.starts, seen, depths, keys.firsts, largest, total, mixed,
        key_heads, group, nodes, parts, part_keys, pending, size, value_size, seen_row, depth_row, scale, *strides,
        BY_POSITION=by_position, HAS_WINDOW=keys.firsts is not None, QUERIES=queries, **sizes, **STARTED,
    )  # fmt: skip
    if by_position:
        attend_along_path[nodes, rows * key_heads](
            query, key, value, keys.starts, depths, keys.firsts, seen, largest, total, mixed, found,
            key_heads, group, nodes, parts, size, value_size, slots, pending, depth_row, seen_row, scale, *strides,
            GROUP=max(triton.next_power_of_2(group), 16), **sizes,
        )  # fmt: skip
        return found
    shape = key_heads, group, nodes, parts, value_size
    wide["PARTS"] = triton.next_power_of_2(parts + 1)
    join_parts[(rows * heads * nodes,)](largest, total, mixed, found, *shape, num_warps=1, **wide, **STARTED)
    return found
