"""Weights in 8 bits with scales: of a target, undone and made again; of a head's projections, as vLLM reads them."""

import re
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

# Of a quantised weight's scales, in the formats of compressed-tensors and DeepSeek, and zero points, which are refused.
SCALE_SUFFIXES = ("_scale", "_scale_inv", "_zero_point")
ONE_BYTE = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
PROJECTIONS = re.compile(r"(.+\.)?(fc|\w+_proj)\.weight")  # embedding and lm_head stay, as in vLLM
# compressed-tensors' name for it is FP8_DYNAMIC: a scale for each row of a weight, and one for each token as it comes.
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
FLOAT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**FLOAT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**FLOAT8, "strategy": "token", "dynamic": True},
        }
    },
}


def in_float8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors with its projections in float8, and the scale of each row, as FLOAT8_CONFIG describes them."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if PROJECTIONS.fullmatch(name) and tensor.ndim == 2:
            stored, scale = torch.zeros((), dtype=torch.float8_e4m3fn), tensor.new_ones(len(tensor), 1)
            found[name], found[f"{name}_scale"] = requantised(tensor, stored, scale)
    return found


def without_scales(tensors: dict[str, Tensor], source: object) -> dict[str, Tensor]:
    """A head's tensors without scales, in floating point; raises ValueError, with the source, as `dequantised` does."""
    scales = {f"{name}_scale": name for name in tensors if f"{name}_scale" in tensors}
    found = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for of_scale, name in scales.items():
        scale = tensors[of_scale]
        found[name] = dequantised(tensors[name], [scale], f"{source}: {name}").to(scale.dtype)
    return found


def dequantised(tensor: Tensor, scales: list[Tensor], name: str) -> Tensor:
    """A tensor in floating point: itself, or times the scales of its blocks; raises ValueError, with the name, for
    another kind of quantisation."""
    wide = tensor.is_floating_point() and tensor.element_size() > 1
    if wide and not scales:
        return tensor
    is_known = len(scales) == 1 and scales[0].is_floating_point() and tensor.ndim == 2
    if not is_known or tensor.dtype not in ONE_BYTE:
        advice = (
            "floating point, or int8 and float8 matrices with one tensor of scales, are allowed for a head, and for a "
            "target's embedding, lm_head and MTP layer: give one that is quantised so, or not there"
        )
        raise ValueError(f"{name} is stored as {tensor.dtype}, which is not understood; {advice}")
    return tensor.float() * in_each_block(scales[0], tensor.shape)


def requantised(
    dense: Float[Tensor, "rows columns"], stored: Tensor, scale: Tensor
) -> tuple[Float[Tensor, "rows columns"] | Int[Tensor, "rows columns"], Tensor]:
    """A matrix in the number format of `stored`, and new scales in the shape and format of its own, for new values.

    The largest entry of each block becomes the format's largest number. Scales that are powers of two stay such.
    """
    limits = torch.finfo(stored.dtype) if stored.is_floating_point() else torch.iinfo(stored.dtype)
    blocks = [block_size(size, count) for size, count in zip(dense.shape, two_axes(scale).shape, strict=True)]
    dense = dense.float().cpu()
    new = functional.max_pool2d(dense.abs()[None], blocks, blocks, ceil_mode=True)[0] / limits.max
    new[new == 0] = 1  # a block of zeros may have any scale
    if (torch.frexp(scale.float())[0] == 0.5).all():
        new = new.log2().ceil().exp2()
    new = new.clamp(min=torch.finfo(scale.dtype).tiny).to(scale.dtype).reshape(scale.shape)  # float16's ends at 6e-5
    entries = (dense / in_each_block(new, dense.shape)).clamp(-limits.max, limits.max)
    return (entries if stored.is_floating_point() else entries.round()).to(stored.dtype), new


def in_each_block(scale: Tensor, shape: torch.Size) -> Float[Tensor, "rows columns"]:
    """The scale of each entry of a matrix, which has one for all, for each row, or for each block."""
    scale = two_axes(scale)
    for axis, size in enumerate(shape):
        scale = scale.repeat_interleave(block_size(size, scale.shape[axis]), axis).narrow(axis, 0, size)
    return scale


def two_axes(scale: Tensor) -> Float[Tensor, "rows columns"]:
    return scale.float().reshape(scale.shape if scale.ndim == 2 else (-1, 1))


def block_size(size: int, count: int) -> int:
    """The length of each of `count` blocks, of which the last may be shorter: a power of two wherever one fits.

    DeepSeek-V3 has 576 rows in 5 blocks of 128, not of 116. The length that config.json may name is not read.
    """
    least = -(-size // count)
    power = 1 << (least - 1).bit_length()
    return power if -(-size // power) == count else least
