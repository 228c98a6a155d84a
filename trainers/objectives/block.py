"""Training of block heads: blocks are drawn from each text and run in one pass, and every level is scored."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.data_pipelines.features.batches import TrainingBatch, tapped
from headstart.heads.frozen import at_least_float32
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.block_attention import Blocks
from headstart.heads.losses import OBJECTIVES
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.unrolled import HeadInTraining, Teacher


@dataclass(frozen=True)
class BlockSupervision:
    """The blocks of a batch, and the tokens that their levels predict.

    Level k of a block with anchor a predicts the token at a + 1 + k, whose distribution the target gives at a + k.
    """

    blocks: Blocks
    rows: Tensor  # [levels, blocks], row in the batch
    columns: Tensor  # [levels, blocks], a + k, or a column that exists where nothing is predicted
    predicted: Tensor  # [levels, blocks]: the target wrote this token and those before it, and the head can draft it
    before: Tensor  # [levels, blocks], the token at a + k
    last_hidden: Tensor  # [levels, blocks, hidden]; the target's distributions are computed from it a chunk at a time
    text: Tensor  # [levels, blocks], column in the draft vocabulary of the token at a + 1 + k; -1 if it is outside
    outside: int  # predictions left out because the target's choice is not in the draft vocabulary

    def counts(self, unroll: int) -> Tensor:
        """The number of blocks that each level is scored in. [levels]"""
        assert unroll == len(self.predicted)
        return self.predicted.sum(1).float()


class TrainedBlocks(HeadInTraining):
    """A block head under training; the levels of a block take the place of unroll steps."""

    head: BlockHead
    learns_from = "the second of two in a row"

    def __init__(self, head: BlockHead, teacher: Teacher, objective: Objective, section: TrainSection) -> None:
        super().__init__(head, teacher, objective, section)
        assert objective.unroll == head.shape.levels
        self.anchors = section.anchors
        if head.shared_lm_head is not None:
            # The teacher's is already in the number format of the matrix products. Autocast keeps only what it converts
            # of trained weights, so it would convert this one again for every chunk of blocks.
            head.shared_lm_head = teacher.within_vocab.lm_head

    @torch.no_grad()
    def supervise(self, batch: TrainingBatch, key: str) -> BlockSupervision:
        """Draw the blocks of a batch; they depend on the key and on each text alone, not on the rest of the batch."""
        return self.supervision_of(batch, draw_blocks(batch, self.anchors, key))

    def supervision_of(self, batch: TrainingBatch, blocks: Blocks) -> BlockSupervision:
        device, seq = batch.tokens.device, batch.tokens.shape[1]
        levels = torch.arange(self.objective.unroll, device=device).unsqueeze(1)
        rows, anchors = blocks.indices(device)
        columns = anchors + levels  # [levels, blocks]
        rows, inside = rows.expand_as(columns), columns + 1 < seq
        columns = columns.clamp(max=seq - 2)
        written = batch.loss_mask[rows, columns + 1] & inside
        if batch.documents is not None:
            places = batch.documents.places
            written = written & (places[rows, columns + 1] == blocks.positions(device) + levels + 1)
        reached = written.long().cumprod(0).bool()  # a level whose text begins with another one is never reached
        last_hidden = batch.last_hidden[rows, columns]
        drafted = self.teacher.can_draft(batch, rows[reached], columns[reached])
        predicted = reached.clone()
        predicted[reached] = drafted
        return BlockSupervision(
            blocks=blocks,
            rows=rows,
            columns=columns,
            predicted=predicted,
            before=batch.tokens[rows, columns],
            last_hidden=last_hidden,
            text=self.teacher.column[batch.tokens[rows, columns + 1]],
            outside=int((~drafted).sum()),
        )

    def unroll(self, batch: TrainingBatch, supervision: Any, noise: Tensor | None) -> Tensor:
        """The head's hidden state at each level of each block. [levels, blocks, hidden]"""
        assert noise is None
        head = self.head
        features = head.project(tapped(batch.taps, batch.last_hidden, head.taps, head.target.num_layers))
        hidden = head.blocks_of(features, batch.places, batch.tokens, supervision.blocks, self.checkpointing)
        return hidden.transpose(0, 1)

    def score(self, supervision: Any, weights: Tensor, hidden: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The weighted loss of a chunk of blocks, and its sums [3, levels] of losses, hits and acceptances."""
        head, before = self.head, supervision.before[:, part]
        log_p = self.teacher.log_p(supervision.last_hidden[:, part])  # [levels, chunk, draft_vocab]
        log_q = at_least_float32(head.logits(hidden, before)).log_softmax(-1)
        losses = self.losses(log_q, log_p, supervision.text[:, part])  # [levels, chunk]
        return self.weighted(weights, losses, log_q, log_p, supervision.predicted[:, part])

    def losses(self, log_q: Tensor, log_p: Tensor, text: Tensor) -> Tensor:
        """The objective and the cross-entropy to the text, by their weights. [levels, chunk]"""
        objective = self.objective
        found = log_q.new_zeros(log_q.shape[:-1])
        if objective.weight:
            found = found + objective.weight * OBJECTIVES[objective.name](log_q, log_p)
        if objective.text_weight:  # a token outside the draft vocabulary costs nothing
            chosen = log_q.gather(-1, text.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            found = found - objective.text_weight * chosen.where(text >= 0, 0.0)
        return found


def draw_blocks(batch: TrainingBatch, count: int, key: str) -> Blocks:
    """Up to `count` blocks from each text; their anchors are tokens that the target wrote, and wrote another after.

    The anchors of a text depend on the key and on its tokens, so they are the same in any batch and on any rank.
    """
    found: list[tuple[int, int, int]] = []
    for row, start, text, mask in texts_of(batch):
        possible = (mask[1:-1] & mask[2:]).nonzero().flatten() + 1  # an anchor needs a position before it
        chosen = shuffled(possible, text, key)[:count].sort().values.tolist()
        found += [(row, start + anchor, start) for anchor in chosen]
    return blocks_at(found)


def texts_of(batch: TrainingBatch) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Row, first column, tokens and loss mask of each text of a batch, with what pads it."""
    tokens, loss_mask = batch.tokens.cpu(), batch.loss_mask.cpu()
    everything = slice(0, tokens.shape[1])
    spans = [(slice(row, row + 1), everything) for row in range(len(tokens))]
    for row, columns in spans if batch.documents is None else batch.documents.spans():
        yield row.start, columns.start, tokens[row, columns][0], loss_mask[row, columns][0]


def shuffled(anchors: Tensor, text: Tensor, key: str) -> Tensor:
    """The possible anchors of a text in random order, which depends on the key and on the text without padding."""
    length = int(anchors[-1]) + 2 if len(anchors) else 0
    seed = zlib.crc32(text[:length].numpy().tobytes(), zlib.crc32(key.encode()))
    return anchors[torch.randperm(len(anchors), generator=torch.Generator().manual_seed(seed))]


def blocks_at(places: list[tuple[int, int, int]]) -> Blocks:
    """The blocks with these rows, anchors and first columns of their documents."""
    rows, anchors, starts = (tuple(each) for each in zip(*places, strict=True)) if places else ((), (), ())
    return Blocks(rows, anchors, starts)
