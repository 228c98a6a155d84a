"""Laws of packed rows: samples in one row do not affect each other and train the head exactly as padded ones do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.data_pipelines.features.batches import Sample, TrainingBatch, length_buckets, pack
from headstart.heads.base import LevelHead
from headstart.heads.vocab import DraftVocab
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.unrolled import Teacher, UnrolledHead, input_noise

MakeHead = Callable[..., LevelHead]
UNROLL, VOCAB, HIDDEN = 4, 97, 32
LENGTHS = [1, 14, 2, 9, 23, 5, 14, 3]
LIMITS = {"one row": 100, "two rows": 40, "less than the longest": 16, "one token": 1}
HEADS: dict[str, tuple[dict[str, Any], bool]] = {  # arguments of make_head, and whether to use a draft vocabulary
    "eagle3": ({}, False),
    "EAGLE-3.1": ({"fc_norm": True, "norm_output": True}, True),
    "eagle1": ({"kind": "eagle1"}, False),
}


def head_and_samples(make_head: MakeHead, name: str) -> tuple[LevelHead, list[Sample]]:
    shape, limited = HEADS[name]
    head = make_head(vocab=DraftVocab(torch.arange(0, VOCAB, 2), VOCAB) if limited else None, **shape)
    with torch.no_grad():
        for parameter in head.parameters():
            if head.kind == "eagle1" and parameter.ndim == 2:
                parameter.mul_(0.3)  # EAGLE-1 features have no norm and would grow from step to step
    samples = []
    for length in LENGTHS:
        taps = torch.randn(length, 0 if head.kind == "eagle1" else 3 * HIDDEN)
        mask, last_hidden = torch.rand(length) < 0.8, torch.randn(length, HIDDEN)
        samples.append(Sample(torch.randint(VOCAB, (length,)), mask, taps, last_hidden))
    return head.requires_grad_(True), samples


def loss_and_gradients(head, frozen, batch, noise):
    """The training loss, the sums that it consists of, and its gradient with respect to each weight."""
    weights = (0.1, 1.0) if head.kind == "eagle1" else (1.0, 0.0)
    objective = Objective("soft_cross_entropy", *weights, unroll_weights=tuple(0.8**k for k in range(UNROLL)))
    unrolled = UnrolledHead(head, Teacher(frozen, head.vocab), objective)
    supervision = unrolled.teacher.supervise(batch)
    scores = unrolled(batch, supervision, supervision.counts(UNROLL), noise)
    names, parameters = zip(*head.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(scores.loss, parameters), strict=True))
    return {"loss": scores.loss.detach(), "sums": scores.sums().detach(), **gradients}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("name", HEADS)
def test_packed_samples_give_the_same_loss_and_gradients_as_padded_ones(make_head, frozen, name, limit):
    head, samples = head_and_samples(make_head, name)
    packing = pack(LENGTHS, limit)
    keys = [str(number) for number in range(len(LENGTHS))]
    noises: list[Tensor | None] = [None, None]
    if name == "eagle1":
        noises = [input_noise(0.01, LENGTHS, keys, HIDDEN, "cpu", rows) for rows in (None, packing)]
    padded = loss_and_gradients(head, frozen, TrainingBatch.collate(samples, torch.float32), noises[0])
    batch = TrainingBatch.collate(samples, torch.float32, "cpu", packing)
    assert packing is not None
    assert batch.tokens.shape[0] == len(packing)
    packed = loss_and_gradients(head, frozen, batch, noises[1])
    for what, its in padded.items():
        assert its.abs().max() > 1e-6, f"{what} is zero, so the comparison would be empty"
        assert (packed[what] - its).norm() <= 1e-5 * its.norm(), what


@pytest.mark.parametrize("tokens", [0, 100, 300])
def test_texts_of_a_pass_are_of_similar_length_and_short_ones_are_more(tokens: int) -> None:
    lengths = torch.randint(1, 65, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    groups = length_buckets(lengths, 4, tokens)
    assert sorted(number for group in groups for number in group) == [*range(40)]
    assert [lengths[number] for group in groups for number in group] == sorted(lengths)
    sizes = [(len(group), max(lengths[number] for number in group)) for group in groups]
    assert all(count <= 4 or count * longest <= tokens for count, longest in sizes)
    following = [min(lengths[number] for number in group) for group in groups[1:]]
    for (count, _), next_length in zip(sizes, following, strict=False):  # no group could have taken one more
        assert count >= 4
        assert (count + 1) * next_length > tokens


def test_packing_puts_each_sample_undivided_into_one_row_of_limited_length() -> None:
    generator = torch.Generator().manual_seed(0)
    for limit in (1, 7, 30, 64, 1000):
        lengths = torch.randint(1, 65, (40,), generator=generator).tolist()
        packing = pack(lengths, limit)
        assert packing is not None
        assert sorted(number for row in packing for number in row) == list(range(40))
        sizes = [sum(lengths[number] for number in row) for row in packing]
        assert all(size <= limit or len(row) == 1 for size, row in zip(sizes, packing, strict=True))
        fitting = [size for size in sizes if size <= limit]
        assert all(a + b > limit for i, a in enumerate(fitting) for b in fitting[:i])  # no two rows would fit in one
        assert pack(lengths, limit) == packing
    assert pack(lengths, None) is None
