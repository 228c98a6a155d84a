"""Laws of a harvest in parts: in whatever order, number and company they run, the store is that of an undivided run."""

import json
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import PartialState
from bad_inputs import Says, Typed, assert_raises, assert_refused, assert_told
from matrix import slow
from tiny_run import contents, modified, recipe_values, tiny_recipe

from headstart.common.run_lock import only_run_in
from headstart.data_pipelines.harvest import harvest, harvest_part
from headstart.data_pipelines.stages.shard_work import CODE, PARTS, ShardProgress, locks_of
from headstart.inference.targets.model import TargetModel
from headstart.recipes import load_recipe
from headstart.recipes.command_line import Share


@pytest.fixture
def folder(harvested: Path, tmp_path: Path) -> Path:
    values = {**recipe_values(harvested), "run_dir": str(tmp_path / "run")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return tmp_path


def make(folder: Path, part: str, *overrides: str) -> None:
    harvest_part(tiny_recipe(folder, *overrides), Share.parse(part), PartialState())


@pytest.mark.parametrize("parts", [["1/3", "1/2", "the rest"], slow(["3/5", "1/5", "2/5", "5/5", "4/5"])])
def test_parts_of_any_number_and_order_and_a_plain_run_leave_what_an_undivided_run_leaves(folder, harvested, parts):
    for part in parts:
        made = modified(folder / "run/features") if (folder / "run").exists() else {}
        harvest(tiny_recipe(folder)) if part == "the rest" else make(folder, part)
        now = modified(folder / "run/features")
        assert all(now[name] == made[name] for name in made if name.endswith(".safetensors"))
    assert contents(folder / "run") == contents(harvested / "run")


def make_in_process(folder: Path, part: str) -> None:
    torch.set_num_threads(1)
    harvest_part(load_recipe(folder / "recipe.yaml"), Share.parse(part), PartialState(cpu=True))


@pytest.mark.slow
def test_parts_that_run_at_the_same_time_make_the_prompts_and_the_manifest_once(folder: Path, harvested: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=make_in_process, args=(folder, f"{number}/3")) for number in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert contents(folder / "run") == contents(harvested / "run")


def test_a_part_that_runs_twice_is_refused_by_name(folder: Path, typed: Typed) -> None:
    with only_run_in(locks_of(folder / "run") / "2-of-3", "harvest --part 2/3"):
        command = ["harvest", str(folder / "recipe.yaml"), "--part"]
        twice = typed(*command, "2/3")
        assert_refused(twice, Says("2-of-3", "harvest --part 2/3 as process", "one command at a time", "wait for it"))
        others = typed(*command, "2/4")
        assert_refused(others, Says("run", "harvest --part 2/3 as process", "parts of the same division", "SIGTERM"))
        assert not (folder / "run/prompts").exists()
        assert_told(typed(*command, "1/3"), "part 1/3 is made | the last part to finish")


@pytest.mark.parametrize("command", ["harvest", "train", "prompts"])
def test_no_other_command_writes_beside_a_part(folder: Path, command: str, typed: Typed) -> None:
    with only_run_in(locks_of(folder / "run") / "2-of-3", "harvest --part 2/3"):
        outcome = typed(command, str(folder / "recipe.yaml"))
        assert_refused(outcome, Says(f"{folder / 'run'}", "harvest --part 2/3 as process", "parts", "wait for them"))
        assert not (folder / "run/prompts").exists()
    with only_run_in(folder / "run", "training"), pytest.raises(ValueError, match="in use by training"):
        make(folder, "1/2")  # nor does a part wait


def test_the_last_of_parts_writes_the_manifest_and_then_none_loads_the_target(folder, harvested, monkeypatch, capsys):
    make(folder, "1/2")
    with only_run_in(locks_of(folder / "run") / "1-of-2", "harvest --part 1/2"):  # it has not come to its end yet
        make(folder, "2/2")
        assert "part 2/2 is made" in capsys.readouterr().out
        assert not (folder / "run/features/manifest.json").exists()
    make(folder, "1/2")
    monkeypatch.setattr(TargetModel, "load_to_answer", lambda *given: pytest.fail("loaded"))
    make(folder, "2/2")
    assert "complete in" in capsys.readouterr().out
    assert contents(folder / "run") == contents(harvested / "run")


def test_a_part_of_another_recipe_or_by_other_code_is_refused_by_name(folder, monkeypatch):
    make(folder, "1/2")
    before = contents(folder / "run")
    for override, facts in (
        ("target.split=tensor", "target.split: tensor given with --part 2/2 | null or layers is allowed | leave -"),
        ("seed=4", f"the prompts in {folder}/run/prompts were made from other inputs | seed: made with 3, the recipe"),
        ("data.response_tokens=13", "the responses in | data.response_tokens: made with 12"),
        ("data.dtype=int8", "the features in | data.dtype: made with 'float32'"),
    ):
        assert_raises(lambda override=override: make(folder, "2/2", override), facts)
    code = {**json.loads(before[f"{PARTS}/{CODE}"]), "commit of headstart": "abc", "version of torch": "1.0"}
    monkeypatch.setattr("headstart.data_pipelines.stages.shard_work.running_code", lambda: code)
    said = f"the same code | version of torch: '{torch.__version__}' in other parts | '1.0' here | rm "
    assert_raises(lambda: make(folder, "2/2"), f"{said} | commit of headstart | 'abc' here")
    assert contents(folder / "run") == before


def test_sigterm_finishes_what_has_begun_and_the_same_command_goes_on(folder, harvested, monkeypatch, capsys):
    """Three texts decode together; a shard of features has five samples."""
    run, add, stopped = folder / "run", ShardProgress.add, set[str]()

    def signalling(meter: ShardProgress, *counts: Any) -> None:
        add(meter, *counts)
        if meter.what not in stopped:
            stopped.add(meter.what)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ShardProgress, "add", signalling)
    for stage in ("responses", "features"):
        with pytest.raises(SystemExit) as stop:
            make(folder, "1/1", "data.generate_batch=3")
        assert (stop.value.code, stage in stopped) == (143, True)
        assert "SIGTERM: finished texts and shards are saved" in capsys.readouterr().out
        if stage == "responses":
            kept = sum(len(path.read_text().splitlines()) for path in (run / "responses").glob("*.jsonl*"))
            assert 1 < kept <= 3, "the other two texts that were running"
        assert len(list((run / "features").glob("*.safetensors"))) == (stage == "features")
        assert not list(run.rglob("*.partial"))
    make(folder, "1/1")
    assert contents(run) == contents(harvested / "run")
