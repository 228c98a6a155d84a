"""Speculative decoding with a small causal LM as the drafter (Leviathan et al., arXiv 2211.17192)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.calibration import Calibration
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.cache_memory import Shape
from headstart.inference.core.tree import PendingTokens, causal_block
from headstart.inference.core.verify import Verified
from headstart.inference.drafters.growth import GrowthPolicy
from headstart.inference.drafters.head import Frontier, HeadDrafter, LevelMasks
from headstart.inference.targets.model import TargetModel


class ModelAsHead:
    """A causal LM with the interface of a head: it reads no features, and its "hidden states" are its logits."""

    taps: tuple[int, ...] = ()
    calibration = Calibration()
    max_levels: int | None = None

    def __init__(self, model: TargetModel, target: TargetModel) -> None:
        """The vocabularies may differ by padding or added tokens.

        Only tokens that both have are drafted, and tokens that a constraint forces.
        """
        self.decoder_layers: Sequence[nn.Module] = model.layers
        self.cache_shape: Shape = model.passes.layout.shapes
        self.columns = min(model.config.vocab_size, target.config.vocab_size)
        self.vocab = DraftVocab(torch.arange(self.columns), target.config.vocab_size)
        self.embedding: Tensor = model.model.get_input_embeddings().weight

    def logits(self, hidden: Float[Tensor, "*axes vocab"], level: int = 0) -> Float[Tensor, "*axes draft_vocab"]:
        return hidden[..., : self.columns]

    def feedback(self, hidden: Float[Tensor, "*axes vocab"], features: Tensor) -> Float[Tensor, "*axes none"]:
        """No features: the next level reads only tokens."""
        return hidden[..., :0]


class ModelDrafter(HeadDrafter):
    """Drafts with a model that has the target's tokenizer, and grows trees as a head does.

    The model's KV cache lies next to the target's; its slot t holds the token at position t. After verification the
    model reads the accepted tokens again and overwrites the draft tokens' slots, so no cache entries have to be moved.
    While a tree grows, its root is the first pending token: written to the cache, but not yet counted in its length.
    """

    head: ModelAsHead

    def __init__(self, model: TargetModel, growth: GrowthPolicy, target: TargetModel) -> None:
        """Raise ValueError for a model whose dtype, device, positions or vocabulary do not fit target and growth."""
        if model.dtype != target.dtype or model.device != target.device:
            raise ValueError(
                f"decode.draft_model: {model.dtype} on {model.device} given, the target's {target.dtype} on "
                f"{target.device} is allowed, as both share one KV cache"
            )
        if not model.passes.verifies_trees:
            raise ValueError(
                f"decode.draft_model: a {model.config.model_type!r} model given, a model whose cache can be cut back "
                f"after a rejected draft is allowed; choose another draft model"
            )
        if model.max_positions < target.max_positions:
            raise ValueError(
                f"decode.draft_model: a model with {model.max_positions} positions given, the target's "
                f"{target.max_positions} or more are allowed; choose another draft model"
            )
        super().__init__(ModelAsHead(model, target), growth)
        self.model, self.passes, self.target = model, model.passes, target

    @property
    def max_nodes(self) -> int:
        return max(self.growth.nodes + 1, self.growth.width * self.growth.depth + 1)

    @torch.inference_mode()
    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        # The position before the first new one is read again: it costs little, and a reused prefix lacks it.
        self.run(text[:, :-1], causal_block(text.shape[1] - 1, text.device), self.slots(row), last_only=True)

    def read(self, verified: Verified, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Read the accepted tokens, the last of which is the root; returns no features and the logits after the root.

        [batch, 1, 0] and [batch, 1, vocab]
        """
        slots = self.slots(cache)
        verified.rewind(slots, read=1)
        block = causal_block(verified.next_tokens.shape[1], verified.roots.device)
        logits = self.run(verified.next_tokens, block, slots)
        verified.advance(slots, already=1)
        slots.hold(1)  # the root
        self.depths: Int[Tensor, "1 pending"] = torch.zeros(1, 1, dtype=torch.long, device=slots.starts.device)
        last = verified.last(logits)
        return last[..., :0], last

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
        visible = functional.pad(masks.of(frontier, level) == 0, (1, 0), value=True)  # every node sees the root
        logits = self.run(frontier.tokens, PendingTokens(visible, depths), slots)
        slots.hold(count)
        return logits

    def run(
        self, tokens: Int[Tensor, "batch block"], block: PendingTokens, slots: Slots, last_only: bool = False
    ) -> Tensor:
        """Append a block of tokens to the accepted and pending ones; returns the logits after each, or the last.

        A token outside the model's vocabulary is read as the model's last one.
        """
        assert block.depths is not None
        positions = slots.starts[:, None] + block.depths[:, -tokens.shape[1] :]
        known, masks = tokens.clamp(max=self.model.config.vocab_size - 1), self.passes.masks(slots, block)
        return self.passes.forward(known, positions, masks, KVCache(slots, None), last_only=last_only).logits
