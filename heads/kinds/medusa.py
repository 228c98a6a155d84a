"""Medusa (arXiv 2401.10774): a small head for each of the next tokens; all read the same hidden state of the target."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.base import Features, Hidden, LastHiddenHead, Mask, Positions, Tokens, input_scales
from headstart.heads.frozen import FrozenTarget
from headstart.heads.layers import AttentionCache
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import MedusaSection

LOW_RANK = "lm_heads.0.down.weight"
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")  # vLLM's names, which are ours too
LM_HEAD = re.compile(r"lm_heads\.(\d+)\..+")


@dataclass(frozen=True)
class MedusaShape:
    """Everything about a set of Medusa heads that is not a weight."""

    hidden_size: int
    num_heads: int
    num_layers: int
    bias: bool = True
    lm_head_rank: int | None = None
    cache_shape: ClassVar[None] = None

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], hidden_size: int) -> "MedusaShape":
        """The shape that a file's tensors have; without layers if it has no Medusa head's."""
        blocks = [block for block in map(BLOCK.fullmatch, tensors) if block]
        lm_heads = [lm_head for lm_head in map(LM_HEAD.fullmatch, tensors) if lm_head]
        return cls(
            hidden_size,
            num_heads=len({name[1] for name in (*blocks, *lm_heads)}),
            num_layers=len({block[2] for block in blocks}),
            bias=any(block[3] == "bias" for block in blocks),
            lm_head_rank=len(tensors[LOW_RANK]) if LOW_RANK in tensors else None,
        )


class ResidualBlocks(nn.Module):
    """Layers that compute x + SiLU(W x + b)."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=shape.bias) for _ in range(shape.num_layers)])

    def forward(self, hidden: Float[Tensor, "*axes hidden"], scale: Tensor | None) -> Float[Tensor, "*axes hidden"]:
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden if scale is None else hidden * scale))
        return hidden


class LowRank(nn.Module):
    """A linear layer of low rank: up(down(x))."""

    def __init__(self, input_size: int, output_size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(input_size, rank, bias=False)
        self.up = nn.Linear(rank, output_size, bias=False)

    def forward(self, inputs: Float[Tensor, "*axes input"]) -> Float[Tensor, "*axes output"]:
        return self.up(self.down(inputs))

    @property
    def weight(self) -> Float[Tensor, "output input"]:
        return self.up.weight @ self.down.weight


class MedusaHead(LastHiddenHead):
    """All Medusa heads of a target: head i, at index t, reads the feature at position t and scores token t + 2 + i.

    Each head drafts one level, and all levels read the same feature. With `lm_head_rank`, all heads share the target's
    lm_head and each adds a linear layer of that rank to it. Parameters have vLLM's names.
    """

    kind = "medusa"
    title = "Medusa"
    shape: MedusaShape
    has_rope = False
    repeats_layers = False
    vocab_map = "token_map"

    def __init__(self, shape: MedusaShape, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        super().__init__(shape, frozen, vocab)
        assert shape.hidden_size == frozen.config.hidden_size
        self.max_levels = shape.num_heads
        numbers = range(shape.num_heads)
        self.blocks = nn.ModuleList([ResidualBlocks(shape) for _ in numbers])
        hidden, size, rank = shape.hidden_size, len(vocab.ids), shape.lm_head_rank
        self.lm_heads = nn.ModuleList(
            [nn.Linear(hidden, size, bias=False) if rank is None else LowRank(hidden, size, rank) for _ in numbers]
        )
        self.shared_lm_head: Tensor | None
        lm_head = None if shape.lm_head_rank is None else frozen.within(vocab).lm_head
        self.register_buffer("shared_lm_head", lm_head, persistent=False)  # [draft_vocab, hidden]

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        return "medusa_num_heads" in config or config.get("model_type") == "medusa"

    @classmethod
    def section_shape(cls, section: MedusaSection, target: TargetConfig, vocab: DraftVocab) -> MedusaShape:
        sizes = target.hidden_size, section.medusa_heads
        return MedusaShape(*sizes, num_layers=1, lm_head_rank=section.lm_head_rank)

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], frozen: FrozenTarget) -> "MedusaHead":
        ids, target = tensors.pop("token_map", None), frozen.config
        size = target.vocab_size
        vocab = DraftVocab.full(size) if ids is None else DraftVocab.from_ids(ids, size)
        shape = MedusaShape.of_tensors(tensors, target.hidden_size)
        if not shape.num_layers:
            advice = "convert a published head with headstart convert, or copy the head again"
            raise ValueError(f"blocks.0.layers.0.weight is missing; every Medusa head has this tensor: {advice}")
        return cls(shape, frozen, vocab)

    @torch.no_grad()
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        """Start with blocks that are the identity and with the target's lm_head, so every head gives the target's own
        logits; the random weights of low-rank layers have no effect before the first training step."""
        self.input_scale = input_scales(frozen)[1].to(self.embedding)
        for parameter in self.blocks.parameters():
            parameter.zero_()
        for lm_head in self.lm_heads:
            if isinstance(lm_head, LowRank):
                lm_head.down.weight.normal_(0.0, self.shape.hidden_size**-0.5, generator=generator)
                lm_head.up.weight.zero_()
            else:
                assert isinstance(lm_head, nn.Linear)
                lm_head.weight.copy_(frozen.within(self.vocab).lm_head)

    def engine_config(self) -> dict[str, Any]:
        """vLLM's keys, and the Medusa authors' where they have other names."""
        shape = self.shape
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": shape.num_heads,
            "num_hidden_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": len(self.vocab.ids),
            "original_lm_head": False,
            "medusa_fc_bias": shape.bias,  # without it vLLM drops the biases
            "medusa_num_heads": shape.num_heads,
            "medusa_num_layers": shape.num_layers,
        }

    def engine_tensors(self) -> dict[str, Tensor]:
        tensors = self.folded_state()
        return tensors if self.vocab.is_full else {**tensors, "token_map": self.vocab.ids}

    def folded_scale(self, name: str) -> Tensor | None:
        if self.input_scale is None or not (name.startswith("blocks.") and name.endswith(".weight")):
            return None
        return self.input_scale

    @torch.no_grad()
    def served_tensors(self) -> dict[str, Tensor]:
        """`engine_tensors` with low-rank layers expanded to full lm_heads, the only kind that the engines support."""
        tensors = self.engine_tensors()
        if self.shared_lm_head is None:
            return tensors
        others = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_heads.")}
        for number, lm_head in enumerate(self.lm_heads):
            assert isinstance(lm_head, LowRank)
            others[f"lm_heads.{number}.weight"] = self.shared_lm_head + lm_head.weight
        return others

    @property
    def logits_parameters(self) -> list[Tensor]:
        return list(self.lm_heads.parameters())

    def forward(
        self,
        features: Features,
        tokens: Tokens,
        positions: Positions,
        mask: Mask | None = None,
        cache: AttentionCache | None = None,
        level: int = 0,
    ) -> Hidden:
        return self.blocks[level](features, self.input_scale)

    def logits(self, hidden: Float[Tensor, "*axes hidden"], level: int = 0) -> Float[Tensor, "*axes draft_vocab"]:
        logits = self.lm_heads[level](hidden)
        if self.shared_lm_head is not None:
            logits = logits + functional.linear(hidden, self.shared_lm_head)
        cap = self.target.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def unrolled_logits(self, hidden: Float[Tensor, "levels *axes hidden"]) -> Float[Tensor, "levels *axes vocab"]:
        return torch.stack([self.logits(states, level) for level, states in enumerate(hidden)])

    def feedback(self, hidden: Hidden, features: Features) -> Features:
        return features
