"""Laws of ranks that start together: they agree on the run or all refuse it, and none waits for a dead one."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import build_run, tiny_recipe

from headstart.common.launcher import refuse_separate_processes
from headstart.common.run_lock import only_run_in
from headstart.data_pipelines import together
from headstart.data_pipelines.stages import lifeline
from headstart.data_pipelines.stages.lifeline import DONE, Line, read_line
from headstart.data_pipelines.together import Facts, folder_fact, refuse_differences, run_facts

TWO_RANKS: Any = SimpleNamespace(num_processes=2)


def gather_with(other: Facts) -> Callable[[list[Any]], list[Any]]:
    """What gather_object gives on rank 0 if rank 1, on the host `b`, has these facts."""
    return lambda own: [*own, ("b", other)]


def test_ranks_with_the_same_facts_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "gather_object", gather_with({"seed": "1"}))
    refuse_differences(TWO_RANKS, {"seed": "1"})


def test_each_difference_between_ranks_is_named_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "gather_object", gather_with({"train.steps": "20", "step to resume from": "0"}))
    with pytest.raises(ValueError, match="not on the same run") as error:
        refuse_differences(TWO_RANKS, {"train.steps": "10", "step to resume from": "5", "seed": "1"})
    message = str(error.value)
    assert "train.steps: 10 on rank 0" in message
    assert "20 on rank 1 (b)" in message
    assert "step to resume from: 5 on rank 0" in message
    assert "seed: 1 on rank 0" in message
    assert "None on rank 1" in message
    assert "docs/several_machines.md" in message


def test_a_folder_is_recognised_by_its_lock_and_not_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """`accelerate launch --cpu --num_processes 2` without a launch file started two runs in one folder."""
    typed = "bin/accelerate launch --cpu --num_processes 2 trainers/eagle.py recipes/tiny.yaml"
    command = ["python", *typed.split()]
    monkeypatch.setattr("headstart.common.launcher.launcher_command", lambda: command)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    meant = "--config_file recipes/launch/ddp.yaml --num_processes 2 trainers/eagle.py recipes/tiny.yaml"
    with pytest.raises(ValueError, match=meant):
        refuse_separate_processes(1)
    refuse_separate_processes(2)
    monkeypatch.delenv("MASTER_PORT")
    refuse_separate_processes(1)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of processes that ended themselves, which they do not do in a test."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(lifeline, "GRACE_SECONDS", 0.05)
    return codes


def wait_for_threads(line: Line) -> None:
    for thread in line.threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_rank_ends_when_its_peer_dies(exits: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    own, other = socket.socketpair()
    line = Line(0, {1: own})
    other.close()  # as the operating system does for a killed process
    wait_for_threads(line)
    assert exits == [1]
    assert "rank 0 ends, because rank 1 ended without a word" in capfd.readouterr().err
    assert line.lost_peer() is not None


def test_a_rank_outlives_a_peer_that_is_done(exits: list[int]) -> None:
    own, other = socket.socketpair()
    line = Line(0, {1: own})
    other.sendall(f"1 {DONE}\n".encode())
    other.close()
    wait_for_threads(line)
    assert exits == []


def test_the_main_rank_passes_on_which_rank_died(exits: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    (to_one, one), (to_two, two) = socket.socketpair(), socket.socketpair()
    line, survivor = Line(0, {1: to_one, 2: to_two}), Line(2, {0: two})
    one.close()
    wait_for_threads(survivor)
    line.threads[0].join(10)
    assert "rank 2 ends, because rank 1 ended without a word" in capfd.readouterr().err
    line.close(DONE)
    assert exits.count(1) == 2


def test_a_rank_that_fails_says_why(exits: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    own, other = socket.socketpair()
    line = Line(1, {0: own})
    Line(0, {1: other}).close("failed: ValueError('a loss that is\nnot finite')")
    wait_for_threads(line)
    assert "rank 0 failed: ValueError('a loss that is not finite')" in capfd.readouterr().err


def test_a_line_is_read_without_the_bytes_after_it() -> None:
    own, other = socket.socketpair()
    other.sendall(b"one\ntwo")
    other.close()
    assert [read_line(own), read_line(own), read_line(own)] == ["one", "two", ""]
