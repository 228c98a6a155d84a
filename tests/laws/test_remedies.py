"""Whatever a message or a document names exists: recipe fields and values, commands, options, extras, files."""

import argparse
import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from headstart.cli import COMMANDS
from headstart.recipes.fields import recipe_fields, recipe_sections

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "recipes", "heads", "inference", "data_pipelines", "trainers")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "Makefile", "docs/*.md", "recipes/*.yaml", "recipes/launch/*")
VALUE = "\0"  # stands for a value that an f-string fills in
# report.json is a file
FILE_SUFFIXES = ("json", "jsonl", "md", "png", "html", "safetensors", "gguf", "py", "yaml", "txt", "svg")

# Texts in which other programs' options appear.
OTHER_PROGRAMS = {
    "data_pipelines/features/vllm_states.py": "prints a command of vLLM",
    "heads/formats/commands.py": "serves exports in other engines",
    "heads/formats/export.py": "runs llama.cpp's converter",
    "inference/kernels/products.py": "runs the C++ compiler",
    "inference/report/tables.py": "CSS variables look like options",
    "trainers/tracking.py": "asks git for the revision",
    "Makefile": "runs pip and pytest too",
    "recipes/launch/slurm.sh": "options of SLURM",
    "recipes/launch/slurm_array.sh": "options of SLURM",
}
OTHER_COMMANDS = r"\b(pip|sbatch|srun|torchrun|ray|transformers serve|aiperf) "  # on their lines, options are theirs


@dataclass(frozen=True)
class Passage:
    """One string of our code, or one document."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def strings_of(file: Path) -> Iterator[Passage]:
    """Every string literal, docstrings included; an f-string is one string with VALUE for each value."""
    tree, name = tree_of(file), file.relative_to(ROOT).as_posix()
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values]
            yield Passage(name, node.lineno, "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield Passage(name, node.lineno, node.value)


def our_files() -> list[Path]:
    """The code of our packages; headstart/ links to their folders, so only its own files count there."""
    return [*ROOT.glob("headstart/*.py"), *(file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py")))]


@cache
def passages() -> tuple[Passage, ...]:
    code = [file for file in our_files() if file.name != "smollm2.py"]  # it calls pip
    documents = [file for pattern in DOCUMENTS for file in sorted(ROOT.glob(pattern))]
    found = [passage for file in code for passage in strings_of(file)]
    return (*found, *(Passage(file.relative_to(ROOT).as_posix(), 1, file.read_text()) for file in documents))


def unknown(pattern: str, known: Callable[[re.Match[str]], bool], skip: tuple[str, ...] = ()) -> list[str]:
    """Where the pattern finds something that is not known."""
    return [
        f"{passage}: {match[0]!r}"
        for passage in passages()
        if passage.file not in skip
        for match in re.finditer(pattern, passage.text, re.MULTILINE)
        if not known(match)
    ]


def test_every_recipe_field_that_a_text_names_is_in_the_schema() -> None:
    sections = "|".join(recipe_sections())
    found = unknown(
        rf"(?<![\w./-])({sections})\.([a-z_0-9]+)\b(?!\()",
        lambda match: match[0] in recipe_fields() or match[2] in FILE_SUFFIXES,
    )
    assert not found, found


def test_every_value_that_a_text_gives_to_a_field_is_one_of_its_choices() -> None:
    def is_choice(match: re.Match[str]) -> bool:
        field = recipe_fields().get(match[1])
        return field is None or not field.choices or match[2] in field.choices

    sections = "|".join(recipe_sections())
    found = unknown(rf"(?<![\w./-])((?:{sections})\.[a-z_]+)(?:=|: )([a-z0-9_]+)(?=[,;.)`]|$)", is_choice)
    assert not found, found


def test_every_headstart_command_that_a_text_names_exists() -> None:
    """In backticks, at the start of a line, after a colon or `run`, or followed by what only an argument can be."""
    argument = r"(?=\s+(?:[A-Z]{3,}\b|[\w.-]*/|--\w|[a-z]+\.[a-z_]+=))"
    before = r"(?:`|^[ #]*(?:\$ )?|: |\b[Rr]un )"
    for pattern in (rf"{before}headstart ([a-z_]+)(?=`| [A-Z]{{3,}}\b)", rf"\bheadstart ([a-z_]+){argument}"):
        found = unknown(pattern, lambda match: match[1] in COMMANDS)
        assert not found, found


def test_every_module_that_a_text_runs_exists() -> None:
    ours = "|".join((*PACKAGES, "headstart"))

    def exists(match: re.Match[str]) -> bool:
        path = ROOT / match[1].removeprefix("headstart.").replace(".", "/")
        return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()

    found = unknown(rf"-m ((?:{ours})[\w.]*\w)", exists)
    assert not found, found


def test_no_message_tells_a_user_to_run_a_module_that_headstart_runs_from_any_folder() -> None:
    """`python -m data_pipelines.prompts.prompts` was named as a remedy: it works in the repository's root only."""
    modules = [command.module.removeprefix("headstart.") for command in COMMANDS.values() if command.module]
    examples = [passage for passage in passages() if passage.file.endswith(".py") and passage.line > 1]
    found = [
        f"{passage}: {match[0]}"
        for passage in examples
        for match in re.finditer(r"(?:python -m|\brun|\bwith) ([\w.]+\w)", passage.text)
        if match[1] in modules
    ]
    assert not found, found


