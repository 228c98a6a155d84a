"""What the files of a head and of a target have in common: a JSON object to read, and large weights to identify."""

import json
from pathlib import Path
from typing import Any

END = 1 << 20  # bytes at each end of a file


def read_json_object(path: Path, of: str) -> dict[str, Any]:
    """The JSON object in a file of a head or target (`of`); raises ValueError, naming the file, for anything else."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy or download the {of} again") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds a {type(found).__name__}; a JSON object is allowed: copy or download the {of} again"
        )
    return found


def both_ends(path: Path) -> bytes:
    """The first and last MiB of a file, which identify weights of hundreds of gigabytes together with its size."""
    with path.open("rb") as file:
        start = file.read(END)
        file.seek(max(path.stat().st_size - END, 0))
        return start + file.read()
