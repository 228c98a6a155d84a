"""Medusa (arXiv 2401.10774): a small head for each of the next tokens; all read the same hidden state of the target.

With `sequential`, head i also reads the i + 1 tokens before the one that it predicts: Hydra (arXiv 2402.05109).
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.base import Features, Hidden, LastHiddenHead, Mask, Positions, Tokens, input_scales
from headstart.heads.frozen import FrozenTarget
from headstart.heads.layers import AttentionCache
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import MedusaSection

LOW_RANK = "lm_heads.0.down.weight"
# The two naming schemes for tensors: vLLM's, which we use too, and the Medusa authors' (reference).
# vLLM       blocks.H.layers.L.weight   blocks.H.layers.L.bias   lm_heads.H.weight        token_map
# reference  H.L.linear.weight          H.L.linear.bias          H.N.weight, N layers
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
PREFIX = re.compile(r"(?:medusa_heads?\.)?(?=\d+\.\d+\.)")
REFERENCE_BLOCK = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
REFERENCE_LM_HEAD = re.compile(r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight")


@dataclass(frozen=True)
class MedusaShape:
    """Everything about a set of Medusa heads that is not a weight."""

    hidden_size: int
    num_heads: int
    num_layers: int
    bias: bool = True
    sequential: bool = False
    lm_head_rank: int | None = None
    cache_shape: ClassVar[None] = None

    def input_size(self, head: int) -> int:
        """Input width of a head's first layer: a hidden state and, with `sequential`, the known tokens' embeddings."""
        return self.hidden_size * (head + 2 if self.sequential else 1)


class ResidualBlocks(nn.Module):
    """Layers that compute x + SiLU(W x + b); in the first one, W may read further inputs next to x."""

    def __init__(self, input_size: int, shape: MedusaShape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        sizes = [input_size] + [hidden] * (shape.num_layers - 1)
        self.layers = nn.ModuleList([nn.Linear(size, hidden, bias=shape.bias) for size in sizes])

    def forward(self, inputs: Float[Tensor, "*axes input"], scale: Tensor | None) -> Float[Tensor, "*axes hidden"]:
        hidden = inputs[..., : self.layers[0].out_features]
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(inputs if scale is None else inputs * scale[: inputs.shape[-1]]))
            inputs = hidden
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

    Each head drafts one level. All levels read the same feature; with `sequential`, the embeddings of the tokens in
    between are appended to it. With `lm_head_rank`, all heads share the target's lm_head and each adds a linear layer
    of that rank to it. Parameters have vLLM's names.
    """

    kind = "medusa"
    title = "Medusa"
    shape: MedusaShape
    has_rope = False
    reads_tokens = False
    repeats_layers = False
    vocab_map = "token_map"

    def __init__(self, shape: MedusaShape, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        super().__init__(frozen, vocab)
        assert shape.hidden_size == frozen.config.hidden_size
        self.shape, self.max_levels = shape, shape.num_heads
        numbers = range(shape.num_heads)
        self.blocks = nn.ModuleList([ResidualBlocks(shape.input_size(head), shape) for head in numbers])
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
    def section_vocab(cls, section: MedusaSection, counts: Int[Tensor, " vocab"]) -> DraftVocab:
        return DraftVocab.most_frequent(counts, section.draft_vocab_size)

    @classmethod
    def from_section(cls, section: MedusaSection, frozen: FrozenTarget, vocab: DraftVocab) -> "MedusaHead":
        sizes = frozen.config.hidden_size, section.medusa_heads
        shape = MedusaShape(*sizes, num_layers=1, sequential=section.sequential, lm_head_rank=section.lm_head_rank)
        return cls(shape, frozen, vocab)

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], frozen: FrozenTarget) -> "MedusaHead":
        named = from_any_layout(tensors)
        tensors.clear()
        tensors.update(named)
        ids, target = tensors.pop("token_map", None), frozen.config
        size = target.vocab_size
        vocab = DraftVocab.full(size) if ids is None else DraftVocab.from_ids(ids, size)
        first = [name for name in tensors if name.startswith("blocks.0.layers.") and name.endswith(".weight")]
        if not first:
            advice = "copy the head again, or correct headstart.kind in its config.json"
            raise ValueError(f"blocks.0.layers.0.weight is missing; every Medusa head has this tensor: {advice}")
        shape = MedusaShape(
            hidden_size=target.hidden_size,
            num_heads=len({name.split(".")[1] for name in tensors if name.startswith("lm_heads.")}),
            num_layers=len(first),
            bias="blocks.0.layers.0.bias" in tensors,
            sequential=tensors["blocks.0.layers.0.weight"].shape[-1] == 2 * target.hidden_size,
            lm_head_rank=len(tensors[LOW_RANK]) if LOW_RANK in tensors else None,
        )
        return cls(shape, frozen, vocab)

    @torch.no_grad()
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        """Start with blocks that are the identity and with the target's lm_head, so every head gives the target's own
        logits; the random weights of low-rank layers have no effect before the first training step."""
        embedding, feature = input_scales(frozen)
        last = self.shape.num_heads - 1
        known = self.shape.input_size(last) // self.shape.hidden_size - 1
        self.input_scale = torch.cat([feature, *[embedding] * known]).to(self.embedding)
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
        """vLLM's keys, then the Medusa authors' keys that have other names; no engine supports sequential heads."""
        shape = self.shape
        return {
            "architectures": ["HydraHeads" if shape.sequential else "MedusaModel"],
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
        return self.input_scale[: self.get_parameter(name).shape[-1]]

    @torch.no_grad()
    def tensors_with_full_lm_heads(self) -> dict[str, Tensor]:
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
        return self.blocks[level](self.with_tokens(features, tokens), self.input_scale)

    def with_tokens(self, features: Features, tokens: Tokens) -> Float[Tensor, "batch seq extended"]:
        """The features, with the tokens' embeddings appended for sequential heads."""
        return torch.cat([features, self.embedding[tokens]], dim=-1) if self.shape.sequential else features

    def logits(self, hidden: Float[Tensor, "*axes hidden"], level: int = 0) -> Float[Tensor, "*axes draft_vocab"]:
        logits = self.lm_heads[level](hidden)
        if self.shared_lm_head is not None:
            logits = logits + functional.linear(hidden, self.shared_lm_head)
        cap = self.target.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def unrolled_logits(self, hidden: Float[Tensor, "levels *axes hidden"]) -> Float[Tensor, "levels *axes vocab"]:
        return torch.stack([self.logits(states, level) for level, states in enumerate(hidden)])

    def feedback(self, hidden: Hidden, features: Features, tokens: Tokens) -> Float[Tensor, "batch seq next_feature"]:
        return self.with_tokens(features, tokens)


def from_any_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under vLLM's names; a name that belongs to neither layout stays as it is."""
    return {vllm_name(name): tensor for name, tensor in tensors.items()}


def vllm_name(name: str) -> str:
    if block := REFERENCE_BLOCK.fullmatch(name):
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    if lm_head := REFERENCE_LM_HEAD.fullmatch(name):
        return f"lm_heads.{lm_head[1]}.weight"
    return name


def to_reference_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the Medusa authors' names; raises ValueError for heads that their layout cannot hold."""
    first = next(tensor for name, tensor in tensors.items() if name.startswith("blocks."))
    if first.shape[0] != first.shape[-1]:
        reads = "blocks.0.layers.0.weight reads more than one hidden state"
        raise ValueError(f"{reads}; the Medusa authors' layout has no such heads")
    num_layers = 1 + max(int(found[2]) for found in map(BLOCK.fullmatch, tensors) if found)
    return {reference_name(name, num_layers): tensor for name, tensor in tensors.items()}


def reference_name(name: str, num_layers: int) -> str:
    if block := BLOCK.fullmatch(name):
        return f"{block[1]}.{block[2]}.linear.{block[3]}"
    if lm_head := LM_HEAD.fullmatch(name):
        return f"{lm_head[1]}.{num_layers}.weight"
    raise ValueError(f"{name}: the Medusa authors' layout has no such tensor, and no draft vocabulary, as vLLM's has")
