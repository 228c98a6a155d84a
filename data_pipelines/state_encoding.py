"""Hidden states as they are stored: in a float format, or in 8 bits with a scale for each token and state.

Every state of a token has its own scale, as the sizes of states differ by orders of magnitude from tap to tap and from
token to token.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

SCALE = torch.bfloat16  # the states are divided by the scale as it is stored, so its rounding costs nothing
LARGEST = {"int8": 127.0, "float8": torch.finfo(torch.float8_e4m3fn).max}
STORED = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def compute_dtype(storage: str) -> torch.dtype:
    """What states should be in before `encode`."""
    return torch.float32 if storage in LARGEST else getattr(torch, storage)


def bytes_per_token(hidden_size: int, num_taps: int, storage: str) -> int:
    """Of a stored token: its taps, its last hidden state, its id and its place in the loss mask."""
    state = hidden_size * STORED.get(storage, compute_dtype(storage)).itemsize
    scale = SCALE.itemsize if storage in LARGEST else 0
    return (num_taps + 1) * (state + scale) + torch.int32.itemsize + torch.uint8.itemsize


def encode(name: str, states: Float[Tensor, "tokens hidden"], storage: str) -> dict[str, Tensor]:
    """The tensors to store under a name, and behind it."""
    if storage not in LARGEST:
        return {name: states.to(compute_dtype(storage))}
    largest = LARGEST[storage]
    peaks = states.float().abs().amax(dim=-1, keepdim=True)
    scale = (peaks / largest).clamp(min=torch.finfo(SCALE).tiny).to(SCALE)  # [tokens, 1]
    scaled = (states.float() / scale.float()).clamp(-largest, largest)
    return {name: (scaled.round() if storage == "int8" else scaled).to(STORED[storage]), f"{name}.scale": scale}


def decode(opened: Any, name: str, start: int, end: int) -> Float[Tensor, "tokens hidden"]:
    """Tokens `start` to `end` of what `encode` made, from an opened safetensors file."""
    states = opened.get_slice(name)[start:end]
    if states.dtype not in STORED.values():
        return states
    return states.float() * opened.get_slice(f"{name}.scale")[start:end].float()
