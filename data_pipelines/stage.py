"""A stage of a run: a folder that records its inputs, so its output is reused, resumed or refused."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from headstart.recipes.whole_files import write_text

Json = dict[str, Any]
CHECKSUM = "xxh3_128"  # of each shard, in a store's manifest


def write_jsonl(path: Path, rows: Iterable[Json]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(path: Path) -> str:
    """A fast checksum (xxh3) for large files: it detects damage at disk speed, but not deliberate forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def differences(found: Json, wanted: Json, wording: str) -> list[str]:
    """One line per key whose values differ; `wording` has two placeholders, the found and the wanted value."""
    return [
        f"{key}: " + wording.format(repr(found.get(key)), repr(wanted.get(key)))
        for key in sorted(found.keys() | wanted.keys())
        if found.get(key) != wanted.get(key)
    ]


class Stage:
    """A folder with a stage.json that records the stage's inputs and whether it is complete."""

    def __init__(self, name: str, folder: Path, inputs: Json) -> None:
        self.name, self.folder = name, folder
        self.inputs: Json = json.loads(json.dumps(inputs))  # as JSON reads them back: tuples become lists
        self.path = folder / "stage.json"

    def is_complete(self) -> bool:
        """Whether the output is complete; raises ValueError naming the differences if it was made from other inputs."""
        inputs = self.claimed_for()
        if inputs is None:
            return False
        self._refuse_difference(inputs)
        return bool(json.loads(self.path.read_text())["complete"])

    def claimed_for(self) -> Json | None:
        """The inputs recorded in the folder, or None if no run has claimed it."""
        if not self.path.is_file():
            return None
        inputs: Json = json.loads(self.path.read_text())["inputs"]
        return inputs

    def identity(self) -> str:
        """A digest of the inputs."""
        return hashlib.sha256(json.dumps(self.inputs, sort_keys=True).encode()).hexdigest()

    def begin(self) -> None:
        """Claim the folder for these inputs; what an interrupted run left in it may be reused."""
        if not self.is_complete():
            write_text(self.path, json.dumps({"inputs": self.inputs, "complete": False}, indent=1))

    def finish(self, facts: Json) -> None:
        write_text(self.path, json.dumps({"inputs": self.inputs, "complete": True, "facts": facts}, indent=1))

    def facts(self) -> Json:
        """The facts that `finish` recorded."""
        found: Json = json.loads(self.path.read_text())["facts"]
        return found

    def digest(self) -> str:
        """The identity of the complete stage, an input of the next stage."""
        return file_digest(self.path)

    def _refuse_difference(self, found: Json) -> None:
        different = differences(found, self.inputs, "made with {}, the recipe says {}")
        if different:
            raise ValueError(
                f"the {self.name} in {self.folder} were made from other inputs:\n  "
                + "\n  ".join(different)
                + f"\nchoose another run_dir, undo the change in the recipe, or remove {self.folder}"
            )


def target_identity(folder: Path) -> str:
    """A digest of a target's config and weights that is cheap for hundreds of gigabytes.

    It covers config.json, and the name, size, first and last MiB of every weight file.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    end = 1 << 20
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(end))
            file.seek(max(size - end, 0))
            digest.update(file.read())
    return digest.hexdigest()
