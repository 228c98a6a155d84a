"""The interface of every draft head: one forward that training, drafting and export all use."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headstart.heads.calibration import Calibration
from headstart.heads.frozen import FrozenTarget
from headstart.heads.layers import AttentionCache, LayerShape, Projections, power_of_two_scales, rotary_table
from headstart.heads.target_config import TargetConfig, TargetOrigin
from headstart.heads.unroll_attention import UnrollCache
from headstart.heads.vocab import DraftVocab

EXTRA_ROTARY_POSITIONS = 64  # rotary table rows beyond the target's positions: an unroll runs past a sample's end
ADDED = ("o_proj.weight", "down_proj.weight", "markov_w2.weight", "gate_proj.bias")  # zero at first
SHARED = ("norm_weight", "norm_bias", "lm_head", "lm_head_bias")
Features = Float[Tensor, "batch seq feature"]
Tokens = Int[Tensor, "batch seq"]
Positions = Int[Tensor, "*batch seq"]
Mask = Float[Tensor, "*axes seq keys"]  # additive
Hidden = Float[Tensor, "batch seq hidden"]


@dataclass(frozen=True)
class TrainingPasses:
    """The sizes of a micro-batch in training, from which its memory follows.

    A pass is what activation checkpointing computes again: an unroll step, or a layer where one pass has all levels.
    """

    count: int
    positions: int  # that go through a layer, in all passes together
    scored: int  # positions whose hidden states are kept for the loss
    read_once: tuple[nn.Linear, ...] = ()  # layers outside these passes, which read each position of the texts once
    kept_in_float32: int = 0  # elements per position of `positions` that are kept in float32 in any precision


class DraftHead(nn.Module, ABC):
    """Predicts a target's next tokens from its hidden states: what all kinds of heads have in common.

    A kind of head is a subclass in heads/kinds. It says here what the trainers, drafters, exports and the doctor have
    to know about it; its section in recipes/schema_heads.py says what is known without building a head.
    """

    kind: ClassVar[str]  # the value of head.kind
    title: ClassVar[str]  # its name in text
    trained_by: ClassVar[str]  # a key of trainers.step.TRAINED: how its loss is computed
    drafted_by: ClassVar[str]  # a key of inference.drafters.for_heads.DRAFTERS: how it drafts
    has_rope: ClassVar[bool] = True  # whether it has rotary embeddings, which must then match the target's
    repeats_layers: ClassVar[bool] = True  # whether all levels run the same layers
    max_layers: ClassVar[int | None] = 1  # decoder layers that it may have; None is any number
    is_target_layer: ClassVar[bool] = False  # whether it is a part of its target, with which engines read it
    vocab_map: ClassVar[str] = "d2t"  # the tensor that holds its draft vocabulary
    norm_flags: ClassVar[tuple[str, ...]] = ()  # keys of config.json about its norms, true or false
    shape: Any  # everything about it but its weights: a frozen dataclass of its kind, which has a `cache_shape`
    target: TargetConfig
    taps: tuple[int, ...]  # indices of the target's hidden_states that `project` takes, ascending
    vocab: DraftVocab
    feature_size: int
    embedding: Tensor  # the target's, [vocab, hidden], shared
    rotary: Tensor
    input_scale: Tensor | None  # powers of two that multiply the inputs of new layers
    calibration: Calibration = Calibration()  # fitted after training
    origin: TargetOrigin | None = None  # the target it was trained for, where that is known
    max_levels: int | None = None  # how many levels it can draft; None is any number

    def __init__(self, shape: Any, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        """The head shares the target's embedding, and neither copies, trains nor saves it."""
        super().__init__()
        self.shape, self.target, self.vocab = shape, frozen.config, vocab
        self.register_buffer("embedding", frozen.embedding, persistent=False)
        self.register_buffer("input_scale", None, persistent=False)

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        """Whether a published config.json, which lacks our own section, is of a head of this kind."""
        return False

    @classmethod
    @abstractmethod
    def section_taps(cls, section: Any, target: TargetConfig) -> tuple[int, ...]:
        """The `taps` of the head that a recipe's section of this kind describes."""

    @classmethod
    def section_vocab(cls, section: Any, counts: Int[Tensor, " vocab"]) -> DraftVocab:
        """The tokens that the recipe's head may draft, given how often the target wrote each; never its mask token."""
        sizes = section.model_dump()
        if "mask_token_id" in sizes:
            counts = counts.clone()
            counts[-1 if sizes["mask_token_id"] is None else sizes["mask_token_id"]] = -1
        return DraftVocab.most_frequent(counts, sizes.get("draft_vocab_size"))

    @classmethod
    def scales_taps(cls, section: Any) -> bool:
        """Whether a new head of the recipe starts with `scale_taps`."""
        return False

    @classmethod
    @abstractmethod
    def config_taps(cls, config: dict[str, Any], target: TargetConfig) -> tuple[int, ...]:
        """The `taps` of the head that a config.json describes."""

    @classmethod
    def section_shape(cls, section: Any, target: TargetConfig, vocab: DraftVocab) -> Any:
        """The `shape` with the sizes of a recipe, or the target's where the recipe gives none; for `from_section`."""
        raise NotImplementedError

    @classmethod
    def from_section(cls, section: Any, frozen: FrozenTarget, vocab: DraftVocab) -> "DraftHead":
        """The head that a recipe's section describes, not yet initialised."""
        return cls(cls.section_shape(section, frozen.config, vocab), frozen, vocab)

    @classmethod
    @abstractmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], frozen: FrozenTarget) -> "DraftHead":
        """A head with the sizes of a config.json; makes `tensors` its state dict; ValueError if they disagree."""

    @abstractmethod
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        """Set the weights that training starts from."""

    @abstractmethod
    def engine_config(self) -> dict[str, Any]:
        """config.json as the engines read it; each key is there because omitting it costs acceptance somewhere."""

    @abstractmethod
    def engine_tensors(self) -> dict[str, Tensor]:
        """model.safetensors as the engines read it."""

    def served_tensors(self) -> dict[str, Tensor]:
        """`engine_tensors` in the one form that all engines can draft with."""
        return self.engine_tensors()

    def own_keys(self) -> dict[str, Any]:
        """More keys of the section of config.json that only we read."""
        return {}

    def folded_scale(self, name: str) -> Tensor | None:
        """The factor of a weight's inputs that `engine_tensors` folds into the weight; None for no factor."""
        return self.input_scale if name == "fc.weight" else None

    def folded_state(self) -> dict[str, Tensor]:
        """The state dict, with every factor folded into its weight."""
        scales = {name: (tensor, self.folded_scale(name)) for name, tensor in self.state_dict().items()}
        return {name: tensor if scale is None else tensor * scale for name, (tensor, scale) in scales.items()}

    def scale_taps(self, sizes: list[float]) -> None:
        """Scale the input of `fc` so that every tap is about 1, given the RMS of each tap's hidden states.

        Large taps would drown out the new layer, and each optimizer step would change the features in proportion.
        """
        self.input_scale = power_of_two_scales(sizes).repeat_interleave(self.target.hidden_size).to(self.embedding)

    def add_rotary(self, shape: LayerShape) -> None:
        """Register the rotary table of the head's layers. [positions, 2 * head_dim]"""
        positions = self.target.max_positions + EXTRA_ROTARY_POSITIONS
        table = rotary_table(shape.rope_of(self.target), shape.head_dim, positions)
        self.register_buffer("rotary", table if table.is_meta else table.to(self.embedding), persistent=False)

    @torch.no_grad()
    def start_at_random(self, generator: torch.Generator) -> None:
        """Random matrices, but zeros where a layer adds to its input, so that it starts by passing the input on."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.5 * self.feature_size**-0.5, generator=generator)
            if name.endswith(ADDED):
                parameter.zero_()

    @torch.no_grad()
    def take_weights(self, source: "DraftHead") -> None:
        """Start from the weights of another head of this shape. Factors are powers of two, so this is exact."""
        state = source.state_dict()
        for name, tensor in state.items():
            scale = self.folded_scale(name)
            state[name] = tensor if scale is None else tensor / scale
        self.load_state_dict(state)

    def hold_lm_head(self, packed: nn.Module | None) -> None:
        """Get ready to draft with the target's lm_head; `packed` is its layer, if its weights are packed."""

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """The layers that a decode step may compile: those around an attention of ours."""
        return [module for module in self.modules() if any(isinstance(part, Projections) for part in module.children())]

    @property
    def starts_linear(self) -> bool:
        """Whether it can start as a fitted map: only such a head has `linear_inputs` and `start_with_fit`."""
        return False

    @property
    def cache_shape(self) -> tuple[int, int, int] | None:
        """(layers, kv_heads, head_dim) of the head's KV cache; None if it needs none."""
        return self.shape.cache_shape

    @property
    @abstractmethod
    def logits_parameters(self) -> list[Tensor]:
        """The trainable weights that `logits` depends on."""

    @abstractmethod
    def project(self, taps: Float[Tensor, "*axes tapped"]) -> Float[Tensor, "*axes feature"]:
        """The head's features, from the target's tapped hidden states concatenated in ascending order."""

    @abstractmethod
    def text_logits(
        self, features: Features, text: Int[Tensor, "1 tokens"], depth: int
    ) -> Iterator[Float[Tensor, "choices draft_vocab"]]:
        """Yield the logits depth by depth, each from the true tokens before it, given features of all but the last.

        Row t of depth k (from 0) is about the token at position t + 2 + k.
        """

    @abstractmethod
    def training_passes(self, samples: int, longest: int, unroll: int, anchors: int) -> TrainingPasses:
        """The sizes of a micro-batch of `samples` texts of `longest` tokens; `anchors` is train.anchors."""


