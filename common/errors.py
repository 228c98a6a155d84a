"""Errors of files, disks and networks, and Ctrl-C, as one message of the command line instead of a traceback."""

import errno
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headstart.common.remote import PARTIAL, shown

STARTS_OVER = "interrupted; the same command starts over"
NOT_BEGUN = "interrupted before the work began; run the same command again"
CONTINUES = "interrupted; the same command continues where it stopped"

RUN_AGAIN = "correct the cause, then run the same command again"


def wrong_value(name: str, given: object, allowed: str, remedy: str) -> ValueError:
    """The error for what a user wrote: the field, its value, what is allowed, and what to do."""
    return ValueError(f"{name}: {given} given, {allowed} allowed; {remedy}")


@contextmanager
def named_errors(name: object) -> Iterator[None]:
    """Put a name, such as the recipe's field or the folder that it gives, in front of a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@contextmanager
def errors_as_messages(interrupted: str = STARTS_OVER, settings: BaseModel | None = None) -> Iterator[None]:
    """End the process with one message for a user's mistake, a failing file or connection, or Ctrl-C.

    The exit codes are 1 and, as shells report signals, 130 for Ctrl-C (the message is `interrupted`) and 141 for a
    reader such as `head` that has closed the output. The message names the field of `settings` with the failing path.
    """
    try:
        yield
        sys.stdout.flush()  # here rather than at exit, where nothing can be caught
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        message = explained(error, settings)
        if message is None:
            raise
        flush_or_discard_output()
        raise SystemExit(141 if isinstance(error, BrokenPipeError) else f"error: {shown(message)}") from None


def explained(error: Exception, settings: BaseModel | None = None) -> str | None:
    """The message for an error that the user can correct, None for one of ours."""
    if isinstance(error, ValueError):
        return str(error)
    libraries = {family.__module__.partition(".")[0] for family in type(error).__mro__}
    said = " ".join(str(error).split())  # in one line
    if "wandb" in libraries:
        return f"wandb: {said}; run `wandb login`, or set WANDB_MODE=offline"
    if "safetensors" in libraries:
        return f"a safetensors file: {said}; make it again, or copy or download it again"
    if libraries & {"httpx", "huggingface_hub"} or isinstance(error, ConnectionError | TimeoutError):
        advice = "check the network, or give a folder on this disk in place of a name on the hub"
        return f"network: {type(error).__name__}: {said}; {advice}"
    if not isinstance(error, OSError):
        return None
    if error.filename is not None:
        return path_message(error, settings)
    if error.errno is None:  # from a library, in its own words
        return f"{type(error).__name__}: {said}; {RUN_AGAIN}"
    # Every writer of ours names its file.
    return f"standard output, or a temporary file: {error.strerror}; {RUN_AGAIN}"


def path_message(error: OSError, settings: BaseModel | None) -> str:
    """The path, what is wrong with it, and what to do."""
    parts = Path(os.fsdecode(error.filename2 or error.filename)).parts
    path = Path(*(part.removesuffix(PARTIAL) for part in parts))
    reason, advice, stage = error.strerror, RUN_AGAIN, path.parent / "stage.json"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        reason = next((f"{each} is a file" for each in (path, *path.parents) if each.is_file()), reason)
    if error.errno == errno.ENOENT and stage.is_file():
        advice = f"{shlex.join(['rm', str(stage)])}, and the same command makes it again"
    field = field_of(path.absolute(), settings)
    return f"{path}: {reason}; {advice}, or {'give another path' if field is None else f'choose another {field}'}"


def field_of(path: Path, settings: BaseModel | None) -> str | None:
    """The field that holds the path or the nearest folder above it."""
    given = {} if settings is None else dict(paths_in(settings.model_dump()))
    above = {name: folder for name, folder in given.items() if path.is_relative_to(folder)}
    return max(above, key=lambda name: len(above[name].parts), default=None)


def paths_in(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Every path in a recipe after its field, section.key; absolute."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from paths_in(value, f"{prefix}{name}.")
        elif isinstance(value, Path) or (isinstance(value, str) and os.sep in value):
            yield prefix + name, Path(value).absolute()


def flush_or_discard_output() -> None:
    """Write what standard output still holds, or nowhere if that fails, so that the last flush cannot fail."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
