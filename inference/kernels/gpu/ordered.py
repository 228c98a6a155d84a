"""Triton kernels for a GPU whose sums have one order, so that a token's numbers have the same bits in every pass.

A product adds along its inputs in steps of one size, whatever the number of tokens. Attention goes by positions: the
keys of a token at position p lie in blocks of 64 positions. Blocks that end 64 positions or more before p + 1 are read
in order, in splits of 512 that several processors share (Flash-Decoding, Dao et al. 2023); the 64 to 127 newest
positions are gathered along the token's path through the tree. All parts are merged in the order of positions. A
position that is hidden adds an exact zero, so neither the tree, nor other rows, nor the size of the cache change a sum.

TRITON_INTERPRET=1, set before the import, runs the kernels on a CPU.
"""

import torch
import triton
from jaxtyping import Float
from torch import Tensor
from triton import language as tl

from headstart.inference.core.tree import Places

BLOCK = 64  # positions, and rows of queries; tokens of a product
SPLIT = 8  # blocks
COLUMNS = 32  # outputs of a product that one program computes: few, as reading the weights of one token takes longest


@triton.jit
def multiply(
    left, right, found, tokens, columns, size,
    left_part, left_row, right_part, right_row, right_column,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """left [parts, tokens, size] times right [parts, size, columns]; grid: blocks of tokens, of columns, parts."""
    part = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    left += part * left_part + token[:, None].to(tl.int64) * left_row
    right += part * right_part + column[None, :].to(tl.int64) * right_column
    total = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for start in range(0, size, STEP):
        step = start + tl.arange(0, STEP)
        inputs = tl.load(left + step[None, :], mask=(token[:, None] < tokens) & (step[None, :] < size), other=0.0)
        weights = tl.load(
            right + step[:, None] * right_row, mask=(column[None, :] < columns) & (step[:, None] < size), other=0.0
        )
        total = tl.dot(inputs, weights, total, input_precision="ieee")
    at = found + (part * tokens + token[:, None]) * columns + column[None, :]
    tl.store(at, total.to(found.dtype.element_ty), mask=(token[:, None] < tokens) & (column[None, :] < columns))


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


@triton.jit
def attend_to_prefix(
    query, key, value, starts, depths, firsts, largest_of, total_of, mixed_of,
    key_heads, group, nodes, splits, size, value_size, slots, depth_row, scaling,
    query_row, query_head, query_node, key_row, key_head, key_slot, value_row, value_head, value_slot,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
):  # fmt: skip
    """One split of the older blocks; grid: blocks of queries, splits, rows x key heads.

    A query is a node and one of the `group` heads that share a key head.
    """
    split, pair = tl.program_id(1), tl.program_id(2)
    row, head = (pair // key_heads).to(tl.int64), pair % key_heads
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_query = number < nodes * group
    node = number // group
    position = tl.load(starts + row) + tl.load(depths + row * depth_row + node, mask=is_query, other=0)
    first = tl.load(firsts + row * nodes + node, mask=is_query, other=0)
    end = tl.where(is_query, tl.maximum(position + 1 - BLOCK, 0) // BLOCK * BLOCK, 0)
    inside, of_value = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    at = query + row * query_row + (head * group + number % group)[:, None] * query_head + node[:, None] * query_node
    queries = tl.load(at + inside[None, :], mask=is_query[:, None] & (inside[None, :] < size), other=0.0)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mixed = tl.zeros((BLOCK, VALUE_SIZE), tl.float32)
    for block in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, tl.max(end, 0) // BLOCK)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        is_key = place[:, None] < slots
        keys = tl.load(
            key + row * key_row + head * key_head + place[:, None].to(tl.int64) * key_slot + inside[None, :],
            mask=is_key & (inside[None, :] < size), other=0.0,
        )  # fmt: skip
        values = tl.load(
            value + row * value_row + head * value_head + place[:, None].to(tl.int64) * value_slot + of_value[None, :],
            mask=is_key & (of_value[None, :] < value_size), other=0.0,
        )  # fmt: skip
        visible = (place[None, :] < end[:, None]) & (place[None, :] >= first[:, None])
        largest, total, mixed = with_keys(queries, keys, values, visible, largest, total, mixed, scaling)
    to = (pair * splits + split).to(tl.int64) * nodes * group + number
    tl.store(largest_of + to, largest, mask=is_query)
    tl.store(total_of + to, total, mask=is_query)
    at = mixed_of + to[:, None] * value_size + of_value[None, :]
    tl.store(at, mixed, mask=is_query[:, None] & (of_value[None, :] < value_size))


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
    key_heads, group, nodes, splits, size, value_size, slots, pending, depth_row, path_row, scaling,
    query_row, query_head, query_node, key_row, key_head, key_slot, value_row, value_head, value_slot,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
):  # fmt: skip
    """The newest positions of one node, after the splits of `attend_to_prefix`; grid: nodes, rows x key heads."""
    node, pair = tl.program_id(0), tl.program_id(1)
    row, head = (pair // key_heads).to(tl.int64), pair % key_heads
    start = tl.load(starts + row)
    position = start + tl.load(depths + row * depth_row + node)
    first = tl.load(firsts + row * nodes + node)
    end = tl.maximum(position + 1 - BLOCK, 0) // BLOCK * BLOCK
    member, inside, of_value = tl.arange(0, GROUP), tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    is_query = member < group
    at = query + row * query_row + (head * group + member)[:, None] * query_head + node * query_node
    queries = tl.load(at + inside[None, :], mask=is_query[:, None] & (inside[None, :] < size), other=0.0)
    largest = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, VALUE_SIZE), tl.float32)
    for half in range(2):
        place = end + half * BLOCK + tl.arange(0, BLOCK)
        on_path = (place >= start) & (place <= position)
        step = tl.load(paths + row * path_row + node * pending + (place - start), mask=on_path, other=0)
        slot = tl.where(on_path, start + step, place)
        is_key = slot[:, None] < slots
        keys = tl.load(
            key + row * key_row + head * key_head + slot[:, None].to(tl.int64) * key_slot + inside[None, :],
            mask=is_key & (inside[None, :] < size), other=0.0,
        )  # fmt: skip
        values = tl.load(
            value + row * value_row + head * value_head + slot[:, None].to(tl.int64) * value_slot + of_value[None, :],
            mask=is_key & (of_value[None, :] < value_size), other=0.0,
        )  # fmt: skip
        visible = (place[None, :] <= position) & (place[None, :] >= first) & is_query[:, None]
        largest, total, mixed = with_keys(queries, keys, values, visible, largest, total, mixed, scaling)
    whole = tl.full((GROUP,), float("-inf"), tl.float32)
    sums = tl.zeros((GROUP,), tl.float32)
    outputs = tl.zeros((GROUP, VALUE_SIZE), tl.float32)
    for split in range(splits):
        part = (pair * splits + split).to(tl.int64) * nodes * group + node * group + member
        of_split = tl.load(largest_of + part, mask=is_query, other=float("-inf"))
        sum_of_split = tl.load(total_of + part, mask=is_query, other=0.0)
        is_value = is_query[:, None] & (of_value[None, :] < value_size)
        mixed_in_split = tl.load(mixed_of + part[:, None] * value_size + of_value[None, :], mask=is_value, other=0.0)
        whole, sums, outputs = merge(whole, sums, outputs, of_split, sum_of_split, mixed_in_split)
    whole, sums, outputs = merge(whole, sums, outputs, largest, total, mixed)
    outputs = outputs / tl.where(sums == 0.0, 1.0, sums)[:, None]
    at = (row * nodes + node) * key_heads * group + head * group + member
    is_value = is_query[:, None] & (of_value[None, :] < value_size)
    to = found + at[:, None] * value_size + of_value[None, :]
    tl.store(to, outputs.to(found.dtype.element_ty), mask=is_value)


def matmul(
    left: Float[Tensor, "parts tokens size"], right: Float[Tensor, "parts size columns"]
) -> Float[Tensor, "parts tokens columns"]:
    """A product whose sums do not depend on the number of tokens."""
    parts, tokens, size = left.shape
    columns = right.shape[2]
    found = left.new_empty(parts, tokens, columns)

    grid = triton.cdiv(tokens, BLOCK), triton.cdiv(columns, COLUMNS), parts
    left = left if left.stride(2) == 1 else left.contiguous()
    strides = left.stride(0), left.stride(1), *right.stride()
    multiply[grid](left, right, found, tokens, columns, size, *strides, BLOCK=BLOCK, COLUMNS=COLUMNS, STEP=BLOCK)
    return found


def attention(
    query: Float[Tensor, "batch num_heads nodes head_dim"],
    key: Float[Tensor, "batch kv_heads slots head_dim"],
    value: Float[Tensor, "batch kv_heads slots value_dim"],
    places: Places,
    scaling: float | None,
) -> Float[Tensor, "batch nodes num_heads value_dim"]:
    """softmax(query key^T * scaling) value over the positions that each token sees; keys and values as in the cache."""
    batch, heads, nodes, size = query.shape
    key_heads, slots, value_size = key.shape[1], key.shape[2], value.shape[3]
    group, splits = heads // key_heads, triton.cdiv(slots, BLOCK * SPLIT)
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    found = query.new_empty(batch, nodes, heads, value_size)
    largest, total = query.new_empty(2, batch * key_heads, splits, nodes * group, dtype=torch.float32)
    mixed = query.new_empty(batch * key_heads, splits, nodes * group, value_size, dtype=torch.float32)
    depths, firsts, paths = places.depths, places.firsts, places.paths
    depth_row = 0 if len(depths) == 1 else depths.stride(0)
    path_row = 0 if len(paths) == 1 else paths.stride(0)
    scale = size**-0.5 if scaling is None else scaling
    strides = *query.stride()[:3], *key.stride()[:3], *value.stride()[:3]
    widths = {"SIZE": triton.next_power_of_2(size), "VALUE_SIZE": triton.next_power_of_2(value_size), "BLOCK": BLOCK}
    if query.dtype == torch.float32:
        widths["num_stages"] = 1  # several would need more shared memory than most cards have
    shape = key_heads, group, nodes, splits, size, value_size, slots
    attend_to_prefix[triton.cdiv(nodes * group, BLOCK), splits, batch * key_heads](
        query, key, value, places.starts, depths, firsts, largest, total, mixed, *shape, depth_row, scale, *strides,
        SPLIT=SPLIT, **widths,
    )  # fmt: skip
    attend_along_path[nodes, batch * key_heads](
        query, key, value, places.starts, depths, firsts, paths, largest, total, mixed, found, *shape,
        paths.shape[2], depth_row, path_row, scale, *strides,
        GROUP=max(triton.next_power_of_2(group), 16), **widths,
    )  # fmt: skip
    return found
