"""Laws of the recipe: one typed file, all mistakes in one report, overrides win."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headstart.recipes import Recipe, RecipeError, load_recipe, recipe_from_command_line
from headstart.recipes.fields import recipe_fields

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
NUM_LAYERS = 16

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """The smallest recipe; its files exist."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": NUM_LAYERS, "vocab_size": 1024}))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import os"}\n')
    return {
        "run_dir": str(tmp_path / "run"),
        "target": {"path": str(target), "dtype": "float32"},
        "data": {
            "prompts": str(tmp_path / "prompts.jsonl"),
            "heldout_prompts": str(tmp_path / "prompts.jsonl"),
            "num_prompts": 8,
        },
        "head": {"kind": "eagle3"},
        "train": {"steps": 10},
    }


def write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def report(folder: Path, values: dict[str, Any], *overrides: str) -> list[str]:
    """The lines of the error report below its heading."""
    with pytest.raises(RecipeError) as error:
        load_recipe(write(folder, values), overrides)
    return [line.strip() for line in str(error.value).splitlines()[1:]]


def test_all_mistakes_are_in_one_report(tmp_path: Path, good: dict[str, Any]) -> None:
    good["train"]["lerning_rate"] = 1e-4  # unknown key
    good["train"]["steps"] = "many"  # wrong type
    good["head"]["taps"] = [2, 8, NUM_LAYERS + 1]  # no such layer
    good["data"]["heldout_prompts"] = str(tmp_path / "gone.jsonl")  # no such file
    lines = report(tmp_path, good)
    assert {line.partition(": ")[0] for line in lines} == {
        "train.lerning_rate",
        "train.steps",
        "head.taps",
        "data.heldout_prompts",
    }
    assert all(" given, " in line and " allowed; " in line for line in lines)


@pytest.mark.parametrize(
    ("edit", "start", "contains"),
    [
        (lambda r: r["train"].update(unrol=3), "train.unrol: 3 given", "did you mean unroll?"),
        (lambda r: r["train"].update(depth=3), "train.depth: 3 given", "did you mean decode.depth?"),
        (lambda r: r.update(trian={}), "trian: {} given", "did you mean train?"),
        (lambda r: r.update({7: 1}), "7: 1 given", "no such key"),
        (lambda r: r["train"].pop("steps"), "train.steps: nothing given", "add it"),
        (lambda r: r.pop("head"), "head: nothing given", "with keys of kind"),
        (lambda r: r.update(train=5), "train: 5 given", "a section is allowed"),
        (lambda r: r["train"].update(steps="600"), "train.steps: '600' given", "a whole number > 0 is allowed"),
        (lambda r: r["train"].update(steps=True), "train.steps: true given", "a whole number > 0 is allowed"),
        (lambda r: r["train"].update(steps=0), "train.steps: 0 given", "a whole number > 0 is allowed"),
        (lambda r: r["train"].update(optimizer="adam"), "train.optimizer: 'adam' given", "did you mean adamw?"),
        (lambda r: r["train"].update(learning_rate=float("nan")), "train.learning_rate: nan given", "a number > 0"),
        (lambda r: r["data"].update(temperatures=[0, -1]), "data.temperatures: [0, -1] given", ">= 0"),
        (lambda r: r["data"].update(prompts="gone.jsonl"), "data.prompts: 'gone.jsonl' given", "an existing file"),
        (lambda r: r["target"].update(path="./gone"), "target.path: './gone' given", "config.json"),
        (lambda r: r["head"].update(taps=[8, 2]), "head.taps: [8, 2] given", "write [2, 8]"),
        (lambda r: r["head"].update(taps=[2, 2]), "head.taps: [2, 2] given", "write [2]"),
        (lambda r: r["head"].update(num_heads=4, num_kv_heads=3), "head.num_kv_heads: 3 given", "a divisor of"),
        (lambda r: r["head"].update(kind="eagle2"), "head.kind: 'eagle2' given, one of eagle1, eagle3", "did you mean"),
        (
            lambda r: r["head"].update(kind=3),
            "head.kind: 3 given",
            "one of eagle1, eagle3, peagle, medusa, block, mtp is",
        ),
        (
            lambda r: r["head"].pop("kind"),
            "head.kind: nothing given",
            "one of eagle1, eagle3, peagle, medusa, block, mtp is allowed; add it",
        ),
        (lambda r: r["head"].update(kind="eagle1", taps=[2]), "head.taps: [2] given", "or choose kind eagle3"),
        (lambda r: r["head"].update(kind="eagle1", num_head=2), "head.num_head: 2 given", "did you mean num_heads?"),
        (lambda r: r["head"].update(kind="eagle1", num_heads=0), "head.num_heads: 0 given", "a whole number > 0"),
        (lambda r: r["head"].update(draft_vocab_size=2000), "head.draft_vocab_size: 2000 given", "1024"),
    ],
)
def test_a_mistake_is_one_line_with_path_value_and_allowed_values(
    tmp_path: Path, good: dict[str, Any], edit: Edit, start: str, contains: str
) -> None:
    edit(good)
    [line] = report(tmp_path, good)
    assert line.startswith(start)
    assert contains in line


