"""Laws of the training loop: a killed run ends in the same weights, and nothing goes wrong in silence."""

import itertools
import json
import math
import os
import shutil
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import contents, modified, tiny_recipe
from torch import Tensor, nn
from torch.testing import assert_close

from data_pipelines.batches import Batch, SampleOrder
from data_pipelines.harvest import harvest
from data_pipelines.shards import FeatureStore, Sample, shard_name, write_manifest, write_shard
from heads.build import draft_vocab, load_head, save_head
from heads.eagle1 import Eagle1Head
from heads.eagle3 import Eagle3Head
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from recipes import Recipe
from recipes.schema import TrainSection
from trainers import loop
from trainers.memory import head_sizes
from trainers.optimizers import build_optimizers, set_learning_rates
from trainers.plan import refuse_sizes
from trainers.precision import LossScale
from trainers.ranks import HeadOnRanks, start_ranks
from trainers.run import build_head, run
from trainers.step import StepResult, train_step
from trainers.tracking import Tracker
from trainers.training import Materials, Training


@pytest.fixture(scope="module")
def frozen(harvested: Path) -> FrozenTarget:
    return FrozenTarget.from_folder(harvested / "target", torch.float32)


class Killed(BaseException):
    """What no code of ours may catch."""


@pytest.fixture
def kill_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """`with kill_in_step(n)`: training in there dies in its n-th step."""

    class Trap:
        def __init__(self, step: int) -> None:
            self.step = step

        def __enter__(self) -> None:
            left, train_step = iter(range(self.step - 1)), loop.train_step

            def dying(*arguments: Any) -> Any:
                if next(left, None) is None:
                    raise Killed
                return train_step(*arguments)

            monkeypatch.setattr(loop, "train_step", dying)

        def __exit__(self, kind: Any, *rest: object) -> bool:
            monkeypatch.undo()
            return bool(kind is Killed)

    return Trap


def rows(recipe: Recipe) -> list[tuple[int, str]]:
    """(step, what was measured) of every row of the metrics."""
    lines = [json.loads(line) for line in recipe.metrics_path.read_text().splitlines()]
    return [(line["step"], next(name.partition("/")[0] for name in line if "/" in name)) for line in lines]


def numbers(recipe: Recipe) -> list[dict[str, float]]:
    """All rows but for what the clock says."""
    lines = [json.loads(line) for line in recipe.metrics_path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if "per_second" not in name} for line in lines]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("killed_in", [2, 5, 7])
def test_a_resumed_run_ends_like_an_uninterrupted_one(
    make_recipe: Callable[..., Recipe], kill_in_step: Callable[[int], Any], optimizer: str, killed_in: int
) -> None:
    """steps        1 2 3 4 5 6 7 8, checkpoints behind 4 and 8
    killed in 7     1 2 3 4 5 6 x
    resumed                 5 6 7 8   the same weights, moments and numbers, bit for bit"""
    options = f"train.optimizer={optimizer}", "train.muon_learning_rate=0.02", "train.weight_decay=0.01"
    whole, cut = make_recipe("whole", *options), make_recipe("cut", *options)
    run(whole)
    with kill_in_step(killed_in):
        run(cut)
    done = 4 * (killed_in > 4)
    assert [path.name for path in cut.checkpoints_dir.glob("step-*")] == ([f"step-{done}"] if done else [])
    assert not cut.head_dir.exists()
    run(cut)
    assert contents(cut.checkpoints_dir) == contents(whole.checkpoints_dir)
    assert contents(cut.head_dir) == contents(whole.head_dir)
    assert numbers(cut) == numbers(whole)
    assert rows(cut) == [
        row for step in range(1, 9) for row in [(step, "train"), *[(step, "heldout")] * (step % 4 == 0)]
    ]


EAGLE_1_RUN = "head={kind: eagle1}", "train.activation_checkpointing=true", "train.objective=blended_acceptance"


