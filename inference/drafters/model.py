"""Drafting with a language model of its own: any causal LM with the target's tokenizer, in the place of a head."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heads.calibration import Calibration
from heads.vocab import DraftVocab
from inference.cache import KVCache, Slots
from inference.drafter import Verified
from inference.drafters.growth import Growth
from inference.drafters.head import Frontier, HeadDrafter, LevelMasks
from inference.target.architecture import first_layers
from inference.target.model import Masks, TargetModel
from inference.tree import Block, Tree


class ModelAsGuesser:
    """A model where a head is expected: it reads no features, and its hidden states are the logits themselves."""

    taps: tuple[int, ...] = ()
    calibration = Calibration()
    max_levels: int | None = None

    def __init__(self, model: TargetModel, target: TargetModel) -> None:
        """Vocabularies may differ by padding or added tokens; only tokens that both have are drafted."""
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
        """(tokens, positions, masks, cache) to logits; it reads its last token where it does not know the target's."""
        known = tokens.clamp(max=self.model.config.vocab_size - 1)
        logits: Tensor = self.model.forward(known, *args, **options).logits
        return logits

    def logits(self, hidden: Float[Tensor, "*axes vocab"], level: int = 0) -> Float[Tensor, "*axes draft_vocab"]:
        return hidden[..., : self.columns]

    def feedback(
        self, hidden: Float[Tensor, "*axes vocab"], features: Tensor, tokens: Tensor
    ) -> Float[Tensor, "*axes none"]:
        """Nothing: the next level reads tokens alone."""
        return hidden[..., :0]


class ModelDrafter(HeadDrafter):
    """Grows trees as a head does. The model's slots stand beside the target's: slot t is for the token of position t.

    The tokens that were verified are read again in place of what was drafted there, so nothing has to be moved. While a
    tree grows its root is pending, the first of the pending tokens.
    """

    head: ModelAsGuesser

    def __init__(self, model: TargetModel, growth: Growth, target: TargetModel) -> None:
        """Raises ValueError for a model that does not fit the target or the growth."""
        if model.dtype != target.dtype or model.device != target.device:
            raise ValueError(
                f"decode.draft_model: in {model.dtype} on {model.device}, the target's {target.dtype} on "
                f"{target.device} is allowed, as they share one cache"
            )
        if model.max_positions < target.max_positions:
            raise ValueError(
                f"decode.draft_model: knows {model.max_positions} positions, the target's {target.max_positions} or "
                f"more are allowed; choose another draft model"
            )
        super().__init__(ModelAsGuesser(model, target), growth)
        self.masks = model.masks

    @property
    def max_nodes(self) -> int:
        return max(self.growth.nodes + 1, self.growth.width * self.growth.depth + 1)

    @torch.inference_mode()
    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        self.head(text[:, :-1], cache=KVCache(self.slots(row), None), last_only=True)

    def slots(self, cache: KVCache) -> Slots:
        """Where the model keeps keys and values."""
        assert cache.head is not None
        return cache.head

    def read(self, verified: Verified, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Take in what follows the verified positions, the root at its end; there are no features.

        [batch, 1, 0] and [batch, 1, vocab]
        """
        slots = self.slots(cache)
        verified.rewind(slots, read=1)
        offsets = torch.arange(verified.next_tokens.shape[1], device=verified.roots.device)
        block = Block((offsets <= offsets[:, None]).unsqueeze(0), offsets.unsqueeze(0))
        logits = self.run(verified.next_tokens, block, slots)
        verified.advance(slots, already=1)
        return self.begin_tree(verified.last(logits), slots)

    def begin_tree(self, logits: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """The root has been written, and stays pending; what `read` says of it."""
        slots.hold(1)
        self.depths: Int[Tensor, "1 pending"] = torch.zeros(1, 1, dtype=torch.long, device=slots.starts.device)
        return logits[..., :0], logits

    def level_masks(self, cache: KVCache) -> LevelMasks:
        """Of the drafted nodes alone: the model's layers may see the text through windows."""
        return LevelMasks(0, self.siblings)

    def expand(
        self, features: Tensor, frontier: Frontier, masks: LevelMasks, level: int, cache: KVCache
    ) -> Float[Tensor, "batch frontier vocab"]:
        """One level through the model; each node sees the verified tokens, the root, its ancestors and itself."""
        slots, count = self.slots(cache), frontier.tokens.shape[1]
        self.depths = torch.cat([self.depths, torch.full_like(self.depths[:, :1], level).expand(1, count)], dim=1)
        depths = self.depths.expand(len(frontier.tokens), -1)
        logits = self.run(frontier.tokens, Block(with_root(masks.of(frontier, level) == 0), depths), slots)
        slots.hold(count)
        return logits

    def run(self, tokens: Int[Tensor, "batch block"], block: Block, slots: Slots) -> Float[Tensor, "batch block vocab"]:
        """Write a block of tokens behind what is held and pending, and score what follows each."""
        assert block.depths is not None
        positions = slots.starts[:, None] + block.depths[:, -tokens.shape[1] :]
        masks: Masks = self.masks(slots, block)
        return self.head(tokens, positions, masks, KVCache(slots, None))


def with_root(visible: Bool[Tensor, "batch frontier pending"]) -> Bool[Tensor, "batch frontier pending+1"]:
    return torch.cat([torch.ones_like(visible[..., :1]), visible], dim=-1)


class EarlyExit(ModelDrafter):
    """The target's own first layers, then its norm and lm_head; it shares the target's cache, which has read the text.

    What it writes there is overwritten when the target verifies.
    """

    def __init__(self, target: TargetModel, num_layers: int, growth: Growth) -> None:
        """Raises ValueError for a number of layers that the target does not have to spare."""
        super().__init__(target, growth, target)
        self.exit = first_layers(target.model, num_layers)

    @property
    def cache_shape(self) -> tuple[int, int, int] | None:
        return None

    def slots(self, cache: KVCache) -> Slots:
        return cache.target

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """The target has read it."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        tree = super().draft(verified, cache)
        cache.target.reset()
        return tree

    def read(self, verified: Verified, cache: KVCache) -> tuple[Tensor, Tensor]:
        slots = self.slots(cache)
        alone = torch.ones(1, 1, 1, dtype=torch.bool, device=verified.roots.device)
        logits = self.run(verified.roots, Block(alone, torch.zeros_like(alone[0], dtype=torch.long)), slots)
        return self.begin_tree(logits, slots)

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
