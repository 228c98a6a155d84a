"""Laws of ranks that start together: they agree on the run or all refuse it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_inputs import assert_message
from tiny_run import build_run, tiny_recipe

from headstart.common.process import refuse_separate_processes
from headstart.common.run_lock import only_run_in
from headstart.data_pipelines import together
from headstart.data_pipelines.together import (
    Facts,
    folder_fact,
    naming_lost_ranks,
    on_all_ranks,
    refuse_differences,
    run_facts,
)

TWO_RANKS: Any = SimpleNamespace(num_processes=2)


def gather_with(other: Facts) -> Callable[[list[Any]], list[Any]]:
    """What gather_object gives on rank 0 if rank 1, on the host `b`, has these facts."""
    return lambda own: [*own, ("b", other)]


def test_each_difference_between_ranks_is_named_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "gather_object", gather_with({"train.steps": "20", "step to resume from": "0"}))
    with pytest.raises(ValueError, match="not on the same run") as error:
        refuse_differences(TWO_RANKS, {"train.steps": "10", "step to resume from": "5", "seed": "1"})
    assert_message(
        str(error.value),
        "train.steps: 10 on rank 0 | 20 on rank 1 (b) | step to resume from: 5 on rank 0 | seed: 1 on rank 0"
        " | None on rank 1 | docs/several_machines.md",
    )
    refuse_differences(TWO_RANKS, {"train.steps": "20", "step to resume from": "0"})


def test_a_folder_is_recognised_by_its_lock_and_not_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(together, "FOLDER_SECONDS", 0.2)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "other").mkdir()
    with only_run_in(tmp_path / "run", "training") as owner:
        assert folder_fact(tmp_path / "run", owner.token) == folder_fact(tmp_path / "link", owner.token)
        assert str(tmp_path / "other") in folder_fact(tmp_path / "other", owner.token)
        assert "another folder" in folder_fact(tmp_path / "missing", owner.token)


def test_facts_show_a_changed_field_and_changed_data_but_not_where_the_folder_lies(tmp_path: Path) -> None:
    build_run(tmp_path)
    recipe = tiny_recipe(tmp_path)
    facts = run_facts(recipe)
    assert run_facts(tiny_recipe(tmp_path, "train.steps=9")) == {**facts, "train.steps": "9"}
    (recipe.prompts_dir).mkdir(parents=True)
    (recipe.prompts_dir / "stage.json").write_text("{}")
    changed = run_facts(recipe)
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
    with pytest.raises(ValueError, match=r"rank 1 stopped: data\.prompts: x\.jsonl given"):
        on_all_ranks(lambda: 7)
    monkeypatch.setattr(together, "gather_object", lambda own: [*own, (8, None)])
    assert on_all_ranks(lambda: 7) == [7, 8]
    with pytest.raises(FileNotFoundError):
        on_all_ranks((Path("/nowhere") / "x").read_text)


def test_a_lost_rank_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "SETTLE_SECONDS", 0.0)
    state: Any = SimpleNamespace(num_processes=2, process_index=1)
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    reported = pytest.raises(ValueError, match=r"rank 1 lost the connection .* start the same command again")
    with reported, naming_lost_ranks(state):
        raise lost
    with pytest.raises(RuntimeError, match="shapes"), naming_lost_ranks(state):
        raise RuntimeError("the shapes do not fit")
