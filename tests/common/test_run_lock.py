"""Laws of the lock in a run's folder: one command at a time, and no lock outlives its process."""

import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import pytest
from bad_inputs import Says, assert_refused
from matrix import slow
from tiny_run import build_run

from headstart.common.run_lock import LOCK, OWNER, Owner, only_run_in

Hold = Callable[[Path, Owner], IO[str]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """hold(folder, owner): hold a folder as another process does, until the file is closed."""
    with ExitStack() as stack:

        def hold(folder: Path, owner: Owner) -> IO[str]:
            file = stack.enter_context((folder / LOCK).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / OWNER).write_text(json.dumps(asdict(owner)))
            return file

        yield hold


@pytest.fixture
def other() -> Owner:
    return replace(Owner.this_process("training"), pid=os.getppid(), launcher=None)


def test_a_folder_is_held_by_one_command_and_free_afterwards(tmp_path: Path) -> None:
    with only_run_in(tmp_path, "training") as owner:
        assert Owner.read(tmp_path) == owner
        refused = pytest.raises(ValueError, match=rf"in use by training as process {os.getpid()} .* another run_dir")
        with refused, only_run_in(tmp_path, "a harvest"):
            pass
        assert Owner.read(tmp_path) == owner
    assert not list(tmp_path.glob("in_use.*"))


def test_a_new_folder_in_which_nothing_was_written_is_removed(tmp_path: Path) -> None:
    with only_run_in(tmp_path / "empty", "training"):
        pass
    with only_run_in(tmp_path / "full", "training"):
        (tmp_path / "full" / "metrics.jsonl").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def die_within(folder: Path) -> None:
    with only_run_in(folder, "training"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_does_not_block_its_folder(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=die_within, args=(tmp_path,))
    process.start()
    process.join(60)
    assert (tmp_path / OWNER).exists()
    with only_run_in(tmp_path, "training") as owner:
        assert Owner.read(tmp_path) == owner
    assert not list(tmp_path.glob("in_use.*"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"token": "x"}'])
def test_a_damaged_file_of_an_owner_is_no_owner(tmp_path: Path, content: str) -> None:
    (tmp_path / OWNER).write_text(content)
    assert Owner.read(tmp_path) is None
    with only_run_in(tmp_path, "training"):
        refused = pytest.raises(ValueError, match="in use by another command")
        (tmp_path / OWNER).write_text(content)
        with refused, only_run_in(tmp_path, "training"):
            pass


def test_a_run_that_is_saving_because_its_launcher_ended_is_waited_for_and_no_other(tmp_path, hold, other):
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock = hold(tmp_path, replace(other, launcher=os.getppid()))
    with pytest.raises(ValueError, match="in use by training"), only_run_in(tmp_path, "training"):
        pass
    lock.close()
    lock = hold(tmp_path, replace(other, launcher=ended.pid))
    threading.Timer(0.3, lock.close).start()
    started = time.monotonic()
    with only_run_in(tmp_path, "training"):
        assert time.monotonic() - started > 0.2


def count_in_turn(folder: Path, times: int) -> None:
    """Read, wait and write a number, which loses counts unless one process at a time does it."""
    for _ in range(times):
        with only_run_in(folder / "turn", "counting", wait=True):  # which is removed after each turn
            count = int((folder / "count").read_text())
            time.sleep(0.005)
            (folder / "count").write_text(str(count + 1))


def test_processes_that_compete_for_a_folder_hold_it_in_turn(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=count_in_turn, args=(tmp_path, 3)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "count").read_text() == "9"


def test_a_folder_that_vanishes_between_two_calls_ended_its_waiter_with_file_exists_error(tmp_path, monkeypatch):
    races, mkdir = [True, True], Path.mkdir

    def racing(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name == "run" and races:
            races.pop()
            raise FileExistsError(self)
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", racing)
    with only_run_in(tmp_path / "run", "training") as owner:
        assert Owner.read(tmp_path / "run") == owner
    assert not races


@pytest.mark.parametrize("kind", ["file", "link to nothing", "below /proc"])
def test_a_folder_that_cannot_be_made_was_tried_forever(kind: str, tmp_path: Path) -> None:
    folder = Path("/proc/run") if kind == "below /proc" else tmp_path / "run"
    if kind == "file":
        folder.touch()
    elif kind == "link to nothing":
        folder.symlink_to(tmp_path / "nothing")
    with pytest.raises((FileExistsError, FileNotFoundError)), only_run_in(folder, "training"):
        pass


@pytest.mark.parametrize("command", ["train", "prompts", slow("inspect"), slow("calibrate"), slow("harvest")])
def test_no_command_writes_into_a_run_that_another_process_writes(command, tmp_path, hold, other, typed):
    build_run(tmp_path)
    (tmp_path / "run").mkdir()
    hold(tmp_path / "run", other)
    outcome = typed(command, str(tmp_path / "recipe.yaml"))
    assert_refused(outcome, Says(str(tmp_path / "run"), f"process {other.pid}", "one command at a time", "wait for it"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {LOCK, OWNER}
