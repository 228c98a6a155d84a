"""Laws of continuing a run: more steps and more prompts continue it, and nothing else does."""

import json
import shutil
from pathlib import Path

import pytest
from bad_inputs import assert_message, assert_raises
from safetensors.torch import load_file
from tiny_run import contents, copy_run, tiny_recipe, write_prompts

from headstart.trainers import train as run


def test_more_steps_continue_a_finished_run(make_recipe, monkeypatch, capsys):
    monkeypatch.setattr("headstart.trainers.parallel.head_on_ranks.set_learning_rates", lambda *_: 1.0)
    run(make_recipe("at once", "train.steps=4"))
    run(make_recipe("in two", "train.steps=2"))
    capsys.readouterr()
    run(make_recipe("in two", "train.steps=4"))
    printed = capsys.readouterr().out
    assert "continuing after step 2; kept: the head's weights" in printed
    assert "train.eval_prompts: 0, so the head's scores are not calibrated; headstart calibrate" in printed
    assert "train.steps: 4 instead of 2; from here on the learning rate follows the schedule" in printed
    at_once, in_two = (make_recipe(name) for name in ("at once", "in two"))
    assert contents(in_two.head_dir) == contents(at_once.head_dir)
    rows = [json.loads(line)["step"] for line in in_two.metrics_path.read_text().splitlines()]
    assert rows == sorted(rows)


@pytest.fixture(scope="module")
def trained_once(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_run(harvested, tmp_path_factory.mktemp("trained"))
    run(tiny_recipe(folder))
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    return copy_run(trained_once, tmp_path)


def test_a_damaged_checkpoint_and_a_damaged_note_on_the_start_are_named_and_the_start_is_kept(trained: Path) -> None:
    """The start was noted anew, as if no step had been taken."""
    recipe = tiny_recipe(trained, "train.steps=12")
    start = (recipe.checkpoints_dir / "start.json").read_bytes()
    (recipe.checkpoints_dir / "start.json").touch()
    newest = max(recipe.checkpoints_dir.glob("step-*"))
    state = (newest / "state.json").read_text()
    (newest / "state.json").write_text("{")
    assert_raises(lambda: run(recipe), f"{newest} cannot be read | ; remove it to resume from step-")
    assert (recipe.checkpoints_dir / "start.json").read_bytes() == start
    (newest / "state.json").write_text(state)
    shutil.rmtree(recipe.head_dir)
    (recipe.checkpoints_dir / "start.json").write_text("{")
    assert_raises(lambda: run(tiny_recipe(trained)), "start.json cannot be read | remove | checkpoints to start over")


def test_more_prompts_continue_a_finished_run_with_the_same_draft_vocabulary_if_steps_are_left(trained, capsys):
    write_prompts(trained / "prompts.jsonl", count=24, first=0)
    recipe = tiny_recipe(trained, "data.num_prompts=24")
    before, weights = contents(recipe.head_dir), load_file(recipe.head_dir / "model.safetensors")
    run(recipe)
    assert "no steps are left for the new samples: raise train.steps above 8" in capsys.readouterr().out
    assert contents(recipe.head_dir) == before
    run(tiny_recipe(trained, "data.num_prompts=24", "train.steps=12"))
    said = "continuing after step 8; kept: the head's weights, its draft vocabulary | resuming after step 8"
    assert_message(capsys.readouterr().out, f"{said} | features: 24 training samples instead of 12")
    after = load_file(recipe.head_dir / "model.safetensors")
    assert after["d2t"].equal(weights["d2t"])
    assert not after["fc.weight"].equal(weights["fc.weight"])
