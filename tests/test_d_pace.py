"""Laws of D-PACE's weights for unrolled heads: each chain of steps weighs its depths by the length that they decide."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from headstart.data_pipelines.features.batches import Batch, Sample, pack
from headstart.heads.base import LevelHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.losses import d_pace, soft_cross_entropy
from headstart.heads.vocab import DraftVocab
from headstart.trainers.objectives.unrolled import Objective, Teacher, UnrolledHead

MakeHead = Callable[..., Any]
OBJECTIVE = Objective("soft_cross_entropy", 1.0, 0.0, 0.0, (1.0, 0.8, 0.64), d_pace=True)


def a_sample(length: int, prompt: int, seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(
        tokens=torch.randint(97, (length,), generator=generator),
        loss_mask=torch.arange(length) >= prompt,
        taps=torch.randn(length, 96, generator=generator),
        last_hidden=torch.randn(length, 32, generator=generator),
    )


SAMPLES = [a_sample(9, 3, 1), a_sample(6, 2, 2), a_sample(12, 8, 3)]


def by_hand(unrolled: UnrolledHead, sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Loss and weight of every step of every chain in a text, chain by chain."""
    lone = Batch.collate([sample], torch.float32)
    plain = unrolled.teacher.supervise(lone)
    hidden, head = unrolled.unroll(lone, plain, None), unrolled.head  # [steps, positions, feature]
    assert isinstance(head, LevelHead)
    log_q = torch.stack([head.logits(states, k) for k, states in enumerate(hidden)]).log_softmax(-1)
    log_p = unrolled.teacher.log_p(plain.last_hidden)
    at = {int(place): number for number, place in enumerate(plain.places)}
    found = []
    for index in range(len(sample.tokens)):
        steps = [k for k in range(3) if index + 1 + k in at]
        chances = torch.zeros(3, 1)
        for k in steps:
            token = int(sample.tokens[index + 2 + k])
            inside = (unrolled.teacher.vocab.ids == token).nonzero().flatten()
            if len(inside):
                chances[k] = log_q[k, at[index + 1 + k], inside[0]].exp()
        predicted = torch.tensor([k in steps for k in range(3)]).unsqueeze(1)
        weights = d_pace(chances.detach(), predicted)
        for k in steps:
            number = at[index + 1 + k]
            found.append((soft_cross_entropy(log_q[k, number], log_p[number]), weights[k, 0]))
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("packed", [None, 16])
@pytest.mark.parametrize("vocab_size", [97, 60])
def test_the_weights_are_those_of_each_chain(
    make_head: MakeHead, frozen: FrozenTarget, kind: str, packed: int | None, vocab_size: int
) -> None:
    """chain from index t:  t+1 (step 0)  t+2 (step 1)  t+3 (step 2)      their weights add up to 1"""
    vocab = DraftVocab.most_frequent(torch.arange(97) % 7, vocab_size)
    unrolled = UnrolledHead(make_head(kind, vocab=vocab), Teacher(frozen, vocab), OBJECTIVE)
    taps = 0 if kind == "medusa" else 96  # Medusa reads the last hidden state alone
    samples = [replace(sample, taps=sample.taps[:, :taps]) for sample in SAMPLES]
    packing = pack([len(sample.tokens) for sample in samples], packed)
    batch = Batch.collate(samples, torch.float32, packing=packing)
    supervision = unrolled.supervise(batch, "key")
    counts = supervision.counts(3)
    scores = unrolled(batch, supervision, counts)
    parts = [part for sample in samples for part in by_hand(unrolled, sample)]
    wanted = sum(loss * weight for loss, weight in parts) * sum(OBJECTIVE.unroll_weights) / counts[0]
    assert_close(scores.loss, wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_batch_without_a_position_has_no_loss(make_head: MakeHead, frozen: FrozenTarget) -> None:
    unrolled = UnrolledHead(make_head(), Teacher(frozen, DraftVocab.full(97)), OBJECTIVE)
    batch = Batch.collate([a_sample(4, 4, 1)], torch.float32)
    supervision = unrolled.supervise(batch, "key")
    assert unrolled(batch, supervision, supervision.counts(3)).loss == 0
