"""The launcher that started this process: what it asked for, and ending when it ends instead of working on unseen."""

import os
import signal
import threading
import time

import psutil

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
