"""EAGLE-1 (arXiv 2401.15077) and, if unrolled, HASS (2408.15766): one decoder layer predicts the target's next feature.

The feature is the target's last hidden state after its final norm, so the target's lm_head turns it into logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Features, Hidden, LastHiddenHead, Mask, input_scales
from headstart.heads.frozen import FrozenTarget, drop_embedding
from headstart.heads.layers import Attention, AttentionCache, DecoderLayer, LayerShape
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import Eagle1Section


@dataclass(frozen=True)
class Eagle1Shape(LayerShape):
    """Everything about an EAGLE-1 head that is not a weight."""

    fc_bias: bool = False  # published heads often have one; we train none because vLLM ignores it


class Eagle1Layer(DecoderLayer):
    """A Llama decoder layer without its first norm."""

    def __init__(self, shape: Eagle1Shape, eps: float) -> None:
        super().__init__(shape, eps, Attention(shape.hidden_size, shape))
        self.input_layernorm = nn.Identity()


class Eagle1Head(LastHiddenHead):
    """An EAGLE-1 head; its parameters are named as in the published checkpoints."""

    kind = "eagle1"
    title = "EAGLE-1"
    shape: Eagle1Shape

    def __init__(self, shape: Eagle1Shape, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        super().__init__(shape, frozen, vocab)
        assert vocab.is_full
        assert shape.hidden_size == frozen.config.hidden_size
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=shape.fc_bias)
        self.layers = nn.ModuleList([Eagle1Layer(shape, shape.eps_of(frozen.config))])
        self.add_rotary(shape)

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        """Its files name nothing of their own: a head of no other kind is taken for one."""
        return True

    @classmethod
    def section_shape(cls, section: Eagle1Section, target: TargetConfig, vocab: DraftVocab) -> Eagle1Shape:
        return Eagle1Shape.from_section(section, target, target.hidden_size)

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], frozen: FrozenTarget) -> "Eagle1Head":
        drop_embedding(tensors, frozen)
        if "fc.bias" in tensors and not tensors["fc.bias"].any():
            del tensors["fc.bias"]
        shape = Eagle1Shape.from_config(config, frozen.config, fc_bias="fc.bias" in tensors)
        return cls(shape, frozen, DraftVocab.full(frozen.config.vocab_size))

    @torch.no_grad()
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        """Start with a layer that passes its input through, and scale the inputs of `fc` to about 1."""
        self.input_scale = torch.cat(input_scales(frozen)).to(self.embedding)
        self.start_at_random(generator)

    def engine_config(self) -> dict[str, Any]:
        """Has no key `bias`, which SGLang reads as the bias of `fc` but vLLM as that of the attention."""
        architectures = ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"]  # vLLM's name, SGLang's
        return {"architectures": architectures, **self.shape.to_config(self.target)}

    def engine_tensors(self) -> dict[str, Tensor]:
        # SGLang's `fc` always has a bias and leaves it uninitialised if the file has none.
        return {"fc.bias": self.fc.weight.new_zeros(self.shape.hidden_size), **self.folded_state()}

    def run(
        self, embedded: Hidden, features: Features, rotary: Tensor, mask: Mask | None, cache: AttentionCache | None
    ) -> Hidden:
        both = torch.cat([embedded, features], dim=-1)
        inputs = self.fc(both if self.input_scale is None else both * self.input_scale)
        return self.layers[0](inputs, rotary, mask, cache, 0)
