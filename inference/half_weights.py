"""Linear layers that keep their weights in half precision and compute in float32, for CPUs without bfloat16 arithmetic.

A decoding step reads every weight once, so half the bytes is up to half the time. Published weights are bfloat16
numbers, which float16 holds exactly unless they are tiny, so nothing is lost. The matrix product is FBGEMM's, which
torch ships for x86 (Khudia et al. 2021, arXiv 2101.05615).
"""

import torch
from torch import Tensor, nn

SMALL_BYTES = 32 * 2**20  # float32 weights below this stay in a processor's cache, where nothing is gained


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


def can_pack() -> bool:
    """Whether this build of torch has FBGEMM for this processor."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def gains_by_half_weights(model: nn.Module) -> bool:
    """Whether reading the weights of this model's linear layers is what a step waits for."""
    return can_pack() and sum(linear.weight.nbytes for *_, linear in float32_layers(model)) >= SMALL_BYTES


def use_half_weights(model: nn.Module, exact: bool) -> bool:
    """Replace the model's float32 linear layers on a CPU by `HalfLinear`; returns whether any was replaced.

    With `exact`, a layer stays as it is if one of its weights is no float16 number.
    """
    found = [each for each in float32_layers(model) if not exact or is_half(each[-1].weight)]
    for parent, name, linear in found:
        setattr(parent, name, HalfLinear(linear))
    return bool(found)


def float32_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The model's linear layers of float32 on a CPU, each with its parent and its name there."""
    named = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    return [
        (parent, name, child)
        for parent, name, child in named
        if type(child) is nn.Linear and child.weight.dtype == torch.float32 and child.weight.device.type == "cpu"
    ]


@torch.no_grad()
def is_half(weight: Tensor) -> bool:
    """Is every number of this tensor a float16 number?"""
    return torch.equal(weight.half().float(), weight)
