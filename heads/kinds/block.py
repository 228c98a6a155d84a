"""Block heads: one pass over a block of slots drafts all levels of a tree.

DFlash (arXiv 2602.06036): every layer attends to keys and values that it computes from the target's hidden states.
DSpark (2607.05147): a Markov head adds scores for a slot's token given the token before it.
JetSpec (2606.18394): a slot sees only the slots before it in its block.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headstart.heads.base import DraftHead, Features, Positions, Tokens, TrainingPasses
from headstart.heads.frozen import FrozenTarget, drop_embedding, is_copy
from headstart.heads.kinds.block_attention import BlockCache, Blocks, Reach
from headstart.heads.kinds.block_config import BlockShape, block_config, block_shape, block_taps, is_block_config
from headstart.heads.layers import AttentionCache, DecoderLayer, Projections, RMSNorm, rotate
from headstart.heads.target_config import TargetConfig, mask_token
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import BlockSection

Slots = Float[Tensor, "blocks slots hidden"]
NUM_TAPS = 5  # by default
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")  # engines read them, headstart does not
FIRST_NORM = 0.25  # share of the target's norm; a full one makes an untrained head confidently wrong


@runtime_checkable  # the shape checks in tests use isinstance
class ContextCache(AttentionCache, Protocol):
    """Keeps the keys and values of the verified positions, which every block attends to."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> object: ...


