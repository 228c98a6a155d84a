"""EAGLE-3 (arXiv 2503.01840) and 3.1 (2605.09992): one decoder layer over tapped features and the token embedding."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heads.base import DraftHead
from heads.cache import AttentionCache
from heads.frozen import FrozenTarget
from heads.layers import MLP, Attention, RMSNorm, rotary_table
from heads.target_config import TargetConfig
from heads.vocab import DraftVocab

UNROLL_MARGIN = 64  # positions of the rotary table beyond the target's


@dataclass(frozen=True)
class Eagle3Shape:
    """Everything about an EAGLE-3 head that is not a weight."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    fc_norm: bool = False  # EAGLE-3.1: one RMSNorm per tap before `fc`
    norm_output: bool = False  # EAGLE-3.1: the next step is fed the hidden state after the norm, not before


class Eagle3Layer(nn.Module):
    """The decoder layer: it attends over cat(norm(embedding), norm(feature)); the residual is the un-normed feature."""

    def __init__(self, shape: Eagle3Shape, eps: float) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(2 * hidden, hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.mlp = MLP(hidden, shape.intermediate_size)

    def forward(
        self,
        embedding: Float[Tensor, "batch seq hidden"],
        features: Float[Tensor, "batch seq hidden"],
        rotary: Tensor,
        mask: Tensor | None,
        cache: AttentionCache | None,
    ) -> Float[Tensor, "batch seq hidden"]:
        inputs = torch.cat([self.input_layernorm(embedding), self.hidden_norm(features)], dim=-1)
        hidden = features + self.self_attn(inputs, rotary, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(DraftHead):
    """Parameter names are those of the published checkpoints, so the state dict is the export."""

    kind = "eagle3"

    def __init__(self, shape: Eagle3Shape, target: TargetConfig, vocab: DraftVocab, embedding: Tensor) -> None:
        """`embedding` is the target's [vocab, hidden]; it is shared, not copied, trained or saved."""
        super().__init__()
        if embedding.shape[-1] != shape.hidden_size:
            raise ValueError(
                f"head.hidden_size: {shape.hidden_size} given, the target's embedding has {embedding.shape[-1]}; "
                f"leave it out (a head of another width than its target comes with its own embedding, not yet here)"
            )
        self.shape, self.target, self.taps, self.vocab = shape, target, shape.taps, vocab
        self.feature_size = shape.hidden_size
        tapped = len(shape.taps) * target.hidden_size
        self.fc = nn.Linear(tapped, shape.hidden_size, bias=False)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(target.hidden_size, target.norm_eps) for _ in shape.taps)
        self.midlayer = Eagle3Layer(shape, target.norm_eps)
        self.norm = RMSNorm(shape.hidden_size, target.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(vocab.ids), bias=False)
        self.embedding: Tensor
        self.rotary: Tensor
        self.register_buffer("embedding", embedding, persistent=False)
        # An unroll looks a few positions past a sample's end; what it finds there is never scored.
        table = rotary_table(target.rope, shape.head_dim, target.max_positions + UNROLL_MARGIN)
        self.register_buffer("rotary", table.to(embedding), persistent=False)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return 1, self.shape.num_kv_heads, self.shape.head_dim

    @torch.no_grad()
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        """Start with the target's own norm and lm_head, the new layer silent."""
        std = 0.5 * self.shape.hidden_size**-0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, std, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        self.norm.weight.copy_(frozen.norm_weight)
        self.lm_head.weight.copy_(frozen.lm_head[self.vocab.ids])

    def project(self, taps: Float[Tensor, "*axes tapped"]) -> Float[Tensor, "*axes feature"]:
        if self.shape.fc_norm:
            parts = taps.split(self.target.hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def forward(
        self,
        features: Float[Tensor, "batch seq feature"],
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "*batch seq"],
        mask: Float[Tensor, "*axes seq keys"] | None = None,
        cache: AttentionCache | None = None,
    ) -> Float[Tensor, "batch seq feature"]:
        return self.midlayer(self.embedding[tokens], features, self.rotary[positions], mask, cache)

    def logits(self, hidden: Float[Tensor, "*axes feature"]) -> Float[Tensor, "*axes draft_vocab"]:
        return self.lm_head(self.norm(hidden))

    def feedback(self, hidden: Float[Tensor, "*axes feature"]) -> Float[Tensor, "*axes feature"]:
        return self.norm(hidden) if self.shape.norm_output else hidden
