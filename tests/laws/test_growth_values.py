"""The law that only one file says what a value of decode.growth means; all others ask a `Growth`."""

import ast
from typing import get_args

import pytest
from test_layout import ROOT, our_files

from headstart.recipes.schema import DecodeSection

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
    files = {path.relative_to(ROOT).as_posix(): growths_in_tests_of(path.read_text()) for path in our_files()}
    assert files["inference/drafters/growth.py"] == {"chain", "searched", "cost_aware"}
    assert not {name: values for name, values in files.items() if values and name not in OWNERS}


@pytest.mark.parametrize(
    "test", ["x.growth == 'chain'", "d['growth'] in names('chain')", "x.growth.startswith('searched')"]
)
def test_a_test_of_a_growth_is_found(test: str) -> None:
    assert growths_in_tests_of(test)
