"""One command at a time writes into a folder; its lock ends with its process, however that ends."""

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from headstart.common.files import naming
from headstart.common.process import launcher_command
from headstart.common.remote import create, delete, pull, stored_text, url_of

LOCK = "in_use.lock"  # held by the operating system
OWNER = "in_use.json"  # says who holds it
ENDING_SECONDS = 600.0  # how long to wait for a run that is saving because its launcher has ended
TRIES = 100  # to enter a folder that others remove
STORE_SECONDS = 5.0  # between looks into a store for the owner that is waited for


@dataclass(frozen=True)
class Owner:
    """The command that holds a folder."""

    token: str  # random; different for every command that was started
    command: str
    host: str
    pid: int
    launcher: int | None  # process number; None if no launcher started it
    since: str  # local time

    @classmethod
    def this_process(cls, command: str) -> "Owner":
        launcher = None if launcher_command() is None else os.getppid()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(secrets.token_hex(8), command, socket.gethostname(), os.getpid(), launcher, since)

    @classmethod
    def read(cls, folder: Path) -> "Owner | None":
        """The owner that a folder, or its store, names; None if there is none, or its name is not properly written."""
        return cls.read_here(folder) if url_of(folder) is None else cls.parse(stored_text(folder / OWNER) or "")

    @classmethod
    def read_here(cls, folder: Path) -> "Owner | None":
        try:
            return cls.parse((folder / OWNER).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    @classmethod
    def parse(cls, text: str) -> "Owner | None":
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def is_ending(self) -> bool:
        """Whether its launcher has ended, on this machine, so that it saves and ends too."""
        on_this_machine = self.host == socket.gethostname()
        return on_this_machine and self.launcher is not None and not psutil.pid_exists(self.launcher)

    def describe(self) -> str:
        return f"{self.command} as process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def only_run_in(folder: Path, command: str, wait: bool = False) -> Iterator[Owner]:
    """Hold the folder in the context, and create it if it is missing.

    Waits for a run that is ending and, with `wait`, for one at work; otherwise raises ValueError naming the owner.
    """
    is_new = not folder.exists()
    lock, owner = FileLock(folder / LOCK), Owner.this_process(command)
    for tries_left in reversed(range(TRIES)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            acquire(lock, folder, wait)
            break
        except (FileNotFoundError, FileExistsError):  # the owner that was waited for has just removed its empty folder
            if not tries_left:
                raise
    try:
        killed, text = Owner.read_here(folder), json.dumps(asdict(owner), indent=1)
        with naming(folder / OWNER):
            (folder / OWNER).write_text(text, encoding="utf-8")
        if url_of(folder) is not None:
            claim(folder, text, killed, wait)
            pull(folder)
        yield owner
    finally:
        names = (OWNER, LOCK) if left_store(folder, owner) else (LOCK,)
        for name in names:  # removed while it is held: whoever waits for a removed file opens the new one
            (folder / name).unlink(missing_ok=True)
        lock.release()
        if is_new:
            with suppress(OSError):  # something was written
                folder.rmdir()


def acquire(lock: FileLock, folder: Path, wait: bool) -> None:
    """Take the lock, after waiting for an owner that is ending, or for any with `wait`; else raise ValueError."""
    with suppress(Timeout):
        lock.acquire(blocking=False)
        return
    owner = Owner.read(folder)
    is_ending = owner is not None and owner.is_ending()
    who = "another command" if owner is None else owner.describe()
    try:
        if wait or is_ending:
            print(f"{folder}: waiting for {who}{', which is ending' if is_ending else ''}", file=sys.stderr)
            lock.acquire(timeout=-1 if wait else ENDING_SECONDS, poll_interval=0.2)
            return
    except Timeout:
        pass
    stop = "" if owner is None else f" (kill {owner.pid} there saves and ends a training run)"
    advice = f"wait for it, stop it{stop}, or choose another run_dir"
    raise ValueError(f"{folder} is in use by {who}; one command at a time may write into a folder: {advice}")


def claim(folder: Path, text: str, killed: Owner | None, wait: bool) -> None:
    """Become the owner of a folder in its store, where no lock ends with its process; raises ValueError naming another.

    `killed` is the owner that this machine's files name. It ended without leaving, as this process holds its lock.
    """
    told = False
    while not create(folder / OWNER, text):
        owner, url = Owner.read(folder), url_of(folder)
        who = "another command" if owner is None else owner.describe()
        if owner is not None and killed is not None and owner.token == killed.token:
            delete(folder / OWNER)
            continue
        if_killed = f"if it was killed, remove {url}/{OWNER} and run the same command again"
        if not wait:
            advice = f"wait for it, stop it, or choose another run_dir; {if_killed}"
            raise ValueError(f"{url} is in use by {who}; one command at a time may write into a folder: {advice}")
        if not told:
            print(f"{url}: waiting for {who}; {if_killed}", file=sys.stderr)
        told = True
        time.sleep(STORE_SECONDS)


def left_store(folder: Path, owner: Owner) -> bool:
    """Remove the owner from the folder's store, if it is in one; False if that fails, which leaves it to the next."""
    if url_of(folder) is None:
        return True
    try:
        if Owner.read(folder) == owner:
            delete(folder / OWNER)
    except ValueError:  # the store cannot be reached, and the first error says more
        return False
    return True
