"""Laws of going on with more prompts: what did not change is kept, and the result is that of a fresh harvest."""

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import assert_told
from matrix import slow
from test_harvest import start
from tiny_run import contents, copy_run, modified, tiny_recipe, write_prompts

from headstart.data_pipelines import more_prompts
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.stages.stage import Stage

FEW = "data.num_prompts=12"  # of 14 in the file: shards of 5, 5 and 2
MORE = "data.num_prompts=15"


@pytest.fixture
def folder(harvested: Path, tmp_path: Path) -> Path:
    return copy_run(harvested, tmp_path)


def grow(folder: Path, count: int) -> None:
    write_prompts(folder / "prompts.jsonl", count=count, first=0)


def fresh(folder: Path, *overrides: str) -> dict[str, bytes]:
    other = tiny_recipe(folder, f"run_dir={folder / 'fresh'}", *overrides)
    harvest(other)
    return contents(other.run_dir)


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        pytest.param(33, 33, id="more rows and a larger num_prompts", marks=pytest.mark.slow),
        pytest.param(33, 15, id="the last shard is filled up exactly", marks=pytest.mark.slow),
        pytest.param(14, 13, id="one more prompt of the same file"),
    ],
)
def test_adding_prompts_keeps_the_whole_shards_and_ends_like_a_fresh_harvest(folder, typed, rows, count):
    """shards of 5   before: 5 5 2    kept: 5 5, and the 2 responses of the third    after: as many as fresh"""
    before = modified(folder / "run")
    grow(folder, rows)
    override = f"data.num_prompts={count}"
    outcome = typed("harvest", str(folder / "recipe.yaml"), override)
    unchanged = f"prompts: 12 are unchanged, and their responses and features are reused; {count - 12} are new"
    responses = f"responses: 16 of {count + 4} are reused, {count - 12} are new"
    assert_told(outcome, f"{unchanged} | {responses} | features: 3 of ")
    assert outcome.text.index("are unchanged") < outcome.text.index("responses ")
    now = modified(folder / "run")
    for stage, suffix, shards in (("responses", "jsonl", 2), ("features", "safetensors", 2)):
        for name in (f"{stage}/train-{shard:05d}.{suffix}" for shard in range(shards)):
            assert now[name] == before[name], name
    assert now["features/heldout-00000.safetensors"] == before["features/heldout-00000.safetensors"]
    assert contents(folder / "run") == fresh(folder, override)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("claim", 3),
        *map(slow, [("claim", 1), ("claim", 2), ("claim", 4), ("claim", 5)]),
        *map(slow, [("unlink", 1), ("unlink", 2), ("unlink", 5), ("write_text", 2)]),
    ],
)
def test_a_kill_while_prompts_are_added_costs_nothing(folder, monkeypatch, name, call):
    grow(folder, 20)
    holder: Any = {"claim": Stage, "unlink": Path, "write_text": more_prompts}[name]
    calls, whole = count(1), getattr(holder, name)

    def call_or_die(*args: object, **kwargs: object) -> object:
        if next(calls) == call:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    monkeypatch.setattr(holder, name, call_or_die)
    with pytest.raises(KeyboardInterrupt):
        harvest(tiny_recipe(folder, MORE))
    monkeypatch.undo()
    harvest(tiny_recipe(folder, MORE))
    assert contents(folder / "run") == fresh(folder, MORE)


def test_rows_after_the_last_prompt_that_is_used_change_nothing(folder: Path) -> None:
    """A trained head stays valid: its checkpoints depend on the features' stage.json."""
    before = modified(folder / "run")
    grow(folder, 20)
    harvest(tiny_recipe(folder, FEW))
    now = modified(folder / "run")
    assert now.keys() == before.keys()
    assert not [name for name in now if now[name] != before[name] and not name.startswith("prompts/")]


OTHER = json.dumps({"prompt": "another"}) + "\n"


@pytest.mark.parametrize(
    ("change", "count", "said"),
    [
        (lambda rows: [OTHER, *rows[1:]], 20, "its first 12 prompts differ from the .* of the run.* rm -r {stages}"),
        (lambda rows: [*rows, '{"text": 5}\n'], 20, r"prompts\.jsonl line 15: text is a number"),
        (lambda rows: rows, 11, r"made with 12, the recipe says 11.* prompts can be added, not taken away"),
    ],
    ids=["other rows", "a bad row", "fewer"],
)
def test_prompts_that_cannot_continue_a_run_are_refused_and_change_nothing(folder, change, count, said):
    path, before = folder / "prompts.jsonl", contents(folder / "run")
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    stages = " ".join(str(folder / "run" / name) for name in ("prompts", "responses", "features"))
    with pytest.raises(ValueError, match=f"(?s){said.format(stages=stages)}"):
        harvest(tiny_recipe(folder, f"data.num_prompts={count}"))
    assert contents(folder / "run") == before


@pytest.mark.parametrize(
    ("first", "removed", "count", "refused"),
    [
        (50, ["prompts"], 12, "responses"),
        (50, ["prompts", "responses"], 12, "features"),
        # They were counted as reused, and every reader of the store that was written refused it.
        slow((0, ["prompts", "responses"], 10, "features")),
    ],
)
def test_responses_or_features_of_other_prompts_are_not_taken_over(folder, first, removed, count, refused):
    """The prompts' folder was removed and made from another file or number; what depends on it was left there."""
    write_prompts(folder / "prompts.jsonl", count=14, first=first)
    for stage in removed:
        shutil.rmtree(folder / "run" / stage)
    before = modified(folder / "run" / refused)
    with pytest.raises(ValueError, match=rf"the {refused} in .* were made from other inputs"):
        harvest(tiny_recipe(folder, f"data.num_prompts={count}"))
    assert modified(folder / "run" / refused) == before


@pytest.mark.slow
def test_two_ranks_go_on_with_more_prompts_like_one(folder: Path) -> None:
    grow(folder, 20)
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("num_prompts: 12", "num_prompts: 20"))
    processes = start(folder, ranks=2)
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert contents(folder / "run") == fresh(folder)
