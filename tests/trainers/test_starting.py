"""Laws of warm starts: a run that starts from a trained head begins with its weights, vocabulary and acceptance."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import make_dense
from torch.testing import assert_close

from headstart.data_pipelines.features.shards import FeatureStore
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.checkpoint import draft_vocab, load_head_for, new_head, save_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.kinds.peagle import PEagleHead
from headstart.heads.vocab import DraftVocab
from headstart.recipes import Recipe
from headstart.recipes.fields import head_kinds
from headstart.recipes.schema_heads import BlockSection, Eagle3Section
from headstart.trainers import train as run
from headstart.trainers.new_head import describe_vocabulary

BLOCK = ("head.kind=block", "head.block_size=4", "head.markov_rank=6", "head.taps=[2, 3, 4]", "train.unroll=4")


@pytest.fixture
def frozen(harvested: Path) -> FrozenTarget:
    return FrozenTarget.from_folder(harvested / "target", torch.float32)


@pytest.mark.parametrize("kind", sorted(head_kinds().keys() - {"mtp"}))
def test_a_head_takes_over_the_weights_of_a_saved_one_exactly(frozen: FrozenTarget, kind: str, tmp_path: Path) -> None:
    """Training scales inputs by powers of two, which saved weights contain; taken over, the files are the same."""
    size, section = frozen.config.vocab_size, head_kinds()[kind](kind=kind)
    trained = new_head(section, frozen, DraftVocab.full(size), seed=1)
    make_dense(trained, 1.0)
    save_head(trained, tmp_path / "head")
    again = new_head(section, frozen, DraftVocab.full(size), seed=2)
    if isinstance(again, Eagle3Head | BlockHead | PEagleHead):
        again.scale_taps([4.0, 0.25, 8.0, 2.0, 16.0][: len(again.taps)])
    again.take_weights(load_head_for(tmp_path / "head", frozen))
    assert_close(again.engine_tensors(), trained.engine_tensors(), rtol=0, atol=0)


def logged(recipe: Recipe) -> list[dict[str, float]]:
    return [json.loads(line) for line in recipe.metrics_path.read_text().splitlines()]


@pytest.mark.parametrize("fields", [(), pytest.param(BLOCK, marks=pytest.mark.slow)], ids=["eagle3", "block"])
def test_a_run_begins_where_the_other_one_ended(make_recipe, capsys, fields):
    """Its first measurement is the other run's last one, on the same prompts; the end says what was gained."""
    fields = *fields, "train.eval_prompts=1", "train.steps=1", "train.warmup_steps=0", "decode.max_new_tokens=4"
    first = make_recipe("first", *fields)
    run(first)
    tuned = make_recipe("tuned", *fields, f"train.start_from={first.head_dir}")
    capsys.readouterr()
    run(tuned)
    last = next(row for row in reversed(logged(first)) if "heldout/tau" in row)
    start = next(row for row in logged(tuned) if "heldout/tau" in row)
    assert start["step"] == 0
    for name, value in start.items():
        if name.startswith("heldout/") and "tau" not in name and "score" not in name:  # those depend on calibration
            assert_close(value, last[name], atol=1e-4, rtol=1e-4)
    assert "before and" in capsys.readouterr().out
    ids = [load_file(recipe.head_dir / "model.safetensors")["d2t"] for recipe in (first, tuned)]
    assert torch.equal(*ids)


def test_a_published_head_keeps_what_no_recipe_can_say(make_recipe, frozen, tmp_path):
    """A norm over all taps together, as some published EAGLE-3 heads have one."""
    plain: Any = new_head(Eagle3Section(kind="eagle3"), frozen, DraftVocab.full(300), seed=1)
    published = Eagle3Head(replace(plain.shape, norm_before_fc=True), frozen, plain.vocab)
    published.load_state_dict(plain.state_dict(), strict=False)
    save_head(published, tmp_path / "published")
    recipe = make_recipe("run", f"train.start_from={tmp_path}/published", "head.draft_vocab_size=null", "train.steps=2")
    run(recipe)
    found: Any = load_head_for(recipe.head_dir, frozen)
    assert found.shape.norm_before_fc


@pytest.mark.parametrize(
    ("folder", "fields", "said"),
    [
        ("eagle3", ["head.norms=true"], "fc_norm: True in the recipe, False in the folder"),
        ("eagle3", ["head.draft_vocab_size=70"], "draft_vocab_size: 70 in the recipe, 80 in the folder"),
        ("eagle3", ["head.intermediate_size=32"], "intermediate_size: 32 in the recipe, 64 in the folder"),
        ("eagle3", BLOCK, "head.kind: block in the recipe, eagle3 in the folder"),
        ("block", ["head={kind: block, block_size: 5}", "train.unroll=5"], "block_size: 5 in the recipe, 4 in the"),
    ],
)
def test_a_head_that_differs_from_the_recipe_is_refused_by_name(make_recipe, frozen, tmp_path, folder, fields, said):
    sections = Eagle3Section(kind="eagle3", draft_vocab_size=80), BlockSection(kind="block", block_size=4)
    section = next(each for each in sections if each.kind == folder)
    counts = FeatureStore(make_recipe("run").features_dir, "train").token_counts(300)
    save_head(new_head(section, frozen, draft_vocab(section, counts), seed=1), tmp_path / "head")
    with pytest.raises(ValueError, match=rf"train\.start_from: .*{said}.*write its values into the recipe"):
        run(make_recipe("run", *fields, f"train.start_from={tmp_path / 'head'}"))


def test_the_mass_outside_the_draft_vocabulary_is_the_targets_own(harvested: Path, frozen: FrozenTarget) -> None:
    store = FeatureStore(harvested / "run" / "features", "heldout")
    vocab = DraftVocab.most_frequent(store.token_counts(300), 20)
    said = describe_vocabulary(vocab, frozen, store)
    samples = [store[number] for number in range(len(store))]
    states = torch.cat([each.last_hidden[:-1][each.loss_mask[1:]] for each in samples]).float()
    p = frozen.logits(states).softmax(-1)
    outside = 1 - float(p[:, vocab.ids].sum(1).mean())
    missed = float((~torch.isin(p.argmax(-1), vocab.ids)).float().mean())
    assert f"{outside:.2%} of its probability" in said
    assert f"{missed:.2%} of its first choices ({len(states)} held-out positions)" in said
