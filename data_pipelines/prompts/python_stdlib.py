"""The demo's corpus: the source code of the running Python's standard library, so no download is needed."""

import hashlib
import random
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from headstart.data_pipelines.stages.stage import Json
from headstart.inference.targets.tokenizer import Tokenizer
from headstart.recipes.schema import PYTHON_STDLIB

# Skip tests, vendored copies and generated tables (code pages, help topics): people do not write such code by hand.
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"})
HELD_OUT_PERCENT = 5
CHARACTERS_PER_TOKEN = 12  # a generous bound, to shorten text before tokenizing
FRUITLESS_DRAWS = 200  # draws without a single excerpt that is long enough, before giving up


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


def stdlib_prompts(
    tokenizer: Tokenizer, count: int, length: int, seed: int, held_out: Set[tuple[int, ...]] = frozenset()
) -> list[Json]:
    """Prompts of `length` tokens from files that are not held out; raises ValueError if few texts are that long."""
    rng = random.Random(seed)
    texts = [file.text for file in source_files() if not file.held_out]
    weights = [len(text) for text in texts]
    tokens: list[list[int]] = []
    fruitless = 0
    while len(tokens) < count:
        excerpts = []
        for text in rng.choices(texts, weights, k=count - len(tokens)):
            start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
            excerpts.append(text[start : start + length * CHARACTERS_PER_TOKEN])
        encoded = [row[:length] for row in tokenizer(excerpts, verbose=False)["input_ids"] if len(row) >= length]
        found = [row for row in encoded if tuple(row) not in held_out]
        fruitless = 0 if found else fruitless + 1
        if fruitless == FRUITLESS_DRAWS:
            few = f"{PYTHON_STDLIB} has hardly a text of that many tokens; lower it, or name a file in data.prompts"
            raise ValueError(f"data.prompt_tokens: {length} given, but {few}")
        tokens += found
    return [{"id": i, "tokens": row, "cut": False} for i, row in enumerate(tokens)]
