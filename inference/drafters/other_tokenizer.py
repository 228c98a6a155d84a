"""Drafting with a model of another tokenizer: text is what the two have in common (arXiv 2502.05202)."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from inference.cache import PAGE, KVCache
from inference.drafter import Verified
from inference.drafters.trie import Trie, side_by_side
from inference.masks import Block
from inference.target.model import TargetModel
from inference.target.tokenizer import REPLACEMENT_CHARACTER
from inference.tree import Tree

LOOKBEHIND = 8  # tokens of the target's text that are encoded again with what was drafted behind them


@runtime_checkable  # the shape checks of the tests look at instances
class Tokenizer(Protocol):
    """As much of a transformers tokenizer as is used here."""

    def __call__(self, text: str, **options: Any) -> Any: ...

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


@dataclass
class Read:
    """What the draft model has read of one text: its own tokens, and their keys and values."""

    tokens: list[int]
    cache: KVCache


class OtherTokenizerDrafter:
    """A chain that the draft model writes greedily, decoded with its tokenizer and encoded with the target's.

    Rows are drafted one by one, each with a cache of its own: their tokens do not lie side by side with the target's.
    The noise of sampling belongs to the target's tokens, so drafts do not look at it.
    """

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    static_shapes = False

    def __init__(self, model: TargetModel, own: Tokenizer, targets: Tokenizer, depth: int) -> None:
        self.model, self.own, self.targets, self.depth = model, own, targets, depth
        self.read: list[Read] = []  # for the rows of the last draft

    @property
    def max_nodes(self) -> int:
        return self.depth + 1

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Nothing yet: the texts come with every draft."""

    @torch.inference_mode()
    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        before, self.read, tries = self.read, [], []
        for text, room in zip(verified.texts, verified.remaining, strict=True):
            trie = Trie(text[-1], min(room, self.depth))
            if trie.room > 0:
                trie.add_path(0, self.guess(text, trie.room, before))
            tries.append(trie)
        return side_by_side(tries, verified.roots.device)

    def guess(self, text: list[int], room: int, before: list[Read]) -> list[int]:
        """Target tokens that may follow; none where the two texts cannot be brought together."""
        certain = decoded(self.targets, text)
        tokens = list(self.own(certain)["input_ids"])
        if certain.endswith(REPLACEMENT_CHARACTER) or not tokens or len(tokens) + room > self.model.max_positions:
            return []
        written = self.write(tokens, room, before)
        start = decoded(self.own, tokens)
        whole = decoded(self.own, tokens + written)
        if not whole.startswith(start):
            return []
        return self.encode(text[-LOOKBEHIND:], whole[len(start) :].rstrip(REPLACEMENT_CHARACTER))

    def write(self, tokens: list[int], count: int, before: list[Read]) -> list[int]:
        """What the draft model writes behind its tokens, greedily."""
        kept, read = self.borrow(tokens, count, before)
        written: list[int] = []
        slots, fresh = read.cache.target, tokens[kept:]
        slots.set_lengths([kept])
        for _ in range(count):
            token = int(self.step(fresh, read.cache)[0, -1].argmax())
            slots.advance([len(fresh)])
            if token in self.model.end_tokens:
                break
            written.append(token)
            fresh = [token]
        read.tokens = (tokens + written)[: slots.lengths[0]]
        self.read.append(read)
        return written

    def borrow(self, tokens: list[int], count: int, before: list[Read]) -> tuple[int, Read]:
        """The cache that has read most of these tokens, and how many; the last token is always read again."""
        shared = [common(read.tokens, tokens) for read in before]
        most = max(shared, default=0)
        size = len(tokens) + count
        read = before.pop(shared.index(most)) if most else Read([], self.model.new_cache(size + PAGE))
        read.cache.target.set_lengths([most])
        read.cache.make_room(size, self.model.max_positions)
        return min(most, len(tokens) - 1), read

    def step(self, tokens: list[int], cache: KVCache) -> Tensor:
        """Logits behind the last of a few tokens. [1, 1, vocab]"""
        device = self.model.device
        offsets = torch.arange(len(tokens), device=device)
        masks = self.model.masks(cache.target, Block((offsets <= offsets[:, None]).unsqueeze(0), offsets.unsqueeze(0)))
        positions = cache.target.starts[:, None] + offsets
        return self.model.forward(torch.tensor([tokens], device=device), positions, masks, cache, True).logits

    def encode(self, last: list[int], added: str) -> list[int]:
        """The target's tokens for a text behind its last tokens."""
        before = decoded(self.targets, last)
        together = list(self.targets(before + added, add_special_tokens=False)["input_ids"])
        if together[: len(last)] == last:
            return together[len(last) :]
        return list(self.targets(added, add_special_tokens=False)["input_ids"])


def decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