class ContextAttention(Projections):
    """Grouped-query attention of the slots to the context and to each other, with one norm per attention head."""

    same_input = (("k_proj", "v_proj"),)  # they read the context, too, which has no queries

    def __init__(self, shape: BlockShape, eps: float) -> None:
        super().__init__(shape.hidden_size, shape)
        self.q_norm = RMSNorm(shape.head_dim, eps)
        self.k_norm = RMSNorm(shape.head_dim, eps)

    def keys_and_values(
        self, inputs: Float[Tensor, "batch seq hidden"], rotary: Float[Tensor, "*batch seq double"]
    ) -> tuple[Tensor, Tensor]:
        """[batch, kv_heads, seq, head_dim] each"""
        key = self.k_norm(self.by_head(self.k_proj(inputs)))
        return rotate(key, *rotary.unsqueeze(-3).chunk(2, dim=-1)), self.by_head(self.v_proj(inputs))

    def forward(
        self,
        inputs: Slots,
        rotary: Float[Tensor, "blocks slots double"],
        mask: Float[Tensor, "*axes slots keys"] | None,
        cache: AttentionCache,
        layer: int,
    ) -> Slots:
        query = rotate(self.q_norm(self.by_head(self.q_proj(inputs))), *rotary.unsqueeze(-3).chunk(2, dim=-1))
        mixed = cache.attend(layer, query, *self.keys_and_values(inputs, rotary), mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MarkovHead(nn.Module):
    """Scores for a slot's token given the token before: a low-rank table, or one gated by the slot's state."""

    def __init__(self, shape: BlockShape, vocab: DraftVocab) -> None:
        super().__init__()
        rank = shape.markov_rank
        self.markov_w1 = nn.Embedding(vocab.target_size, rank)
        self.markov_w2 = nn.Linear(rank, len(vocab.ids), bias=False)
        if shape.markov_gate:
            self.gate_proj = nn.Linear(shape.hidden_size + rank, rank)
        self.gated = shape.markov_gate

    def forward(
        self, hidden: Float[Tensor, "*#axes hidden"], before: Int[Tensor, "*axes"]
    ) -> Float[Tensor, "*axes draft_vocab"]:
        known = self.markov_w1(before)  # [*axes, rank]
        if self.gated:
            hidden = hidden.expand(*known.shape[:-1], -1)
            known = torch.sigmoid(self.gate_proj(torch.cat([hidden, known], dim=-1))) * known
        return self.markov_w2(known)


class BlockHead(DraftHead):
    """A block head; its parameters are named as in the published checkpoints.

    A block begins at its anchor, the last token of the text. The anchor's hidden states are not known yet, so the block
    sees the target's features of the positions before it.
    """

    kind = "block"
    title = "Block"
    trained_by = "blocks"
    drafted_by = "blocks"
    max_layers = None
    shape: BlockShape

    def __init__(self, shape: BlockShape, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        super().__init__(shape, frozen, vocab)
        target = frozen.config
        assert shape.hidden_size == target.hidden_size
        self.taps, self.feature_size, self.max_levels = shape.taps, shape.hidden_size, shape.levels
        eps = shape.eps_of(target)
        self.fc = nn.Linear(len(shape.taps) * target.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, eps)
        attentions = [ContextAttention(shape, eps) for _ in range(shape.num_layers)]
        self.layers = nn.ModuleList([DecoderLayer(shape, eps, each) for each in attentions])
        self.norm = RMSNorm(shape.hidden_size, eps)
        self.markov_head = MarkovHead(shape, vocab) if shape.markov_rank else None
        self.lm_head: nn.Module | None
        self.lm_head = nn.Linear(shape.hidden_size, len(vocab.ids), bias=False) if shape.own_lm_head else None
        self.shared_lm_head: Tensor | None
        shared = None if shape.own_lm_head else frozen.within(vocab).lm_head
        self.register_buffer("shared_lm_head", shared, persistent=False)  # [draft_vocab, hidden]
        self.add_rotary(shape)

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        return is_block_config(config)

    @classmethod
    def scales_taps(cls, section: BlockSection) -> bool:
        return True

    @classmethod
    def section_taps(cls, section: BlockSection, target: TargetConfig) -> tuple[int, ...]:
        return spread_taps(target.num_layers, NUM_TAPS) if section.taps is None else section.taps

    @classmethod
    def config_taps(cls, config: dict[str, Any], target: TargetConfig) -> tuple[int, ...]:
        return block_taps(config)

    @classmethod
    def section_shape(cls, section: BlockSection, target: TargetConfig, vocab: DraftVocab) -> BlockShape:
        return BlockShape.from_section(
            section,
            target,
            target.hidden_size,
            taps=cls.section_taps(section, target),
            reaches=(Reach(section.window, section.causal),) * section.num_layers,
            block_size=section.block_size,
            mask_token_id=mask_token(section.mask_token_id, target, vocab.ids),
            sample_from_anchor=section.sample_from_anchor,
            markov_rank=section.markov_rank,
        )

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], frozen: FrozenTarget) -> "BlockHead":
        target = frozen.config
        vocab = DraftVocab.from_tensors(tensors, target.vocab_size)
        drop_embedding(tensors, frozen)
        for name in CONFIDENCE:
            tensors.pop(name, None)
        lm_head = tensors.get("lm_head.weight")
        own_lm_head = lm_head is not None and not is_copy(lm_head, frozen.within(vocab).lm_head)
        if not own_lm_head:
            tensors.pop("lm_head.weight", None)
        shape = block_shape(config, target, own_lm_head=own_lm_head)
        if not vocab.is_full and shape.mask_token_id in vocab.ids:
            allowed = "the id of a token that the head does not draft is allowed: correct mask_token_id or d2t"
            raise ValueError(f"mask_token_id: {shape.mask_token_id} given, which is in the draft vocabulary; {allowed}")
        return cls(shape, frozen, vocab)

    @torch.no_grad()
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        """Start with layers that pass their input through, and with a Markov head whose scores are zero.

        Its table of tokens starts as a projection of the target's embedding, so that similar tokens start similar.
        """
        self.start_at_random(generator)
        self.norm.weight.copy_(FIRST_NORM * frozen.norm_weight)
        if self.markov_head is not None:
            table = self.markov_head.markov_w1.weight
            projection = torch.empty(frozen.embedding.shape[1], table.shape[1]).normal_(0, 1, generator=generator)
            tokens = frozen.embedding.float() @ projection.to(frozen.embedding.device)
            table.copy_(tokens / tokens.square().mean().sqrt())

    def engine_config(self) -> dict[str, Any]:
        return block_config(self.shape, self.target, len(self.vocab.ids))

    def engine_tensors(self) -> dict[str, Tensor]:
        """With an lm_head of its own for a reduced draft vocabulary, which engines cannot cut out themselves."""
        tensors = self.folded_state()
        if not self.vocab.is_full:
            tensors |= {"lm_head.weight": self.output_layer, "d2t": self.vocab.offsets()}
        return tensors

    def own_keys(self) -> dict[str, Any]:
        """The slots that it was trained with: engines may be given a smaller number."""
        return {"block_size": self.shape.block_size}

    @property
    def output_layer(self) -> Float[Tensor, "draft_vocab hidden"]:
        """The target's lm_head within the draft vocabulary, or the head's own."""
        found = self.shared_lm_head if self.lm_head is None else self.lm_head.weight
        assert isinstance(found, Tensor)
        return found

    def hold_lm_head(self, packed: nn.Module | None) -> None:
        """Make a layer of the shared lm_head, which can be packed for a processor; for a head that drafts.

        `packed` is the target's own layer, if it is packed, which serves a head that drafts the whole vocabulary.
        """
        if self.lm_head is None and packed is not None and self.vocab.is_full:
            self.lm_head, self.shared_lm_head = packed, None
        elif self.lm_head is None:
            out_features, in_features = self.output_layer.shape
            lm_head = nn.Linear(in_features, out_features, bias=False, device="meta")
            lm_head.weight = nn.Parameter(self.output_layer, requires_grad=False)
            self.lm_head = lm_head
            self.shared_lm_head = None

    @property
    def logits_parameters(self) -> list[Tensor]:
        parts = self.lm_head, self.markov_head
        return [parameter for part in parts if part is not None for parameter in part.parameters()]

    def project(self, taps: Float[Tensor, "*axes tapped"]) -> Float[Tensor, "*axes feature"]:
        return self.hidden_norm(self.fc(taps if self.input_scale is None else taps * self.input_scale))

    def read(self, features: Features, positions: Positions, cache: ContextCache) -> None:
        """Write the keys and values of verified positions to the cache, where the blocks of later steps find them."""
        rotary = self.rotary[positions]
        for number, layer in enumerate(self.layers):
            assert isinstance(layer.self_attn, ContextAttention)
            cache.append(number, *layer.self_attn.keys_and_values(features, rotary))

    def forward(
        self,
        anchors: Int[Tensor, " blocks"],
        positions: Int[Tensor, " blocks"],
        cache: ContextCache,
        masks: Sequence[Tensor | None] | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "blocks levels hidden"]:
        """The hidden state of each level, from blocks that begin with these tokens at these positions.

        `masks` are those of each layer, additive; without them, the cache knows what a block sees. With
        `checkpointing`, the backward pass computes each layer again.
        """
        size = self.shape.block_size
        hidden = self.embedding[self.shape.mask_token_id].expand(len(anchors), size - 1, -1)
        hidden = torch.cat([self.embedding[anchors].unsqueeze(1), hidden], dim=1)  # [blocks, slots, hidden]
        rotary = self.rotary[positions.unsqueeze(1) + torch.arange(size, device=positions.device)]
        for number, layer in enumerate(self.layers):
            given = hidden, rotary, None if masks is None else masks[number], cache, number
            if checkpointing:
                hidden = checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(*given)
        return self.norm(hidden[:, size - self.shape.levels :])

    def slot_logits(self, hidden: Float[Tensor, "*axes hidden"]) -> Float[Tensor, "*axes draft_vocab"]:
        """Scores from the slots alone, without the Markov head."""
        own = self.lm_head  # decoding may have no `weight` of the own one, so it is called
        logits = own(hidden) if own is not None else functional.linear(hidden, self.output_layer)
        cap = self.target.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def logits(
        self, hidden: Float[Tensor, "*#axes hidden"], before: Int[Tensor, "*axes"]
    ) -> Float[Tensor, "*axes draft_vocab"]:
        """Scores of the tokens after the tokens `before`, given the slots' hidden states."""
        slots = self.slot_logits(hidden)
        if self.markov_head is None:
            return slots.expand(*before.shape, -1)
        return slots + self.markov_head(hidden, before)

    def text_states(self, features: Features, tokens: Tokens, blocks: Blocks) -> Float[Tensor, "blocks levels hidden"]:
        """`forward` for blocks within whole texts, whose features are those of the positions of `tokens`."""
        return self.blocks_of(features, torch.arange(tokens.shape[1], device=tokens.device), tokens, blocks)

    def text_logits(
        self, features: Features, text: Int[Tensor, "1 tokens"], depth: int
    ) -> Iterator[Float[Tensor, "choices draft_vocab"]]:
        choices = features.shape[1] - 1
        states = self.text_states(features, text[:, :-1], Blocks.at_every_position(features.shape[1]))
        for level in range(min(depth, choices)):
            yield self.logits(states[: choices - level, level], text[0, level + 1 : choices + 1])

    def training_passes(self, samples: int, longest: int, unroll: int, anchors: int) -> TrainingPasses:
        """Only `fc` reads all positions; the layers read the blocks."""
        shape, scored = self.shape, samples * min(anchors, longest)
        return TrainingPasses(
            shape.num_layers,
            scored * shape.block_size,
            scored,
            read_once=(self.fc,),
            kept_in_float32=2 * shape.num_layers * shape.num_heads * shape.head_dim,  # of the norms of queries and keys
        )

    def blocks_of(
        self, features: Features, positions: Positions, tokens: Tokens, blocks: Blocks, checkpointing: bool = False
    ) -> Float[Tensor, "blocks levels hidden"]:
        """`forward` for blocks within texts that the target has read, all in one pass."""
        cache = BlockCache(blocks, self.shape.reaches)
        self.read(features, positions, cache)
        anchors = tokens[blocks.indices(tokens.device)]
        return self(anchors, blocks.positions(tokens.device), cache, checkpointing=checkpointing)


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """DFlash's taps: hidden_states from 2 to L-2 of L layers, evenly spread; fewer if the target has few layers."""
    last = max(num_layers - 2, 0)
    first = min(2, last)
    return tuple(sorted({round(first + i * (last - first) / max(count - 1, 1)) for i in range(count)}))
