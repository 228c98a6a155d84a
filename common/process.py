"""This process: the launcher that started it, how its allocator keeps memory, and where it caches results."""

import ctypes
import os
import platform
import signal
import subprocess
import threading
import time
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import psutil

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # mallopt parameters, from glibc's malloc.h
MIB = 2**20


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations; returns False with another C library or on failure.

    By default it returns large blocks at once, and a forward pass on a CPU spends a tenth of its time getting the same
    pages back and clearing them. Blocks above 32 MiB, glibc's limit, are still returned.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept = {TRIM_THRESHOLD: 1024 * MIB, TOP_PAD: 64 * MIB, MMAP_THRESHOLD: 32 * MIB}
    return [mallopt(option, size) for option, size in kept.items()] == [1] * len(kept)


def user_cache(kind: str) -> Path:
    """A cache folder shared by all runs of a user, in HEADSTART_CACHE or headstart/ of the system's cache folder."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "headstart"
    return Path(os.environ.get("HEADSTART_CACHE", usual)).expanduser() / kind


POLL_SECONDS = 0.5
LAUNCHERS = ("accelerate", "torchrun", "torch.distributed.run")  # in the command lines of launchers


def launcher_command() -> list[str] | None:
    """The command line of the launcher that started this process; None if it was started otherwise."""
    try:
        command = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return None
    names = [os.path.basename(word) for word in command[:3]]  # python bin/accelerate launch, python -m accelerate...
    return command if any(name.startswith(LAUNCHERS) for name in names) else None


def end_with_launcher() -> None:
    """If a launcher started this process, send it SIGTERM once the launcher is gone: training saves and exits.

    A process that a shell started is left alone, because a shell may end before its jobs.
    """
    if launcher_command() is not None:
        end_with_parent()


def refuse_separate_processes(num_ranks: int) -> None:
    """Raise ValueError if a launcher was asked for several processes, but starts single ones that know no others.

    accelerate does so for --num_processes above 1 without GPUs and without a configuration of several ranks.
    """
    command = launcher_command()
    if command is None or num_ranks > 1 or "MASTER_PORT" not in os.environ or "WORLD_SIZE" in os.environ:
        return
    launched, asked = command[command.index("launch") if "launch" in command else 2 :], "N"
    if "--num_processes" in launched[:-1]:
        asked = launched[launched.index("--num_processes") + 1]
    script = next((place for place, word in enumerate(launched) if word == "-m" or word.endswith(".py")), 1)
    meant = ["accelerate launch --config_file recipes/launch/ddp.yaml --num_processes", asked, *launched[script:]]
    raise ValueError(
        f"--num_processes: {asked} given, but without GPUs and without a launch file accelerate starts processes that "
        f"know nothing of each other; only 1 is allowed so. For ranks that train together: {' '.join(meant)}"
    )


def end_with_parent() -> None:
    """Send this process SIGTERM once the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


class Interrupts:
    """Records SIGTERM and the first Ctrl-C inside its context; a second Ctrl-C ends the process at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> "Interrupts":
        self._handlers = {number: signal.signal(number, self._record) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        line = f"\n{signal.Signals(number).name}: finishes this step, then saves; Ctrl-C now stops at once\n"
        os.write(2, line.encode())  # `print` may be interrupted by this very signal
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def number(self) -> signal.Signals:
        """The signal; SIGTERM on a rank that stops because another rank received one."""
        return signal.Signals(signal.SIGTERM if self.received is None else self.received)


def running_code() -> dict[str, str]:
    """The versions that results depend on, and the commit if this is a clone: what the workers of a run must share."""
    found = {f"version of {name}": version(name) for name in ("headstart", "torch", "transformers")}
    root = Path(__file__).resolve().parents[1]
    if (root / ".git").exists():
        asked = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
        found["commit of headstart"] = asked.stdout.strip() or "unknown to git"
    return found
