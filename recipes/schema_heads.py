"""The recipe's head section: a class for each kind of head, which also says how heads of that kind are trained."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from headstart.recipes.values import Section

DraftVocabSize = Annotated[
    int | None, Field(gt=0, description="Most frequent tokens that the head may draft; null is the whole vocabulary.")
]


@dataclass(frozen=True)
class Loss:
    """The loss that a head is trained with: the sum of its parts, each by its weight."""

    name: str = "soft_cross_entropy"  # of the head's and the target's distributions; a key of heads.losses.OBJECTIVES
    weight: float = 1.0
    regression_weight: float = 0.0  # of the distance between the head's and the target's features
    input_noise: float = 0.0  # width of the noise on the features at NOISE_LENGTH tokens; 0 for none
    text_weight: float = 0.0  # of the cross-entropy to the text


class HeadSection(Section):
    """Base of the head sections: the facts about a kind of head that are known without building one."""

    kind: str
    script: ClassVar[str] = "trainers/eagle.py"  # trains heads of this kind
    own_fields: ClassVar[frozenset[str]] = frozenset()  # fields of training that only some kinds have
    levels_field: ClassVar[str | None] = None  # the field that sets `levels`

    @property
    def levels(self) -> int | None:
        """The number of levels that the head drafts; None is any number, of which training scores train.unroll."""
        return None if self.levels_field is None else int(getattr(self, self.levels_field))

    @property
    def loss(self) -> Loss:
        """The loss of the paper that the head follows."""
        return Loss()

    @property
    def unroll_decay(self) -> float:
        """The loss weight of a depth, relative to the one before, in that paper."""
        return 0.8


class LayerSection(HeadSection):
    """Sizes shared by the heads that are made of decoder layers; null copies the target's size."""

    intermediate_size: int | None = Field(
        default=None, gt=0, description="Width of the MLP, in features; null is the target's."
    )
    num_heads: int | None = Field(default=None, gt=0, description="Attention heads; null is the target's.")
    num_kv_heads: int | None = Field(
        default=None, gt=0, description="Key and value heads, a divisor of num_heads; null is the target's."
    )


class Eagle1Section(LayerSection):
    """An EAGLE-1 draft head (arXiv 2401.15077); train.unroll above 1 makes it HASS (2408.15766)."""

    kind: Literal["eagle1"] = Field(description="Architecture of the draft head.")

    @property
    def loss(self) -> Loss:
        return Loss(weight=0.1, regression_weight=1.0, input_noise=0.2)


class MtpSection(HeadSection):
    """The target's own multi-token-prediction layer (arXiv 2412.19437), which training tunes."""

    kind: Literal["mtp"] = Field(description="Architecture of the draft head.")


def refuse_unordered_taps(taps: tuple[int, ...]) -> tuple[int, ...]:
    """Raise ValueError for taps that repeat or do not ascend; heads read them in ascending order."""
    if list(taps) != sorted(set(taps)):
        raise ValueError(f"ascending indices without repeats are allowed; write {sorted(set(taps))}")
    return taps


Taps = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1), AfterValidator(refuse_unordered_taps)
]


class TappedSection(LayerSection):
    """Fields shared by EAGLE-3 and P-EAGLE heads."""

    own_fields: ClassVar[frozenset[str]] = frozenset({"train.fitted_start"})
    hidden_size: int | None = Field(
        default=None, gt=0, description="Width of the head; null is the target's. Another width gets its own embedding."
    )
    draft_vocab_size: DraftVocabSize = None
    taps: Taps | None = Field(
        default=None,
        description="Target hidden states that the head reads, by index (0 is the embedding); null is 2, L//2 and L-3 "
        "of L layers, for a block head five, spread from 2 to L-2.",
    )
    norms: bool = Field(
        default=False,
        description="Normalise each tap before joining them, and the feature fed to the next draft level (EAGLE-3.1).",
    )


class Eagle3Section(TappedSection):
    """An EAGLE-3 draft head (arXiv 2503.01840)."""

    kind: Literal["eagle3"] = Field(description="Architecture of the draft head.")


