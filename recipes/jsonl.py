"""Reading JSONL files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file; raises ValueError naming the file and line of a broken row."""
    with path.open("rb") as lines:
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
