"""Whatever a message or a document names exists: fields and values, commands, options, extras, files, addresses."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from test_layout import FOLDERS, ROOT, our_files, text_of

from headstart.cli import COMMANDS
from headstart.recipes.fields import recipe_fields, recipe_sections

sys.path.append(str(ROOT / "tests/interop"))
from check_addresses import files, mistakes_in

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "Makefile", "docs/*.md", "recipes/*.yaml", "recipes/launch/*")
VALUE = "\0"  # stands for a value that an f-string fills in
FILE_SUFFIXES = ("json", "jsonl", "md", "png", "html", "safetensors", "gguf", "py", "yaml", "txt", "svg")
CALLS_PIP = "headstart/smollm2.py"

# Texts in which other programs' options appear.
OTHER_PROGRAMS = {
    "data_pipelines/features/vllm_states.py": "prints a command of vLLM",
    "heads/formats/commands.py": "serves exports in other engines",
    "heads/formats/export.py": "runs llama.cpp's converter",
    "heads/formats/kinds/block.py": "serves exports in other engines",
    "inference/kernels/products.py": "runs the C++ compiler",
    "inference/report/tables.py": "CSS variables look like options",
    "trainers/tracking.py": "asks git for the revision",
    "Makefile": "runs pip and pytest too",
    "recipes/launch/slurm.sh": "options of SLURM",
    "recipes/launch/slurm_array.sh": "options of SLURM",
}
OTHER_COMMANDS = r"\b(pip|sbatch|srun|torchrun|ray|transformers serve|aiperf) "  # on their lines, options are theirs
SECTIONS = "|".join(recipe_sections())
PACKAGES = "|".join((*FOLDERS, "headstart"))
MAKE_TARGETS = re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
YAML_FILES = {file.name for file in (ROOT / "recipes").rglob("*.yaml")}
EXTRAS = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


@dataclass(frozen=True)
class Passage:
    """One string of our code, or one document."""

    file: str
    line: int
    text: str


def strings_of(file: Path) -> Iterator[Passage]:
    """Every string literal, docstrings included; an f-string is one string with VALUE for each value."""
    name = file.relative_to(ROOT).as_posix()
    nodes: list[ast.AST] = [ast.parse(text_of(file))]  # not kept: trees make work for the garbage collector
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values]
            yield Passage(name, node.lineno, "".join(parts))
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Passage(name, node.lineno, node.value)
        elif not isinstance(node, ast.Name):
            nodes += ast.iter_child_nodes(node)


@cache
def passages() -> tuple[Passage, ...]:
    code = [passage for file in our_files() for passage in strings_of(file)]
    documents = [file for pattern in DOCUMENTS for file in sorted(ROOT.glob(pattern))]
    return (*code, *(Passage(file.relative_to(ROOT).as_posix(), 1, file.read_text()) for file in documents))


def is_choice(match: re.Match[str]) -> bool:
    field = recipe_fields().get(match[1])
    return field is None or not field.choices or match[2] in field.choices


def runs(module: str) -> bool:
    name = module.removeprefix("headstart.").replace(".", "/")
    files = [ROOT / f"{folder}{name}.py" for folder in ("", "headstart/")]
    return any(file.is_file() and 'if __name__ == "__main__":' in file.read_text() for file in files)


@cache
def options() -> frozenset[str]:
    """Every option that one of our own files gives to an argument parser, and those of accelerate launch."""
    known = {"--help", "--version"}
    known |= {option for action in launch_command_parser()._actions for option in action.option_strings}
    files = [*ROOT.glob("benchmarks/**/*.py"), *our_files()]
    for file in [each for each in files if '"--' in text_of(each)]:
        for node in ast.walk(ast.parse(text_of(file))):
            called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and called in ("add_argument", "add"):
                known |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return frozenset(known)


def is_option(match: re.Match[str]) -> bool:
    before, after = match.string[: match.start()].replace("\\\n", " "), match.string[match.end() :]
    line = before.rpartition("\n")[2] + match[0] + after.partition("\n")[0]
    return match[1] in options() or re.search(OTHER_COMMANDS, line) is not None


@dataclass(frozen=True)
class Law:
    pattern: str
    exists: Callable[[re.Match[str]], bool]
    broken_by: str  # a text that names what does not exist
    skip: tuple[str, ...] = ()

    def violations(self, texts: tuple[Passage, ...]) -> list[str]:
        return [
            f"{passage.file}:{passage.line}: {match[0]!r}"
            for passage in texts
            if passage.file not in self.skip
            for match in re.finditer(self.pattern, passage.text, re.MULTILINE)
            if not self.exists(match)
        ]


COMMAND_BEFORE = r"(?:`|^[ #]*(?:\$ )?|: |\b[Rr]un )"
COMMAND_ARGUMENT = r"(?=\s+(?:[A-Z]{3,}\b|[\w.-]*/|--\w|[a-z]+\.[a-z_]+=))"
LAWS = {
    "recipe fields": Law(
        rf"(?<![\w./-])({SECTIONS})\.([a-z_0-9]+)\b(?!\()",
        lambda match: match[0] in recipe_fields() or match[2] in FILE_SUFFIXES,
        "give decode.corpuss",
    ),
    "values of fields": Law(
        rf"(?<![\w./-])((?:{SECTIONS})\.[a-z_]+)(?:=|: )([a-z0-9_]+)(?=[,;.)`]|$)", is_choice, "decode.growth=chains"
    ),
    "commands alone": Law(
        rf"{COMMAND_BEFORE}headstart ([a-z_]+)(?=`| [A-Z]{{3,}}\b)",
        lambda match: match[1] in COMMANDS,
        "`headstart calibrat`",
    ),
    "commands with an argument": Law(
        rf"\bheadstart ([a-z_]+){COMMAND_ARGUMENT}", lambda match: match[1] in COMMANDS, "run headstart calibrat RECIPE"
    ),
    "modules": Law(rf"-m ((?:{PACKAGES})[\w.]*\w)", lambda match: runs(match[1]), "python -m heads.exports"),
    "options": Law(r"(?<![\w`-])(--[a-z][\w-]*)", is_option, "give --spede 3", (*OTHER_PROGRAMS, CALLS_PIP)),
    "make targets": Law(
        r"(?:`|^ {4,}|\b[Rr]un )make ([a-z-]+)\b", lambda match: match[1] in MAKE_TARGETS, "`make test-everything`"
    ),
    "files of ours": Law(
        rf"(?<![\w/.{VALUE}])((?:{PACKAGES}|benchmarks|tests|docs|assets)/[\w./-]*\.(?:py|yaml|md|sh|jsonl|svg))\b",
        lambda match: (ROOT / match[1]).is_file() or "{" in match[1] or "NAME" in match[1],
        "see docs/nowhere.md",
    ),
    "recipes": Law(
        rf"(?<![\w/.$*{VALUE}-])(\w+\.yaml)\b",
        lambda match: match[1] in YAML_FILES,
        "give smal.yaml",
        ("heads/formats/commands.py",),
    ),
    # No package index has headstart: `pip install 'headstart[lora]'` was named as a remedy.
    "extras": Law(
        r"pip install (?:-\S+ (?:constraints\.txt )?)*'?([\w.]+)\[([\w,]+)\]",
        lambda match: match[1] == "." and set(match[2].split(",")) <= EXTRAS,
        "pip install 'headstart[lora]'",
    ),
}


@pytest.mark.parametrize("named", LAWS)
def test_what_a_text_names_exists(named: str) -> None:
    assert LAWS[named].violations((Passage("heads/x.py", 2, LAWS[named].broken_by),))
    found = LAWS[named].violations(passages())
    assert not found, found


def test_no_message_tells_a_user_to_run_a_module_that_headstart_runs_from_any_folder() -> None:
    modules = {command.runs.partition(":")[0].removeprefix("headstart.") for command in COMMANDS.values()}
    law = Law(r"(?:python -m|\brun|\bwith) ([\w.]+\w)", lambda match: match[1] not in modules, "")
    messages = tuple(passage for passage in passages() if passage.file.endswith(".py") and passage.line > 1)
    assert not law.violations(messages)


def test_every_address_paper_and_link_of_the_documents_and_the_code_is_right() -> None:
    mistakes = [f"{path.relative_to(ROOT)}: {each}" for path in files() for each in mistakes_in(path.read_text(), path)]
    assert not mistakes, mistakes


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("see github.com/hemingkexia/Spec-Bench", "the repository hemingkexia/Spec-Bench is not in REPOSITORIES"),
        ("https://github.com/sgl-project/SpecForge/blob/main/README.md", "names a branch"),
        ("https://docs.example.org/page", "the host docs.example.org is not in OTHER_HOSTS"),
        ("EAGLE-3 (arXiv 2513.01840)", "arXiv 2513.01840"),
        ("[2503.0184](https://arxiv.org/abs/2503.0184)", "arXiv 2503.0184"),
        ("arXiv 9901.00001", "arXiv 9901.00001"),
        ("[a page](docs/no_page.md)", "there is no such file"),
        ("[a heading](docs/structure.md#no-heading)", "there is no such heading"),
    ],
)
def test_a_wrong_one_is_found(text: str, mistake: str) -> None:
    right = "See [x](docs/structure.md#the-folders), arXiv 2503.01840 and https://github.com/sgl-project/SpecForge."
    assert not [*mistakes_in(right, ROOT / "README.md")]
    assert any(mistake in each for each in mistakes_in(f"{right} {text}", ROOT / "README.md"))