class LevelHead(DraftHead):
    """Drafts one level of a tree in each call.

    Index t of a sequence holds the target's features at position t and the token at position t + 1; the head's logits
    at index t score the token at position t + 2. While drafting, the head's own `feedback` replaces the features of
    positions that the target has not read yet; `level` counts these replacements, so it is 0 for the first draft token.
    """

    trained_by = "unroll"
    drafted_by = "levels"

    def forward(
        self,
        features: Features,
        tokens: Tokens,
        positions: Positions,
        mask: Mask | None = None,
        cache: AttentionCache | None = None,
        level: int = 0,
    ) -> Hidden:
        """The head's hidden state at each index, attending to what the cache and the additive mask allow."""
        return self.run(self.embedded(tokens, level), features, self.rotary[positions], mask, cache)

    def embedded(self, tokens: Tokens, level: int) -> Hidden:
        return self.embedding[tokens]

    def run(
        self, embedded: Hidden, features: Features, rotary: Tensor, mask: Mask | None, cache: AttentionCache | None
    ) -> Hidden:
        """`forward`, given the embeddings and the rows of the rotary table."""
        raise NotImplementedError

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*axes hidden"], level: int = 0) -> Float[Tensor, "*axes draft_vocab"]:
        """Scores over the draft vocabulary; separate from `forward`, so that only the needed indices pay for them."""

    def unrolled_logits(self, hidden: Float[Tensor, "levels *axes hidden"]) -> Float[Tensor, "levels *axes vocab"]:
        """The logits of all levels of an unroll at once."""
        return self.logits(hidden)

    @abstractmethod
    def feedback(self, hidden: Hidden, features: Features) -> Features:
        """The features of the next level, from this level's output `hidden` and its features."""

    def text_logits(
        self, features: Features, text: Int[Tensor, "1 tokens"], depth: int
    ) -> Iterator[Float[Tensor, "choices draft_vocab"]]:
        before = features.shape[1]
        positions, cache = torch.arange(before, device=text.device), UnrollCache()
        for level in range(min(depth, before - 1)):  # each further depth has one choice fewer
            tokens = text[:, 1:].roll(-level, dims=1)
            hidden = self(features, tokens, positions + level, cache=cache, level=level)
            yield self.logits(hidden[:, : before - 1 - level], level)[0]
            features = self.feedback(hidden, features)

    def training_passes(self, samples: int, longest: int, unroll: int, anchors: int) -> TrainingPasses:
        tokens = samples * longest
        return TrainingPasses(unroll, tokens * unroll if self.repeats_layers else tokens, tokens)


