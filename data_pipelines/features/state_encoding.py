"""The storage formats of hidden states: a float format, or 8 bits with one scale per token and tap.

Each tap of each token has its own scale, because their sizes differ by orders of magnitude.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

SCALE = torch.bfloat16  # states are divided by the rounded scale, so its rounding adds no error
LARGEST_VALUE = {"int8": 127.0, "float8": torch.finfo(torch.float8_e4m3fn).max}
STORED_DTYPE = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def compute_dtype(storage: str) -> torch.dtype:
    """The dtype that `encode` stores, or that it expects for the 8-bit formats."""
    return torch.float32 if storage in LARGEST_VALUE else getattr(torch, storage)


def bytes_per_token(hidden_size: int, num_taps: int, storage: str) -> int:
    """The bytes that one stored token takes: taps, last hidden state, id and loss mask."""
    state = hidden_size * STORED_DTYPE.get(storage, compute_dtype(storage)).itemsize
    scale = SCALE.itemsize if storage in LARGEST_VALUE else 0
    return (num_taps + 1) * (state + scale) + torch.int32.itemsize + torch.uint8.itemsize


def encode(name: str, states: Float[Tensor, "tokens hidden"], storage: str) -> dict[str, Tensor]:
    """The tensors to store for these states: `name`, and `name.scale` in an 8-bit format."""
    if storage not in LARGEST_VALUE:
        return {name: states.to(compute_dtype(storage))}
    largest = LARGEST_VALUE[storage]
    peaks = states.float().abs().amax(dim=-1, keepdim=True)
    scale = (peaks / largest).clamp(min=torch.finfo(SCALE).tiny).to(SCALE)  # [tokens, 1]
    scaled = (states.float() / scale.float()).clamp(-largest, largest)
    return {name: (scaled.round() if storage == "int8" else scaled).to(STORED_DTYPE[storage]), f"{name}.scale": scale}


def decode(opened: Any, name: str, start: int, end: int) -> Float[Tensor, "tokens hidden"]:
    """Read tokens `start` to `end` of encoded states from an opened safetensors file."""
    states = opened.get_slice(name)[start:end]
    if states.dtype not in STORED_DTYPE.values():
        return states
    return states.float() * opened.get_slice(f"{name}.scale")[start:end].float()