def test_each_kind_of_head_has_its_own_keys(tmp_path: Path, good: dict[str, Any]) -> None:
    good["head"] = {"kind": "eagle1", "num_heads": 2, "num_kv_heads": 1}
    assert set(load_recipe(write(tmp_path, good)).head.model_dump()) == {
        "kind",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
    }
    assert recipe_fields()["head.kind"].choices == ("eagle1", "eagle3", "peagle", "medusa", "block", "mtp")
    assert recipe_fields()["head.taps"].description.endswith(" Only eagle3, peagle and block.")
    assert recipe_fields()["head.num_heads"].description.endswith(" Only eagle1, eagle3, peagle and block.")
    assert "Only" not in recipe_fields()["head.kind"].description


def test_the_last_hidden_state_may_be_a_tap_and_a_later_one_may_not(tmp_path: Path, good: dict[str, Any]) -> None:
    good["head"]["taps"] = [0, NUM_LAYERS]
    assert load_recipe(write(tmp_path, good)).head.model_dump()["taps"] == (0, NUM_LAYERS)
    [line] = report(tmp_path, good, f"head.taps=[{NUM_LAYERS + 1}]")
    assert f"0 to {NUM_LAYERS}" in line


def test_a_mistake_names_its_line_or_its_override(tmp_path: Path, good: dict[str, Any]) -> None:
    path = write(tmp_path, good)
    path.write_text(path.read_text().replace("steps: 10", "steps: -10"))
    with pytest.raises(RecipeError) as error:
        load_recipe(path, ["seed=x"])
    line = path.read_text().splitlines().index("  steps: -10") + 1
    assert f"(line {line})" in str(error.value)
    assert "(override seed=x)" in str(error.value)


@pytest.mark.parametrize(
    ("override", "contains"),
    [
        ("train.steps", "train.steps: 'train.steps' given, section.key=value is allowed"),
        ("=5", "section.key=value is allowed"),
        ("train.=5", "no such key"),
        ("train=5", "train: 5 given, a section is allowed"),
        ("trian.steps=5", "did you mean train?"),
        ("train.stebs=5", "did you mean steps?"),
        ("train.steps=", "train.steps: null given"),
        ("head.taps=[2", "head.taps: '[2' given"),
        ("train.steps=2024-99-99", "train.steps: '2024-99-99' given"),
        ("decode.drafter=draft_model", "drafter draft_model needs draft_model; give decode.draft_model"),
    ],
)
def test_a_bad_override_is_reported(tmp_path: Path, good: dict[str, Any], override: str, contains: str) -> None:
    [line] = report(tmp_path, good, override)
    assert contains in line


def test_a_key_given_twice_is_an_error(tmp_path: Path, good: dict[str, Any]) -> None:
    path = write(tmp_path, good)
    path.write_text(path.read_text() + "  steps: 20\nseed: 1\nseed: 2\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    text = str(error.value)
    assert "2 mistakes" in text
    assert "train.steps: given in line" in text
    assert "seed: given in line" in text


@pytest.mark.parametrize(
    ("content", "contains"),
    [
        (None, "No such file"),
        (b"train: [1, 2\nhead: 3\n", "line 2"),
        (b"train: {steps: 1}\n---\nseed: 1\n", "line 2"),
        (b"seed: !!python/name:os.system\n", "line 1"),
        (b"seed: !!int many\n", "not YAML"),
        (b"- 1\n", "not a recipe"),
        (b"\xff\xfe\xff", "not YAML"),
        (b"", "run_dir: nothing given"),
    ],
)
def test_an_unreadable_file_is_a_recipe_error(tmp_path: Path, content: bytes | None, contains: str) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"recipe\.yaml") as error:
        load_recipe(path)
    assert contains in str(error.value)


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
    good["seed"] = 1
    overrides = ["seed=2", "train.steps=3", "train.steps=4", "run_dir=elsewhere", "log.wandb=disabled"]
    recipe = load_recipe(write(tmp_path, good), overrides)
    assert (recipe.seed, recipe.train.steps, recipe.log.wandb) == (2, 4, "disabled")
    assert recipe.features_dir == Path("elsewhere/features")


