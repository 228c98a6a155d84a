"""Our training step of a block head (DFlash), as trainers/step.py runs it."""

from itertools import count

import torch
from peers.contender import Case, Inputs, Step, serve
from peers.headstart_step import batch_of, frozen_of
from torch import Tensor

from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import BlockSection
from headstart.trainers.objectives.block import TrainedBlocks
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.unrolled import Teacher


def make_step(case: Case, inputs: Inputs) -> Step:
    section = BlockSection(
        kind="block",
        num_layers=case.head_layers,
        block_size=case.block_size,
        markov_rank=0,
        taps=case.taps,
    )
    frozen, vocab = frozen_of(case, inputs), DraftVocab(torch.arange(case.draft_vocab), case.vocab)
    head = new_head(section, frozen, vocab, seed=0).to(case.device, case.torch_dtype)
    assert isinstance(head, BlockHead)
    objective = Objective(
        weight=0.0 if case.to_text else 1.0,
        text_weight=1.0 if case.to_text else 0.0,
        unroll_weights=tuple(section.unroll_decay**k for k in range(section.levels)),
    )
    trained = TrainedBlocks(head, Teacher(frozen, vocab), objective, case.anchors)
    batch, numbers = batch_of(case, inputs), count()

    def step() -> Tensor:
        trained.zero_grad()
        supervision = trained.supervise(batch, f"step {next(numbers)}")
        scores = trained(batch, supervision, supervision.counts(section.levels))
        scores.loss.backward()
        return scores.loss.detach()

    return step


if __name__ == "__main__":
    serve(make_step, ())
