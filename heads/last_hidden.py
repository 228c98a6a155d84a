"""The base class of EAGLE-1 and Medusa, whose only feature is the target's last hidden state after its final norm."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from headstart.heads.base import LevelHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.layers import power_of_two_scales
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema import HeadSection


class LastHiddenHead(LevelHead):
    """A head that shares the target's embedding, final norm and lm_head, and neither trains nor saves them."""

    norm_weight: Tensor
    norm_bias: Tensor | None
    lm_head: Tensor

    def __init__(self, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        super().__init__()
        self.target, self.taps, self.vocab = frozen.config, (frozen.config.num_layers,), vocab
        self.feature_size = frozen.config.hidden_size
        for name in ("embedding", "norm_weight", "norm_bias", "lm_head"):
            self.register_buffer(name, getattr(frozen, name), persistent=False)

    @classmethod
    def section_taps(cls, section: HeadSection, target: TargetConfig) -> tuple[int, ...]:
        return (target.num_layers,)

    @classmethod
    def config_taps(cls, config: dict[str, Any], target: TargetConfig) -> tuple[int, ...]:
        return (target.num_layers,)

    @property
    def frozen(self) -> FrozenTarget:
        """The target's shared tensors, on this head's device."""
        return FrozenTarget(self.target, self.embedding, self.norm_weight, self.norm_bias, self.lm_head)

    def project(self, taps: Float[Tensor, "*axes tapped"]) -> Float[Tensor, "*axes feature"]:
        return self.frozen.norm(taps)


def input_scales(frozen: FrozenTarget) -> tuple[Float[Tensor, " hidden"], Float[Tensor, " hidden"]]:
    """Powers of two that scale an embedding and a feature to about 1.

    A feature is as large as the final norm's weight. An embedding is often far smaller, and unscaled it would hardly
    influence the result.
    """
    sizes = [float(ends.float().square().mean().sqrt()) for ends in (frozen.embedding, frozen.norm_weight)]
    embedding, feature = (
        power_of_two_scales(sizes).to(frozen.embedding).unsqueeze(1).expand(-1, frozen.config.hidden_size)
    )
    return embedding, feature
