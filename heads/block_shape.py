"""The sizes and options of a block head: everything about it that is not a weight."""

from dataclasses import dataclass

from headstart.heads.block_attention import Reach
from headstart.heads.layers import LayerShape


@dataclass(frozen=True)
class BlockShape(LayerShape):
    """Everything about a block head that is not a weight."""

    taps: tuple[int, ...]
    reaches: tuple[Reach, ...]  # one for each layer
    block_size: int  # slots of a block
    mask_token_id: int  # the token whose embedding fills all slots but the first
    sample_from_anchor: bool = True  # slot k predicts the token after slot k; false: slot k > 0 predicts its own token
    markov_rank: int = 0  # 0: no Markov head
    markov_gate: bool = False
    confidence: bool = False
    confidence_reads_markov: bool = True  # the confidence head sees the Markov head's view of the token before
    own_lm_head: bool = False  # a trained one; only published heads have it

    @property
    def num_layers(self) -> int:
        return len(self.reaches)

    @property
    def levels(self) -> int:
        """How many levels one pass drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def confidence_inputs(self) -> int:
        """The width of what the confidence head reads; 0 if there is none."""
        if not self.confidence:
            return 0
        return self.hidden_size + (self.markov_rank if self.confidence_reads_markov else 0)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.num_layers, self.num_kv_heads, self.head_dim
