"""Laws of a P-EAGLE head: its training pass is its drafting pass, its first level is EAGLE-3's, no level sees ahead."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_inputs import assert_message
from drafting import OTHER_TEXTS, PENALTIES, TEXT, Naive, a_sample, draft, new_cache, verified
from exported import EVERY_HEAD, files_in_memory, logits, read_config, read_tensors
from matrix import slow_unless
from scripted import paths
from test_heads import empty_slots
from torch import Tensor
from torch.testing import assert_close

from headstart.data_pipelines.features.batches import TrainingBatch, pack
from headstart.heads.formats.lint import lint, violations
from headstart.heads.formats.published import import_head
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block_attention import Blocks
from headstart.heads.kinds.checkpoint import load_head_for, new_head
from headstart.heads.kinds.peagle import KEEP_RATIO, KEEP_SHARE_MIN, MASK_TOKEN_KEYS, PEagleHead
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema_heads import PEagleSection
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.peagle import TrainedChains, draw_chains
from headstart.trainers.objectives.unrolled import Teacher

MakeHead = Callable[..., PEagleHead]
SEQ, DEPTHS = 12, 4
OBJECTIVE = Objective(unroll_weights=(1.0, 0.7, 0.5, 0.3))
SHAPES: list[dict[str, Any]] = [{}, {"num_layers": 3, "fc_norm": True}, {"num_layers": 1, "num_kv_heads": 4}]
# The target wrote no token that can be predicted of the last one.
SAMPLES = [
    a_sample(16, range(3, 16), 16),
    a_sample(9, range(2, 6), 9),
    a_sample(14, range(8, 14), 14),
    a_sample(4, range(1), 4),
]


def in_training(head: PEagleHead, frozen: FrozenTarget, **fields: Any) -> TrainedChains:
    return TrainedChains(head, Teacher(frozen, head.vocab), OBJECTIVE, TrainSection(steps=1, **fields))


def a_text(seq: int = SEQ) -> TrainingBatch:
    return TrainingBatch.collate([a_sample(seq, range(seq), seq)], torch.float32)


def chain_at(anchor: int) -> tuple[Blocks, ...]:
    none = Blocks((), (), ())
    return none, none, none, Blocks((0,), (anchor,), (0,))


def drafted(head: PEagleHead, text: TrainingBatch, anchor: int, reads: tuple[int, ...]) -> Tensor:
    """The states of all levels after the positions before `anchor`, read in these portions; the last with the masks."""
    slots, features, start = empty_slots(head, SEQ + DEPTHS, 1), head.project(text.taps), 0
    for end in reads:
        tokens, positions = text.tokens[:, start + 1 : end + 1], torch.arange(start, end).unsqueeze(0)
        entries = [features[:, start:end], tokens, positions]
        if end == anchor:
            masks = head.mask_entries(torch.tensor([anchor]), DEPTHS - 1)
            entries = [torch.cat(pair, dim=1) for pair in zip(entries, masks, strict=True)]
        count = entries[0].shape[1]
        mask = torch.full((count, start + count), -torch.inf).triu(start + 1)
        hidden = head(*entries, mask, slots)
        slots.advance([end - start])
        start = end
    return hidden[0, -DEPTHS:]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("anchor", [1, 5, SEQ - DEPTHS])
def test_the_pass_of_training_is_that_of_drafting(make_head, frozen, shape, anchor):
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


def test_the_first_level_of_one_layer_is_eagle_3s(make_head: MakeHead) -> None:
    """So is all of it with an EAGLE-3 head's weights and feedback replaced by the learned vector."""
    eagle3: Any = make_head("eagle3")
    head = make_head("peagle", num_layers=1)
    head.load_state_dict({**head.state_dict(), **eagle3.state_dict()})
    text = torch.randint(97, (1, SEQ))
    features = eagle3.project(torch.randn(1, SEQ - 1, 96))
    ours, theirs = (next(each.text_logits(features, text, 1)) for each in (head, eagle3))
    assert torch.equal(ours, theirs)


def test_levels_one_by_one_are_those_of_one_pass(make_head: MakeHead, frozen: FrozenTarget) -> None:
    """`text_logits` unrolls the head as any `LevelHead`; calibration and the doctor read it."""
    head, text = make_head("peagle"), a_text()
    trained = in_training(head, frozen)
    levels = [*head.text_logits(head.project(text.taps[:, :-1]), text.tokens, DEPTHS)]
    for anchor in range(1, SEQ - DEPTHS):
        states = trained.unroll(text, trained.supervision_of(text, chain_at(anchor)), None)[0]
        found = torch.stack([logits[anchor - 1] for logits in levels])
        assert_close(found, head.logits(states), atol=1e-4, rtol=1e-4)


