"""The optional parts of block heads: Markov head (DSpark), candidate selector and local convolutions (DFlash2)."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.kinds.block_config import BlockShape
from headstart.heads.vocab import DraftVocab

Slots = Float[Tensor, "blocks slots hidden"]


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


class CandidateSelector(nn.Module):
    """Scores the likeliest tokens of a slot again, given the token before; all others keep the slot's own scores."""

    def __init__(self, shape: BlockShape, vocab: DraftVocab) -> None:
        super().__init__()
        self.num_candidates = min(shape.selector_top_k, len(vocab.ids))
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab.target_size, shape.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(len(vocab.ids), shape.selector_rank))
        self.hidden_projection = nn.Linear(shape.hidden_size, shape.selector_rank, bias=False)

    def forward(
        self,
        slots: Float[Tensor, "*#axes draft_vocab"],
        hidden: Float[Tensor, "*#axes hidden"],
        before: Int[Tensor, "*axes"],
    ) -> Float[Tensor, "*axes draft_vocab"]:
        """The scores `slots` of slots with these hidden states, after the tokens `before`."""
        candidates = slots.topk(self.num_candidates, dim=-1).indices
        known = self.predecessor_codebook[before] * self.hidden_projection(hidden)  # [*axes, rank]
        added = (self.successor_codebook[candidates] @ known.unsqueeze(-1)).squeeze(-1)  # [*axes, candidates]
        slots = slots.expand(*before.shape, -1)
        return slots.scatter_add(-1, candidates.expand_as(added), added.to(slots.dtype))


class LocalConvolution(nn.Module):
    """Convolves the slots of a block before a sublayer and again after it, with weights that depend on the slot.

    A weight is the sum of one for each channel and one for each group of channels, which follows from the sublayer's
    input at the slot. A slot takes in the slots before it in its block, and never another block's.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        kernel, groups = shape.conv_kernel_size, shape.hidden_size // shape.conv_group_size
        identity = torch.zeros(2, kernel, shape.hidden_size)
        identity[:, 0] = 1
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(shape.hidden_size, 2 * kernel * groups, bias=False)
        self.sizes = 2, kernel, groups

    def forward(self, inputs: Slots, sublayer: Callable[[Slots], Slots]) -> Slots:
        """The sublayer's output for these inputs, with a convolution before it and one after it."""
        before, after = self.kernel_projection(inputs).unflatten(-1, self.sizes).unbind(-3)
        return convolved(sublayer(convolved(inputs, self.base_kernel[0], before)), self.base_kernel[1], after)


def convolved(
    slots: Slots, base: Float[Tensor, "kernel hidden"], added: Float[Tensor, "blocks slots kernel groups"]
) -> Slots:
    """Sums each slot and the slots before it, by the weights of their distance; before the first slot are zeros."""
    size, most = slots.shape[1], len(base) - 1
    padded, out = functional.pad(slots, (0, 0, most, 0)), torch.zeros_like(slots)
    for distance, weight in enumerate(base.to(slots.dtype)):
        earlier = padded[:, most - distance :][:, :size]
        by_group = earlier.unflatten(-1, (added.shape[-1], -1)) * added[:, :, distance].unsqueeze(-1)
        out = out + weight * earlier + by_group.flatten(-2)
    return out
