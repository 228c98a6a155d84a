"""Laws of the training loop: a killed run ends in the same weights, and nothing fails silently."""

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import killed_in
from matrix import slow_unless
from safetensors.torch import load_file
from tiny_run import contents, write_shard

from headstart.common.files import read_jsonl
from headstart.data_pipelines.features.batches import Sample, TrainingBatch
from headstart.data_pipelines.features.shards import FeatureStore, shard_name, write_manifest
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, save_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.recipes import Recipe
from headstart.trainers import loop
from headstart.trainers import train as run
from headstart.trainers.loop import SampleOrder
from headstart.trainers.tracking import Tracker


@pytest.fixture(scope="module")
def frozen(harvested: Path) -> FrozenTarget:
    return FrozenTarget.from_folder(harvested / "target", torch.float32)


def numbers(recipe: Recipe) -> list[dict[str, float]]:
    lines = read_jsonl(recipe.metrics_path)
    return [{name: value for name, value in line.items() if "per_second" not in name} for line in lines]


BLOCK = "head={kind: block, block_size: 4, markov_rank: 6, taps: [2, 3, 4]}", "train.unroll=4", "train.anchors=5"
MEDUSA = "head={kind: medusa, medusa_heads: 2}", "train.unroll=2"
RESUMED: dict[str, tuple[int, tuple[str, ...]]] = {  # the step in which the run is killed, and fields of its recipe
    "before its first checkpoint": (2, ()),
    "block, packed": (5, (*BLOCK, "train.pack_tokens=40", "train.accumulate=2")),
    "medusa2": (6, (*MEDUSA, "joint={mode: full, learning_rate: 1e-2, warmup_steps: 2}")),
    "muon": (5, ("train.optimizer=muon", "train.muon_learning_rate=0.02")),
    "eagle1": (5, ("head={kind: eagle1}", "train.activation_checkpointing=true")),
    "adamw": (5, ()),
    "peagle": (5, ("head={kind: peagle, num_layers: 2, depths: 4, taps: [2, 3, 4]}", "train.unroll=4")),
    "block": (5, BLOCK),
    "medusa2 in its warm-up": (2, (*MEDUSA, "joint={mode: full, learning_rate: 1e-2, warmup_steps: 4}")),
    "medusa2 with adapters": (6, (*MEDUSA, "joint={mode: lora, lora_rank: 4, learning_rate: 1e-2, warmup_steps: 2}")),
}


@pytest.mark.parametrize("name", slow_unless(list(RESUMED)[:2], RESUMED))
def test_a_resumed_run_ends_like_an_uninterrupted_one(make_recipe: Callable[..., Recipe], name: str) -> None:
    """steps        1 2 3 4 5 6, checkpoints after 3 and 6
    killed in 6     1 2 3 4 5 x
    resumed               4 5 6   the same weights, optimizer state, tuned target and metrics, bit for bit"""
    step, options = RESUMED[name][0], (*RESUMED[name][1], "train.steps=6", "train.checkpoint_every=3")
    whole, cut = make_recipe("whole", *options), make_recipe("cut", *options)
    run(whole)
    with killed_in(step):
        run(cut)
    done = 3 * (step > 3)
    assert [path.name for path in cut.checkpoints_dir.glob("step-*")] == ([f"step-{done}"] if done else [])
    assert not cut.head_dir.exists()
    run(cut)
    for folder in ("checkpoints_dir", "head_dir", "tuned_target_dir"):
        assert contents(getattr(cut, folder)) == contents(getattr(whole, folder)), folder
    assert numbers(cut) == numbers(whole)
    assert [line["step"] for line in numbers(cut)] == [1, 2, 3, 3, 4, 5, 6, 6]  # measured after 3 and 6


