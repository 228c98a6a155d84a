"""A Triton kernel for products on a GPU whose sums have one order, so that a token's numbers have the same bits in all
passes: it adds along the inputs in steps of one size, whatever the number of tokens.

TRITON_INTERPRET=1, set before the import, runs the kernel on a CPU.
"""

import triton
from jaxtyping import Float
from torch import Tensor
from triton import language as tl

BLOCK = 64  # tokens, and inputs of a step
COLUMNS = 32  # outputs that one program computes: few, as reading the weights of one token takes longest


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
