"""EAGLE-3 (arXiv 2503.01840) and 3.1 (2605.09992): one decoder layer over tapped features and the token embedding."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headstart.heads.base import Features, Hidden, LevelHead, Mask, Tokens, TrainingPasses
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.linear_start import LeastSquares
from headstart.heads.layers import MLP, Attention, AttentionCache, LayerShape, RMSNorm
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import TappedSection

TAPS = "eagle_aux_hidden_state_layer_ids"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # absent from the first heads
# Size of the queries and keys that a fitted start attends with: a token's score with itself is this squared times the
# root of head_dim, 11.5 for 64, while those with other tokens are about 1.4.
OWN_POSITION = 1.2


@dataclass(frozen=True)
class Eagle3Shape(LayerShape):
    """Everything about an EAGLE-3 head that is not a weight."""

    taps: tuple[int, ...]
    fc_norm: bool = False  # EAGLE-3.1: one RMSNorm per tap before `fc`
    norm_output: bool = False  # EAGLE-3.1: the next level gets the hidden state after the norm, not before it
    own_embedding: bool = False  # required if the head's width differs from its target's
    norm_before_fc: bool = False  # one RMSNorm over all taps together; only published heads have it
    norm_before_residual: bool = False  # the residual is the normed feature; only published heads have it

    @property
    def norms(self) -> bool:
        """The field of the recipe's section."""
        return self.fc_norm


def midlayer_name(name: str) -> str:
    """The reference's name of an EAGLE-3 tensor: midlayer, which speculators, vLLM and others call layers.0."""
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