def test_a_plain_eagle_3_head_is_saved_with_the_scales_of_its_taps(make_recipe, harvested, frozen, monkeypatch):
    """The saved head reads unscaled hidden states, and projects them to the same features as in training."""
    trained: list[Eagle3Head] = []

    def watching(head: Eagle3Head, folder: Path) -> None:
        trained.append(head)
        save_head(head, folder)

    monkeypatch.setattr("headstart.trainers.stages.save_head", watching)
    recipe = make_recipe("run", "train.steps=1", "train.warmup_steps=0")
    run(recipe)
    [head], saved = trained, load_head_for(recipe.head_dir, frozen)
    assert head.input_scale is not None
    assert head.input_scale.max() < 1  # the hidden states of this target are large
    taps = FeatureStore(recipe.features_dir, "train")[0].taps
    assert torch.equal(saved.project(taps), head.project(taps))


def test_measuring_and_logging_do_not_change_the_weights(make_recipe, monkeypatch):
    short = "train.steps=2", "train.warmup_steps=1"
    often = make_recipe("often", *short, "train.checkpoint_every=1", "train.eval_prompts=1")
    rarely = make_recipe("rarely", *short)
    run(often)
    monkeypatch.setattr(loop, "LOG_EVERY", 2)
    run(rarely)
    weights = [contents(recipe.head_dir)["model.safetensors"] for recipe in (rarely, often)]
    assert weights[0] == weights[1]
    taus = [line["heldout/tau"] for line in numbers(often) if "heldout/tau" in line]
    assert len(taus) == 2
    assert all(1 <= tau <= often.decode.depth + 1 for tau in taus)


def test_every_step_trains_on_its_samples_in_the_shuffled_order(make_recipe, monkeypatch):
    """So are they announced to the store, which reads ahead."""
    recipe, seen, announced, train_step = make_recipe("run"), [], list[int](), loop.train_step

    def expect(store: FeatureStore, batches: Sequence[Sequence[int]], limit: int | None = None) -> None:
        announced.extend(chain(*batches) if len(store) == 12 else [])  # the held-out store has 4 samples

    def watching(*arguments: Any) -> Any:
        seen.extend(next(argument for argument in arguments if isinstance(argument, list) and argument[0] in range(99)))
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", watching)
    monkeypatch.setattr(FeatureStore, "expect", expect)
    run(recipe)
    order = SampleOrder([5, 5, 2], recipe.seed)
    assert seen == announced == [order[place] for place in range(recipe.train.steps * recipe.train.batch_size)]


def test_a_checkpoint_of_another_recipe_is_refused_by_field(make_recipe: Callable[..., Recipe]) -> None:
    with killed_in(6):
        run(make_recipe("run"))
    for overrides, difference in (
        ("train.learning_rate=2e-3", "train.learning_rate: checkpoint 0.001, recipe 0.002"),
        ("train.steps=3", "train.steps: checkpoint 8, recipe 3"),
        ("head.draft_vocab_size=81", "head.draft_vocab_size: checkpoint 80, recipe 81"),
        ("train.unroll=2 train.steps=12", "train.unroll: checkpoint 3, recipe 2"),  # more steps alone are allowed
    ):
        other = make_recipe("run", *overrides.split())
        before = contents(other.run_dir)
        with pytest.raises(ValueError, match="step-4 belongs to another recipe") as refusal:
            run(other)
        assert [line.strip() for line in str(refusal.value).splitlines()][1:-1] == [difference]
        assert contents(other.run_dir) == before


def assert_stops_in(recipe: Recipe, step: int, what: str) -> None:
    """The run stops in this step, counted from 1, before the step has changed the weights."""
    spoiled = SampleOrder([5, 5, 2], recipe.seed).of_step(step - 1, recipe.train.batch_size)
    with pytest.raises(ValueError, match=f"the {what} of step {step} is not finite") as refusal:
        run(recipe)
    named = [f"{number} (row {number % 5} of train-0000{number // 5}.safetensors)" for number in spoiled]
    assert all(each in str(refusal.value) for each in named)
    assert not recipe.head_dir.exists()
    assert max(recipe.checkpoints_dir.glob("step-*")).name == f"step-{step - 1}"
    newest = load_file(recipe.checkpoints_dir / f"step-{step - 1}/head.safetensors")
    assert all(tensor.isfinite().all() for tensor in newest.values())


