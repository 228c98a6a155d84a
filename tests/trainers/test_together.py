"""Laws of ranks that start together: they agree on the run or all refuse it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_inputs import assert_message, assert_raises
from tiny_run import build_run, tiny_recipe

from headstart.common.process import refuse_separate_processes
from headstart.common.run_lock import only_run_in
from headstart.data_pipelines import together

TWO_RANKS: Any = SimpleNamespace(num_processes=2)


def test_each_difference_between_ranks_is_named_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank_1 = {"train.steps": "20", "step to resume from": "0"}
    monkeypatch.setattr(together, "gather_object", lambda own: [*own, ("b", of_rank_1)])  # on the host b
    with pytest.raises(ValueError, match="not on the same run") as error:
        together.refuse_differences(TWO_RANKS, {"train.steps": "10", "step to resume from": "5", "seed": "1"})
    assert_message(
        str(error.value),
        "train.steps: 10 on rank 0 | 20 on rank 1 (b) | step to resume from: 5 on rank 0 | seed: 1 on rank 0"
        " | None on rank 1 | docs/several_machines.md",
    )
    together.refuse_differences(TWO_RANKS, of_rank_1)


def test_a_folder_is_recognised_by_its_lock_and_not_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(together, "FOLDER_SECONDS", 0.2)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "other").mkdir()
    with only_run_in(tmp_path / "run", "training") as owner:
        facts = [together.folder_fact(tmp_path / name, owner.token) for name in ("run", "link")]
        assert facts[0] == facts[1]
        assert str(tmp_path / "other") in together.folder_fact(tmp_path / "other", owner.token)
        assert "another folder" in together.folder_fact(tmp_path / "missing", owner.token)


def test_facts_show_a_changed_field_and_changed_data_but_not_where_the_folder_lies(tmp_path: Path) -> None:
    build_run(tmp_path)
    recipe = tiny_recipe(tmp_path)
    facts = together.run_facts(recipe)
    assert together.run_facts(tiny_recipe(tmp_path, "train.steps=9")) == {**facts, "train.steps": "9"}
    (recipe.prompts_dir).mkdir(parents=True)
    (recipe.prompts_dir / "stage.json").write_text("{}")
    changed = together.run_facts(recipe)
    assert {name for name in facts if facts[name] != changed[name]} == {"prompts/stage.json"}
    assert not any("run_dir" in name for name in facts)


def test_processes_started_apart_are_refused_with_the_command_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "bin/accelerate launch --cpu --num_processes 2 trainers/eagle.py recipes/tiny.yaml"
    command = ["python", *typed.split()]
    monkeypatch.setattr("headstart.common.process.launcher_command", lambda: command)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    meant = "--config_file recipes/launch/ddp.yaml --num_processes 2 trainers/eagle.py recipes/tiny.yaml"
    with pytest.raises(ValueError, match=meant):
        refuse_separate_processes(1)
    refuse_separate_processes(2)
    monkeypatch.delenv("MASTER_PORT")
    refuse_separate_processes(1)


def test_what_one_rank_refuses_ends_all_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "gather_object", lambda own: [*own, (None, "data.prompts: x.jsonl given")])
    assert_raises(lambda: together.on_all_ranks(lambda: 7), "rank 1 stopped: data.prompts: x.jsonl given")
    monkeypatch.setattr(together, "gather_object", lambda own: [*own, (8, None)])
    assert together.on_all_ranks(lambda: 7) == [7, 8]
    with pytest.raises(FileNotFoundError):
        together.on_all_ranks((Path("/nowhere") / "x").read_text)


def test_a_lost_rank_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "SETTLE_SECONDS", 0.0)
    state: Any = SimpleNamespace(num_processes=2, process_index=1)
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    reported = pytest.raises(ValueError, match=r"rank 1 lost the connection .* start the same command again")
    with reported, together.naming_lost_ranks(state):
        raise lost
    with pytest.raises(RuntimeError, match="shapes"), together.naming_lost_ranks(state):
        raise RuntimeError("the shapes do not fit")