def places(chains: tuple[Blocks, ...], depth: int) -> set[tuple[int, int]]:
    """Row and anchor of the chains that reach a depth."""
    return {pair for blocks in chains[depth:] for pair in zip(blocks.rows, blocks.anchors, strict=True)}


def test_the_draw_is_nested_within_the_loss_mask_and_as_large_as_the_formula_says() -> None:
    batch = TrainingBatch.collate([SAMPLES[0]], torch.float32)
    written = batch.loss_mask[0]
    chains = draw_chains(batch, 6, "key")
    whole = {anchor for anchor in range(1, len(written) - 1) if written[anchor + 1]}
    assert places(chains, 0) == {(0, anchor) for anchor in whole}
    for depth in range(1, 6):
        kept = places(chains, depth)
        assert kept <= places(chains, depth - 1)
        assert all(written[anchor + 1 + depth] for _, anchor in kept)
        count = int((len(whole) - depth) * max(KEEP_RATIO**depth, KEEP_SHARE_MIN))
        assert len(kept) == count > 0
    assert places(draw_chains(batch, 6, "another key"), 2) != places(chains, 2)


def test_the_draw_of_a_text_is_the_same_in_any_batch_and_in_packed_rows() -> None:
    alone = [draw_chains(TrainingBatch.collate([sample], torch.float32), DEPTHS, "key") for sample in SAMPLES]
    lengths = [len(sample.tokens) for sample in SAMPLES]
    for packing in (None, pack(lengths, 64)):
        together = draw_chains(TrainingBatch.collate(SAMPLES, torch.float32, packing=packing), DEPTHS, "key")
        rows = [[number] for number in range(len(SAMPLES))] if packing is None else packing
        for number_of_masks, blocks in enumerate(together):
            wanted = [anchor for row in rows for number in row for anchor in alone[number][number_of_masks].anchors]
            assert [a - start for a, start in zip(blocks.anchors, blocks.starts, strict=True)] == wanted


@pytest.mark.parametrize(("vocab_size", "packed"), slow_unless(((60, 64),), itertools.product((97, 60), (None, 64))))
def test_the_loss_is_the_sum_over_entries_of_one_chain_each(make_head, frozen, packed, vocab_size):
    """Each depth's mean of soft cross-entropies, by its weight; entries whose choice cannot be drafted are left out."""
    vocab = DraftVocab.most_frequent(torch.arange(97) % 7, vocab_size)
    head = make_head("peagle", vocab=vocab).requires_grad_(True)
    trained, packing = in_training(head, frozen), pack([len(sample.tokens) for sample in SAMPLES], packed)
    batch = TrainingBatch.collate(SAMPLES, torch.float32, packing=packing)
    supervision = trained.supervise(batch, "key")
    counts = supervision.counts(DEPTHS)
    scores = trained(batch, supervision, counts)
    sums, wanted = torch.zeros(4, DEPTHS), torch.zeros(())
    for sample in SAMPLES:
        alone = TrainingBatch.collate([sample], torch.float32)
        for masks, blocks in enumerate(draw_chains(alone, DEPTHS, "key")):
            for anchor in blocks.anchors:
                lone = [Blocks((), (), ())] * masks + [Blocks((0,), (anchor,), (0,))]
                one = trained.supervision_of(alone, tuple(lone))
                states = trained.unroll(alone, one, None)[0]
                for state, depth, last_hidden in zip(states, one.depths, one.last_hidden, strict=True):
                    p, log_q = frozen.logits(last_hidden)[vocab.ids].softmax(-1), head.logits(state).log_softmax(-1)
                    loss = -(p * log_q).sum()
                    hit, accepted = (p.argmax() == log_q.argmax()).float(), torch.minimum(p, log_q.exp()).sum()
                    sums[:, depth] += torch.stack([torch.ones(()), loss, hit, accepted]).detach()
                    wanted = wanted + OBJECTIVE.unroll_weights[depth] / counts[depth] * loss
    assert_close(scores.sums(), sums, atol=1e-3, rtol=1e-4)
    assert_close(scores.loss, wanted, atol=1e-4, rtol=1e-4)
    parameters = [*head.parameters()]
    again = in_training(head, frozen, activation_checkpointing=True)(batch, supervision, counts)
    gradients = (torch.autograd.grad(loss, parameters) for loss in (scores.loss, again.loss, wanted))
    for one_gradient, checkpointed, other in zip(*gradients, strict=True):
        assert_close(one_gradient, other, atol=1e-4, rtol=1e-3)
        assert torch.equal(one_gradient, checkpointed)
    head.requires_grad_(False)


