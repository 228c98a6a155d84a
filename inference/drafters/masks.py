"""Drafting with a P-EAGLE head: one pass reads the newly verified positions and the mask entries of all levels."""

import torch
from torch import Tensor

from headstart.heads.kinds.peagle import PEagleHead
from headstart.inference.core.cache import KVCache
from headstart.inference.core.tree import PendingTokens, block_mask
from headstart.inference.core.verify import Verified
from headstart.inference.drafters.block import OnePassDrafter
from headstart.inference.drafters.head import HeadDrafter


class MaskDrafter(OnePassDrafter, HeadDrafter):
    """Its trees are of marginals. The head's cache holds verified positions only: mask entries are written over."""

    head: PEagleHead

    @property
    def num_masks(self) -> int:
        """The mask entries of a pass: the first level needs none."""
        return self.growth.depth - 1

    @property
    def max_nodes(self) -> int:
        return self.most_verified + self.num_masks

    def read(self, verified: Verified, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Score all levels; returns no features and the scores of the first one. [batch, 1, 0], [batch, 1, vocab]"""
        slots = self.slots(cache)
        verified.rewind(slots)
        count, ends = verified.next_tokens.shape[1], verified.num_verified()
        offsets = torch.arange(count, device=self.ids.device)
        read = slots.starts[:, None] + offsets  # [batch, count]
        features, tokens, positions = self.head.mask_entries(slots.starts + ends, self.num_masks)
        features = torch.cat([self.head.project(verified.taps), features], dim=1)
        tokens, positions = torch.cat([verified.next_tokens, tokens], 1), torch.cat([read, positions], 1)
        is_read = torch.cat([offsets < ends[:, None], torch.ones_like(positions[:, count:], dtype=torch.bool)], dim=1)
        order = torch.arange(is_read.shape[1], device=self.ids.device)
        visible = (order <= order[:, None]) & is_read[:, None]  # nothing sees what pads a row
        mask = block_mask(slots, PendingTokens(visible), features.dtype)
        hidden = self.head(features, tokens, positions, mask, slots)  # [batch, count + masks, hidden]
        verified.advance(slots)
        states = torch.cat([verified.last(hidden[:, :count]), hidden[:, count:]], dim=1)
        self.slot_logits = self.head.logits(states)  # [batch, levels, draft_vocab]
        return states[:, :1, :0], self.slot_logits[:, :1]
