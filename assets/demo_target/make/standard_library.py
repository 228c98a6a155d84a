"""Prompts for the demo recipes: excerpts of the running Python's standard library.

    python assets/demo_target/make/standard_library.py 768 > assets/demo_target/prompts_768.jsonl

The bundled files were made by Python 3.11.7. Six rows of _sysconfigdata, which names folders of the machine that Python
was built for, have been replaced since.
"""

import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from headstart.common.files import read_jsonl
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.tokenizer import load_tokenizer

TARGET = Path(__file__).resolve().parents[1]
# Skip tests, vendored copies and generated tables (code pages, help topics, _sysconfigdata): people do not write such
# code by hand.
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"})
HELD_OUT_PERCENT = 5
PROMPT_TOKENS = 64
CHARACTERS_PER_TOKEN = 12  # a generous bound, to shorten text before tokenizing


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
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and not path.name.startswith("_sysconfigdata"):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield SourceFile(relative.as_posix(), text)


def excerpts(template: ChatTemplate, count: int, held_out: Set[tuple[int, ...]]) -> list[list[int]]:
    """`count` prompts of PROMPT_TOKENS tokens, each the beginning of some line of a file that is not held out."""
    rng = random.Random(0)
    texts = [file.text for file in source_files() if not file.held_out]
    weights = [len(text) for text in texts]
    tokens: list[list[int]] = []
    while len(tokens) < count:
        drawn = []
        for text in rng.choices(texts, weights, k=count - len(tokens)):
            start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
            drawn.append(text[start : start + PROMPT_TOKENS * CHARACTERS_PER_TOKEN])
        rows = [template.encode_text(text)[:PROMPT_TOKENS] for text in drawn]
        tokens += [row for row in rows if len(row) == PROMPT_TOKENS and tuple(row) not in held_out]
    return tokens


def main() -> None:
    template = ChatTemplate(load_tokenizer(TARGET))
    held_out = {tuple(template.encode_text(row["prompt"])) for row in read_jsonl(TARGET / "heldout_prompts.jsonl")}
    for tokens in excerpts(template, int(sys.argv[1]), held_out):
        text = str(template.tokenizer.decode(tokens))
        # An excerpt that ends within a character, or within a word that would be tokenized differently, stays tokens.
        print(json.dumps({"text": text} if template.encode_text(text) == tokens else {"tokens": tokens}))


if __name__ == "__main__":
    main()