class LastHiddenHead(LevelHead):
    """A head (EAGLE-1, MTP, Medusa) whose only feature is the target's last hidden state after its final norm.

    It shares the target's embedding, final norm and lm_head, and neither trains nor saves them. Unless a head says
    otherwise, its hidden state is the target's next feature, which lm_head scores.
    """

    norm_weight: Tensor
    norm_bias: Tensor | None
    lm_head: Tensor
    lm_head_bias: Tensor | None

    def __init__(self, shape: Any, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        super().__init__(shape, frozen, vocab)
        self.taps, self.feature_size = (frozen.config.num_layers,), frozen.config.hidden_size
        self.logit_scale, self.softcap = frozen.logit_scale, frozen.softcap
        for name in SHARED:
            self.register_buffer(name, getattr(frozen, name), persistent=False)

    @classmethod
    def section_taps(cls, section: Any, target: TargetConfig) -> tuple[int, ...]:
        return (target.num_layers,)

    @classmethod
    def config_taps(cls, config: dict[str, Any], target: TargetConfig) -> tuple[int, ...]:
        return (target.num_layers,)

    @property
    def frozen(self) -> FrozenTarget:
        """The target's shared tensors, on this head's device."""
        shared = {name: getattr(self, name) for name in ("embedding", *SHARED)}
        return FrozenTarget(config=self.target, logit_scale=self.logit_scale, softcap=self.softcap, **shared)

    @property
    def logits_parameters(self) -> list[Tensor]:
        return []

    def project(self, taps: Float[Tensor, "*axes tapped"]) -> Float[Tensor, "*axes feature"]:
        return self.frozen.norm(taps)

    def logits(self, hidden: Float[Tensor, "*axes hidden"], level: int = 0) -> Float[Tensor, "*axes draft_vocab"]:
        return self.frozen.unembed(hidden)

    def feedback(self, hidden: Hidden, features: Features) -> Features:
        return hidden


def input_scales(frozen: FrozenTarget) -> tuple[Float[Tensor, " hidden"], Float[Tensor, " hidden"]]:
    """Powers of two that scale an embedding and a feature to about 1.

    A feature is as large as the final norm's weight; an embedding is often far smaller, and would hardly count.
    """
    sizes = [float(ends.float().square().mean().sqrt()) for ends in (frozen.embedding, frozen.norm_weight)]
    embedding, feature = power_of_two_scales(sizes).to(frozen.embedding).unsqueeze(1)
    return embedding.expand(frozen.config.hidden_size), feature.expand(frozen.config.hidden_size)
