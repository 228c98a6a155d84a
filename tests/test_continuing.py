"""Laws of going on with a run: more steps and more prompts continue it, and nothing else does."""

import json
import shutil
from collections.abc import Callable

import pytest
from tiny_run import contents

from headstart.recipes import Recipe
from headstart.trainers.run import run

MakeRecipe = Callable[..., Recipe]
CONSTANT = "train.schedule=constant"


def test_more_steps_continue_a_finished_run(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    """It was refused: the checkpoint belonged to another recipe. With a constant rate both ways are the same steps."""
    run(make_recipe("at once", CONSTANT, "train.steps=8"))
    run(make_recipe("in two", CONSTANT, "train.steps=4"))
    capsys.readouterr()
    run(make_recipe("in two", CONSTANT, "train.steps=8"))
    printed = capsys.readouterr().out
    assert "going on after step 4; kept: the head's weights" in printed
    assert "train.steps: 8 instead of 4; from here on the learning rate follows the schedule" in printed
    at_once, in_two = (make_recipe(name, CONSTANT) for name in ("at once", "in two"))
    assert contents(in_two.head_dir) == contents(at_once.head_dir)
    rows = [json.loads(line)["step"] for line in in_two.metrics_path.read_text().splitlines()]
    assert rows == sorted(rows)


def test_fewer_steps_than_are_done_are_refused(make_recipe: MakeRecipe) -> None:
    run(make_recipe("run"))
    with pytest.raises(ValueError, match=r"train\.steps: checkpoint 8, recipe 6"):
        run(make_recipe("run", "train.steps=6"))


def test_another_field_is_refused_with_more_steps_too(make_recipe: MakeRecipe) -> None:
    run(make_recipe("run"))
    with pytest.raises(ValueError, match=r"train.unroll: checkpoint 3, recipe 2") as error:
        run(make_recipe("run", "train.steps=12", "train.unroll=2"))
    assert "train.steps" not in str(error.value)


def test_the_same_recipe_says_nothing_about_going_on(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    run(make_recipe("run"))
    run(make_recipe("run"))
    assert "going on" not in capsys.readouterr().out


def test_a_damaged_note_on_the_start_names_its_file(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("run")
    run(recipe)
    shutil.rmtree(recipe.head_dir)
    (recipe.checkpoints_dir / "start.json").write_text("{")
    with pytest.raises(ValueError, match=r"start\.json cannot be read .* remove .*checkpoints to start over"):
        run(recipe)
