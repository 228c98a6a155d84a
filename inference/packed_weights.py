"""Linear layers whose weights lie as a CPU reads them fastest. A decoding step waits for little else.

bfloat16 weights are put into oneDNN's blocked layout once, where torch's own layer does it again in every call. float32
weights that are half-precision numbers, as published ones are, are kept in float16, half the bytes; the products and
sums stay in float32 (FBGEMM, Khudia et al. 2021, arXiv 2101.05615). Neither changes a weight, so the text stays.
"""

import torch
from torch import Tensor, nn

SMALL_BYTES = 32 * 2**20  # float32 weights, or as many bfloat16 ones, that stay in a processor's cache


class HalfLinear(nn.Module):
    """A linear layer in inference. Its weights are float16, its inputs, sums, bias and outputs float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), bias)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = torch.ops.quantized.linear_dynamic_fp16(inputs, self.packed)
        return found

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class BlockedLinear(nn.Module):
    """A bfloat16 linear layer in inference, its weights in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.own_bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.own_bias, "none", [], "")
        return found

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the kernels for weights of this dtype on this processor."""
    if dtype == torch.float32:
        return "fbgemm" in torch.backends.quantized.supported_engines
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return False


def gains_by_packing(model: nn.Module) -> bool:
    """Whether reading the weights of this model's linear layers is what a step waits for."""
    return sum(linear.weight.numel() * 4 for *_, linear in packable_layers(model)) >= SMALL_BYTES


def pack_weights(model: nn.Module, exact: bool) -> bool:
    """Replace the model's linear layers on a CPU by packed ones; returns whether any was replaced.

    With `exact`, a float32 layer stays as it is if one of its weights is no float16 number.
    """
    found = [
        each
        for each in packable_layers(model)
        if not exact or each[-1].weight.dtype == torch.bfloat16 or is_half(each[-1].weight)
    ]
    for parent, name, linear in found:
        packed = BlockedLinear if linear.weight.dtype == torch.bfloat16 else HalfLinear
        setattr(parent, name, packed(linear))
    return bool(found)


def packable_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The model's linear layers on a CPU whose dtype has kernels, each with its parent and its name there."""
    named = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    return [
        (parent, name, child)
        for parent, name, child in named
        if type(child) is nn.Linear and child.weight.device.type == "cpu" and can_pack(child.weight.dtype)
    ]


@torch.no_grad()
def is_half(weight: Tensor) -> bool:
    """Is every number of this tensor a float16 number?"""
    return torch.equal(weight.half().float(), weight)
