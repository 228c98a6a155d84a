"""Matrix products in modules that hold their own weights, such as routers and experts, with sums of one order.

Their code is transformers' own; only its products of matrices are computed by our kernel (matmul.cpp), so that a
token's result does not depend on the number of tokens.
"""

import ctypes
import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headstart.inference.kernels.outside_graph import CURRENT, CannotTrace
from headstart.inference.kernels.products import library

SHAPE = ctypes.c_int64 * 7
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def kernels_on_gpu(name: str) -> Any:
    """A module of Triton kernels: attention, ordered, fused, few_rows or lm_head."""
    return import_module(f"headstart.inference.kernels.gpu.{name}")


def matmul_on_gpu(left: Tensor, right: Tensor) -> Tensor:
    """`ordered_matmul` by Triton."""
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    parts = (each.expand(*batch, *each.shape[-2:]).reshape(-1, *each.shape[-2:]) for each in (left, right))
    found: Tensor = kernels_on_gpu("ordered").matmul(*parts)
    return found.view(*batch, *found.shape[-2:])


def ordered_matmul(left: Tensor, right: Tensor) -> Tensor:
    """left [..., rows, size] times right [..., size, columns], like torch.matmul; at least two axes each."""
    if not left.is_cpu:
        return matmul_on_gpu(left, right)
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    rows, (size, columns) = left.shape[-2], right.shape[-2:]
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
    """A function of each number, for tokens padded to whole vectors, a few tokens at a time.

    torch computes the end of a tensor, and the end of each thread's share of a large one, by other code.
    """
    if not inputs.is_cpu or not inputs.ndim:
        return function(inputs, *more)
    width = inputs.shape[-1]
    if width % VECTOR == 0 and inputs.numel() <= ONE_THREAD_MAX:
        return function(inputs, *more)
    rows = functional.pad(inputs, (0, -width % VECTOR)).reshape(-1, width + -width % VECTOR)
    parts = rows.split(max(ONE_THREAD_MAX // rows.shape[1], 1))
    return torch.cat([function(part, *more) for part in parts])[:, :width].reshape(inputs.shape)


VECTOR = 64  # two AVX512 vectors of 16-bit numbers, which torch computes at once
ONE_THREAD_MAX = 2**14  # numbers of a tensor that torch computes in the thread that asks for it
ORDERED: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), matmul),
    **dict.fromkeys(("addmm", "baddbmm"), addmm),
    **{name: partial(in_whole_vectors, getattr(functional, name)) for name in ("gelu", "silu", "softplus")},
    **{name: partial(in_whole_vectors, getattr(torch, name)) for name in ("sigmoid", "tanh")},
}
ACTIVATION = re.compile("GELU|SiLU|Swish|Sigmoid|Tanh|Softplus|Mish")


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


def ordered_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that holds weights of its own."""
    own = type(module).forward
    if CURRENT.trace is not None:
        raise CannotTrace("products of a module with weights of its own")
    if torch.is_grad_enabled():
        return own(module, *args, **kwargs)
    with OrderedProducts():
        return own(module, *args, **kwargs)


@cache
def weights_read_by(kind: Any) -> set[str]:
    """The layers of a class of modules whose weights its forward reads, instead of calling them."""
    forwards = [each for name, each in vars(kind).items() if "forward" in name and inspect.isfunction(each)]
    try:
        return {*re.findall(r"self\.(\w+)\.(?:weight|bias)\b", "".join(map(inspect.getsource, forwards)))}
    except OSError:  # no source
        return set()


def ordered_activation(module: nn.Module, inputs: Tensor) -> Tensor:
    """The forward of an activation; compiled layers compute it themselves."""
    own: Callable[..., Tensor] = partial(type(module).forward, module)
    if CURRENT.trace is not None or torch.is_grad_enabled():
        return own(inputs)
    return in_whole_vectors(own, inputs)


def order_products(model: nn.Module) -> None:
    """Let each module that holds matrices of its own, and is neither an embedding nor packed, compute in one order.

    So do modules that read other layers' weights, activations, and modules with a gate of one number a token.
    """
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")  # others hide their products in operations of their own
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        axes = {each.ndim for each in tensors if not isinstance(module, nn.Embedding)}
        children = [*module.children()]
        if ACTIVATION.search(type(module).__name__) and not children and "forward" not in vars(module):
            vars(module)["forward"] = partial(ordered_activation, module)
            continue
        has_weight = getattr(getattr(module, "weight", None), "ndim", 0) == 2 and not isinstance(module, nn.Embedding)
        kind: Any = type(module)
        reads = not {name for name, _ in module.named_children()}.isdisjoint(weights_read_by(kind))
        reads = reads and not any([*child.children()] for child in children)  # a layer, not a whole model
        is_gated = any(getattr(child, "out_features", None) == 1 for child in children)  # a gate of shared experts
        is_leaf = not any([*child.parameters()] for child in children)
        if (3 in axes or (2 in axes and is_leaf) or has_weight or reads or is_gated) and "forward" not in vars(module):
            vars(module)["forward"] = partial(ordered_forward, module)