def test_an_override_can_fix_a_mistake_in_the_file(tmp_path: Path, good: dict[str, Any]) -> None:
    good["train"]["steps"] = "many"
    assert load_recipe(write(tmp_path, good), ["train.steps=5"]).train.steps == 5


def test_a_recipe_cannot_be_changed(tmp_path: Path, good: dict[str, Any]) -> None:
    recipe = load_recipe(write(tmp_path, good))
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 5  # type: ignore[misc]


def test_all_output_is_below_run_dir(tmp_path: Path, good: dict[str, Any]) -> None:
    recipe = load_recipe(write(tmp_path, good))
    names = [name for name, member in vars(Recipe).items() if isinstance(member, property)]
    places = {getattr(recipe, name) for name in names if name.endswith(("_dir", "_path"))}
    assert len(places) == 9
    assert {place.parent for place in places} == {recipe.data_folder} == {recipe.run_dir}
    good["data"]["folder"] = str(tmp_path / "shared")
    shared = load_recipe(write(tmp_path, good))
    harvest = {shared.prompts_dir, shared.responses_dir, shared.features_dir}
    assert {place.parent for place in harvest} == {tmp_path / "shared"}
    assert shared.head_dir.parent == shared.checkpoints_dir.parent == shared.run_dir


def test_a_hub_name_needs_no_local_folder(tmp_path: Path, good: dict[str, Any]) -> None:
    good["target"]["path"] = "some-organisation/some-model"
    good["head"]["taps"] = [99]  # the number of layers is unknown without the hub
    assert load_recipe(write(tmp_path, good)).target.path == "some-organisation/some-model"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path: Path, tmp_path: Path, good: dict[str, Any]) -> None:
    given = yaml.safe_load(path.read_text())
    overrides = []
    if given["data"]["heldout_prompts"] != "self":
        overrides.append(f"data.heldout_prompts={good['data']['heldout_prompts']}")
    if given["data"]["prompts"] != "self":
        overrides.append(f"data.prompts={good['data']['heldout_prompts']}")
    if given["target"]["path"].startswith("models/"):  # larger than the target that stands in for it
        overrides += [f"head.{field}=null" for field in ("draft_vocab_size", "taps") if field in given["head"]]
    if given["target"]["path"].startswith(("assets/", "models/")):
        overrides.append(f"target.path={good['target']['path']}")
    assert load_recipe(path, overrides).run_dir == Path("runs") / path.stem


@pytest.mark.skipif(not (ROOT / "assets/demo_target/config.json").exists(), reason="the demo target is missing")
@pytest.mark.parametrize("name", ["tiny", "tiny_eagle1", "tiny_full", "tiny_medusa", "tiny_medusa2", "tiny_block"])
def test_the_demo_recipes_fit_the_demo_target(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    load_recipe(f"recipes/{name}.yaml")


def test_every_field_has_a_description() -> None:
    fields = recipe_fields()
    assert {"seed", "target.path", "head.taps", "train.learning_rate"} <= fields.keys()
    assert all(field.description.endswith(".") and "\n" not in field.description for field in fields.values())


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


def test_the_command_line_loads_a_recipe(tmp_path: Path, good: dict[str, Any]) -> None:
    assert recipe_from_command_line("", [str(write(tmp_path, good)), "train.steps=7"]).train.steps == 7


def test_a_bad_recipe_exits_with_status_2_and_no_traceback(tmp_path: Path, good: dict[str, Any]) -> None:
    path = write(tmp_path, good)
    code = "from recipes import recipe_from_command_line; recipe_from_command_line('')"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path), "train.steps=0", "seed=-1"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith(f"{path}: 2 mistakes\n")
    assert len(ended.stderr.splitlines()) == 3
