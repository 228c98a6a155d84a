"""The pieces of a draft head: norm, rotary embedding, attention and MLP, named as the engines name their tensors."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from heads.cache import AttentionCache, attention
from heads.target_config import Rope


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Float[Tensor, "*axes size"]) -> Float[Tensor, "*axes size"]:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def rotary_table(rope: Rope, head_dim: int, max_positions: int) -> Float[Tensor, "positions double"]:
    """Cosines, then sines, of every position: [positions, 2 * head_dim], in float32.

    Raises ValueError for a scaling that is not `default`, `linear` or `llama3`.
    """
    frequencies = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.scaling["factor"]
    elif rope.kind == "llama3":
        frequencies = llama3_frequencies(frequencies, rope)
    elif rope.kind != "default":
        raise ValueError(f"rope_type {rope.kind!r} of the target's config.json: only default, linear, llama3 are known")
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequencies)  # [positions, head_dim / 2]
    angles = torch.cat([angles, angles], dim=-1)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def llama3_frequencies(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended (Llama 3.1)."""
    original = rope.scaling["original_max_position_embeddings"]
    low, high = rope.scaling["low_freq_factor"], rope.scaling["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)  # turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / rope.scaling["factor"]


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention of Hugging Face."""
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat([-second, first], dim=-1) * sines


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output (EAGLE-3 feeds it 2 x hidden)."""

    def __init__(self, input_size: int, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(
        self,
        inputs: Float[Tensor, "batch seq input"],
        rotary: Float[Tensor, "*batch seq double"],
        mask: Float[Tensor, "*axes seq keys"] | None,
        cache: AttentionCache | None,
    ) -> Float[Tensor, "batch seq hidden"]:
        batch, seq, _ = inputs.shape
        cosines, sines = rotary.unsqueeze(-3).chunk(2, dim=-1)  # [(batch,) 1, seq, head_dim]
        query = self.q_proj(inputs).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(inputs).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(inputs).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        mixed = attention(query, key, value, mask) if cache is None else cache.attend(0, query, key, value, mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Float[Tensor, "*axes hidden"]) -> Float[Tensor, "*axes hidden"]:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
