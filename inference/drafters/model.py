"""Speculative decoding with a model as the drafter: a small causal LM (Leviathan et al., arXiv 2211.17192), or the
target's own first layers (early exit, as in LayerSkip, arXiv 2404.16710). Both grow trees as a head does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headstart.heads.calibration import Calibration
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.drafter import Verified
from headstart.inference.core.tree import Block, Tree
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.head import Frontier, HeadDrafter, LevelMasks
from headstart.inference.targets.architecture import first_layers
from headstart.inference.targets.model import Masks, TargetModel


class ModelAsHead:
    """A causal LM with the interface of a head: it reads no features, and its "hidden states" are its logits."""

    taps: tuple[int, ...] = ()
    calibration = Calibration()
    max_levels: int | None = None

    def __init__(self, model: TargetModel, target: TargetModel) -> None:
        """The vocabularies may differ by padding or added tokens.

        Only tokens that both have are drafted, and those that a constraint forces.
        """
        self.model = model
        self.columns = min(model.config.vocab_size, target.config.vocab_size)
        self.vocab = DraftVocab(torch.arange(self.columns), target.config.vocab_size)
        self.embedding: Tensor = model.model.get_input_embeddings().weight

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        return self.model.layers

    @property
    def cache_shape(self) -> tuple[int, int, int] | None:
        return self.model.cached_shape

    def project(self, taps: Tensor) -> Tensor:
        return taps

    def __call__(self, tokens: Int[Tensor, "batch block"], *args: Any, **options: Any) -> Tensor:
        """The logits for (tokens, positions, masks, cache).

        The model reads its own last token in place of a target token that is outside its vocabulary.
        """
        known = tokens.clamp(max=self.model.config.vocab_size - 1)
        logits: Tensor = self.model.forward(known, *args, **options).logits
        return logits

    def logits(self, hidden: Float[Tensor, "*axes vocab"], level: int = 0) -> Float[Tensor, "*axes draft_vocab"]:
        return hidden[..., : self.columns]

    def feedback(
        self, hidden: Float[Tensor, "*axes vocab"], features: Tensor, tokens: Tensor
    ) -> Float[Tensor, "*axes none"]:
        """No features: the next level reads only tokens."""
        return hidden[..., :0]


class ModelDrafter(HeadDrafter):
    """Drafts with a model that has the target's tokenizer, and grows trees as a head does.

    The model's KV cache lies next to the target's; its slot t holds the token at position t. After verification the
    model reads the accepted tokens again and overwrites the draft tokens' slots, so no cache entries have to be moved.
    While a tree grows, its root is the first pending token: written to the cache, but not yet counted in its length.
    """

    head: ModelAsHead

    def __init__(self, model: TargetModel, growth: Growth, target: TargetModel) -> None:
        """Raise ValueError for a model whose dtype, device, positions or vocabulary do not fit target and growth."""
        if model.dtype != target.dtype or model.device != target.device:
            raise ValueError(
                f"decode.draft_model: {model.dtype} on {model.device} given, the target's {target.dtype} on "
                f"{target.device} is allowed, as both share one KV cache"
            )
        if model.max_positions < target.max_positions:
            raise ValueError(
                f"decode.draft_model: a model with {model.max_positions} positions given, the target's "
                f"{target.max_positions} or more are allowed; choose another draft model"
            )
        super().__init__(ModelAsHead(model, target), growth)
        self.masks = model.masks

    @property
    def max_nodes(self) -> int:
        return max(self.growth.nodes + 1, self.growth.width * self.growth.depth + 1)

    @torch.inference_mode()
    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        # The position before the first new one is read again: it costs little, and a reused prefix lacks it.
        slots, offsets = self.slots(row), torch.arange(text.shape[1] - 1, device=text.device)
        block = Block((offsets <= offsets[:, None]).unsqueeze(0), offsets.unsqueeze(0))
        positions, masks = slots.starts[:, None] + offsets, self.masks(slots, block)
        self.head(text[:, :-1], positions, masks, KVCache(slots, None), last_only=True)

    def slots(self, cache: KVCache) -> Slots:
        """The slots in which the model keeps its keys and values."""
        assert cache.head is not None
        return cache.head

    def read(self, verified: Verified, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Read the accepted tokens, the last of which is the root; returns no features and the logits after the root.

        [batch, 1, 0] and [batch, 1, vocab]
        """
        slots = self.slots(cache)
        verified.rewind(slots, read=1)
        offsets = torch.arange(verified.next_tokens.shape[1], device=verified.roots.device)
        block = Block((offsets <= offsets[:, None]).unsqueeze(0), offsets.unsqueeze(0))
        logits = self.run(verified.next_tokens, block, slots)
        verified.advance(slots, already=1)
        return self.hold_root(verified.last(logits), slots)

    def hold_root(self, logits: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """Mark the root as pending once it is in the cache; returns what `read` returns."""
        slots.hold(1)
        self.depths: Int[Tensor, "1 pending"] = torch.zeros(1, 1, dtype=torch.long, device=slots.starts.device)
        return logits[..., :0], logits

    def level_masks(self, cache: KVCache) -> LevelMasks:
        """Masks over draft tokens only; `masks` adds the text, which some layers see through a sliding window."""
        return LevelMasks(0, self.siblings)

    def expand(
        self, features: Tensor, frontier: Frontier, masks: LevelMasks, level: int, cache: KVCache
    ) -> Float[Tensor, "batch frontier vocab"]:
        """Run one level of nodes; each node sees the accepted tokens, the root, its ancestors and itself."""
        slots, count = self.slots(cache), frontier.tokens.shape[1]
        self.depths = torch.cat([self.depths, torch.full_like(self.depths[:, :1], level).expand(1, count)], dim=1)
        depths = self.depths.expand(len(frontier.tokens), -1)
        logits = self.run(frontier.tokens, Block(with_root(masks.of(frontier, level) == 0), depths), slots)
        slots.hold(count)
        return logits

    def run(self, tokens: Int[Tensor, "batch block"], block: Block, slots: Slots) -> Float[Tensor, "batch block vocab"]:
        """Append a block of tokens to the accepted and pending ones; returns the logits after each."""
        assert block.depths is not None
        positions = slots.starts[:, None] + block.depths[:, -tokens.shape[1] :]
        masks: Masks = self.masks(slots, block)
        return self.head(tokens, positions, masks, KVCache(slots, None))


def with_root(visible: Bool[Tensor, "batch frontier pending"]) -> Bool[Tensor, "batch frontier pending+1"]:
    """A visibility mask with the root in front, which every node sees."""
    return torch.cat([torch.ones_like(visible[..., :1]), visible], dim=-1)


class EarlyExit(ModelDrafter):
    """Self-speculative decoding by early exit: drafts with the target's first layers, then its norm and lm_head.

    It uses the target's own KV cache, in which these layers have already read the text. The target overwrites the draft
    tokens' entries when it verifies them.
    """

    def __init__(self, target: TargetModel, num_layers: int, growth: Growth) -> None:
        """Raise ValueError unless `num_layers` is at least 1 and less than the target's."""
        super().__init__(target, growth, target)
        self.exit = first_layers(target.model, num_layers)

    @property
    def cache_shape(self) -> tuple[int, int, int] | None:
        return None

    def slots(self, cache: KVCache) -> Slots:
        return cache.target

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Do nothing: the target has filled the cache."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        tree = super().draft(verified, cache)
        cache.target.reset()
        return tree

    def read(self, verified: Verified, cache: KVCache) -> tuple[Tensor, Tensor]:
        slots = self.slots(cache)
        alone = torch.ones(1, 1, 1, dtype=torch.bool, device=verified.roots.device)
        logits = self.run(verified.roots, Block(alone, torch.zeros_like(alone[0], dtype=torch.long)), slots)
        return self.hold_root(logits, slots)

    def run(self, tokens: Int[Tensor, "batch block"], block: Block, slots: Slots) -> Float[Tensor, "batch block vocab"]:
        assert block.depths is not None
        positions = slots.starts[:, None] + block.depths[:, -tokens.shape[1] :]
        cache: Any = KVCache(slots, None)
        logits: Tensor = self.exit(
            input_ids=tokens,
            attention_mask=self.masks(slots, block),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits
