"""The fastest form of a target and its heads on their device, and the number format in which a CPU is fastest."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from headstart.inference.kernels.compiled import Compiler
from headstart.inference.kernels.fast_layers import (
    JointLinear,
    PackedLinear,
    fuse_norms,
    join_linears,
    kernels_on_gpu,
    linear_layers,
    pack_weights,
    packed_linear,
)
from headstart.inference.kernels.matmul import order_products
from headstart.inference.kernels.products import EightBits, cpp_compiler, kernel_name, library, remember_eight_bits

CACHED_WEIGHT_BYTES = 32 * 2**20  # float32 weights, or the same number of bfloat16 ones, that a processor caches
AS_FAST = 1.02  # ratio of the seconds of two formats


@dataclass
class FastForm:
    """How a target's layers were made faster, for its heads to follow."""

    is_packed: bool = False  # linear layers keep their weights packed for this processor
    compiler: Compiler | None = None  # of layers on a CPU
    by_position: bool = False  # attention on a GPU adds keys in the order of positions, by our kernel
    fused: set[str] = field(default_factory=set)  # the kinds of small operations on a GPU that our kernels compute
    products: dict[str, tuple[float, float]] = field(default_factory=dict)  # microseconds of torch's and ours, by shape
    lm_head: Any = None  # one on a GPU that chooses tokens without logits

    def apply_to(self, head: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Pack a head's weights and compile its decoder layers like the target's.

        Rounding float32 weights to half precision changes draft tokens at most, never the text.
        """
        if self.is_packed:
            pack_weights(head, exact=False)
        if self.compiler is not None:
            self.compiler.use_for(layers)

    def choose_products(self, head: nn.Module) -> None:
        """On a GPU, measure a head's products of few tokens, too."""
        if self.products:
            few_rows = kernels_on_gpu("few_rows")
            few_rows.choose_products(head, few_rows.Trials())

    def finish(self) -> None:
        """Wait until all layers seen so far are compiled, before a measurement."""
        if self.compiler is not None:
            self.compiler.finish()

    def packed_as(self, model: nn.Module) -> list[str]:
        """The kernel of the packed weights, and the forms in which a model's linear layers keep them; empty if none."""
        if not self.is_packed:
            return []
        packed = [each.product.product if isinstance(each, JointLinear) else each for each in model.modules()]
        return [kernel_name(), *sorted({each.kernel.form for each in packed if isinstance(each, PackedLinear)})]


def fast_form(model: nn.Module, layers: Sequence[nn.Module], compiles: bool, exact: bool = False) -> FastForm:
    """Give a target the fastest form on its device that changes no weight; `layers` are its decoder layers.

    On a CPU its weights are packed, and then, if it `compiles` and is not small, its layers are compiled in the
    background. On a GPU its layers are fused.
    """
    if next(model.parameters()).device.type == "cuda":
        fuse_norms(model)
        if exact and find_spec("triton") is not None:
            order_products(model)
            return FastForm(by_position=True)
        join_linears(model)
        torch.cuda.empty_cache()  # of the weights before they were joined
    compiles = compiles and gains_by_packing(model) and cpp_compiler() is not None
    if not pack_weights(model, exact=True):
        return FastForm()
    compiler = Compiler() if compiles else None
    if compiler is not None:
        compiler.use_for(layers)
    return FastForm(True, compiler)


def gains_by_packing(model: nn.Module) -> bool:
    """Whether reading the weights of linear layers from a CPU's memory is the bottleneck of this model."""
    on_cpu = [linear.weight for *_, linear in linear_layers(model) if linear.weight.is_cpu]
    return sum(weight.numel() * 4 for weight in on_cpu) >= CACHED_WEIGHT_BYTES


def is_packed_linear(layer: object) -> bool:
    return isinstance(layer, PackedLinear)


@cache
def float32_is_as_fast(eight_bits: bool) -> bool:
    """Whether this CPU's packed products with a few tokens take no longer in float32 than in bfloat16.

    With `eight_bits`, the float32 weights are kept in 8 bits.
    """
    if library() is None:
        return False
    return seconds_of_products(torch.float32, eight_bits) <= AS_FAST * seconds_of_products(torch.bfloat16)


@torch.inference_mode()
def seconds_of_products(dtype: torch.dtype, eight_bits: bool = False) -> float:
    """The time of packed layers with 32 million weights for one token and for eight, the least of a few runs each."""
    linears = [nn.Linear(1024, 4096, bias=False, dtype=dtype) for _ in range(8)]
    for linear in linears if eight_bits else ():
        numbers, factors = torch.zeros(4096, 1024, dtype=torch.int8), torch.zeros(4096, 32, dtype=torch.half)
        remember_eight_bits(linear.weight.zero_(), EightBits(numbers, factors, None))
    layers = [packed_linear(linear, exact=False) for linear in linears]
    total = 0.0
    for tokens in (1, 8):
        inputs, times = torch.zeros(tokens, 1024, dtype=dtype), []
        for _ in range(5):
            started = time.perf_counter()
            for layer in layers:
                layer(inputs)
            times.append(time.perf_counter() - started)
        total += min(times)
    return total
