"""Errors of files, disks and networks, and Ctrl-C, as one message of the command line instead of a traceback."""

import errno
import os
import select
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

PARTIAL = ".partial"  # ends the name of a file or folder until it is whole
STARTS_OVER = "interrupted; the same command starts over"
NOT_BEGUN = "interrupted before the work began; run the same command again"
CONTINUES = "interrupted; the same command goes on where it stopped"

FOLDER_NEEDED = "only a folder is allowed here", "move the file away"
CHECK_PERMISSIONS = "a path that this user may read and write is allowed", "change its permissions or its folder's"
MAKE_ROOM = "a disk with room for the whole file is needed", "make room there, then run the same command again"
CAUSES = {  # errno -> what is allowed, what to do
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EFBIG: ("files of this size must be allowed", "make room for them: raise the limit (ulimit -f)"),
    errno.EACCES: CHECK_PERMISSIONS,
    errno.EPERM: CHECK_PERMISSIONS,
    errno.EROFS: ("a disk that can be written to is needed", "mount it writable"),
    errno.ENOENT: (
        "an existing path is allowed",
        "check it: relative paths start from the current directory",
    ),
    errno.EEXIST: FOLDER_NEEDED,
    errno.ENOTDIR: FOLDER_NEEDED,
    errno.EISDIR: ("only a file is allowed here", "move the folder away"),
    errno.ENOTEMPTY: ("only an empty or missing folder is allowed here", "move this one away"),
    errno.ENAMETOOLONG: ("most file systems allow 255 bytes in a name", "choose a shorter one"),
    errno.ELOOP: ("a path without circular links is allowed", "correct the links"),
    errno.EMFILE: ("more open files must be allowed", "raise the limit (ulimit -n)"),
    errno.EIO: ("a disk without errors is needed", "check it (dmesg), and copy the data to another"),
    errno.ESTALE: ("a mounted disk is needed", "mount it again, then run the same command again"),
}
OTHER_CAUSE = "a disk and a connection without errors are needed", "correct the cause, then run the same command again"
OFFLINE = "a connection is needed", "check the network, or give a folder on this disk in place of a name on the hub"
DAMAGED = "a whole file is needed", "make it again, or copy or download it again"
WANDB = "a key and a connection are needed", "run `wandb login`, or set log.wandb=offline"


@contextmanager
def errors_as_messages(interrupted: str = STARTS_OVER, settings: BaseModel | None = None) -> Iterator[None]:
    """End the process with one message for a user's mistake, a failing file or connection, or Ctrl-C.

    The exit codes are 1 and, as shells report signals, 130 for Ctrl-C and 141 for a reader such as `head` that has
    closed the output. `interrupted` is said after Ctrl-C. If a field of `settings` holds the failing path, the message
    names it.
    """
    try:
        yield
        sys.stdout.flush()  # here rather than at exit, where nothing can be caught
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        message, unread = explained(error, settings), isinstance(error, BrokenPipeError) and reader_is_gone()
        if message is None:
            raise
        flush_or_discard_output()
        raise SystemExit(141 if unread else f"error: {message}") from None


def explained(error: Exception, settings: BaseModel | None = None) -> str | None:
    """The message for an error that the user can correct, None for one of ours."""
    libraries = {family.__module__.partition(".")[0] for family in type(error).__mro__}
    if isinstance(error, ValueError):
        return str(error)
    if "wandb" in libraries:
        return in_words("log.wandb", str(error), *WANDB)
    if "safetensors" in libraries:
        return in_words("a safetensors file", str(error), *DAMAGED)
    if libraries & {"httpx", "huggingface_hub"} or isinstance(error, ConnectionError | TimeoutError):
        return in_words("network", f"{type(error).__name__}: {error}", *OFFLINE)
    return os_error_message(error, settings) if isinstance(error, OSError) else None


def os_error_message(error: OSError, settings: BaseModel | None = None) -> str:
    """What failed, why, what is allowed and what to do."""
    allowed, remedy = cause(error)
    if error.filename is None:  # every writer of ours names its file
        what = "standard output, or a temporary file" if error.errno else type(error).__name__
        return in_words(what, reason(error), allowed, remedy)
    parts = Path(os.fsdecode(error.filename2 or error.filename)).parts
    path = Path(*(part.removesuffix(PARTIAL) for part in parts))
    stage = path.parent / "stage.json"
    if error.errno == errno.ENOENT and stage.is_file():
        remedy = f"{shlex.join(['rm', str(stage)])}, and the same command makes it again"
    field = field_of(path, settings)
    elsewhere = "give another path" if field is None else f"choose another {field}"
    return in_words(str(path), reason(error), allowed, f"{remedy}, or {elsewhere}")


def cause(error: OSError) -> tuple[str, str]:
    """What is allowed, and what to do."""
    return CAUSES.get(error.errno or 0, OTHER_CAUSE)


def in_words(what: str, problem: str, allowed: str, remedy: str) -> str:
    return f"{what}: {' '.join(problem.split())}; {allowed}; {remedy}"


def reason(error: OSError) -> str:
    """The system's own words; for a file in place of a folder, which file it is."""
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and error.filename is not None:
        path = Path(os.fsdecode(error.filename))
        if file := next((each for each in (path, *path.parents) if each.is_file()), None):
            return "this is a file" if file == path else f"{file} is a file"
    said = error.strerror or str(error)
    return said[:1].lower() + said[1:]


def field_of(path: Path, settings: BaseModel | None) -> str | None:
    """The field with the failing path, else with the nearest folder above it, else with something in it."""
    path = path.absolute()
    given = {} if settings is None else paths_in(settings.model_dump())
    above = {name: folder for name, folder in given.items() if path.is_relative_to(folder)}
    inside = [name for name, folder in given.items() if folder.is_relative_to(path)]
    return max(above, key=lambda name: len(above[name].parts), default=next(iter(inside), None))


def paths_in(values: Mapping[str, Any], prefix: str = "") -> dict[str, Path]:
    """Every path in a recipe by its field, section.key; absolute."""
    found: dict[str, Path] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= paths_in(value, f"{prefix}{name}.")
        elif isinstance(value, Path) or (isinstance(value, str) and os.sep in value):
            found[prefix + name] = Path(value).absolute()
    return found


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError raised inside, which a failing write or flush does not do itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def reader_is_gone() -> bool:
    """Has the reader of standard output, such as `head`, closed it?"""
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
    except OSError:  # not a file of the system's, as in tests
        return False
    return any(happened & select.POLLERR for _, happened in poll.poll(0))


def flush_or_discard_output() -> None:
    """Write what standard output still holds, or nowhere if that fails, so that the last flush cannot fail."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
