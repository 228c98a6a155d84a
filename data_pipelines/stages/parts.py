"""Processes that make parts of one harvest: they share its folder and their code, and nothing else."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from headstart.common.files import read_json, remove, write_text
from headstart.common.process import running_code, user_cache
from headstart.common.remote import url_of
from headstart.common.run_lock import Owner, only_run_in
from headstart.data_pipelines.stages.stage import differences

PARTS = "parts"  # the folder with the locks of parts, next to the stages, until the harvest is complete
CODE = "code.json"


@contextmanager
def entrance(folder: Path, command: str, wait: bool = False) -> Iterator[None]:
    """Hold a run's folder for a moment, in turn with other parts; any other command is refused, or waited for."""
    with only_run_in(folder / PARTS, command, wait=True), only_run_in(folder, command, wait):
        yield


def locks_of(folder: Path) -> Path:
    """Where a run's parts are held. A lock in a store would outlive a killed part, so each machine has its own."""
    url = url_of(folder)
    return (folder if url is None else user_cache("parts") / quote(url, safe="")) / PARTS


def lock_of(folder: Path, name: str) -> Path:
    """The folder to hold while making the part, or the shard, of this name."""
    return locks_of(folder) / name


def parts_at_work(folder: Path) -> dict[str, str]:
    """Who makes what in a run's folder, by the name of its lock; only the holder of the folder may ask."""
    found = {}
    for lock in sorted(path for path in locks_of(folder).glob("*") if path.is_dir()):
        try:
            with only_run_in(lock, "a look"):
                pass
        except ValueError:
            owner = Owner.read(lock)
            found[lock.name] = lock.name if owner is None else owner.describe()
        else:
            with suppress(OSError):
                lock.rmdir()  # left by a part that was killed
    return found


def refuse_parts_at_work(folder: Path, beside: str | None = None) -> None:
    """Raise ValueError naming the parts at work in a run's folder, except those whose lock's name ends in `beside`."""
    others = [who for name, who in parts_at_work(folder).items() if beside is None or not name.endswith(beside)]
    if others:
        what = f"{folder} is in use by parts of a harvest, which only parts of the same division may run beside"
        raise ValueError(
            "\n  ".join([f"{what}:", *others]) + "\nwait for them, or stop them (SIGTERM keeps what they have made)"
        )


def refuse_other_code(folder: Path) -> None:
    """Record the code of a run's first part; raises ValueError, naming the differences, if other code runs another."""
    path, code = folder / PARTS / CODE, running_code()
    if not path.is_file():
        write_text(path, json.dumps(code, indent=1))
    elif different := differences(read_json(path, "remove it"), code, "{} in other parts of this run, {} here"):
        lines = "\n  ".join(["the parts of a run must be made by the same code:", *different])
        removal = shlex.join(["rm", str(path)])
        raise ValueError(f"{lines}\ninstall the same here, or go on with this code ({removal}), if it writes the same")


def replace_parts(folder: Path) -> None:
    """Go on with what parts have made; raises ValueError naming those at work."""
    refuse_parts_at_work(folder)
    forget_parts(folder)


def forget_parts(folder: Path) -> None:
    """Remove what parts that are no longer at work have left behind; only the holder of the folder may call this."""
    remove(folder / PARTS / CODE)
    with suppress(OSError):  # the lock of the part that calls this is removed by itself
        locks_of(folder).rmdir()
