"""Laws of Medusa-2: the target learns with its heads; with a learning rate of 0 it stays the same, bit for bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import slow, slow_unless
from safetensors.torch import load_file
from saved_tensors import SavedForBackward, storage_of
from tiny_run import contents, tiny_recipe
from torch.testing import assert_close

from headstart.common.files import read_jsonl
from headstart.data_pipelines.features.batches import TrainingBatch
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.heads.base import LevelHead
from headstart.heads.formats.export import export
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import draft_vocab, load_head_for, new_head
from headstart.heads.target_config import TargetOrigin
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.report.command import report
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.trainers import train as run
from headstart.trainers.memory import Machine, RunMemory
from headstart.trainers.objectives.medusa2 import JointHead, TrainableTarget
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.unrolled import Teacher

MakeRecipe = Callable[..., Recipe]
MEDUSA = ("head={kind: medusa, medusa_heads: 2}", "train.unroll=2", "train.learning_rate=1e-2")
MODES = ["lora", "full"]


def joint(mode: str, **fields: float) -> str:
    own = {"mode": mode, "lora_rank": 4, "learning_rate": 1e-2, "warmup_steps": 2, **fields}
    return f"joint={json.dumps(own)}"


@pytest.fixture(scope="module", params=slow_unless(["lora"], MODES))
def tuned(request: pytest.FixtureRequest, harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("tuned") / "run"
    shutil.copytree(harvested / "run", folder)
    measured = "train.eval_prompts=1", "train.steps=5", "train.checkpoint_every=5"
    reported = "report.num_prompts=1", "report.temperatures=[0.9]", "report.baselines=[plain, tree]"
    recipe = tiny_recipe(harvested, f"run_dir={folder}", *MEDUSA, joint(request.param), *measured, *reported)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.trainers.loop.LOG_EVERY", 1)
        run(recipe)
    return recipe


def on_tuned(recipe: Recipe) -> Recipe:
    section = recipe.target.model_copy(update={"path": str(recipe.tuned_target_dir)})
    return recipe.model_copy(update={"target": section})


def joint_head(recipe: Recipe, folder: Path) -> tuple[JointHead, TrainingBatch]:
    frozen = FrozenTarget.from_folder(folder / "target", torch.float32)
    vocab = draft_vocab(recipe.head, torch.zeros(frozen.config.vocab_size, dtype=torch.long))
    head = new_head(recipe.head, frozen, vocab, seed=0)
    target, store = TrainableTarget.load(recipe, torch.device("cpu")), FeatureStore(recipe.features_dir, "train", ())
    unrolled = JointHead(head, Teacher(frozen, vocab), Objective.from_recipe(recipe), recipe.train, target)
    return unrolled, TrainingBatch.collate([store[number] for number in range(4)], torch.float32)


def test_the_head_changes_no_token_of_the_tuned_target(tuned: Recipe, harvested: Path) -> None:
    target = TargetModel.load(on_tuned(tuned).target, (4,))
    original = TargetModel.load(tuned.target, (), packed=False).model.state_dict()
    tuned_weights = target.unpacked.model.state_dict()
    changed = {name for name, weight in tuned_weights.items() if not weight.equal(original[name])}
    assert changed
    assert all(name.startswith("model.layers.") for name in changed)
    head = load_head_for(tuned.head_dir, target.frozen)
    assert head.origin == TargetOrigin.of(tuned.tuned_target_dir)
    for sampling in (Sampling(), Sampling(0.9, seed=4)):
        requests = [Request([5, 6, 7], 6, sampling), Request([40, 41], 6, sampling)]
        plain = generate_batch(target, requests)
        drafted = generate_batch(target, requests, head_drafter(head, Dynamic(2, 2, 4)))
        assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    files = contents(tuned.tuned_target_dir)
    for name, content in contents(harvested / "target").items():
        assert files[name] == content or name in ("config.json", "model.safetensors")


@pytest.mark.parametrize(
    "section",
    [
        joint("full", learning_rate=0.0, warmup_steps=0),
        joint("lora", warmup_steps=8),
        slow(joint("lora", learning_rate=0.0, warmup_steps=0)),
    ],
)
def test_the_target_stays_bit_identical_at_a_learning_rate_of_0_and_in_the_warm_up(make_recipe, harvested, section):
    recipe = make_recipe("run", *MEDUSA, section, "train.steps=3", "train.checkpoint_every=3")
    run(recipe)
    folders = harvested / "target", recipe.tuned_target_dir
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    assert all(weight.equal(before[name]) for name, weight in after.items())
    if recipe.joint.warmup_steps:
        state = load_file(recipe.checkpoints_dir / "step-3/target.safetensors")
        assert not [name for name in state if name.endswith("exp_avg")]


def test_the_heads_loss_and_the_divergence_both_reach_the_target(make_recipe: MakeRecipe, harvested: Path) -> None:
    """The gradient equals that of the definition: cross-entropies of the heads plus KL(original || tuned)."""
    recipe = make_recipe("run", *MEDUSA, joint("full"))
    unrolled, batch = joint_head(recipe, harvested)
    frozen, head = unrolled.teacher.frozen, unrolled.head
    assert isinstance(head, LevelHead)
    with torch.no_grad():
        for parameter in [*head.parameters(), *unrolled.target.trained.values()]:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    supervision = unrolled.teacher.supervise(batch)
    counts = supervision.counts(2)
    scores = unrolled(batch, supervision, counts)
    scores.loss.backward()
    found = {name: parameter.grad for name, parameter in unrolled.target.trained.items()}
    unrolled.target.zero_grad()

    last_hidden = unrolled.target(batch.tokens)
    log_q, log_p = (frozen.logits(each).log_softmax(-1) for each in (last_hidden, batch.last_hidden))
    features, expected = head.project(last_hidden), torch.zeros(())
    for row, column in batch.loss_mask.nonzero().tolist():  # the token to be drafted
        if column >= 2:
            here = log_p[row, column - 1], log_q[row, column - 1]
            expected = expected + (here[0].exp() * (here[0] - here[1])).sum() / counts[0]
        for level in range(2):
            if column - 2 - level >= 0:
                alone, tokens = features[row : row + 1], batch.tokens[row : row + 1]
                hidden = head(alone, tokens, torch.arange(tokens.shape[1]), level=level)
                guess = head.logits(hidden, level)[0, column - 2 - level].log_softmax(-1)
                soft = -(log_q[row, column - 1].detach().exp() * guess).sum()
                expected = expected + 0.8**level * soft / counts[level]
    assert_close(scores.loss, expected)
    expected.backward()
    for name, parameter in unrolled.target.trained.items():
        assert found[name] is not None
        assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-3)


def test_the_divergence_from_the_original_is_logged(tuned: Recipe) -> None:
    """Per token, over the held-out samples; reading them with both targets gives the same."""
    lines: list[Any] = list(read_jsonl(tuned.metrics_path))
    trained = [line.get("train/divergence") for line in lines if "train/loss_0" in line]
    assert trained[:2] == [None, None]  # the warm-up
    assert trained[2] == pytest.approx(0, abs=1e-6)  # the target has not moved yet
    assert all(value > 1e-6 for value in trained[3:])
    (found,) = [line["heldout/divergence"] for line in lines if "heldout/divergence" in line]
    target, total, count = TargetModel.load(on_tuned(tuned).target, ()), 0.0, 0
    for sample in map(FeatureStore(tuned.features_dir, "heldout", ()).__getitem__, range(4)):
        log_q = target.passes.forward(sample.tokens[None]).logits[0].log_softmax(-1)
        log_p = target.frozen.logits(sample.last_hidden).log_softmax(-1)
        scored = sample.loss_mask[1:].nonzero().flatten()
        scored = scored[scored > 0]
        total += float((log_p.exp() * (log_p - log_q)).sum(-1)[scored].sum())
        count += len(scored)
    assert found == pytest.approx(total / count, rel=1e-3)


@pytest.mark.parametrize("mode", slow_unless(["lora"], MODES))
def test_a_dry_run_counts_the_target(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    recipe = make_recipe("run", *MEDUSA, joint(mode), "train.dry_run=true")
    run(recipe)
    said = " ".join(capsys.readouterr().out.split())
    target = TargetModel.load(recipe.target, (), packed=False)
    trainable = TrainableTarget(target, recipe)
    trained = sum(weight.numel() for weight in trainable.trained.values())
    parameters = sum(weight.numel() for weight in trainable.model.parameters())
    assert f"{trained:,} of {parameters:,} parameters learn, joint.mode {mode}" in said
    memory = RunMemory.of(recipe, target.config, Machine(1, torch.device("cpu"), 10**9))
    assert memory.tuned == trained
    kept, activations = (need.size for need in memory.needs[-2:])
    assert abs(kept - (16 * trained + 4 * (parameters - trained))) < 0.01 * kept
    with SavedForBackward({storage_of(tensor) for tensor in target.model.state_dict(keep_vars=True).values()}) as saved:
        trainable(torch.zeros(3, 36, dtype=torch.long))
    assert 0.6 * saved.num_bytes < activations < 1.6 * saved.num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_joint_training_in_bfloat16_follows_that_in_float32(make_recipe: MakeRecipe, mode: str) -> None:
    """Loss and divergence, with adapters and AdamW's state in float32."""
    found = {}
    for precision in ("float32", "bfloat16"):
        recipe = make_recipe(precision, *MEDUSA, joint(mode, learning_rate=1e-3), f"train.precision={precision}")
        run(recipe)
        *_, measured = read_jsonl(recipe.metrics_path)
        found[precision] = measured["heldout/loss_0"], measured["heldout/divergence"]
        state = load_file(recipe.checkpoints_dir / "step-8/target.safetensors")
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert found["bfloat16"] != found["float32"]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.05, abs=0.02)


@pytest.mark.slow
def test_the_same_command_writes_a_tuned_target_that_is_missing(tuned: Recipe) -> None:
    before = contents(tuned.tuned_target_dir)
    shutil.rmtree(tuned.tuned_target_dir)
    run(tuned)
    assert contents(tuned.tuned_target_dir) == before


def test_the_head_is_reported_and_exported_only_with_the_tuned_target(tuned, monkeypatch):
    monkeypatch.setattr(TargetModel, "difference_in_bits", None)
    for command in (report, export):
        with pytest.raises(ValueError, match=r"is for the tuned target; give target.path=.*run/target"):
            command(tuned)
    recipe = on_tuned(tuned)
    said = f"the target's layers were tuned together with the head ({tuned.joint.mode})"
    assert said in (export(recipe) / "README.md").read_text()
    assert all(outcome.same == outcome.prompts for outcome in report(recipe))


def test_sharding_the_trained_target_is_refused(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe("run", *MEDUSA, joint("lora"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"joint.mode: lora given, only null under FSDP2 .* recipes/launch/one.yaml"):
        run(recipe)
