"""Drafting with a block head: one pass gives the scores of all levels, and a tree is drawn from them.

With a Markov head the children of a node follow from the node's own token (a conditional tree). Without one all nodes
of a level have the same children (a tree of marginals).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.block_attention import Reach
from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.tree import PendingTokens, block_mask
from headstart.inference.core.verify import Verified
from headstart.inference.drafters.growth import GrowthPolicy
from headstart.inference.drafters.head import Frontier, LevelMasks, TreeDrafter, for_all_nodes
from headstart.inference.drafters.repeats import Repeats


class OnePassDrafter(TreeDrafter):
    """Scores all levels in `read`, in one pass, as `slot_logits`; all nodes of a level have the same scores."""

    slot_logits: Float[Tensor, "batch levels draft_vocab"]

    def expand(
        self, features: Tensor, frontier: Frontier, masks: LevelMasks, level: int, cache: KVCache
    ) -> Float[Tensor, "batch 1 draft_vocab"]:
        """The scores of the level's slot, which all nodes share."""
        return self.slot_logits[:, level : level + 1]

    def level_logits(self, hidden: Tensor, frontier: Frontier, level: int) -> Float[Tensor, "batch nodes draft_vocab"]:
        return hidden if frontier.history is None else for_all_nodes(hidden, frontier)  # penalties differ by node

    def feedback(self, hidden: Tensor, features: Tensor, tokens: Tensor) -> Tensor:
        return features.expand(-1, tokens.shape[1], -1)


class BlockDrafter(OnePassDrafter):
    """Reads the target's features of the newly verified positions, then fills one block after them.

    The head's cache holds verified positions only: no node of a tree has a slot there.
    """

    def __init__(self, head: BlockHead, growth: GrowthPolicy, repeats: Repeats | None = None) -> None:
        super().__init__(head, growth, repeats)
        self.markov_head = head.markov_head
        device, size = self.ids.device, head.shape.block_size
        # No distance between the slots: a window begins at the same position for all of them.
        depths = torch.zeros(1, size, dtype=torch.long, device=device)
        self.blocks = {
            reach: PendingTokens(reach.within(size).unsqueeze(0).to(device), depths)
            for reach in set(head.shape.reaches)
        }

    @property
    def max_nodes(self) -> int:
        return max(self.most_verified, self.head.shape.block_size)

    @torch.inference_mode()
    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        count, slots = text.shape[1] - 2, self.slots(row)  # the last position is read with the next draft
        if count:
            positions = slots.starts[:, None] + torch.arange(count, device=self.ids.device)
            self.head.read(self.head.project(taps[:, :count]), positions, slots)

    def read(self, verified: Verified, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Fill the block; returns no features and the scores of the first level. [batch, 1, 0], [batch, 1, vocab]"""
        slots = self.slots(cache)
        verified.rewind(slots)
        offsets = torch.arange(verified.next_tokens.shape[1], device=self.ids.device)
        self.head.read(self.head.project(verified.taps), slots.starts[:, None] + offsets, slots)
        verified.advance(slots)
        by_reach = {reach: self.mask(reach, slots) for reach in self.blocks}
        masks = [by_reach[reach] for reach in self.head.shape.reaches]
        self.states = self.head(verified.roots[:, 0], slots.starts, slots, masks)  # [batch, levels, hidden]
        self.slot_logits = self.head.slot_logits(self.states[:, : self.growth.depth])
        return self.states[:, :1, :0], self.slot_logits[:, :1]

    def mask(self, reach: Reach, slots: Slots) -> Float[Tensor, "rows 1 slots keys"] | None:
        """The mask of a block's slots in a layer of this reach; None if they see all that the cache holds."""
        if reach == Reach() and slots.even:
            return None
        window = None if reach.window is None else reach.window + 1  # a block's own window counts the anchor too
        return block_mask(slots, self.blocks[reach], self.head.embedding.dtype, window)

    def level_logits(self, hidden: Tensor, frontier: Frontier, level: int) -> Float[Tensor, "batch nodes draft_vocab"]:
        if self.markov_head is None:
            return super().level_logits(hidden, frontier, level)
        return hidden + self.markov_head(self.states[:, level : level + 1], frontier.tokens)
