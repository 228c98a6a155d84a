"""Drafting with a model that has another tokenizer: its drafts are translated as text (Timor et al., arXiv 2502.05202).

The text so far is encoded with the draft model's tokenizer, continued by the draft model, decoded, and encoded again
with the target's tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headstart.inference.core.cache import PAGE, KVCache
from headstart.inference.core.drafter import Verified, VerifiedOnHost
from headstart.inference.core.tree import Block, Tree
from headstart.inference.drafters.trie import Trie, batch_tries
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import REPLACEMENT_CHARACTER

CONTEXT = 8  # last tokens of the text that are encoded together with the drafted text, as tokens may span the border


@runtime_checkable  # the shape checks in tests use isinstance
class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def __call__(self, text: str, **options: Any) -> Any: ...

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


@dataclass
class CachedText:
    """A text that the draft model has read: its tokens, and the KV cache that holds them."""

    tokens: list[int]
    cache: KVCache


class OtherTokenizerDrafter:
    """Drafts a chain that the draft model generates greedily, decoded to text and encoded as the target's tokens.

    Rows are drafted one by one, each with its own KV cache, because draft tokens and target tokens do not align. Gumbel
    noise is keyed by the target's tokens, so the draft model cannot use it.
    """

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    static_shapes = False
    compilable_layers: Sequence[nn.Module] = ()

    def __init__(self, model: TargetModel, draft_tokenizer: Tokenizer, target_tokenizer: Tokenizer, depth: int) -> None:
        self.model, self.depth = model, depth
        self.draft_tokenizer, self.target_tokenizer = draft_tokenizer, target_tokenizer
        self.cached: list[CachedText] = []  # the texts of the last draft

    @property
    def max_nodes(self) -> int:
        return self.depth + 1

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Do nothing: `draft` is given the whole text."""

    @torch.inference_mode()
    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        previous, self.cached, tries = self.cached, [], []
        for text, remaining, state in zip(verified.texts, verified.remaining, verified.states, strict=True):
            trie = Trie(text[-1], min(remaining, self.depth), state)
            if trie.max_depth > 0:
                trie.add_path(0, self.draft_tokens(text, trie.max_depth, previous))
            tries.append(trie)
        return batch_tries(tries, self.max_nodes, verified.roots.device)

    def draft_tokens(self, text: list[int], count: int, previous: list[CachedText]) -> list[int]:
        """Target tokens for the next `count` tokens of the draft model; none if the text cannot be translated."""
        text_so_far = decode_text(self.target_tokenizer, text)
        tokens = list(self.draft_tokenizer(text_so_far)["input_ids"])
        if text_so_far.endswith(REPLACEMENT_CHARACTER) or not tokens or len(tokens) + count > self.model.max_positions:
            return []
        generated = self.generate(tokens, count, previous)
        before = decode_text(self.draft_tokenizer, tokens)
        after = decode_text(self.draft_tokenizer, tokens + generated)
        if not after.startswith(before):
            return []
        return self.encode_continuation(text[-CONTEXT:], after[len(before) :].rstrip(REPLACEMENT_CHARACTER))

    def generate(self, tokens: list[int], count: int, previous: list[CachedText]) -> list[int]:
        """The draft model's greedy continuation, up to `count` tokens."""
        num_read, cached = self.reuse_cache(tokens, count, previous)
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

    def reuse_cache(self, tokens: list[int], count: int, previous: list[CachedText]) -> tuple[int, CachedText]:
        """Find the cached text with the longest common prefix; returns how many tokens it saves reading, and the text.

        The last token is always read again, as its logits are needed.
        """
        lengths = [common_prefix(cached.tokens, tokens) for cached in previous]
        longest = max(lengths, default=0)
        size = len(tokens) + count
        cached = previous.pop(lengths.index(longest)) if longest else CachedText([], self.model.new_cache(size + PAGE))
        cached.cache.target.set_lengths([longest])
        cached.cache.make_room(size, self.model.max_positions)
        return min(longest, len(tokens) - 1), cached

    def next_logits(self, tokens: list[int], cache: KVCache) -> Tensor:
        """Read tokens after those in the cache; returns the logits after the last one. [1, 1, vocab]"""
        device = self.model.device
        offsets = torch.arange(len(tokens), device=device)
        masks = self.model.masks(cache.target, Block((offsets <= offsets[:, None]).unsqueeze(0), offsets.unsqueeze(0)))
        positions = cache.target.starts[:, None] + offsets
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