def test_a_non_finite_loss_stops_at_once_and_names_its_step_and_samples(make_recipe, monkeypatch):
    """Waiting until the next metrics are due would name other samples and spoil the weights."""
    steps, collate = iter(range(1, 9)), TrainingBatch.collate

    def spoil_the_third(samples: list[Sample], *rest: Any, **options: Any) -> TrainingBatch:
        batch = collate(samples, *rest, **options)
        if len(samples) > 1 and next(steps) == 3:  # one alone is looked at before the first step
            batch.taps[:] = math.nan
        return batch

    monkeypatch.setattr(TrainingBatch, "collate", spoil_the_third)
    monkeypatch.setattr(loop, "measure", lambda *_: None)  # it collates batches, too
    assert_stops_in(make_recipe("run", "train.checkpoint_every=1"), step=3, what="loss")


def test_a_non_finite_gradient_stops_before_it_reaches_the_weights(make_recipe: Callable[..., Recipe]) -> None:
    """With weights around 1e30 the loss is finite, because norms rescale them, but its gradient is not."""
    options = "train.learning_rate=1e30", "train.warmup_steps=0", "train.checkpoint_every=1"
    assert_stops_in(make_recipe("run", *options), step=2, what="gradient")


def test_non_finite_features_are_named_by_shard_and_row(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe("run")
    features = FeatureStore(recipe.features_dir, "train")
    about = {key: value for key, value in features.about.items() if key != "shards"}
    samples = [features[number] for number in range(5, 10)]
    samples[2] = replace(samples[2], taps=samples[2].taps.clone().index_fill_(0, torch.tensor([1]), math.nan))
    write_shard(recipe.features_dir / shard_name("train", 1), samples, features.taps, "spoiled", recipe.data.dtype)
    write_manifest(recipe.features_dir, [path.name for path in recipe.features_dir.glob("*.safetensors")], about)
    with pytest.raises(ValueError, match=r"the features of samples 7 \(row 2 of train-00001\.safetensors\) are not"):
        run(recipe)


def test_a_run_that_ends_where_it_was_stopped_was_not_measured_there(make_recipe, monkeypatch):
    rarely = "train.checkpoint_every=100", "train.warmup_steps=1"
    stopped, train_step = make_recipe("run", *rarely), loop.train_step
    monkeypatch.setattr(loop, "train_step", lambda a, b, c, *_: train_step(a, b, c, True))
    monkeypatch.setattr(loop.Interrupts, "number", signal.SIGTERM, raising=False)
    with pytest.raises(SystemExit):
        run(stopped)
    assert [path.name for path in stopped.checkpoints_dir.glob("step-*")] == ["step-1"]
    ended = make_recipe("run", *rarely, "train.steps=1")
    run(ended)
    assert [row["step"] for row in numbers(ended) if "heldout/loss_0" in row] == [1]


def test_a_signal_was_not_answered_before_the_end_of_a_long_step(capfd: pytest.CaptureFixture[str]) -> None:
    with loop.Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.received == signal.SIGTERM
        assert "SIGTERM: finishes this step, then saves" in capfd.readouterr().err


@pytest.mark.slow
def test_a_wandb_run_starts_offline_and_keeps_its_id_when_resumed(make_recipe, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = make_recipe("wandb")
    ids = []
    for first_step in (0, 2):
        with Tracker(recipe, first_step, active=True) as tracker:
            tracker.log(first_step + 1, {"train/loss_0": 1.0}, "training")
            ids.append(tracker.run.id)
    assert ids[0] == ids[1]
    assert list((recipe.run_dir / "wandb").glob(f"offline-run-*-{ids[0]}"))
