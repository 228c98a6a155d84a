"""Laws of training block heads: which blocks are drawn, what each level is scored against, and that runs resume."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafting import a_sample
from torch import Tensor
from torch.testing import assert_close

from headstart.common.files import read_jsonl
from headstart.data_pipelines.features.batches import Sample, TrainingBatch, pack
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.block_attention import Blocks
from headstart.heads.kinds.checkpoint import load_head_for
from headstart.heads.vocab import DraftVocab
from headstart.recipes import Recipe
from headstart.recipes.schema_train import TrainSection
from headstart.trainers import train as run
from headstart.trainers.evaluation import metrics_by_depth
from headstart.trainers.objectives.block import TrainedBlocks, draw_blocks
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.unrolled import Teacher

MakeHead = Callable[..., BlockHead]
MakeRecipe = Callable[..., Recipe]
DSPARK = Objective("total_variation", 1.8, text_weight=0.1, unroll_weights=(1.0, 0.7, 0.5, 0.3))
HEAD = "head={kind: block, block_size: 4, markov_rank: 6, taps: [2, 3, 4], draft_vocab_size: 80}"
BLOCK = HEAD, "train.unroll=4", "train.anchors=5"
SAMPLES = [
    a_sample(12, range(3, 12), 1),
    a_sample(9, range(2, 6), 2),
    a_sample(20, range(8, 20), 3),
    a_sample(4, range(3, 4), 4),  # the target wrote one token, so no block fits
]


def in_training(make_head: MakeHead, frozen: FrozenTarget, vocab: DraftVocab | None = None) -> TrainedBlocks:
    vocab = vocab or DraftVocab.full(97)
    head = make_head("block", markov_rank=6, vocab=vocab).requires_grad_(True)
    return TrainedBlocks(head, Teacher(frozen, vocab), DSPARK, TrainSection(steps=1, anchors=4))


def test_anchors_are_tokens_that_the_target_wrote_and_wrote_another_after() -> None:
    batch = TrainingBatch.collate(SAMPLES, torch.float32)
    blocks = draw_blocks(batch, 100, "key")
    wanted = [
        (row, anchor, 0)
        for row, sample in enumerate(SAMPLES)
        for anchor in range(1, len(sample.tokens) - 1)
        if sample.loss_mask[anchor] and sample.loss_mask[anchor + 1]
    ]
    assert list(zip(blocks.rows, blocks.anchors, blocks.starts, strict=True)) == wanted
    few = draw_blocks(batch, 3, "key")
    assert [few.rows.count(row) for row in range(4)] == [3, 3, 3, 0]
    assert {*zip(few.rows, few.anchors, strict=True)} < {*zip(blocks.rows, blocks.anchors, strict=True)}
    assert draw_blocks(batch, 3, "another key") != few


@pytest.mark.parametrize("limit", [22, 40])
def test_the_blocks_of_a_text_are_the_same_in_any_batch_and_in_packed_rows(limit: int) -> None:
    alone = [draw_blocks(TrainingBatch.collate([sample], torch.float32), 3, "key").anchors for sample in SAMPLES]
    together = draw_blocks(TrainingBatch.collate(SAMPLES, torch.float32), 3, "key")
    assert together.anchors == sum(alone, ())
    packing = pack([len(sample.tokens) for sample in SAMPLES], limit)
    assert packing is not None
    packed = draw_blocks(TrainingBatch.collate(SAMPLES, torch.float32, packing=packing), 3, "key")
    places = [anchor - start for anchor, start in zip(packed.anchors, packed.starts, strict=True)]
    assert places == [anchor for row in packing for number in row for anchor in alone[number]]


def by_hand(trained: TrainedBlocks, sample: Sample, anchor: int) -> list[dict[str, Tensor]]:
    """For each level of one block that counts: its losses, computed from one block alone, and the target's choice."""
    head, frozen, vocab = trained.head, trained.teacher.frozen, trained.teacher.vocab
    lone = TrainingBatch.collate([sample], torch.float32)
    supervision = trained.supervision_of(lone, Blocks((0,), (anchor,), (0,)))
    states = trained.unroll(lone, supervision, None)[:, 0]
    found: list[dict[str, Tensor]] = []
    for level in range(head.shape.levels):
        at = anchor + level
        if at + 1 >= len(sample.tokens) or not sample.loss_mask[at + 1]:
            break
        logits = frozen.logits(sample.last_hidden[at])
        if int(logits.argmax()) not in vocab.ids:
            found.append({})
            continue
        p, q = logits[vocab.ids].softmax(-1), head.logits(states[level], sample.tokens[at]).softmax(-1)
        column = (vocab.ids == sample.tokens[at + 1]).nonzero().flatten()
        text = -q[column[0]].log() if len(column) else torch.zeros(())
        kept = torch.minimum(p, q).sum()
        loss = 0.9 * (p - q).abs().sum() + 0.1 * text
        found.append({"loss": loss, "hit": (p.argmax() == q.argmax()).float(), "accepted": kept})
    return found