class PEagleSection(TappedSection):
    """A P-EAGLE draft head (arXiv 2602.01469): EAGLE-3 that drafts all levels in one pass."""

    kind: Literal["peagle"] = Field(description="Architecture of the draft head.")
    levels_field: ClassVar[str] = "depths"
    num_layers: int = Field(default=4, gt=0, le=16, description="Decoder layers of the P-EAGLE head.")
    depths: int = Field(default=8, gt=1, le=64, description="Levels that a pass drafts; it drafts no deeper.")
    mask_token_id: int | None = Field(
        default=None, ge=0, description="Token that marks a slot to fill, best an unused one; null chooses such a one."
    )

    @property
    def unroll_decay(self) -> float:
        """The paper takes the mean over all entries, whose number falls by this factor from depth to depth."""
        return 0.7


class MedusaSection(HeadSection):
    """Medusa heads (arXiv 2401.10774)."""

    kind: Literal["medusa"] = Field(description="Architecture of the draft head.")
    script: ClassVar[str] = "trainers/medusa.py"
    own_fields: ClassVar[frozenset[str]] = frozenset({"joint.mode"})
    levels_field: ClassVar[str] = "medusa_heads"
    medusa_heads: int = Field(
        default=4, gt=0, le=32, description="Number of Medusa heads; head i predicts the token at depth i."
    )
    lm_head_rank: int | None = Field(
        default=None, gt=0, description="Rank of each head's addition to the target's lm_head; null: each has its own."
    )
    draft_vocab_size: DraftVocabSize = None


class BlockSection(LayerSection):
    """A block head, which drafts all levels in one pass: DSpark (arXiv 2607.05147) or, by its fields, DFlash
    (2602.06036) or JetSpec (2606.18394)."""

    kind: Literal["block"] = Field(description="Architecture of the draft head.")
    script: ClassVar[str] = "trainers/block.py"
    own_fields: ClassVar[frozenset[str]] = frozenset({"train.anchors"})
    levels_field: ClassVar[str] = "block_size"
    num_layers: int = Field(default=2, gt=0, le=16, description="Decoder layers of the block head.")
    block_size: int = Field(
        default=7, gt=1, le=64, description="Slots that a pass fills, the last token's included; it drafts no deeper."
    )
    causal: bool = Field(
        default=False, description="A slot sees only the slots before it in its block (JetSpec); false is all of them."
    )
    window: int | None = Field(
        default=None, gt=0, description="Positions before the block that it sees (sliding attention); null is all."
    )
    markov_rank: int = Field(
        default=256,
        ge=0,
        description="Rank of the Markov head, which adds to a slot's scores what the token before it says (DSpark); 0 "
        "is none (JetSpec, or DFlash without causal, whose slots predict the token at their own position).",
    )
    draft_vocab_size: DraftVocabSize = None
    mask_token_id: int | None = Field(
        default=None, ge=0, description="Token that marks a slot to fill, best an unused one; null chooses such a one."
    )
    taps: Taps | None = Field(
        default=None,
        description="Target hidden states that the head reads, by index (0 is the embedding); null is five, spread "
        "from 2 to L-2 of L layers.",
    )

    @property
    def sample_from_anchor(self) -> bool:
        """Whether each slot predicts the token after its own position (DSpark, JetSpec), or its own token (DFlash)."""
        return bool(self.markov_rank or self.causal)

    @property
    def levels(self) -> int:
        """The number of levels that one pass drafts; in DFlash the anchor's slot drafts none."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def loss(self) -> Loss:
        if self.markov_rank:  # DSpark: .9 of the L1 distance, which is 2 TV
            return Loss("total_variation", weight=1.8, text_weight=0.1)
        return Loss() if self.causal else Loss(weight=0.0, text_weight=1.0)  # JetSpec's or DFlash's

    @property
    def unroll_decay(self) -> float:
        """DFlash's decay, which is slower for larger blocks."""
        slots = 4 if self.block_size <= 8 else 5 if self.block_size <= 10 else 7
        return math.exp(-1 / slots)


AnyHeadSection = Annotated[
    Eagle1Section | Eagle3Section | PEagleSection | MedusaSection | BlockSection | MtpSection,
    Field(discriminator="kind"),
]
