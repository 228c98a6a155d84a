"""Training of P-EAGLE heads: every text is read once as by EAGLE-3, and mask entries follow some of its positions.

Which positions have mask entries, and how many, is drawn anew for each step (conditional drop, COD, of the paper).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headstart.data_pipelines.features.batches import TrainingBatch, tapped
from headstart.heads.frozen import at_least_float32
from headstart.heads.kinds.block_attention import BlockCache, Blocks, Reach
from headstart.heads.kinds.peagle import KEEP_RATIO, KEEP_SHARE_MIN, PEagleHead
from headstart.heads.losses import OBJECTIVES
from headstart.heads.unroll_attention import UnrollCache
from headstart.trainers.objectives.block import blocks_at, shuffled, texts_of
from headstart.trainers.objectives.unrolled import UnrolledHead


@dataclass(frozen=True)
class ChainSupervision:
    """The chains of a batch, and the distributions that their entries predict.

    A chain is the entry at the position before its anchor and the mask entries after it. Depth k of a chain with anchor
    a predicts the token at a + 1 + k, whose distribution the target gives at a + k.
    """

    chains: tuple[Blocks, ...]  # those with no mask entry, with one, with two and so on
    scored: Tensor  # [entries], places among all entries of those whose target's choice is in the draft vocabulary
    depths: Tensor  # [entries]
    rows: Tensor  # [entries], row in the batch
    columns: Tensor  # [entries], a + k
    last_hidden: Tensor  # [entries, hidden]; the target's distributions are computed from it a chunk at a time
    outside: int  # entries left out because the target's choice is not in the draft vocabulary

    def counts(self, unroll: int) -> Tensor:
        """The number of entries of each depth that are scored. [unroll]"""
        return self.depths.bincount(minlength=unroll).float()


class TrainedChains(UnrolledHead):
    """A P-EAGLE head under training."""

    head: PEagleHead

    @torch.no_grad()
    def supervise(self, batch: TrainingBatch, key: str) -> ChainSupervision:
        """Draw the chains of a batch; they depend on the key and on each text alone, not on the rest of the batch."""
        return self.supervision_of(batch, draw_chains(batch, self.objective.unroll, key))

    def supervision_of(self, batch: TrainingBatch, chains: tuple[Blocks, ...]) -> ChainSupervision:
        device = batch.tokens.device
        entries = []
        for masks, blocks in enumerate(chains):
            rows, anchors = blocks.indices(device)
            depths = torch.arange(masks + 1, device=device).expand(len(blocks), -1)
            each = depths, rows.unsqueeze(1).expand_as(depths), anchors.unsqueeze(1) + depths
            entries.append(torch.stack(each).flatten(1))
        depths, rows, columns = torch.cat(entries, dim=1)
        states = batch.last_hidden.flatten(0, 1)  # [batch * seq, hidden]
        places, shared = torch.unique(rows * batch.tokens.shape[1] + columns, return_inverse=True)
        seq = batch.tokens.shape[1]
        inside = self.teacher.can_draft(batch, places // seq, places % seq)[shared]
        scored = inside.nonzero().flatten()
        return ChainSupervision(
            chains=chains,
            scored=scored,
            depths=depths[scored],
            rows=rows[scored],
            columns=columns[scored],
            last_hidden=states[places[shared[scored]]],
            outside=len(inside) - len(scored),
        )

    def unroll(self, batch: TrainingBatch, supervision: Any, noise: Tensor | None) -> Tensor:
        """The head's hidden state at each scored entry. [1, entries, feature]"""
        head, read, fill = self.head, self.run_step, self.run_masks
        if self.checkpointing:
            read, fill = (
                partial(checkpoint, each, use_reentrant=False, preserve_rng_state=False) for each in (read, fill)
            )
        features = head.project(tapped(batch.taps, batch.last_hidden, head.taps, head.target.num_layers))
        features = features if noise is None else features + noise.to(features.dtype)  # [batch, seq, feature]
        tokens = batch.tokens.roll(-1, dims=1)
        hidden, cache = read(0, features, tokens, batch.places, UnrollCache(documents=batch.documents))
        found = []
        for masks, blocks in enumerate(supervision.chains):
            rows, anchors = blocks.indices(hidden.device)
            chain = hidden[rows, anchors - 1].unsqueeze(1)
            if masks:
                chain = torch.cat([chain, fill(blocks, masks, cache)], dim=1)  # [blocks, masks + 1, feature]
            found.append(chain.flatten(0, 1))
        return torch.cat(found)[supervision.scored].unsqueeze(0)

    def run_masks(self, blocks: Blocks, count: int, cache: UnrollCache) -> Tensor:
        """The hidden states of so many mask entries after each anchor. [blocks, count, feature]"""
        keys, values = ([of_layer for (of_layer,) in each] for each in (cache.keys, cache.values))
        context = BlockCache(blocks, (Reach(causal=True),) * len(keys), keys, values)
        return self.head(*self.head.mask_entries(blocks.positions(keys[0].device), count), cache=context)

    def score(self, supervision: Any, weights: Tensor, hidden: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The weighted loss of a chunk of entries, and its sums [3, unroll] of losses, hits and acceptances."""
        depths, log_p = supervision.depths[part], self.teacher.log_p(supervision.last_hidden[part])
        log_q = at_least_float32(self.head.logits(hidden[0])).log_softmax(-1)  # [chunk, draft_vocab]
        losses = self.objective.weight * OBJECTIVES[self.objective.name](log_q, log_p)  # [chunk]
        with torch.no_grad():
            each = torch.stack([losses, *self.hits_and_acceptances(log_q, log_p)])
            sums = each.new_zeros(3, len(weights)).index_add_(1, depths, each)
        return (weights[depths, 0] * losses).sum(), sums


def draw_chains(batch: TrainingBatch, depths: int, key: str) -> tuple[Blocks, ...]:
    """The chains of a batch by their number of mask entries, 0 to depths - 1.

    Each position that the target wrote a token after has a chain. Of N positions of a text, depth d keeps
    (N - d) * max(KEEP_RATIO ** d, KEEP_SHARE_MIN), drawn from those that depth d - 1 keeps and whose token the target
    wrote. The chains of a text depend on the key and on its tokens, so they are the same in any batch and on any rank.
    """
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(depths)]
    for row, start, text, mask in texts_of(batch):
        possible = mask[2:].nonzero().flatten() + 1  # an anchor needs a position before it
        kept = shuffled(possible, text, key)
        for depth in range(1, depths + 1):
            written = (kept + 1 + depth < len(mask)) & mask[(kept + 1 + depth).clamp(max=len(mask) - 1)]
            count = int((len(possible) - depth) * max(KEEP_RATIO**depth, KEEP_SHARE_MIN)) if depth < depths else 0
            longer = kept[written][: max(count, 0)]
            ended = kept[~torch.isin(kept, longer)].sort().values.tolist()
            found[depth - 1] += [(row, start + anchor, start) for anchor in ended]
            kept = longer
    return tuple(blocks_at(places) for places in found)