def test_a_batch_without_a_chain_has_no_loss_and_a_gradient_of_zero(make_head: MakeHead, frozen: FrozenTarget) -> None:
    """Every weight has a gradient, as data-parallel wrappers wait for each."""
    head = make_head("peagle").requires_grad_(True)
    trained, batch = in_training(head, frozen), TrainingBatch.collate(SAMPLES[3:], torch.float32)
    supervision = trained.supervise(batch, "key")
    scores = trained(batch, supervision, supervision.counts(DEPTHS))
    assert not scores.sums().any()
    assert not any(each.any() for each in torch.autograd.grad(scores.loss, [*head.parameters()]))
    head.requires_grad_(False)


@pytest.mark.each_value
@pytest.mark.parametrize("start", [0, 8, 10], ids=["whole text", "three", "one"])
@pytest.mark.parametrize("growth", [Dynamic.chain(4), Dynamic(3, 4, 9), Dynamic(1, 5, 5)], ids=["chain", "tree", "one"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3), PENALTIES], ids=["greedy", "T 1", "penalties"])
def test_a_tree_is_one_of_marginals(target, make_head, start, growth, sampling):
    """It is the tree that unrolling the head level by level draws, and the path to a node does not matter."""
    head = make_head("peagle")
    drafter = head_drafter(head, growth)
    cache = new_cache(target, drafter)
    if start:
        draft(drafter, verified(target, sampling, (0, start)), cache)
    tree = draft(drafter, verified(target, sampling, (start, 11)), cache)
    assert paths(tree) == [Naive(head, target, TEXT, sampling).tree(growth)]


def test_rows_of_a_batch_draft_as_alone(target: TargetModel, make_head: MakeHead) -> None:
    """Rows hold different numbers of positions and newly verified ones; what pads them is not seen."""
    head, growth, texts = make_head("peagle"), Dynamic(3, 4, 9), [TEXT, *OTHER_TEXTS]
    drafter = head_drafter(head, growth)
    new = verified(target, Sampling(), *((0, len(text) - 1) for text in texts), texts=texts)
    tree = draft(drafter, new, new_cache(target, drafter, 3))
    assert paths(tree) == [Naive(head, target, text, Sampling()).tree(growth) for text in texts]


def test_a_new_head_does_not_draft_its_mask_token(frozen: FrozenTarget) -> None:
    usual = PEagleSection(kind="peagle", draft_vocab_size=96)
    other = usual.model_copy(update={"mask_token_id": 4})
    for section, mask_token in ((usual, 96), (other, 4)):
        assert mask_token not in PEagleHead.section_vocab(section, torch.arange(97)).ids
    head: Any = new_head(other, frozen, DraftVocab.full(97), seed=3)
    assert head.mask_entries(torch.tensor([7]), 2)[1].tolist() == [[4, 4]]


def test_an_export_is_what_vllm_reads_with_the_switch_for_one_pass(make_head, export_as, target_folder, frozen):
    head = make_head(**EVERY_HEAD["peagle limited"])
    folder = export_as(head, "vllm")
    assert lint(folder, str(target_folder)) == []
    config, tensors = read_config(folder), read_tensors(folder)
    assert config["headstart"]["engines"] == ["vllm"]
    assert (config["num_hidden_layers"], config["mask_token_id"], config["ptd_token_id"]) == (3, 95, 95)
    layer = {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"{name}_layernorm.weight" for name in ("input", "post_attention")),
    }
    assert tensors.keys() == {
        *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "mask_hidden", "layers.0.hidden_norm.weight"),
        *(f"layers.{number}.{name}" for number in range(3) for name in layer),
    }
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    said = '"method": "eagle3" | "num_speculative_tokens": 3, "parallel_drafting": true'
    assert_message((folder / "README.md").read_text(), said)
    assert torch.equal(logits(load_head_for(folder, frozen)), logits(head))


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (lambda config, tensors: [config.pop(key) for key in MASK_TOKEN_KEYS if key in config], "mask_token_id"),
        (lambda config, tensors: config.update(mask_token_id=97), "mask_token_id"),
        (lambda config, tensors: config.update(num_hidden_layers=3), "layers.2.mlp.up_proj.weight"),
        (lambda config, tensors: tensors.update(mask_hidden=torch.ones(1, 96)), "mask_hidden"),
    ],
)
def test_lint_and_convert_name_what_is_wrong_with_a_head(make_head, frozen, spoil, where):
    files = files_in_memory(make_head("peagle"), "vllm")
    spoil(files.config, files.tensors)
    assert [each.where for each in violations(files, frozen, ["vllm"]) if where in each.where]
    with pytest.raises(ValueError, match=where):
        import_head(files, frozen)
