"""Laws of a P-EAGLE head: its pass in training is that of drafting, its first level is EAGLE-3's, no level sees ahead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import TEXT, Naive, draft, new_cache, verified
from families import FAMILIES, SOME_FAMILIES
from matrix import slow_unless
from scripted import paths
from torch import Tensor
from torch.testing import assert_close

from headstart.data_pipelines.features.batches import Batch, pack
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block_attention import Blocks
from headstart.heads.kinds.checkpoint import load_head_for, new_head, save_head
from headstart.heads.kinds.peagle import KEEP_RATIO, KEEP_SHARE_MIN, PEagleHead
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import Slots
from headstart.inference.core.drafter import NoDrafter
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema_heads import PEagleSection
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.peagle import TrainedChains, draw_chains
from headstart.trainers.objectives.unrolled import Teacher, UnrolledHead

MakeHead = Callable[..., PEagleHead]
SEQ, DEPTHS = 12, 4
OBJECTIVE = Objective(unroll_weights=(1.0, 0.7, 0.5, 0.3))


def in_training(
    head: PEagleHead, frozen: FrozenTarget, vocab: DraftVocab | None = None, **fields: Any
) -> TrainedChains:
    return TrainedChains(head, Teacher(frozen, vocab or head.vocab), OBJECTIVE, TrainSection(steps=1, **fields))


def a_text(seq: int = SEQ) -> Batch:
    return Batch(
        tokens=torch.randint(97, (1, seq)),
        loss_mask=torch.ones(1, seq, dtype=torch.bool),
        taps=torch.randn(1, seq, 96),
        last_hidden=torch.randn(1, seq, 32),
        lengths=(seq,),
    )


def chain_at(anchor: int) -> tuple[Blocks, ...]:
    """One chain of all depths."""
    none = Blocks((), (), ())
    return none, none, none, Blocks((0,), (anchor,), (0,))


def drafted(head: PEagleHead, text: Batch, anchor: int, reads: tuple[int, ...]) -> Tensor:
    """The states of all levels after the positions before `anchor`, read in these portions; the last with the masks."""
    layers, kv_heads, head_dim = head.shape.cache_shape
    slots = Slots([torch.full((layers, 2, 1, kv_heads, SEQ + DEPTHS, head_dim), float("nan"))], 1)
    features, start = head.project(text.taps), 0
    for end in reads:
        entries = features[:, start:end], text.tokens[:, start + 1 : end + 1], torch.arange(start, end).unsqueeze(0)
        if end == anchor:
            masks = head.mask_entries(torch.tensor([anchor]), DEPTHS - 1)
            entries = tuple(torch.cat(pair, dim=1) for pair in zip(entries, masks, strict=True))
        count = entries[0].shape[1]
        mask = torch.full((count, start + count), -torch.inf).triu(start + 1)
        hidden = head(*entries, mask, slots)
        slots.advance([end - start])
        start = end
    return hidden[0, -DEPTHS:]


@pytest.mark.parametrize(
    "shape", [{}, {"num_layers": 3, "fc_norm": True}, {"num_layers": 1, "num_kv_heads": 4}], ids=str
)
@pytest.mark.parametrize("anchor", [1, 5, SEQ - DEPTHS])
def test_the_pass_of_training_is_that_of_drafting(
    make_head: MakeHead, frozen: FrozenTarget, shape: dict[str, Any], anchor: int
) -> None:
    """index      0  1  2 | 3  4        the last read of drafting holds the mask entries, too
    masks                      m  m  m  see all indices before them and the masks before them
    """
    head, text = make_head("peagle", **shape), a_text()
    trained = in_training(head, frozen)
    states = trained.unroll(text, trained.supervision_of(text, chain_at(anchor)), None)
    once = drafted(head, text, anchor, (anchor,))
    assert_close(states[0], once, atol=1e-4, rtol=1e-4)
    if anchor > 1:
        assert_close(drafted(head, text, anchor, (1, anchor)), once, atol=1e-4, rtol=1e-4)
