"""What every draft head is: one forward, used alike to train, to draft and to export."""

from abc import ABC, abstractmethod

from jaxtyping import Float, Int
from torch import Tensor, nn

from heads.cache import AttentionCache
from heads.target_config import TargetConfig
from heads.vocab import DraftVocab


class DraftHead(nn.Module, ABC):
    """Predicts a target's next tokens from its hidden states.

    Index t of a sequence holds the target's features of position t and the token of position t + 1; the head's logits
    there are for the token of position t + 2. While drafting, where the target has not been yet, the head's own
    `feedback` stands in for the features.
    """

    kind: str
    target: TargetConfig
    taps: tuple[int, ...]  # which hidden_states of the target `project` takes, ascending
    vocab: DraftVocab
    feature_size: int
    embedding: Tensor  # the target's, [vocab, hidden], shared

    @property
    @abstractmethod
    def cache_shape(self) -> tuple[int, int, int]:
        """(layers, kv_heads, head_dim) of the keys that drafting must remember."""

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
    ) -> Float[Tensor, "batch seq feature"]:
        """The head's hidden state at each index, given what the cache and the (additive) mask let it see."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*axes feature"]) -> Float[Tensor, "*axes draft_vocab"]:
        """Scores over the draft vocabulary; apart from `forward`, so that only the indices that count pay for it."""

    @abstractmethod
    def feedback(self, hidden: Float[Tensor, "*axes feature"]) -> Float[Tensor, "*axes feature"]:
        """What the next step takes as its features."""