class Eagle3Layer(nn.Module):
    """A decoder layer over cat(norm(embedding), norm(feature)); the residual is the feature, normed or not."""

    def __init__(self, shape: Eagle3Shape, eps: float) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(2 * hidden, shape)
        self.mlp = MLP(hidden, shape.intermediate_size)
        self.norm_before_residual = shape.norm_before_residual

    def forward(
        self, embedding: Hidden, features: Hidden, rotary: Tensor, mask: Tensor | None, cache: AttentionCache | None
    ) -> Hidden:
        normed = self.hidden_norm(features)
        inputs = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        residual = normed if self.norm_before_residual else features
        hidden = residual + self.self_attn(inputs, rotary, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(LevelHead):
    """An EAGLE-3 head; its parameters are named as in the published checkpoints, so its state dict can be exported."""

    kind = "eagle3"
    title = "EAGLE-3"
    norm_flags = NORM_FLAGS
    shape: Eagle3Shape

    def __init__(self, shape: Eagle3Shape, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        super().__init__(shape, frozen, vocab)
        target = frozen.config
        assert shape.own_embedding or target.hidden_size == shape.hidden_size
        self.taps, self.feature_size = shape.taps, shape.hidden_size
        tapped, eps = len(shape.taps) * target.hidden_size, shape.eps_of(target)
        self.fc = nn.Linear(tapped, shape.hidden_size, bias=False)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(target.hidden_size, eps) for _ in shape.taps)
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(tapped, eps)
        self.midlayer = Eagle3Layer(shape, eps)
        self.norm = RMSNorm(shape.hidden_size, eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(vocab.ids), bias=False)
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(target.vocab_size, shape.hidden_size)
        self.add_rotary(shape)

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        architectures = config.get("architectures") or []
        return "draft_vocab_size" in config or any("Eagle3" in name for name in architectures)

    @classmethod
    def scales_taps(cls, section: TappedSection) -> bool:
        return not section.norms  # which do that

    @classmethod
    def section_taps(cls, section: TappedSection, target: TargetConfig) -> tuple[int, ...]:
        return target.default_taps() if section.taps is None else section.taps

    @classmethod
    def config_taps(cls, config: dict[str, Any], target: TargetConfig) -> tuple[int, ...]:
        """The taps by the best evidence: our own section, vLLM's ids, SGLang's ids, the default of every engine."""
        outputs = (config.get("eagle_config") or {}).get(TAPS) or []  # counted as outputs of layers, one less
        named = config.get("headstart", {}).get("taps") or config.get(TAPS)
        return tuple(named or [layer + 1 for layer in outputs] or target.default_taps())

    @classmethod
    def section_shape(cls, section: Any, target: TargetConfig, vocab: DraftVocab) -> Eagle3Shape:
        hidden_size = section.hidden_size or target.hidden_size
        return Eagle3Shape.from_section(
            section,
            target,
            hidden_size,
            taps=cls.section_taps(section, target),
            fc_norm=section.norms,
            norm_output=section.norms,
            own_embedding=hidden_size != target.hidden_size,
        )

    @classmethod
    def config_shape(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetConfig) -> Eagle3Shape:
        """The shape that a config.json describes; raises ValueError for missing sizes."""
        return Eagle3Shape.from_config(
            config,
            target,
            taps=cls.config_taps(config, target),
            own_embedding="embed_tokens.weight" in tensors or config.get("hidden_size") != target.hidden_size,
            **{flag: config.get(flag, False) for flag in NORM_FLAGS},
        )

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], frozen: FrozenTarget) -> "Eagle3Head":
        vocab = DraftVocab.from_tensors(tensors, frozen.config.vocab_size)
        renamed = {midlayer_name(name): tensors.pop(name) for name in [*tensors]}
        tensors.update(renamed)
        return cls(cls.config_shape(config, tensors, frozen.config), frozen, vocab)

    @torch.no_grad()
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        """Start with the target's norm and lm_head, and with a layer that passes the features through.

        A head of another width starts with random projections of the target's embedding and lm_head to its own.
        """
        hidden = self.shape.hidden_size
        self.start_at_random(generator)
        lm_head = frozen.within(self.vocab).lm_head
        if not self.shape.own_embedding:
            self.norm.weight.copy_(frozen.norm_weight)
            self.lm_head.weight.copy_(lm_head)
            return
        projection = torch.empty(self.target.hidden_size, hidden).normal_(0, hidden**-0.5, generator=generator)
        projection = projection.to(frozen.embedding)
        self.embed_tokens.weight.copy_(frozen.embedding @ projection)
        self.lm_head.weight.copy_((lm_head * frozen.norm_weight) @ projection)

    @property
    def starts_linear(self) -> bool:
        return not self.shape.own_embedding  # it has the target's width

    def linear_inputs(
        self, taps: Float[Tensor, "count tapped"], tokens: Int[Tensor, " count"]
    ) -> Float[Tensor, "count inputs"]:
        """The inputs of a fitted first map: those of `fc`, and the normed embedding of the next token."""
        return torch.cat([self.scaled(taps), self.midlayer.input_layernorm(self.embedding[tokens])], dim=-1)

    @torch.no_grad()
    def start_with_fit(self, fit: LeastSquares, generator: torch.Generator) -> None:
        """Start as the linear map that predicts the target's next normed state from the taps and the next token.

        `fc` takes the share of the taps. The share of the token, at the rank that the key heads allow, goes through one
        query head per key head, whose queries and keys are the same projection of the token, so that they attend to
        their own position. The norm's weight is uniform, so the feedback to the next level keeps the direction of the
        prediction.

        A random head under the target's own norm and lm_head is confidently wrong: its loss is far above that of the
        uniform distribution, and training first unlearns it.
        """
        shape, attention = self.shape, self.midlayer.self_attn
        hidden, head_dim = shape.hidden_size, shape.head_dim
        weight, num_taps = fit.solve(), self.fc.in_features
        rank = min(shape.num_kv_heads * head_dim, hidden)
        basis = fit.principal_outputs(weight[num_taps:], num_taps, rank)  # [hidden, rank]
        low_rank = torch.cat([weight[:num_taps], weight[num_taps:] @ basis @ basis.T])
        size = fit.size(low_rank)
        self.fc.weight.copy_(weight[:num_taps].T / size)
        self.norm.weight.fill_(size)
        values = (weight[num_taps:] @ basis).T / size  # [rank, hidden]
        attention.v_proj.weight[:, hidden:] = 0
        attention.v_proj.weight[:rank, :hidden] = values.to(self.fc.weight)
        group = shape.num_heads // shape.num_kv_heads
        for key_head in range(shape.num_kv_heads):
            keys = slice(key_head * head_dim, (key_head + 1) * head_dim)
            queries = slice(key_head * group * head_dim, (key_head * group + 1) * head_dim)
            projection = torch.randn(head_dim, hidden, generator=generator) * OWN_POSITION * hidden**-0.5
            for matrix, rows in ((attention.q_proj.weight, queries), (attention.k_proj.weight, keys)):
                matrix[rows] = 0
                matrix[rows, :hidden] = projection.to(matrix)
            part = basis[:, keys]  # narrower, or empty, beyond the rank
            start = queries.start
            attention.o_proj.weight[:, start : start + part.shape[1]] = part.to(self.fc.weight)

    def engine_config(self) -> dict[str, Any]:
        shape, target = self.shape, self.target
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **shape.to_config(target),
            "target_hidden_size": target.hidden_size,
            "draft_vocab_size": len(self.vocab.ids),
            **{flag: getattr(shape, flag) for flag in NORM_FLAGS},
        }
        if self.taps != target.default_taps() or target.num_layers < 7:
            # vLLM uses the Hugging Face index; SGLang names the layer that outputs it, one less.
            config[TAPS] = list(self.taps)
            config["eagle_config"] = {TAPS: [tap - 1 for tap in self.taps]}
        if shape.norm_before_fc:  # TensorRT-LLM looks for it here only
            config["eagle_config"] = {**config.get("eagle_config", {}), "norm_before_fc": True}
        if len(self.taps) != 3:
            config["num_aux_hidden_states"] = len(self.taps)
        return config

    def engine_tensors(self) -> dict[str, Tensor]:
        tensors = self.folded_state()
        if not self.vocab.is_full:  # vLLM refuses d2t in a head that drafts the whole vocabulary
            tensors |= {"d2t": self.vocab.offsets(), "t2d": self.vocab.members()}
        return tensors

    def training_passes(self, samples: int, longest: int, unroll: int, anchors: int) -> TrainingPasses:
        return replace(super().training_passes(samples, longest, unroll, anchors), read_once=(self.fc,))

    @property
    def logits_parameters(self) -> list[Tensor]:
        return [self.norm.weight, self.lm_head.weight]

    def project(self, taps: Float[Tensor, "*axes tapped"]) -> Float[Tensor, "*axes feature"]:
        return self.fc(self.scaled(taps))

    def scaled(self, taps: Float[Tensor, "*axes tapped"]) -> Float[Tensor, "*axes tapped"]:
        """The input of `fc`."""
        if self.shape.norm_before_fc:
            taps = self.input_norm(taps)
        if self.shape.fc_norm:
            parts = taps.split(self.target.hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return taps if self.input_scale is None else taps * self.input_scale

    def embedded(self, tokens: Tokens, level: int) -> Hidden:
        return self.embed_tokens(tokens) if self.shape.own_embedding else self.embedding[tokens]

    def run(
        self, embedded: Hidden, features: Features, rotary: Tensor, mask: Mask | None, cache: AttentionCache | None
    ) -> Hidden:
        return self.midlayer(embedded, features, rotary, mask, cache)

    def logits(self, hidden: Float[Tensor, "*axes hidden"], level: int = 0) -> Float[Tensor, "*axes draft_vocab"]:
        return self.lm_head(self.norm(hidden))

    def feedback(self, hidden: Hidden, features: Features) -> Features:
        return self.norm(hidden) if self.shape.norm_output else hidden
