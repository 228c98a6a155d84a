"""Speculative decoding with a model as the drafter: a small causal LM (Leviathan et al., arXiv 2211.17192), or the
target's own first layers (early exit, as in LayerSkip, arXiv 2404.16710). Both grow trees as a head does. A model with
another tokenizer drafts chains of text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.calibration import Calibration
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import PAGE, KVCache, Slots
from headstart.inference.core.cache_memory import Shape
from headstart.inference.core.tree import PendingTokens, Tree, causal_block
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.head import Frontier, HeadDrafter, LevelMasks
from headstart.inference.drafters.lookup import TrieDrafter
from headstart.inference.drafters.repeats import Trie
from headstart.inference.passes.forward import Masks
from headstart.inference.targets.architecture import first_layers
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import REPLACEMENT_CHARACTER

CONTEXT = 8  # last tokens of the text that are encoded together with the drafted text, as tokens may span the border


class ModelAsHead:
    """A causal LM with the interface of a head: it reads no features, and its "hidden states" are its logits."""

    taps: tuple[int, ...] = ()
    calibration = Calibration()
    max_levels: int | None = None

    def __init__(self, model: TargetModel, target: TargetModel) -> None:
        """The vocabularies may differ by padding or added tokens.

        Only tokens that both have are drafted, and those that a constraint forces.
        """
        self.decoder_layers: Sequence[nn.Module] = model.layers
        self.cache_shape: Shape = model.layout.shapes
        self.columns = min(model.config.vocab_size, target.config.vocab_size)
        self.vocab = DraftVocab(torch.arange(self.columns), target.config.vocab_size)
        self.embedding: Tensor = model.model.get_input_embeddings().weight

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
        if not model.grows_trees:
            raise ValueError(
                f"decode.draft_model: a {model.config.model_type!r} model given, one whose cache can be cut back after "
                f"a rejected draft is allowed; choose another draft model"
            )
        if model.max_positions < target.max_positions:
            raise ValueError(
                f"decode.draft_model: a model with {model.max_positions} positions given, the target's "
                f"{target.max_positions} or more are allowed; choose another draft model"
            )
        super().__init__(ModelAsHead(model, target), growth)
        self.model, self.masks = model, model.masks

    @property
    def max_nodes(self) -> int:
        return max(self.growth.nodes + 1, self.growth.width * self.growth.depth + 1)

    @torch.inference_mode()
    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        # The position before the first new one is read again: it costs little, and a reused prefix lacks it.
        self.run(text[:, :-1], causal_block(text.shape[1] - 1, text.device), self.slots(row), last_only=True)

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
        block = causal_block(verified.next_tokens.shape[1], verified.roots.device)
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
        visible = functional.pad(masks.of(frontier, level) == 0, (1, 0), value=True)  # every node sees the root
        logits = self.run(frontier.tokens, PendingTokens(visible, depths), slots)
        slots.hold(count)
        return logits

    def run(
        self, tokens: Int[Tensor, "batch block"], block: PendingTokens, slots: Slots, last_only: bool = False
    ) -> Tensor:
        """Append a block of tokens to the accepted and pending ones; returns the logits after each, or the last."""
        assert block.depths is not None
        positions = slots.starts[:, None] + block.depths[:, -tokens.shape[1] :]
        return self.forward(tokens, positions, self.masks(slots, block), KVCache(slots, None), last_only)

    def forward(self, tokens: Tensor, positions: Tensor, masks: Masks, cache: KVCache, last_only: bool) -> Tensor:
        """The logits; a token outside the model's vocabulary is read as the model's last one."""
        known = tokens.clamp(max=self.model.config.vocab_size - 1)
        return self.model.forward(known, positions, masks, cache, last_only=last_only).logits


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
    def cache_shape(self) -> Shape | None:
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
        logits = self.run(verified.roots, causal_block(1, verified.roots.device), cache.target)
        return self.hold_root(logits, cache.target)

    def forward(self, tokens: Tensor, positions: Tensor, masks: Masks, cache: Any, last_only: bool) -> Tensor:
        logits: Tensor = self.exit(
            input_ids=tokens, attention_mask=masks, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits
        return logits.to(tokens.device)  # from the last of several devices


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def __call__(self, text: str, **options: Any) -> Any: ...

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


@dataclass
class CachedText:
    """A text that the draft model has read: its tokens, and the KV cache that holds them."""

    tokens: list[int]
    cache: KVCache


class OtherTokenizerDrafter(TrieDrafter):
    """Drafts with a model that has another tokenizer: drafts are translated as text (Timor et al., arXiv 2502.05202).

    The text so far is encoded with the draft model's tokenizer, continued greedily by the draft model, decoded, and
    encoded again with the target's tokenizer. Rows are drafted one by one, each with its own KV cache, because draft
    tokens and target tokens do not align. Gumbel noise is keyed by the target's tokens, so the draft model cannot use
    it.
    """

    def __init__(self, model: TargetModel, draft_tokenizer: Tokenizer, target_tokenizer: Tokenizer, depth: int) -> None:
        super().__init__(depth, depth + 1)
        self.model = model
        self.draft_tokenizer, self.target_tokenizer = draft_tokenizer, target_tokenizer
        self.cached: list[CachedText] = []  # the texts of this draft
        self.previous: list[CachedText] = []  # those of the draft before that no text of this one continues

    @torch.inference_mode()
    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        self.previous, self.cached = self.cached, []
        return super().draft(verified, cache)

    def grow(self, trie: Trie, verified: VerifiedOnHost, row: int) -> None:
        if trie.max_depth > 0:
            trie.add_path(0, self.draft_tokens(verified.texts[row], trie.max_depth))

    def draft_tokens(self, text: list[int], count: int) -> list[int]:
        """Target tokens for the next `count` tokens of the draft model; none if the text cannot be translated."""
        text_so_far = decode_text(self.target_tokenizer, text)
        tokens = list(self.draft_tokenizer(text_so_far)["input_ids"])
        if text_so_far.endswith(REPLACEMENT_CHARACTER) or not tokens or len(tokens) + count > self.model.max_positions:
            return []
        generated = self.generate(tokens, count)
        before = decode_text(self.draft_tokenizer, tokens)
        after = decode_text(self.draft_tokenizer, tokens + generated)
        if not after.startswith(before):
            return []
        return self.encode_continuation(text[-CONTEXT:], after[len(before) :].rstrip(REPLACEMENT_CHARACTER))

    def generate(self, tokens: list[int], count: int) -> list[int]:
        """The draft model's greedy continuation, up to `count` tokens."""
        num_read, cached = self.reuse_cache(tokens, count)
        generated: list[int] = []
        slots, unread = cached.cache.target, tokens[num_read:]
        slots.set_lengths([num_read])
        for _ in range(count):
            token = int(self.next_logits(unread, cached.cache)[0, -1].argmax())
            slots.advance([len(unread)])
            if token in self.model.end_tokens:
                break
            generated.append(token)
            unread = [token]
        cached.tokens = (tokens + generated)[: slots.lengths[0]]
        self.cached.append(cached)
        return generated

    def reuse_cache(self, tokens: list[int], count: int) -> tuple[int, CachedText]:
        """Find the cached text with the longest common prefix; returns how many tokens it saves reading, and the text.

        The last token is always read again, as its logits are needed.
        """
        lengths = [common_prefix(cached.tokens, tokens) for cached in self.previous]
        longest = max(lengths, default=0)
        size = len(tokens) + count
        cached = (
            self.previous.pop(lengths.index(longest)) if longest else CachedText([], self.model.new_cache(size + PAGE))
        )
        cached.cache.target.set_lengths([longest])
        cached.cache.make_room(size, self.model.max_positions)
        return min(longest, len(tokens) - 1), cached

    def next_logits(self, tokens: list[int], cache: KVCache) -> Tensor:
        """Read tokens after those in the cache; returns the logits after the last one. [1, 1, vocab]"""
        device = self.model.device
        block = causal_block(len(tokens), device)
        assert block.depths is not None
        positions, masks = cache.target.starts[:, None] + block.depths, self.model.masks(cache.target, block)
        return self.model.forward(torch.tensor([tokens], device=device), positions, masks, cache, True).logits

    def encode_continuation(self, last: list[int], added: str) -> list[int]:
        """The target's tokens for drafted text that continues the text's last tokens."""
        before = decode_text(self.target_tokenizer, last)
        together = list(self.target_tokenizer(before + added, add_special_tokens=False)["input_ids"])
        if together[: len(last)] == last:
            return together[len(last) :]
        return list(self.target_tokenizer(added, add_special_tokens=False)["input_ids"])


def decode_text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of some tokens, without special tokens and without any clean-up of spaces."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def common_prefix(one: list[int], other: list[int]) -> int:
    """The length of the longest common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