def test_a_module_that_a_file_starts_has_a_command() -> None:
    """`make check-speculators` started a module whose command had moved, which does nothing and ends well."""
    found = []
    files = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/**/*.py"), *our_files()]
    for file in [file for file in files if '"-m"' in file.read_text()]:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.List | ast.Tuple):
                words = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
                names = [str(name) for option, name in pairwise(words) if option == "-m" and name is not None]
                found += [f"{file.relative_to(ROOT)}: {name}" for name in names if not has_command(name)]
    assert not found, found


def has_command(module: str) -> bool:
    """Whether `python -m` of this module runs something; a module that is not ours does."""
    first, *rest = module.removeprefix("headstart.").split(".")
    if first not in PACKAGES and not module.startswith("headstart."):
        return True
    folder = ROOT / first if first in PACKAGES else ROOT / "headstart" / first
    file = folder.joinpath(*rest).with_suffix(".py")
    return module.startswith("headstart.") and file.is_file() and 'if __name__ == "__main__":' in file.read_text()


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def name_of(function: ast.expr) -> str:
    """The last part of the name under which a function is called."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def options_of_our_commands() -> set[str]:
    """Every option that one of our own files gives to an argument parser."""
    found = set()
    for file in [*ROOT.glob("benchmarks/**/*.py"), *our_files()]:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call) and name_of(node.func) in ("add_argument", "add"):
                found |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return {"--help", "--version", *found}


def test_every_option_that_a_text_names_exists() -> None:
    known = options_of_our_commands() | options_of(launch_command_parser())
    found = unknown(
        r"(?<![\w`-])(--[a-z][\w-]*)",
        lambda match: match[1] in known or re.search(OTHER_COMMANDS, line_of(match)) is not None,
        (*OTHER_PROGRAMS,),
    )
    assert not found, found


def line_of(match: re.Match[str]) -> str:
    before, after = match.string[: match.start()].replace("\\\n", " "), match.string[match.end() :]
    return before.rpartition("\n")[2] + match[0] + after.partition("\n")[0]


def test_every_make_target_that_a_text_names_exists() -> None:
    targets = re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = unknown(r"(?:`|^ {4,}|\b[Rr]un )make ([a-z-]+)\b", lambda match: match[1] in targets)
    assert not found, found


def test_every_file_of_ours_that_a_text_names_exists() -> None:
    folders = "|".join((*PACKAGES, "benchmarks", "tests", "docs", "assets"))
    found = unknown(
        rf"(?<![\w/.{VALUE}])((?:{folders})/[\w./-]*\.(?:py|yaml|md|sh|jsonl|svg))\b",
        lambda match: (ROOT / match[1]).is_file() or "{" in match[1] or "NAME" in match[1],
    )
    assert not found, found
    launch = {file.name for file in (ROOT / "recipes").rglob("*.yaml")}
    found = unknown(
        rf"(?<![\w/.$*{VALUE}-])(\w+\.yaml)\b", lambda match: match[1] in launch, ("heads/formats/commands.py",)
    )
    assert not found, found


def test_every_extra_that_a_text_installs_exists_and_from_this_repository() -> None:
    """`pip install 'headstart[lora]'` was named as a remedy: no package index has headstart."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = unknown(
        r"pip install (?:-\S+ (?:constraints\.txt )?)*'?([\w.]+)\[([\w,]+)\]",
        lambda match: match[1] == "." and set(match[2].split(",")) <= extras.keys(),
    )
    assert not found, found


@pytest.mark.parametrize(
    "text",
    ["give decode.corpuss", "run headstart calibrat RECIPE", "`make test-everything`", "python -m heads.exports"],
)
def test_the_laws_above_see_what_does_not_exist(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.passages", lambda: (Passage("heads/x.py", 2, text),))
    laws = [
        test_every_recipe_field_that_a_text_names_is_in_the_schema,
        test_every_headstart_command_that_a_text_names_exists,
        test_every_make_target_that_a_text_names_exists,
        test_every_module_that_a_text_runs_exists,
    ]
    refused = 0
    for law in laws:
        try:
            law()
        except AssertionError:
            refused += 1
    assert refused == 1