def test_an_eagle_1_run_resumes_and_ends_in_a_head_that_can_be_loaded(
    make_recipe: Callable[..., Recipe], kill_in_step: Callable[[int], Any], frozen: FrozenTarget
) -> None:
    """Its input noise is drawn anew in every step, the same for the same step."""
    whole, cut = make_recipe("whole", *EAGLE_1_RUN), make_recipe("cut", *EAGLE_1_RUN)
    for recipe in (whole, cut):
        shutil.rmtree(recipe.features_dir)  # those of an EAGLE-3 head
    run(whole)
    with kill_in_step(6):
        run(cut)
    run(cut)
    assert contents(cut.head_dir) == contents(whole.head_dir)
    assert numbers(cut) == numbers(whole)
    losses = [line["heldout/loss_0"] for line in numbers(whole) if "heldout/loss_0" in line]
    assert losses[1] < losses[0]
    assert FeatureStore(whole.features_dir, "train")[0].taps.shape[1] == 0  # the last hidden state is stored once
    assert isinstance(load_head(whole.head_dir, frozen), Eagle1Head)


def test_a_plain_eagle_3_head_is_saved_with_the_scales_of_its_taps(
    make_recipe: Callable[..., Recipe], harvested: Path, frozen: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved head reads the target's hidden states as they are, and gives the features that were trained."""
    trained: list[Eagle3Head] = []

    def watching(head: Eagle3Head, folder: Path) -> None:
        trained.append(head)
        save_head(head, folder)

    monkeypatch.setattr("trainers.run.save_head", watching)
    recipe = make_recipe("run")
    run(recipe)
    [head], saved = trained, load_head(recipe.head_dir, frozen)
    assert head.tap_scale is not None
    assert head.tap_scale.max() < 1  # the hidden states of this target are large
    taps = FeatureStore(recipe.features_dir, "train")[0].taps
    assert torch.equal(saved.project(taps), head.project(taps))


def test_what_is_logged_does_not_change_the_weights(make_recipe: Callable[..., Recipe]) -> None:
    """Measuring, logging and saving more often, and decoding held-out prompts, leave the training alone."""
    seldom, often = make_recipe("seldom", "train.log_every=8"), make_recipe("often")
    run(seldom)
    run(often.model_copy(update={"train": often.train.model_copy(update={"eval_every": 2, "eval_prompts": 1})}))
    weights = [contents(recipe.head_dir)["model.safetensors"] for recipe in (seldom, often)]
    assert weights[0] == weights[1]
    taus = [line["heldout/tau"] for line in numbers(often) if "heldout/tau" in line]
    assert len(taus) == 4
    assert all(1 <= tau <= often.decode.depth + 1 for tau in taus)


def test_every_step_trains_on_its_samples_of_the_order(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, seen, train_step = make_recipe("run"), [], loop.train_step

    def watching(*arguments: Any) -> Any:
        seen.extend(next(argument for argument in arguments if isinstance(argument, list) and argument[0] in range(99)))
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", watching)
    run(recipe)
    order = SampleOrder(recipe.data.num_prompts, recipe.seed)
    assert seen == [order[place] for place in range(recipe.train.steps * recipe.train.batch_size)]


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("train.learning_rate=2e-3", "train.learning_rate: checkpoint 0.001, recipe 0.002"),
        ("train.steps=9", "train.steps: checkpoint 8, recipe 9"),
        ("head.draft_vocab_size=81", "head.draft_vocab_size: checkpoint 80, recipe 81"),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused_by_field(
    make_recipe: Callable[..., Recipe], kill_in_step: Callable[[int], Any], override: str, difference: str
) -> None:
    with kill_in_step(6):
        run(make_recipe("run"))
    other = make_recipe("run", override)
    before = contents(other.run_dir)
    with pytest.raises(ValueError, match="step-4 belongs to another recipe") as refusal:
        run(other)
    assert [line.strip() for line in str(refusal.value).splitlines()][1:-1] == [difference]
    assert contents(other.run_dir) == before


def stopped_in(recipe: Recipe, step: int, what: str) -> None:
    """A run stops in this step, counted from 1, before the step has touched the weights."""
    spoiled = SampleOrder(recipe.data.num_prompts, recipe.seed).of_step(step - 1, recipe.train.batch_size)
    with pytest.raises(ValueError, match=f"the {what} of step {step} is not finite") as refusal:
        run(recipe)
    assert all(
        f"{number} (row {number % 5} of train-0000{number // 5}.safetensors)" in str(refusal.value)
        for number in spoiled
    )
    assert not recipe.head_dir.exists()
    assert max(recipe.checkpoints_dir.glob("step-*")).name == f"step-{step - 1}"
    newest = load_file(recipe.checkpoints_dir / f"step-{step - 1}/head.safetensors")
    assert all(tensor.isfinite().all() for tensor in newest.values())


def test_a_loss_that_is_not_finite_stops_at_once_with_its_step_and_samples(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the next metrics are due: by then the samples are others and the weights are gone."""
    steps, collate = iter(range(1, 9)), Batch.collate

    def spoil_the_third(samples: list[Sample], *rest: Any) -> Batch:
        batch = collate(samples, *rest)
        if next(steps) == 3:
            batch.taps[0, 1] = math.nan
        return batch

    monkeypatch.setattr(Batch, "collate", spoil_the_third)
    stopped_in(make_recipe("run", "train.log_every=8", "train.checkpoint_every=1"), step=3, what="loss")


def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights(make_recipe: Callable[..., Recipe]) -> None:
    """The loss of weights around 1e30 is a number, as they are normalised; its derivative is not."""
    options = "train.learning_rate=1e30", "train.warmup_steps=0", "train.log_every=8", "train.checkpoint_every=1"
    stopped_in(make_recipe("run", *options), step=2, what="gradient")


# Pieces, precision, averages


def one_step(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> tuple[StepResult, dict[str, Tensor]]:
    """What the first step says, and its gradient before it is clipped."""
    found: dict[str, Tensor] = {}

    def watching(ranks: HeadOnRanks, scale: float) -> float:
        for name, parameter in ranks.unrolled.head.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad / scale
        return 1.0

    monkeypatch.setattr(HeadOnRanks, "update", watching)
    training = start_training(recipe)
    return train_step(training, 0, SampleOrder(12, recipe.seed).of_step(0, recipe.train.batch_size)), found


def start_training(recipe: Recipe) -> Training:
    features = harvest(recipe)
    stores = [FeatureStore(features.folder, split) for split in ("train", "heldout")]
    frozen = FrozenTarget.from_folder(locate_target(recipe.target.path), torch.float32)
    vocab = draft_vocab(recipe.head, stores[0].token_counts(frozen.config.vocab_size))
    head = build_head(recipe, frozen, vocab, stores[0])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():  # no path through it is silent
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return Training.start(recipe, head, Materials(frozen, *stores, None), start_ranks(), None)


@pytest.mark.parametrize("head", ["{kind: eagle3, draft_vocab_size: 80}", "{kind: eagle1}"])
def test_pieces_of_a_batch_give_its_loss_and_gradient(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """They differ in length, in supervised tokens and, for EAGLE-1, in noise."""
    name = "run" if "eagle3" in head else "eagle1"
    options = f"head={head}", "train.batch_size=7"
    if name == "eagle1":
        shutil.rmtree(make_recipe(name).features_dir)  # those of an EAGLE-3 head
    whole, gradient = one_step(make_recipe(name, *options), monkeypatch)
    for count in (2, 3, 7):
        result, pieces = one_step(make_recipe(name, *options, f"train.accumulate={count}"), monkeypatch)
        assert_close(result.sums, whole.sums, rtol=1e-5, atol=1e-5)
        assert result.num_tokens == whole.num_tokens
        largest = {key: float(value.abs().max()) for key, value in gradient.items()}
        for key, value in pieces.items():
            assert_close(value, gradient[key], rtol=1e-5, atol=1e-5 * largest[key])


def test_one_piece_of_features_is_read_at_a_time(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Batch]] = []
    most, collate = [0], Batch.collate

    def watching(*arguments: Any) -> Batch:
        batch = collate(*arguments)
        alive.append(weakref.ref(batch))
        most[0] = max(most[0], sum(each() is not None for each in alive))
        return batch

    monkeypatch.setattr(Batch, "collate", watching)
    one_step(make_recipe("run", "train.batch_size=8", "train.accumulate=4"), monkeypatch)
    assert len(alive) == 4 + 3  # counted, then learnt from, the last one without reading it again
    assert most[0] <= 2  # the next one is there before the name lets go of the one before


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02)])
@pytest.mark.parametrize("head", ["{kind: eagle3, draft_vocab_size: 80}", "{kind: eagle1}"])
def test_half_precision_is_close_to_float32_and_keeps_weights_and_losses_in_it(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, precision: str, tolerance: float, head: str
) -> None:
    name = "run" if "eagle3" in head else "eagle1"
    if name == "eagle1":
        shutil.rmtree(make_recipe(name).features_dir)
    options = f"head={head}", "train.input_noise=0"
    exact, gradient = one_step(make_recipe(name, *options), monkeypatch)
    result, rounded = one_step(make_recipe(name, *options, f"train.precision={precision}"), monkeypatch)
    assert not torch.equal(result.sums[1], exact.sums[1])  # autocast reaches the losses
    assert_close(result.sums[1], exact.sums[1], rtol=0.02, atol=0)
    assert result.sums.dtype == torch.float32
    for key, value in rounded.items():
        assert value.dtype == torch.float32
        assert (value - gradient[key]).norm() < tolerance * gradient[key].norm(), key


def test_a_float16_overflow_skips_the_step_and_halves_the_scale(
    make_recipe: Callable[..., Recipe], kill_in_step: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^30 is too much and is halved step by step until nothing overflows, in a resumed run too."""
    monkeypatch.setattr(LossScale, "START", 2.0**30)
    options = "train.precision=float16", "train.steps=24", "train.checkpoint_every=4", "train.eval_every=200"
    whole, cut = make_recipe("whole", *options), make_recipe("cut", *options)
    run(whole)
    with kill_in_step(7):
        run(cut)
    run(cut)
    assert contents(cut.checkpoints_dir) == contents(whole.checkpoints_dir)
    last = [line for line in numbers(whole) if "train/loss_scale" in line][-1]
    assert last["train/loss_scale"] == 2.0 ** (30 - last["train/skipped_steps"])
    assert 6 < last["train/skipped_steps"] < 20


def test_a_run_stops_when_no_loss_scale_is_left() -> None:
    scale = LossScale(TrainSection(steps=1, precision="float16"))
    for step in range(16):
        scale.update(step, finite=False)
    assert scale.factor == 1
    with pytest.raises(ValueError, match="the gradient of step 17 is not finite at any loss scale"):
        scale.update(16, finite=False)


def test_a_loss_scale_grows_again_after_a_long_run_of_good_steps() -> None:
    scale = LossScale(TrainSection(steps=1, precision="float16"))
    for step in range(LossScale.GOOD_STEPS):
        assert scale.factor == LossScale.START
        scale.update(step, finite=True)
    assert scale.factor == 2 * LossScale.START


def test_what_accelerate_was_told_cannot_contradict_the_recipe(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match=r"train\.precision: bfloat16 in the recipe and --mixed_precision fp16"):
        run(make_recipe("run", "train.precision=bfloat16"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(ValueError, match=r"train\.accumulate: 1 in the recipe and --gradient_accumulation_steps 4"):
        run(make_recipe("run"))


def test_the_average_is_resumed_exactly_and_becomes_the_head(
    make_recipe: Callable[..., Recipe], kill_in_step: Callable[[int], Any]
) -> None:
    options = "train.ema_decay=0.5", "train.checkpoint_every=1", "train.keep_checkpoints=8"
    whole, cut, plain = make_recipe("whole", *options), make_recipe("cut", *options), make_recipe("plain")
    run(whole)
    with kill_in_step(6):
        run(cut)
    run(cut)
    run(plain)
    assert contents(cut.run_dir / "head") == contents(whole.run_dir / "head")
    assert contents(cut.checkpoints_dir) == contents(whole.checkpoints_dir)
    assert numbers(cut) == numbers(whole)
    files = [whole.checkpoints_dir / f"step-{step}" for step in range(1, 9)]
    weights, averages = ([load_file(each / f"{name}.safetensors") for each in files] for name in ("head", "average"))
    assert_close(weights[-1], load_file(plain.checkpoints_dir / "step-8/head.safetensors"), rtol=0, atol=0)
    for step in range(1, 8):
        keep = min(0.5, (1 + step) / (10 + step))
        expected = {name: keep * averages[step - 1][name] + (1 - keep) * weights[step][name] for name in weights[0]}
        assert_close(averages[step], expected)
    measured = [line["heldout/loss_0"] for line in numbers(whole) if "heldout/loss_0" in line]
    assert measured != [line["heldout/loss_0"] for line in numbers(plain) if "heldout/loss_0" in line]
    exported = load_file(whole.head_dir / "model.safetensors")
    assert torch.equal(exported["lm_head.weight"], averages[-1]["lm_head.weight"])


def test_the_best_measured_weights_can_be_exported_afterwards(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted length 3, 5 and 4 behind steps 2, 4 and 6, each the mean of two temperatures."""
    scores = iter((3.0, 5.0, 4.0))
    monkeypatch.setattr(loop, "decoded_scores", lambda decoding: {**NO_SCORES, "heldout/score": next(scores)})
    options = "train.steps=6", "train.eval_every=2", "train.checkpoint_every=2", "train.keep_checkpoints=3"
    recipe = make_recipe("run", *options).model_copy()
    decoding = "train.eval_prompts=2"
    run(make_recipe("run", *options, decoding))
    newest = contents(recipe.head_dir)["model.safetensors"]
    best = make_recipe("run", *options, decoding, "train.export=best")
    run(best)
    assert contents(recipe.head_dir)["model.safetensors"] != newest
    exported = load_file(recipe.head_dir / "model.safetensors")["lm_head.weight"]
    assert torch.equal(exported, load_file(recipe.checkpoints_dir / "step-4/head.safetensors")["lm_head.weight"])
    before = modified(recipe.run_dir)
    run(best)
    assert modified(recipe.run_dir) == before
    with pytest.raises(ValueError, match=r"newest is allowed while train\.eval_prompts is 0"):
        make_recipe("run", "train.export=best")


NO_SCORES = {"heldout/tau": 1.0, "heldout/tau_t1": 1.0}


# Being told to stop


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_step_that_is_measured_loses_nothing(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """Told so in step 4, behind which a measurement is due: it saves first, and measures when it is resumed."""
    whole, stopped, train_step, steps = make_recipe("whole"), make_recipe("stopped"), loop.train_step, iter(range(1, 9))
    run(whole)

    def told(training: Training, step: int, numbers: list[int], interrupted: bool) -> Any:
        if next(steps) == 4:
            os.kill(os.getpid(), number)
            interrupted = True  # as it is read behind the signal
        return train_step(training, step, numbers, interrupted)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", told)
        with pytest.raises(SystemExit) as ended:
            run(stopped)
    assert ended.value.code == code
    assert [path.name for path in stopped.checkpoints_dir.glob("step-*")] == ["step-4"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run(stopped)
    assert contents(stopped.checkpoints_dir) == contents(whole.checkpoints_dir)
    assert contents(stopped.head_dir) == contents(whole.head_dir)
    assert numbers(stopped) == numbers(whole)


# What cannot work is said before the first step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.batch_size=13"], r"train\.batch_size: 13 sequences of 12 to train on"),
        (["train.accumulate=4"], r"train\.accumulate: 4 pieces of a rank's 3 sequences"),
    ],
)
def test_sizes_that_cannot_work_are_refused_before_anything_is_spent(
    make_recipe: Callable[..., Recipe], options: list[str], message: str
) -> None:
    recipe = make_recipe("run", *options)
    before = modified(recipe.run_dir)
    with pytest.raises(ValueError, match=message):
        run(recipe)
    assert modified(recipe.run_dir) == before


def test_ranks_samples_and_held_out_samples_are_counted(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe("run")
    refuse_sizes(recipe, 3, 12, 4)
    with pytest.raises(ValueError, match=r"train\.batch_size: 3 sequences for 4 ranks"):
        refuse_sizes(recipe, 4, 12, 4)
    with pytest.raises(ValueError, match="no samples to train on"):
        refuse_sizes(recipe, 1, 0, 4)
    with pytest.raises(ValueError, match=r"data\.heldout_prompts: .* gave no sample"):
        refuse_sizes(recipe, 1, 12, 0)


def test_features_that_are_not_finite_are_named_by_shard_and_row(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe("run")
    features, names = FeatureStore(recipe.features_dir, "train"), ["train-00000.safetensors", "train-00001.safetensors"]
    about = {key: value for key, value in features.about.items() if key != "shards"}
    samples = [features[number] for number in range(12)]
    samples[7] = replace(samples[7], taps=samples[7].taps.clone().index_fill_(0, torch.tensor([1]), math.nan))
    made_from = "spoiled"
    for index in range(3):
        write_shard(recipe.features_dir / shard_name("train", index), samples[5 * index : 5 * index + 5], made_from)
    every = [path.name for path in recipe.features_dir.glob("*.safetensors")]
    assert set(names) < set(every)
    write_manifest(recipe.features_dir, every, about)
    with pytest.raises(ValueError, match=r"the features of samples 7 \(row 2 of train-00001\.safetensors\) are not"):
        run(recipe)


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    make_recipe: Callable[..., Recipe], harvested: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe("run", "train.dry_run=true", "train.ema_decay=0.9", "train.accumulate=3")
    before = modified(recipe.run_dir)
    run(recipe)
    said = " ".join(capsys.readouterr().out.split())
    assert modified(recipe.run_dir) == before
    assert "parameters of the head 17,024 fc 3,072" in said
    tokens = FeatureStore(recipe.features_dir, "train").num_tokens
    assert f"tokens per epoch {tokens} 12 samples, as harvested" in said
    assert "steps per epoch 4.0 train.batch_size 3" in said
    assert "1 samples of 36 tokens, train.unroll 3, float32" in said
    run(tiny_recipe(harvested, f"run_dir={recipe.run_dir / 'new'}", "train.dry_run=true"))
    said = " ".join(capsys.readouterr().out.split())
    assert "tokens per epoch at most 432 12 samples, not harvested yet" in said
    assert not (recipe.run_dir / "new").exists()


@pytest.mark.parametrize("head", ["{kind: eagle3, draft_vocab_size: 80}", "{kind: eagle1}"])
def test_planned_activations_are_about_what_a_step_keeps(
    make_recipe: Callable[..., Recipe], frozen: FrozenTarget, head: str
) -> None:
    """More unrolling, longer samples and more of them keep more; checkpointing keeps less."""
    recipe = make_recipe("run", f"head={head}")

    def planned(rows: int, longest: int, *options: str) -> int:
        changed = make_recipe("run", f"head={head}", *options)
        return head_sizes(changed, frozen.config, rows, longest, torch.device("cpu")).activations

    base = planned(2, 32)
    assert 1.9 * base < planned(4, 32) < 2.1 * base
    assert 1.9 * base < planned(2, 64) < 2.1 * base
    assert planned(2, 32, "train.unroll=6") > 1.6 * base
    assert planned(2, 32, "train.activation_checkpointing=true") < 0.9 * base
    assert planned(2, 32, "train.precision=bfloat16") < 0.9 * base
    assert recipe.train.unroll == 3


# Schedules and the log


def test_the_learning_rate_of_every_schedule_is_a_function_of_the_step_alone() -> None:
    head = nn.ModuleDict({"fc": nn.Linear(4, 4)})
    for schedule, middle, end in (("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant", 1.0, 1.0)):
        section = TrainSection.model_validate({"steps": 50, "warmup_steps": 10, "schedule": schedule})
        optimizers = build_optimizers(head, section)
        factors = [set_learning_rates(optimizers, section, step) for step in range(50)]
        assert_close(factors[:10], [(step + 1) / 10 for step in range(10)])
        assert_close(factors[30], middle)
        assert abs(factors[49] - end) < 0.03
        assert factors[49] > 0


def test_the_learning_rate_is_a_function_of_the_step_alone() -> None:
    section = TrainSection(steps=50, warmup_steps=10, learning_rate=1e-3, muon_learning_rate=2e-2, optimizer="muon")
    head = nn.ModuleDict({"fc": nn.Linear(4, 4, bias=False), "lm_head": nn.Linear(4, 4, bias=False)})

    def rates(steps: list[int]) -> dict[int, tuple[float, ...]]:
        optimizers = build_optimizers(head, section)
        found = {}
        for step in steps:
            set_learning_rates(optimizers, section, step)
            found[step] = tuple(group["lr"] for optimizer in optimizers for group in optimizer.param_groups)
        return found

    in_order = rates(list(range(50)))
    assert rates([49, 7, 0, 7, 30, *range(50)]) == in_order
    adamw, muon = zip(*in_order.values(), strict=True)
    assert_close(list(adamw[:10]), [1e-4 * (step + 1) for step in range(10)])  # linear, never zero
    assert max(adamw) == adamw[10] == 1e-3
    assert all(later < earlier for earlier, later in itertools.pairwise(adamw[10:]))
    assert_close(adamw[30], 1e-3 * 0.5)  # half way down the cosine
    assert 0 < adamw[49] < 1e-3 * 0.01
    assert_close([rate * 20 for rate in adamw], list(muon))


def test_a_wandb_run_starts_offline_and_keeps_its_id_when_resumed(make_recipe: Callable[..., Recipe]):
    recipe = make_recipe("wandb", "log.wandb=offline")
    ids = []
    for first_step in (0, 2):
        with Tracker(recipe, first_step, active=True) as tracker:
            tracker.log(first_step + 1, {"train/loss_0": 1.0}, "training")
            ids.append(tracker.run.id)
    assert ids[0] == ids[1]
    assert list((recipe.run_dir / "wandb").glob(f"offline-run-*-{ids[0]}"))
