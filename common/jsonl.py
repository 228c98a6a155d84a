"""Reading and writing JSON and JSONL files; errors name the file and the line."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headstart.common.os_errors import naming
from headstart.common.whole_files import write_text


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
    """The rows of a file to which a run adds lines, none if it is missing.

    A last line that a full disk or a kill has cut off is left out. Raises ValueError as `read_jsonl` does.
    """
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return list(rows_of(path, whole.splitlines()))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file, whole or not at all."""
    write_text(path, as_lines(rows))


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a growing file."""
    with naming(path), path.open("a") as file:
        file.write(as_lines(rows))


def resume_jsonl(path: Path) -> list[dict[str, Any]]:
    """`read_growing_jsonl`, and an incomplete last line is removed, so that more rows can be appended."""
    rows = read_growing_jsonl(path)
    if path.exists():
        write_jsonl(path, rows)
    return rows


def as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_of(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The rows of these lines of a file."""
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
