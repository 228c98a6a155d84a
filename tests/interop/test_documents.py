"""The walk of the documents (`make walk`) knows every documented command."""

import re
from pathlib import Path

import pytest
import yaml
from documented_commands import Documented, documented_commands, in_document, indented
from walk_plan import ORDER, SIZES, STAND_INS, plan, shrink_recipe, tiny

from headstart.recipes.fields import recipe_fields
from headstart.recipes.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]


def test_every_documented_command_is_walked_or_left_out_for_a_reason() -> None:
    walked = plan(documented_commands())
    assert len([each for each in walked if not each.reason]) > 80
    assert all(each.reason or "VENV" not in each.command for each in walked)


def test_a_documented_command_that_the_walk_does_not_know_is_refused_by_name() -> None:
    new = Documented("docs/new.md", "headstart sing RECIPE")
    with pytest.raises(ValueError, match=r"docs/new\.md: headstart sing RECIPE"):
        plan([*documented_commands(), new])


def test_no_rule_of_the_walk_is_left_over() -> None:
    commands = [each.command for each in documented_commands()]
    tiny_ones = [tiny(command) for command in commands]
    assert not [pattern for pattern in ORDER if not any(re.search(pattern, command) for command in tiny_ones)]
    assert not [pattern for pattern in STAND_INS if not any(re.search(pattern, command) for command in commands)]
    assert SIZES.keys() <= recipe_fields().keys()


def test_commands_are_found_in_blocks_text_and_comments(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Run `make lint` or `headstart report\nRECIPE`; `headstart lint` is a name.\n\n"
        '    DATA="a.b=1\n        c.d=2"\n'
        "    headstart train RECIPE $DATA \\\n        e.f=3   # a comment\n\n```python\nimport headstart\n```\n"
    )
    name = "headstart train RECIPE a.b=1 c.d=2 e.f=3"
    found = [each.command for each in in_document(page, page.parent)]
    assert found == ["import headstart\n", name, "make lint", "headstart report RECIPE"]
    assert list(indented(["  make demo", " make prose of it"], "  ")) == ["make demo"]


def test_every_recipe_is_still_one_when_it_is_made_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    (tmp_path / "data").mkdir()
    for name in ("prompts", "heldout_prompts"):
        (tmp_path / f"data/{name}.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    for path in ROOT.glob("recipes/*.yaml"):
        copy = tmp_path / path.name
        copy.write_text(path.read_text())
        shrink_recipe(copy)
        assert load_recipe(copy).target.path == "assets/demo_target"


def test_the_site_shows_every_page() -> None:
    """`make docs` would stop at a page that its navigation leaves out, but runs on no machine without a network."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = re.findall(r"[\w/]+\.md", str(navigation))
    top = ["index.md", "changelog.md", "contributing.md"]  # docs/site_hooks.py makes these
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted([*top, *pages])


GENERATED = "<!-- What follows is written by"  # a table of all model types


def test_the_documents_and_benchmarks_stay_small() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert len(readme.splitlines()) <= 120
    assert sum(len(text.partition(GENERATED)[0].split()) for text in [readme, *pages]) <= 26_900
    scripts = [path.read_text().splitlines() for path in (ROOT / "benchmarks").rglob("*.py")]
    assert sum(map(len, scripts)) <= 4_000
