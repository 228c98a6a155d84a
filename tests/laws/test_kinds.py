"""Laws of kinds: a kind of head says what it is, and one file says what a value of decode.growth means."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from test_layout import ROOT, our_files, text_of

from headstart.heads.kinds.checkpoint import KINDS
from headstart.recipes.fields import head_kinds
from headstart.recipes.schema import DecodeSection

MOST_FILES = 6
# Where a kind may be told from another: its class, its section, its layouts, its loss and its drafter.
OF_KINDS = ("heads/kinds/", "recipes/schema_heads.py", "heads/formats/kinds/", "trainers/objectives/")


def files_that_name(kind: str, files: list[Path]) -> list[str]:
    """The files that name a kind, see below; relative to the repository."""
    classes = rf"{KINDS[kind].__name__}|{head_kinds()[kind].__name__}"
    named = re.compile(rf"\b(?:{classes})\b|[\"']{kind}[\"']|\bheads\.kinds\.{kind} import\b")
    return [path.relative_to(ROOT).as_posix() for path in files if named.search(text_of(path))]


@pytest.mark.parametrize("kind", KINDS)
def test_few_files_name_a_kind_of_head(kind: str) -> None:
    """A file counts if it names the kind's head class or section class, has the kind as a string in quotes (also as an
    engine's own word, or in the list of all kinds), or imports from the kind's module. The kind's name in prose does
    not count, nor do further modules of heads/kinds (block_attention.py), which other kinds may use.
    """
    files = files_that_name(kind, our_files())
    assert f"heads/kinds/{kind}.py" in files
    assert "recipes/schema_heads.py" in files
    assert len(files) <= MOST_FILES, "\n".join(files)


def test_only_a_kinds_own_files_ask_for_its_class() -> None:
    """With `isinstance(head, BlockHead)` in a trainer, each new kind is one more branch there."""
    assert KINDS.keys() == head_kinds().keys()
    classes = {each.__name__ for each in (*KINDS.values(), *head_kinds().values())}
    asking = re.compile(rf"\bisinstance\([^()]*(?:\([^()]*\)[^()]*)*\b(?:{'|'.join(classes)})\b")
    assert asking.search("if isinstance(self.heads(one), BlockHead | Eagle3Head):")
    files = {path.relative_to(ROOT).as_posix(): text_of(path) for path in our_files()}
    assert not [name for name, text in files.items() if asking.search(text) and not name.startswith(OF_KINDS)]


OWNERS = {"recipes/schema.py", "inference/drafters/growth.py"}
VALUES = {*get_args(DecodeSection.model_fields["growth"].annotation), "searched"}


def growths_in_tests_of(source: str) -> set[str]:
    """The values with which a source compares a `growth`, an attribute or a key of that name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.Match | ast.Call):
            parts = [*ast.walk(node)]
            strings = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
            is_growth = "growth" in strings or any(isinstance(p, ast.Attribute) and p.attr == "growth" for p in parts)
            is_test = not isinstance(node, ast.Call) or (
                isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith")
            )
            found |= VALUES & strings if is_growth and is_test else set()
    return found


def test_only_one_file_tests_a_value_of_growth() -> None:
    texts = {path.relative_to(ROOT).as_posix(): text_of(path) for path in our_files()}
    files = {name: growths_in_tests_of(text) for name, text in texts.items() if "growth" in text}
    assert files["inference/drafters/growth.py"] == {"chain", "searched", "cost_aware"}
    assert not {name: values for name, values in files.items() if values and name not in OWNERS}
    for test in ("x.growth == 'chain'", "d['growth'] in names('chain')", "x.growth.startswith('searched')"):
        assert growths_in_tests_of(test)
