"""Matrix products in modules that hold their own weights, such as routers and experts, with sums of one order.

Their code is transformers' own; only its products of matrices are computed by our kernel (matmul.cpp), so that a
token's result does not depend on the number of tokens.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headstart.inference.kernels.outside_graph import CURRENT, CannotTrace
from headstart.inference.kernels.products import library

SHAPE = ctypes.c_int64 * 7


def on_gpu() -> Any:
    """The module of Triton kernels."""
    return import_module("headstart.inference.kernels.ordered_gpu")


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def ordered_matmul(left: Tensor, right: Tensor) -> Tensor:
    """left [..., rows, size] times right [..., size, columns], like torch.matmul; at least two axes each."""
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    rows, (size, columns) = left.shape[-2], right.shape[-2:]
    if not left.is_cpu:
        return (
            on_gpu()
            .matmul(
                left.expand(*batch, rows, size).reshape(-1, rows, size),
                right.expand(*batch, size, columns).reshape(-1, size, columns),
            )
            .view(*batch, rows, columns)
        )
    left = left.expand(*batch, rows, size).contiguous()
    if 1 not in right.stride()[-2:]:
        right = right.contiguous()
    right = right.expand(*batch, size, columns)
    found = left.new_empty(*batch, rows, columns)
    parts = right.reshape(-1, size, columns)
    input_step, column_step = parts.stride()[1:]
    shape = SHAPE(len(parts), rows, size, columns, parts.stride(0), input_step, column_step)
    kernel = getattr(library(), f"matmul_{str(left.dtype).removeprefix('torch.')}")
    kernel(ctypes.addressof(shape), left.data_ptr(), parts.data_ptr(), found.data_ptr())
    return found


def matmul(left: Tensor, right: Tensor) -> Tensor:
    lines = left if left.ndim > 1 else left.unsqueeze(0)
    columns = right if right.ndim > 1 else right.unsqueeze(1)
    found = ordered_matmul(lines, columns)
    found = found if left.ndim > 1 else found.squeeze(-2)
    return found if right.ndim > 1 else found.squeeze(-1)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = ordered_matmul(inputs.reshape(-1, inputs.shape[-1]), weight.mT).view(*inputs.shape[:-1], len(weight))
    return found if bias is None else found + bias


def addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return ordered_matmul(left, right) + bias


def in_whole_vectors(function: Callable[..., Tensor], inputs: Tensor, *more: Any) -> Tensor:
    """A function of each number, on tokens padded to whole vectors: torch computes the end of a tensor otherwise."""
    width = inputs.shape[-1]
    return function(functional.pad(inputs, (0, -width % VECTOR)), *more)[..., :width]


VECTOR = 16
ORDERED: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), matmul),
    **dict.fromkeys(("addmm", "baddbmm"), addmm),
    "sigmoid": partial(in_whole_vectors, torch.sigmoid),
}


class OrderedProducts(TorchFunctionMode):
    """Within this context products of matrices on a CPU have sums of one order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ordered = ORDERED.get(getattr(func, "__name__", ""))
        kwargs = kwargs or {}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        first = (tensors[0].device, tensors[0].dtype) if tensors else None
        is_plain = all((each.device, each.dtype) == first and each.dtype in DTYPES for each in tensors)
        if ordered is None or not is_plain or not {*kwargs} <= {"bias", "weight", "input", "other", "mat2"}:
            return func(*args, **kwargs)
        return ordered(*args, *kwargs.values())


class OrderedForward:
    """Replaces the forward of a module that holds weights of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = type(self.module).forward
        if CURRENT.trace is not None:
            raise CannotTrace("products of a module with weights of its own")
        if torch.is_grad_enabled():
            return own(self.module, *args, **kwargs)
        with OrderedProducts():
            return own(self.module, *args, **kwargs)


def order_products(model: nn.Module) -> None:
    """Let each module that holds matrices of its own, and is neither an embedding nor packed, compute in one order.

    So do modules with a gate of one number a token, which torch's sigmoid computes by the number of tokens.
    """
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")  # others hide their products in operations of their own
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        axes = {each.ndim for each in tensors if not isinstance(module, nn.Embedding)}
        children = [*module.children()]
        is_gated = any(getattr(child, "out_features", None) == 1 for child in children)  # a gate of shared experts
        if (3 in axes or (2 in axes and not children) or is_gated) and "forward" not in vars(module):
            vars(module)["forward"] = OrderedForward(module)
