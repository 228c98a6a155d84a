"""What every draft head is: one forward, used alike to train, to draft and to export."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heads.calibration import Calibration
from heads.frozen import FrozenTarget
from heads.layers import AttentionCache
from heads.target_config import TargetConfig
from heads.vocab import DraftVocab
from recipes.schema import HeadSection

EXTRA_ROTARY_POSITIONS = (
    64  # positions of the rotary table beyond the target's: an unroll looks a little past a sample's end
)


class DraftHead(nn.Module, ABC):
    """Predicts a target's next tokens from its hidden states.

    Index t of a sequence holds the target's features of position t and the token of position t + 1; the head's logits
    there are for the token of position t + 2. While drafting, where the target has not been yet, the head's own
    `feedback` stands in for the features; `level` counts how often it has.
    """

    kind: str
    shape: Hashable  # everything about it that is not a weight
    target: TargetConfig
    taps: tuple[int, ...]  # which hidden_states of the target `project` takes, ascending
    vocab: DraftVocab
    feature_size: int
    embedding: Tensor  # the target's, [vocab, hidden], shared
    calibration: Calibration = Calibration()  # fitted after training
    max_levels: int | None = None  # that it can draft; None: any number
    has_rope: bool = True  # does it rotate by position, so that its rope must be the target's?

    @classmethod
    @abstractmethod
    def section_taps(cls, section: HeadSection, target: TargetConfig) -> tuple[int, ...]:
        """The `taps` of a head that a recipe names."""

    @classmethod
    @abstractmethod
    def config_taps(cls, config: dict[str, Any], target: TargetConfig) -> tuple[int, ...]:
        """The `taps` of a head that a config.json describes."""

    @classmethod
    @abstractmethod
    def from_section(cls, section: HeadSection, frozen: FrozenTarget, vocab: DraftVocab) -> "DraftHead":
        """A head of the sizes that a recipe names, its weights not yet drawn; what is left open is the target's."""

    @classmethod
    @abstractmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], frozen: FrozenTarget) -> "DraftHead":
        """A head of the sizes that a config.json names; `tensors` comes back as its state dict.

        Raises ValueError for tensors that contradict each other.
        """

    @abstractmethod
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        """Draw the weights that training starts from."""

    @abstractmethod
    def engine_config(self) -> dict[str, Any]:
        """config.json as the engines read it; each key stands because leaving it out costs acceptance."""

    @abstractmethod
    def engine_tensors(self) -> dict[str, Tensor]:
        """model.safetensors as the engines read it."""

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """What a decode step may compile."""
        return ()

    @property
    @abstractmethod
    def cache_shape(self) -> tuple[int, int, int] | None:
        """(layers, kv_heads, head_dim) of the keys that drafting must remember; None if there are none."""

    @property
    @abstractmethod
    def logits_parameters(self) -> list[Tensor]:
        """The trained weights that `logits` depends on."""

    @abstractmethod
    def project(self, taps: Float[Tensor, "*axes tapped"]) -> Float[Tensor, "*axes feature"]:
        """The target's tapped hidden states, concatenated in ascending order, as features of this head."""

    @abstractmethod
    def forward(
        self,
        features: Float[Tensor, "batch seq feature"],
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "*batch seq"],
        mask: Float[Tensor, "*axes seq keys"] | None = None,
        cache: AttentionCache | None = None,
        level: int = 0,
    ) -> Float[Tensor, "batch seq hidden"]:
        """The head's hidden state at each index, given what the cache and the (additive) mask let it see."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*axes hidden"], level: int = 0) -> Float[Tensor, "*axes draft_vocab"]:
        """Scores over the draft vocabulary; apart from `forward`, so that only the indices that count pay for it."""

    def unrolled_logits(self, hidden: Float[Tensor, "levels *axes hidden"]) -> Float[Tensor, "levels *axes vocab"]:
        """The same of all levels of an unroll at once."""
        return torch.stack([self.logits(states, level) for level, states in enumerate(hidden)])

    @abstractmethod
    def feedback(
        self,
        hidden: Float[Tensor, "batch seq hidden"],
        features: Float[Tensor, "batch seq feature"],
        tokens: Int[Tensor, "batch seq"],
    ) -> Float[Tensor, "batch seq next_feature"]:
        """What the next step takes as its features, given what this one took and made of it."""
