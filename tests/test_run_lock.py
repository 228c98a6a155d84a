"""Laws of the lock in a run's folder: one command at a time, and no lock outlives its process."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bad_inputs import Says, assert_refused, type_command
from tiny_run import build_run

from headstart.common import run_lock
from headstart.common.run_lock import LOCK, Owner, Process, only_run_in

Leave = Callable[[Owner], Path]


@pytest.fixture
def leave_lock(tmp_path: Path) -> Leave:
    """leave_lock(owner): write an owner's lock into tmp_path."""

    def leave(owner: Owner) -> Path:
        (tmp_path / LOCK).write_text(json.dumps(asdict(owner)))
        return tmp_path / LOCK

    return leave


@pytest.fixture
def ended() -> Process:
    """A process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = Process.of(process.pid)
    process.communicate()
    return found


@pytest.fixture
def living() -> Process:
    """A process that is alive and not this one: its parent."""
    return Process.of(os.getppid())


def test_a_folder_is_held_by_one_command_and_free_afterwards(tmp_path: Path) -> None:
    with only_run_in(tmp_path, "training") as owner:
        assert Owner.read(tmp_path / LOCK) == owner
        refused = pytest.raises(ValueError, match=rf"in use by training as process {os.getpid()} .* another run_dir")
        with refused, only_run_in(tmp_path, "a harvest"):
            pass
        assert Owner.read(tmp_path / LOCK) == owner
    assert not (tmp_path / LOCK).exists()


def test_a_folder_is_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), only_run_in(tmp_path, "training"):
        raise KeyError
    assert not (tmp_path / LOCK).exists()


def test_a_new_folder_in_which_nothing_was_written_is_removed(tmp_path: Path) -> None:
    with only_run_in(tmp_path / "empty", "training"):
        pass
    with only_run_in(tmp_path / "full", "training"):
        (tmp_path / "full" / "metrics.jsonl").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_killed_process_does_not_block_its_folder(tmp_path: Path, leave_lock: Leave, ended: Process) -> None:
    leave_lock(replace(Owner.this_process("training"), process=ended))
    with only_run_in(tmp_path, "training") as owner:
        assert Owner.read(tmp_path / LOCK) == owner


def test_a_number_used_again_by_another_process_does_not_block_a_folder(
    tmp_path: Path, leave_lock: Leave, living: Process
) -> None:
    leave_lock(replace(Owner.this_process("training"), process=replace(living, started=living.started - 3600)))
    with only_run_in(tmp_path, "training") as owner:
        assert owner.process.pid == os.getpid()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"token": "x"}'])
def test_a_damaged_lock_does_not_block_a_folder(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.3)
    (tmp_path / LOCK).write_text(content)
    with only_run_in(tmp_path, "training") as owner:
        assert Owner.read(tmp_path / LOCK) == owner


def test_a_lock_of_another_machine_is_stale_without_a_heartbeat(
    tmp_path: Path, leave_lock: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.5)
    leave_lock(replace(Owner.this_process("training"), machine="elsewhere"))
    with only_run_in(tmp_path, "training") as owner:
        assert Owner.read(tmp_path / LOCK) == owner


def test_a_lock_of_another_machine_holds_while_its_heart_beats(
    tmp_path: Path, leave_lock: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.1)
    lock, ended = leave_lock(replace(Owner.this_process("training"), machine="elsewhere")), threading.Event()
    heart = threading.Thread(target=run_lock.beat, args=(lock, ended))
    heart.start()
    try:
        refused = pytest.raises(ValueError, match=r"in use by training as process .* on elsewhere")
        with refused, only_run_in(tmp_path, "training"):
            pass
    finally:
        ended.set()
        heart.join()
    assert lock.exists()


def test_a_run_that_is_saving_because_its_launcher_ended_is_waited_for(
    tmp_path: Path, leave_lock: Leave, living: Process, ended: Process
) -> None:
    lock = leave_lock(replace(Owner.this_process("training"), process=living, launcher=ended))
    threading.Timer(0.6, lock.unlink).start()
    started = time.monotonic()
    with only_run_in(tmp_path, "training"):
        assert time.monotonic() - started > 0.5


def test_a_run_whose_launcher_lives_is_not_waited_for(tmp_path: Path, leave_lock: Leave, living: Process) -> None:
    leave_lock(replace(Owner.this_process("training"), process=living, launcher=living))
    with pytest.raises(ValueError, match="in use by training"), only_run_in(tmp_path, "training"):
        pass


def test_a_second_harvest_into_a_shared_folder_waits_for_the_first(
    tmp_path: Path, leave_lock: Leave, living: Process
) -> None:
    lock = leave_lock(replace(Owner.this_process("harvest"), process=living))
    threading.Timer(0.6, lock.unlink).start()
    with only_run_in(tmp_path, "harvest", wait=True) as owner:
        assert Owner.read(lock) == owner


def count_in_turn(folder: Path, times: int) -> None:
    """Read, wait and write a number, which loses counts unless one process at a time does it."""
    for _ in range(times):
        with only_run_in(folder, "counting", wait=True):
            count = int((folder / "count").read_text())
            time.sleep(0.005)
            (folder / "count").write_text(str(count + 1))


def test_processes_that_compete_for_a_folder_hold_it_in_turn(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=count_in_turn, args=(tmp_path, 4)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "count").read_text() == "16"


@pytest.mark.parametrize("command", ["train", "prompts", "inspect", "calibrate", "harvest"])
def test_no_command_writes_into_a_run_that_another_process_writes(
    command: str,
    tmp_path: Path,
    leave_lock: Leave,
    living: Process,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two at once doubled metrics.jsonl, or crashed on a missing file."""
    build_run(tmp_path)
    (tmp_path / "run").mkdir()
    lock = leave_lock(replace(Owner.this_process("training"), process=living)).rename(tmp_path / "run" / LOCK)
    outcome = type_command([command, str(tmp_path / "recipe.yaml")], monkeypatch, capsys)
    assert_refused(
        outcome, Says(str(tmp_path / "run"), f"process {living.pid}", "one command at a time", "wait for it")
    )
    assert list((tmp_path / "run").iterdir()) == [lock]
