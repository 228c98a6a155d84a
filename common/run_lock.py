"""One command at a time writes into a folder: a lock file that says who, and that outlives no process.

The lock is `in_use.json` in the folder. A process that was killed leaves its lock behind; the next command recognises
it: on the same machine by the process, which is gone, and on another by a heartbeat, which has stopped.
"""

import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from headstart.common.files import naming, removed_on_failure
from headstart.common.launcher import launcher_command

LOCK = "in_use.json"
HEARTBEAT_SECONDS = 10.0  # between two signs of life of a lock's owner
STALE_SECONDS = 45.0  # without a sign of life, a lock of another machine is stale
ENDING_SECONDS = 600.0  # how long to wait for a run that is saving because its launcher has ended


@dataclass(frozen=True)
class Process:
    """A process, identified by its start too, because numbers are used again."""

    pid: int
    started: float  # seconds since 1970

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid, psutil.Process(pid).create_time())

    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.started) < 1
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    token: str  # random; different for every command that was started
    command: str
    machine: str  # host and, on Linux, the namespace in which process numbers count
    process: Process
    launcher: Process | None  # None if no launcher started it
    since: str  # local time

    @classmethod
    def this_process(cls, command: str) -> "Owner":
        launcher = None if launcher_command() is None else Process.of(os.getppid())
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(secrets.token_hex(8), command, this_machine(), Process.of(os.getpid()), launcher, since)

    @classmethod
    def read(cls, lock: Path) -> "Owner | None":
        """The owner named in a lock file; None if the file is gone or not yet, or not properly, written."""
        try:
            found = json.loads(lock.read_text(encoding="utf-8"))
            launcher = None if found["launcher"] is None else Process(**found["launcher"])
            return cls(**{**found, "process": Process(**found["process"]), "launcher": launcher})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def describe(self) -> str:
        return f"{self.command} as process {self.process.pid} on {self.machine.partition(' ')[0]}, since {self.since}"


def this_machine() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


@contextmanager
def only_run_in(folder: Path, command: str, wait: bool = False) -> Iterator[Owner]:
    """Hold the folder's lock in the context, and create the folder if it is missing.

    A stale lock is taken over, and a run that is ending is waited for; with `wait`, so is one that is at work. Raises
    ValueError naming the owner otherwise.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock, owner = folder / LOCK, Owner.this_process(command)
    while not take(lock, owner):
        wait_for_owner(folder, lock, wait)
    ended = threading.Event()
    heart = threading.Thread(target=beat, args=(lock, ended), daemon=True, name="lock heartbeat")
    heart.start()
    try:
        yield owner
    finally:
        ended.set()
        heart.join()
        release(lock, owner)
        if is_new:
            with suppress(OSError):  # something was written
                folder.rmdir()


def take(lock: Path, owner: Owner) -> bool:
    """Create the lock file unless there is one; exactly one of several processes succeeds."""
    try:
        file = lock.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    with removed_on_failure(lock), naming(lock), file:
        file.write(json.dumps(asdict(owner), indent=1))
    return True


def release(lock: Path, owner: Owner) -> None:
    """Remove the lock if it is still this owner's."""
    found = Owner.read(lock)
    if found is not None and found.token == owner.token:
        lock.unlink(missing_ok=True)


def beat(lock: Path, ended: threading.Event) -> None:
    """Touch the lock regularly; a disk that fails for a moment must not end the run."""
    while not ended.wait(HEARTBEAT_SECONDS):
        with suppress(OSError):
            os.utime(lock)


def wait_for_owner(folder: Path, lock: Path, wait: bool) -> None:
    """Return once the lock is gone; removes a stale one. Raises ValueError if its owner is at work, unless `wait`."""
    owner = Owner.read(lock)
    if owner is None:
        time.sleep(0.5)  # it was removed, or is being written
        owner = Owner.read(lock)
    if owner is not None and owner.machine == this_machine():
        if owner.process.is_alive():
            wait_for_end(folder, lock, owner, wait)
    elif lock.exists() and shows_life(lock):
        if not wait:
            raise in_use(folder, owner)
        return
    remove_stale(lock, owner)


def wait_for_end(folder: Path, lock: Path, owner: Owner, wait: bool) -> None:
    """Wait for a run whose launcher has ended, because it is saving. Raises ValueError for others, unless `wait`."""
    is_ending = owner.launcher is not None and not owner.launcher.is_alive()
    if not (wait or is_ending):
        raise in_use(folder, owner)
    print(f"{folder}: waiting for {owner.describe()}{', which is ending' if is_ending else ''}", file=sys.stderr)
    deadline = math.inf if wait else time.monotonic() + ENDING_SECONDS
    while owner.process.is_alive() and Owner.read(lock) == owner:
        if time.monotonic() > deadline:
            raise in_use(folder, owner)
        time.sleep(0.2)


def shows_life(lock: Path) -> bool:
    """Whether the lock is touched, or removed, within STALE_SECONDS; no clocks are compared."""
    print(f"{lock}: left by another machine; waiting {STALE_SECONDS:.0f} s for a sign of life", file=sys.stderr)
    touched, deadline = lock.stat().st_mtime_ns, time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if not lock.exists():
            return False
        if lock.stat().st_mtime_ns != touched:
            return True
    return False


def remove_stale(lock: Path, owner: Owner | None) -> None:
    """Remove the lock of an owner that is gone; a new lock that another process has just taken is left alone."""
    if Owner.read(lock) == owner:
        lock.unlink(missing_ok=True)


def in_use(folder: Path, owner: Owner | None) -> ValueError:
    who = "another command" if owner is None else owner.describe()
    stop = "" if owner is None else f" (kill {owner.process.pid} there saves and ends a training run)"
    return ValueError(
        f"{folder} is in use by {who}; one command at a time may write into a folder: wait for it, stop it{stop}, or "
        f"choose another run_dir. If no such process exists, remove {folder / LOCK}"
    )
