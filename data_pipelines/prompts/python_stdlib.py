"""The demo's corpus: the source code of the running Python's standard library, so no download is needed."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Skip tests, vendored copies and generated tables (code pages, help topics): people do not write such code by hand.
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"})
HELD_OUT_PERCENT = 5


@dataclass(frozen=True)
class SourceFile:
    name: str  # relative to the library's root, with forward slashes
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is held out; decided by its name, so the same on every machine and Python version."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def source_files() -> Iterator[SourceFile]:
    """Every module of the standard library, in order of its path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield SourceFile(relative.as_posix(), text)
