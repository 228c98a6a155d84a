"""The layers of draft heads: norm, rotary embedding, attention and MLP, with the tensor names that engines use."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headstart.heads.target_config import SCALINGS, Rope, TargetConfig
from headstart.recipes.schema_heads import LayerSection

Shape = TypeVar("Shape", bound="LayerShape")


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a head's decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # A published head may have a rotary embedding or epsilon unlike its target's; None means the target's.
    rope: Rope | None = field(default=None, kw_only=True)
    norm_eps: float | None = field(default=None, kw_only=True)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return 1, self.num_kv_heads, self.head_dim

    @classmethod
    def from_section(
        cls: type[Shape], section: LayerSection, target: TargetConfig, hidden_size: int, **more: Any
    ) -> Shape:
        """The sizes in a recipe, or the target's where the recipe gives none. `more` are a subclass's own fields."""
        num_heads = section.num_heads or target.num_heads
        return cls(
            hidden_size=hidden_size,
            intermediate_size=section.intermediate_size or target.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=section.num_kv_heads or math.gcd(target.num_kv_heads, num_heads),
            head_dim=target.head_dim,
            **more,
        )

    @classmethod
    def from_config(cls: type[Shape], config: dict[str, Any], target: TargetConfig, **more: Any) -> Shape:
        """The sizes in a head's config.json; raises ValueError that names missing keys."""
        needed = ("hidden_size", "intermediate_size", "num_attention_heads")
        if missing := [key for key in needed if config.get(key) is None]:
            raise ValueError(f"config.json lacks {', '.join(missing)}; the sizes of a Llama layer are needed: add them")
        rope, norm_eps = Rope.from_config(config), config.get("rms_norm_eps", target.norm_eps)
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            rope=None if rope == target.rope else rope,
            norm_eps=None if norm_eps == target.norm_eps else norm_eps,
            **more,
        )

    def rope_of(self, target: TargetConfig) -> Rope:
        return target.rope if self.rope is None else self.rope

    def eps_of(self, target: TargetConfig) -> float:
        return target.norm_eps if self.norm_eps is None else self.norm_eps

    def to_config(self, target: TargetConfig) -> dict[str, Any]:
        """The keys of config.json that all engines read, for EAGLE-1 and for EAGLE-3."""
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_positions,
            "rms_norm_eps": self.eps_of(target),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **self.rope_of(target).to_config(),
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Float[Tensor, "*axes size"]) -> Float[Tensor, "*axes size"]:
        return functional.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self.eps)


def power_of_two_scales(sizes: list[float]) -> Float[Tensor, " inputs"]:
    """Powers of two that scale inputs of these sizes (RMS) to about 1; folding them into a weight is exact."""
    return torch.tensor([2.0 ** -round(math.log2(size)) for size in sizes])


def rotary_table(rope: Rope, head_dim: int, max_positions: int) -> Float[Tensor, "positions double"]:
    """The cosines, then the sines, of every position, in float32; raises ValueError for an unknown rope type.

    The formulas of scaled ones are transformers' own, which also rotate the target.
    """
    frequencies, scale = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim), 1.0
    if rope.kind in SCALINGS and rope.scaling.get("factor") is None:
        raise ValueError(f"rope_scaling.factor in config.json: missing, rope_type {rope.kind} needs a number; add it")
    if rope.kind in SCALINGS:
        parameters = {**rope.scaling, "rope_theta": rope.theta, "partial_rotary_factor": 1.0}  # of all dimensions
        sizes = {"head_dim": head_dim, "hidden_size": head_dim, "num_attention_heads": 1}
        config: Any = SimpleNamespace(rope_parameters=parameters, standardize_rope_params=lambda: None, **sizes)
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](config)
    elif rope.kind != "default":
        advice = "choose another target, or head.kind medusa, which has no rotary embedding"
        raise ValueError(
            f"rope_type {rope.kind!r} in config.json: only default, linear, llama3, yarn are allowed; {advice}"
        )
    positions = torch.arange(max_positions, dtype=torch.float64)
    angles = torch.outer(positions, frequencies.double())  # [positions, head_dim / 2]
    angles = torch.cat([angles, angles], dim=-1)
    return (scale * torch.cat([angles.cos(), angles.sin()], dim=-1)).float()


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply a rotary embedding in Hugging Face's half-split convention."""
    first, second = states.chunk(2, dim=-1)
    turned = states * cosines + torch.cat([-second, first], dim=-1) * sines
    return turned.to(states.dtype)  # under autocast the table has a wider dtype than the states


@runtime_checkable  # the shape checks in tests use isinstance
class AttentionCache(Protocol):
    """Stores the keys and values of each block and attends to them together with all earlier ones."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor: ...


def fold_heads(
    query: Float[Tensor, "batch heads queries head_dim"], kv_heads: int
) -> Float[Tensor, "batch kv_heads folded head_dim"]:
    """Queries that share a key head as further queries of that head: the same attention, without copies of the keys."""
    return query.reshape(len(query), kv_heads, query.shape[1] // kv_heads * query.shape[2], -1)


def fold_mask(mask: Shaped[Tensor, "any 1 queries keys"], group: int) -> Shaped[Tensor, "any 1 folded keys"]:
    """The mask of `fold_heads`, where `group` heads share a key head."""
    return mask.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)


def attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys head_dim"],
    mask: Float[Tensor, "*axes queries keys"] | None = None,
) -> Float[Tensor, "batch heads queries head_dim"]:
    """Softmax attention under an additive mask.

    Without a mask, attention is causal if there are as many queries as keys; otherwise every query sees every key.
    """
    group = query.shape[1] // key.shape[1]
    if query.is_cuda and group > 1 and mask is not None and mask.ndim == 4 and mask.shape[1] == 1:
        folded, own_mask = fold_heads(query, key.shape[1]), fold_mask(mask, group)
        return functional.scaled_dot_product_attention(folded, key, value, own_mask).reshape(query.shape)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] > 1 and query.shape[2] == key.shape[2],
        enable_gqa=query.shape[1] != key.shape[1],
    )


class Projections(nn.Module):
    """Those of grouped-query attention, whose input may be wider than its output (EAGLE-3 feeds it 2 x hidden)."""

    def __init__(self, input_size: int, shape: LayerShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(input_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def by_head(self, projected: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch heads seq head_dim"]:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Attention(Projections):
    """Causal attention, or attention to what a cache and a mask allow."""

    def forward(
        self,
        inputs: Float[Tensor, "batch seq input"],
        rotary: Float[Tensor, "*batch seq double"],
        mask: Float[Tensor, "*axes seq keys"] | None,
        cache: AttentionCache | None,
        layer: int = 0,
    ) -> Float[Tensor, "batch seq hidden"]:
        cosines, sines = rotary.unsqueeze(-3).chunk(2, dim=-1)  # [(batch,) 1, seq, head_dim]
        query, key, value = (self.by_head(project(inputs)) for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        mixed = attention(query, key, value, mask) if cache is None else cache.attend(layer, query, key, value, mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Float[Tensor, "*axes hidden"]) -> Float[Tensor, "*axes hidden"]:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """A plain decoder layer around an attention."""

    def __init__(self, shape: LayerShape, eps: float, attention: nn.Module) -> None:
        super().__init__()
        self.input_layernorm: nn.Module = RMSNorm(shape.hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps)
        self.self_attn = attention
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(
        self,
        hidden: Float[Tensor, "batch seq hidden"],
        rotary: Tensor,
        mask: Tensor | None,
        cache: AttentionCache | None,
        layer: int,
    ) -> Float[Tensor, "batch seq hidden"]:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, mask, cache, layer)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
