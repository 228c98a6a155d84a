"""Files written whole or not at all, and JSON and JSONL files, whose errors name the file and the line."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headstart.common.remote import PARTIAL, delete, publish, publish_growing


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError raised inside, because a failing write or flush does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path next to `path`, renamed to `path` at the end, or removed if anything fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    with removed_on_failure(partial), naming(path):
        yield partial
        publish(partial, path)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """`whole_file` for a new folder."""
    partial = path.with_name(path.name + PARTIAL)
    with removed_on_failure(partial), naming(partial):
        remove(partial)  # left by a killed run
        partial.mkdir(parents=True)
        yield partial
        publish(partial, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove a file or folder if the work on it fails or is interrupted."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the first error says more
            remove(path)
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there, also from the store that it mirrors."""
    delete(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_json(path: Path, remedy: str = "make it again, or copy or download it again") -> Any:
    """The content of a JSON file; raises ValueError naming the file if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); a whole file is needed: {remedy}") from error


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file; raises ValueError naming the file and line of a broken row."""
    with path.open("rb") as lines:
        yield from rows_of(path, lines)


def read_growing_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that a run appends to; none if it is missing, and without a last line that was cut off."""
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return list(rows_of(path, whole.splitlines()))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file, whole or not at all."""
    write_text(path, as_lines(rows))


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a growing file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("a") as file:
        file.write(as_lines(rows))
    publish_growing(path)


def resume_jsonl(path: Path) -> list[dict[str, Any]]:
    """`read_growing_jsonl`, and an incomplete last line is removed, so that more rows can be appended."""
    rows = read_growing_jsonl(path)
    if path.exists():
        write_jsonl(path, rows)
    return rows


def as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_of(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))  # some editors write a mark at the start
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}); fix or remove the line") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{path} line {number} is {type(row).__name__}, a JSON object is needed; fix or remove the line"
            )
        yield row
