"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head, of several layers, that drafts all levels in one pass.

A level below the first reads a mask entry: the embedding of a mask token and a learned vector in place of the taps.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headstart.heads.base import Features, Hidden, Mask, Tokens, TrainingPasses
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.eagle3 import Eagle3Head, Eagle3Shape
from headstart.heads.layers import Attention, AttentionCache, DecoderLayer
from headstart.heads.target_config import TargetConfig, mask_token
from headstart.heads.vocab import DraftVocab

MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # vLLM takes the first that config.json has
KEEP_RATIO, KEEP_SHARE_MIN = 0.7, 0.2  # share of the positions that each depth of a training pass keeps of the last one


@dataclass(frozen=True)
class PEagleShape(Eagle3Shape):
    """Everything about a P-EAGLE head that is not a weight."""

    num_layers: int = field(kw_only=True)
    mask_token_id: int = field(kw_only=True)
    depths: int | None = field(default=None, kw_only=True)  # levels that it was trained to draft; None if unknown

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.num_layers, self.num_kv_heads, self.head_dim


class PEagleHead(Eagle3Head):
    """A P-EAGLE head. Level 0 is EAGLE-3's; a mask entry sees the text and the mask entries before it, no draft token.

    As a `LevelHead`, its feedback is the learned vector, whatever it computed before.
    """

    kind = "peagle"
    title = "P-EAGLE"
    trained_by = "mask entries"
    drafted_by = "mask entries"
    max_layers = None
    shape: PEagleShape

    def __init__(self, shape: PEagleShape, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        super().__init__(shape, frozen, vocab)
        self.max_levels, eps = shape.depths, shape.eps_of(frozen.config)
        later = {str(number): Attention(shape.hidden_size, shape) for number in range(1, shape.num_layers)}
        self.layers = nn.ModuleDict({number: DecoderLayer(shape, eps, each) for number, each in later.items()})
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))  # in place of the taps

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        named = any("peagle" in name.lower() for name in config.get("architectures") or [])
        return named or any(key in config for key in MASK_TOKEN_KEYS[1:])

    @classmethod
    def section_shape(cls, section: Any, target: TargetConfig, vocab: DraftVocab) -> PEagleShape:
        # No level reads an output, which a norm would change.
        sizes = {**vars(super().section_shape(section, target, vocab)), "norm_output": False}
        token = mask_token(section.mask_token_id, target, vocab.ids)
        return PEagleShape(**sizes, num_layers=section.num_layers, mask_token_id=token, depths=section.depths)

    @classmethod
    def config_shape(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetConfig) -> PEagleShape:
        sizes, mask_token_id = vars(super().config_shape(config, tensors, target)), named_mask_token(config)
        if mask_token_id is None or not 0 <= mask_token_id < target.vocab_size:
            allowed = f"0 to the target's {target.vocab_size - 1} is allowed; correct config.json"
            raise ValueError(f"{MASK_TOKEN_KEYS[0]}: {mask_token_id} given, {allowed}")
        return PEagleShape(
            **sizes,
            num_layers=config["num_hidden_layers"],
            mask_token_id=mask_token_id,
            depths=config.get("headstart", {}).get("depths"),
        )

    @torch.no_grad()
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        super().initialise(frozen, generator)
        self.mask_hidden.normal_(generator=generator)

    def folded_scale(self, name: str) -> Tensor | None:
        """The scale of the taps is folded out of the vector that takes their place."""
        if name == "mask_hidden" and self.input_scale is not None:
            return 1 / self.input_scale
        return super().folded_scale(name)

    def engine_config(self) -> dict[str, Any]:
        token = self.shape.mask_token_id
        mask_tokens = {"mask_token_id": token, "ptd_token_id": token}  # the latter for vLLM before 0.33
        return {**super().engine_config(), "num_hidden_layers": self.shape.num_layers, **mask_tokens}

    def engine_tensors(self) -> dict[str, Tensor]:
        return {name.replace("midlayer.", "layers.0."): each for name, each in super().engine_tensors().items()}

    def own_keys(self) -> dict[str, Any]:
        return {} if self.shape.depths is None else {"depths": self.shape.depths}

    def embedded(self, tokens: Tokens, level: int) -> Hidden:
        """At level 0 an entry may also be one of `mask_entries`."""
        return super().embedded(torch.full_like(tokens, self.shape.mask_token_id) if level else tokens, level)

    def run(
        self, embedded: Hidden, features: Features, rotary: Tensor, mask: Mask | None, cache: AttentionCache | None
    ) -> Hidden:
        hidden = super().run(embedded, features, rotary, mask, cache)
        for number, layer in self.layers.items():
            hidden = layer(hidden, rotary, mask, cache, int(number))
        return hidden

    def feedback(self, hidden: Hidden, features: Features) -> Features:
        return self.mask_feature().expand_as(features)

    def mask_feature(self) -> Float[Tensor, "1 1 feature"]:
        """The feature of every mask entry: the learned vector, in units of scaled taps, through `project`."""
        scale = self.input_scale
        return self.project(self.mask_hidden if scale is None else self.mask_hidden / scale)

    def mask_entries(
        self, roots: Int[Tensor, " texts"], count: int
    ) -> tuple[Float[Tensor, "texts count feature"], Int[Tensor, "texts count"], Int[Tensor, "texts count"]]:
        """Features, tokens and positions of the entries of levels 1 to `count`, given the last tokens' positions."""
        positions = roots.unsqueeze(1) + torch.arange(count, device=roots.device)
        tokens = torch.full_like(positions, self.shape.mask_token_id)
        return self.mask_feature().expand(len(roots), count, -1), tokens, positions

    def training_passes(self, samples: int, longest: int, unroll: int, anchors: int) -> TrainingPasses:
        """Each depth of a pass keeps a share of the positions."""
        tokens = samples * longest
        entries = int(tokens * sum(max(KEEP_RATIO**depth, KEEP_SHARE_MIN) for depth in range(unroll)))
        return TrainingPasses(max(entries // tokens, 1), entries, entries // unroll)


def named_mask_token(config: dict[str, Any]) -> int | None:
    """The mask token that a config.json names, as vLLM reads it."""
    return next((config[key] for key in MASK_TOKEN_KEYS if config.get(key) is not None), None)
