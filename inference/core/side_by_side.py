"""Parts of different shapes in one pass: the trees of running rows, and chunks of prompts.

A pass over few tokens takes as long as reading the target's weights from memory, so the parts form a single sequence
and the weights are read once. Only attention separates them: each part has its own slots and mask. The model sees a
transformers Cache and one mask, into which only `grouped_attention` looks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers.cache_utils import Cache

from headstart.inference.core.cache import SlotLayer, Slots
from headstart.inference.core.tree import PendingTokens, Tree


class Part(NamedTuple):
    """Rows with the same number of new tokens each, which come after the tokens in their slots."""

    slots: Slots
    tokens: Int[Tensor, "rows count"]
    block: PendingTokens
    last_only: bool  # whether logits are wanted after each row's last token alone

    @classmethod
    def of_tree(cls, slots: Slots, tree: Tree) -> "Part":
        return cls(slots, tree.tokens, PendingTokens(tree.ancestors, tree.depths), last_only=False)

    @property
    def positions(self) -> Int[Tensor, "rows count"]:
        assert self.block.depths is not None
        return self.slots.positions(self.block.depths)

    @property
    def logits_at(self) -> range:
        """The tokens after which logits are wanted, counted from the part's first one."""
        rows, count = self.tokens.shape
        every = range(rows * count)
        return every[count - 1 :: count] if self.last_only else every


class CannotLieSideBySide(Exception):
    """The model's attention does not go through `grouped_attention`, or it changes the mask on its way there."""


class PackedLayer(SlotLayer):
    """Writes each part's keys and values to its slots, and holds the keys and values that its queries attend to."""

    cache: "PackedCache"

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache = self.cache
        cache.check()
        parts = zip(cache.parts, cache.split(key_states), cache.split(value_states), strict=True)
        cache.held = [part.slots.append(self.layer, key, value) for part, key, value in parts]
        return key_states, value_states


class PackedCache(Cache):
    """The slots of several parts, as the cache of a sequence in which the parts lie one after another."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.target = parts[0].slots
        self.held: list[tuple[Tensor, Tensor]] = []  # keys and values of each part in the layer that runs
        super().__init__(layers=[PackedLayer(self, layer) for layer in range(len(self.target.layers))])

    def split(self, packed: Float[Tensor, "1 heads tokens size"]) -> list[Float[Tensor, "rows heads count size"]]:
        """The queries, keys or values of each part, with its rows as a batch."""
        parts = zip(packed[0].split([part.tokens.numel() for part in self.parts], dim=1), self.parts, strict=True)
        return [tokens.unflatten(1, part.tokens.shape).transpose(0, 1) for tokens, part in parts]

    def take_held(self) -> list[tuple[Tensor, Tensor]]:
        held, self.held = self.held, []
        return held

    def check(self) -> None:
        """Raise CannotLieSideBySide if the last layer written did not attend to the held keys and values."""
        if self.held:
            raise CannotLieSideBySide


class PackedMask(Tensor):
    """A stand-in that carries the masks of all parts, additive and [rows, 1, count, keys] each."""

    cache: PackedCache | None = None
    masks: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, cache: PackedCache, masks: tuple[Tensor, ...]) -> "PackedMask":
        mask = torch.zeros(1, 1, 1, 1, device=masks[0].device).as_subclass(cls)
        mask.cache, mask.masks = cache, masks
        return mask

    def to(self, *args: Any, **kwargs: Any) -> "PackedMask":
        """Itself: attention moves the masks to its layer's device, where accelerate would move their stand-in."""
        return self


def unpacked(packed: Shaped[Tensor, "1 tokens size"], shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The rows of a tensor that belong to each part, [rows, count, size]."""
    parts = packed[0].split([rows * count for rows, count in shapes])
    return [part.view(*shape, -1) for part, shape in zip(parts, shapes, strict=True)]
