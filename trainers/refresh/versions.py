"""The heads that a server, or a trainer, has been given; which of them drafts now, and the verdicts on the others."""

import json
from pathlib import Path
from typing import Any

from headstart.common.files import append_jsonl, read_json, remove, write_text

KEPT = 8  # newest versions, besides the first one


class Versions:
    """The heads that a server has been given, one whole folder each, and a file that says which one it should serve.

    `folder/0000` is the head that the server began with; `folder/served.json` names the served one. Folders
    and the file appear whole or not at all, so a kill at any moment leaves a head to serve.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.path = self.folder / "served.json"

    @property
    def served(self) -> Path | None:
        """The head to serve; None before the first."""
        return self.folder / self._state()["served"] if self.path.is_file() else None

    @property
    def before(self) -> list[str]:
        """The versions that were served before the present one, the last one last."""
        return self._state()["before"]

    def names(self) -> list[str]:
        """All versions, ascending."""
        return sorted(path.name for path in self.folder.glob("[0-9]*") if path.name.isdecimal())

    def add(self, head: Path) -> Path:
        """Move a head's whole folder, which is on the same disk, under the next number; it is not served yet."""
        number = max(map(int, self.names()), default=-1) + 1
        return head.rename(self.folder / f"{number:04d}")

    def choose(self, name: str) -> None:
        """Serve this version from now on, and drop the oldest of those that are not needed."""
        before = [] if self.served is None else [*self.before, self.served.name]
        self._write(name, before)
        for old in self.names()[1:-KEPT]:
            if old != name:
                remove(self.folder / old)

    def go_back(self) -> Path:
        """Serve the version before the present one; raises ValueError if there is none."""
        whole = self.names()
        before = [] if self.served is None else [name for name in self.before if name in whole]
        if not before:
            here = "none" if self.served is None else self.served.name
            raise ValueError(f"--roll-back: {here} is served and no head was before it in {self.folder}; leave it out")
        self._write(before[-1], before[:-1])
        return self.folder / before[-1]

    def note(self, **facts: Any) -> None:
        """Add a line to `folder/verdicts.jsonl`."""
        append_jsonl(self.folder / "verdicts.jsonl", [facts])

    def _state(self) -> dict[str, Any]:
        return read_json(self.path, "write the name of a version as its `served`")

    def _write(self, served: str, before: list[str]) -> None:
        write_text(self.path, json.dumps({"served": served, "before": before}) + "\n")