@pytest.mark.parametrize("packed", [None, 22])
@pytest.mark.parametrize("vocab_size", [97, 60])
def test_the_loss_is_dsparks_level_by_level(make_head, frozen, packed, vocab_size):
    """0.1 CE to the text + 0.9 L1 to the target, for the prefix that the target wrote."""
    vocab = DraftVocab.most_frequent(torch.arange(97) % 7, vocab_size)
    trained = in_training(make_head, frozen, vocab)
    packing = pack([len(sample.tokens) for sample in SAMPLES], packed)
    batch = TrainingBatch.collate(SAMPLES, torch.float32, packing=packing)
    supervision = trained.supervise(batch, "key")
    counts = supervision.counts(4)
    scores = trained(batch, supervision, counts)

    sums, wanted, weights = torch.zeros(4, 4), torch.zeros(()), torch.tensor(DSPARK.unroll_weights)
    chosen = [[number] for number in range(4)] if packing is None else packing
    blocks = supervision.blocks
    for row, anchor, start in zip(blocks.rows, blocks.anchors, blocks.starts, strict=True):
        first = 0
        for number in chosen[row]:
            if first == start:
                break
            first += len(SAMPLES[number].tokens)
        levels = by_hand(trained, SAMPLES[number], anchor - start)
        for level, found in enumerate(levels):
            if found:
                sums[:, level] += torch.stack([torch.ones(()), found["loss"], found["hit"], found["accepted"]]).detach()
                wanted = wanted + weights[level] / counts[level] * found["loss"]
    assert_close(scores.sums(), sums, atol=1e-4, rtol=1e-4)
    assert_close(scores.loss, wanted, atol=1e-4, rtol=1e-4)
    parameters = [each for each in trained.parameters() if each.requires_grad]
    assert_close(*(torch.autograd.grad(loss, parameters) for loss in (scores.loss, wanted)), atol=1e-4, rtol=1e-3)


def test_chunks_change_neither_loss_nor_gradient(make_head, frozen, monkeypatch):
    trained = in_training(make_head, frozen)
    batch = TrainingBatch.collate(SAMPLES, torch.float32)
    supervision = trained.supervise(batch, "key")
    found: list[list[Tensor]] = []
    for blocks_at_once in (100, 2):
        monkeypatch.setattr("headstart.trainers.objectives.unrolled.positions_at_once", lambda *_: blocks_at_once)  # noqa: B023
        loss = trained(batch, supervision, supervision.counts(4)).loss
        found.append([loss, *torch.autograd.grad(loss, [*trained.parameters()])])
    assert_close(*found, atol=1e-5, rtol=1e-4)


def test_an_objective_named_in_the_recipe_had_no_effect_on_a_dflash_head(make_recipe: MakeRecipe) -> None:
    plain = *BLOCK, "head.markov_rank=0", "train.unroll=3"
    assert Objective.from_recipe(make_recipe("a", *plain)).weight == 0
    assert Objective.from_recipe(make_recipe("b", *plain, "train.objective=reverse_kl")).weight == 1
    weighted = make_recipe("c", *plain, "train.objective=reverse_kl", "train.objective_weight=0.5")
    assert Objective.from_recipe(weighted).weight == 0.5


def test_the_expected_acceptance_length_is_that_of_chains_of_the_mean_acceptances() -> None:
    """Of 10, 8 and 4 blocks with 5, 6 and 1 expected acceptances: 1 + 1/2 + 1/2 * 3/4 + 1/2 * 3/4 * 1/4"""
    sums = torch.tensor([[10.0, 8, 4], [0, 0, 0], [0, 0, 0], [5, 6, 1]])
    assert metrics_by_depth("heldout", sums)["heldout/expected_tau"] == 1 + 1 / 2 + 3 / 8 + 3 / 32


def test_a_batch_without_a_block_has_no_loss_and_no_gradient(make_head: MakeHead, frozen: FrozenTarget) -> None:
    trained = in_training(make_head, frozen)
    batch = TrainingBatch.collate(SAMPLES[3:], torch.float32)
    supervision = trained.supervise(batch, "key")
    scores = trained(batch, supervision, supervision.counts(4))
    assert not scores.sums().any()
    for gradient in torch.autograd.grad(scores.loss, [*trained.parameters()], allow_unused=True):
        assert gradient is None or not gradient.any()


def test_a_run_trains_measures_and_writes_a_block_head(harvested: Path, make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("run", *BLOCK, "train.eval_prompts=1", "train.steps=2", "train.warmup_steps=1")
    run(recipe)
    head = load_head_for(recipe.head_dir, FrozenTarget.from_folder(harvested / "target", torch.float32))
    assert isinstance(head, BlockHead)
    assert len(head.vocab.ids) == 80
    assert head.shape.mask_token_id not in head.vocab.ids
    assert head.calibration.tree is not None
    names = {name for row in read_jsonl(recipe.metrics_path) for name in row}
    assert {f"heldout/accuracy_{level}" for level in range(4)} < names
