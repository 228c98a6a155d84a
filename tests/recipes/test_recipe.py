"""Laws of the recipe: one typed file, all mistakes of fields in one report, overrides win."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tiny_run import tiny_recipe

from headstart.inference.report import command
from headstart.recipes import RecipeError, load_recipe, recipe_from_command_line
from headstart.recipes.fields import head_kinds, recipe_fields
from headstart.trainers.tracking import Tracker

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
NUM_LAYERS = 16


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": NUM_LAYERS, "vocab_size": 1024}))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import os"}\n')
    prompts = str(tmp_path / "prompts.jsonl")
    return {
        "run_dir": str(tmp_path / "run"),
        "target": {"path": str(target), "dtype": "float32"},
        "data": {"prompts": prompts, "heldout_prompts": prompts, "num_prompts": 8},
        "head": {"kind": "eagle3"},
        "train": {"steps": 10},
    }


def write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def test_a_report_has_all_mistakes_of_fields_or_else_all_between_fields(tmp_path: Path, good: dict[str, Any]) -> None:
    of_fields = ["train.lerning_rate=1e-4", "train.steps=many"]  # an unknown key and a wrong type
    between = ["data.heldout_prompts=gone.jsonl", f"head.taps=[2, {NUM_LAYERS + 1}]"]  # no such file and no such layer
    for overrides, told in ((of_fields + between, of_fields), (between, between)):
        with pytest.raises(RecipeError) as error:
            load_recipe(write(tmp_path, good), overrides)
        lines = [line.strip() for line in str(error.value).splitlines()[1:]]
        assert sorted(line.partition(": ")[0] for line in lines) == [each.partition("=")[0] for each in told]
        assert all(" given, " in line and " allowed; " in line for line in lines)


def test_each_kind_of_head_has_its_own_keys(tmp_path: Path, good: dict[str, Any]) -> None:
    good["head"] = {"kind": "eagle1", "num_heads": 2, "num_kv_heads": 1}
    keys = load_recipe(write(tmp_path, good)).head.model_dump().keys()
    assert keys == {"kind", "intermediate_size", "num_heads", "num_kv_heads"}
    assert set(recipe_fields()["head.kind"].choices) == head_kinds().keys()
    assert recipe_fields()["head.medusa_heads"].description.endswith(" Only medusa.")
    assert "Only" not in recipe_fields()["head.kind"].description


def test_a_mistake_names_its_line_or_its_override(tmp_path: Path, good: dict[str, Any]) -> None:
    path = write(tmp_path, good)
    path.write_text(path.read_text().replace("steps: 10", "steps: -10"))
    with pytest.raises(RecipeError) as error:
        load_recipe(path, ["seed=x"])
    line = path.read_text().splitlines().index("  steps: -10") + 1
    assert f"(line {line})" in str(error.value)
    assert "(override seed=x)" in str(error.value)


def test_a_section_without_keys_has_the_defaults(tmp_path: Path, good: dict[str, Any]) -> None:
    assert load_recipe(write(tmp_path, {**good, "decode": None})).decode == load_recipe(write(tmp_path, good)).decode


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", "1.0e-4", "0.0001", ".0001", "+1e-4"])
def test_scientific_notation_is_a_number(tmp_path: Path, good: dict[str, Any], text: str) -> None:
    path = write(tmp_path, good)
    path.write_text(path.read_text() + f"  learning_rate: {text}\n")
    assert load_recipe(path).train.learning_rate == 1e-4
    assert load_recipe(write(tmp_path, good), [f"train.learning_rate={text}"]).train.learning_rate == 1e-4


def test_integers_stay_integers_and_are_accepted_for_floats(tmp_path: Path, good: dict[str, Any]) -> None:
    recipe = load_recipe(write(tmp_path, good), ["train.steps=12_000", "data.temperatures=[0, 1]"])
    assert recipe.train.steps == 12000
    assert recipe.data.temperatures == (0.0, 1.0)
    assert all(isinstance(temperature, float) for temperature in recipe.data.temperatures)


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path, good: dict[str, Any]) -> None:
    good["seed"] = "many"
    overrides = ["seed=2", "train.steps=3", "train.steps=4", "run_dir=elsewhere", "export.format=sglang"]
    recipe = load_recipe(write(tmp_path, good), overrides)
    assert (recipe.seed, recipe.train.steps, recipe.export.format) == (2, 4, "sglang")
    assert recipe.features_dir == Path("elsewhere/features")


def test_a_hub_name_needs_no_local_folder(tmp_path: Path, good: dict[str, Any]) -> None:
    good["target"]["path"] = "some-organisation/some-model"
    good["head"]["taps"] = [99]  # the number of layers is unknown without the hub
    assert load_recipe(write(tmp_path, good)).target.path == "some-organisation/some-model"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path: Path, good: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for the demo target with its files; in the others small files stand in for those that are named."""
    given, overrides = yaml.safe_load(path.read_text()), list[str]()
    monkeypatch.chdir(ROOT)
    if not given["target"]["path"].startswith("assets/"):
        names = [name for name in ("prompts", "heldout_prompts") if given["data"][name] != "self"]
        overrides = [f"data.{name}={good['data']['prompts']}" for name in names]
    if given["target"]["path"].startswith("models/"):  # larger than the target that stands in for it
        overrides += [f"head.{field}=null" for field in ("draft_vocab_size", "taps") if field in given["head"]]
        overrides.append(f"target.path={good['target']['path']}")
    assert load_recipe(path, overrides).run_dir == Path("runs") / path.stem


def test_a_recipe_has_at_most_100_keys() -> None:
    """For a new one, another that no recipe sets goes."""
    assert len(recipe_fields()) <= 100


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as stop:
        recipe_from_command_line("Fit a head.", ["--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert printed.index("Fit a head.") < printed.index("examples:") < printed.index("train.learning_rate ")
    assert " a number > 0 " in printed
    assert all(path in printed for path in recipe_fields())
    assert all(field.description.endswith(".") for field in recipe_fields().values())


def test_the_report_uses_as_many_cpu_threads_as_the_recipe_says(harvested, tmp_path, monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(command, "measure", None)
    folders = f"run_dir={tmp_path}", f"data.folder={harvested / 'run'}"
    with pytest.raises(TypeError):
        command.report(tiny_recipe(harvested, *folders, "report.baselines=[plain]", "report.threads=3"))
    assert counts == [3]


def test_metrics_go_to_a_wandb_project_that_the_environment_may_name(make_recipe, monkeypatch):
    settings: dict[str, Any] = {}

    def init(**given: Any) -> SimpleNamespace:
        settings.update(given)
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setenv("WANDB_PROJECT", "drafts")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Tracker(make_recipe("run"), 0, True):
        pass
    assert (settings["project"], settings["mode"]) == ("drafts", "offline")
