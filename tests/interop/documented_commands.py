"""Every command that the documents tell a user to type, with the place where it stands.

Read are README.md, CONTRIBUTING.md and docs/, the comments of recipes and launch files, the targets of `make help`, the
examples of `headstart --help`, and the docstrings of modules.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headstart.cli import overview

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/*.md")
CONFIGURATIONS = ("recipes/*.yaml", "recipes/launch/*")
FOLDERS = "recipes", "heads", "inference", "data_pipelines", "trainers", "benchmarks", "examples"
MODULES = *(f"{folder}/**/*.py" for folder in FOLDERS), "headstart/*.py", "tests/interop/*.py"
DOCSTRING = re.compile(r'(?:#.*\n|\n)*r?"""(.*?)"""', re.DOTALL)
SETTINGS = r"(?:[A-Z_]+=\S+ )*"
PROGRAM = rf"{SETTINGS}(?:make|headstart|accelerate launch|python3?|pip|srun|sbatch|VENV/bin/pip) (?=\S)"
EXAMPLE = re.compile(rf"(?:{PROGRAM}|from headstart import )")
IN_TEXT = re.compile(rf"`({PROGRAM}[^`]+)`")
# In running text this names a command; nobody types it so.
NAME_ONLY = re.compile(r"headstart [a-z]+|accelerate launch -m [\w.]+")


@dataclass(frozen=True)
class Documented:
    place: str
    command: str  # in one line; an example in Python has several


@cache
def documented_commands() -> tuple[Documented, ...]:
    """All of them, in the order of the documents; one that stands in several places comes once for each."""
    found = [each for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern)) for each in in_document(path)]
    for pattern in CONFIGURATIONS:
        for path in sorted(ROOT.glob(pattern)):
            comments = [line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#")]
            found += at(path, [*indented(comments, "  "), *in_text("\n".join(comments))])
    targets = re.findall(r"^([a-z.-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found += [Documented("make help", f"make {target}") for target in targets]
    found += [Documented("headstart --help", line) for line in re.findall(r"(?:\$|harvest with:) (.*)", overview())]
    for pattern in MODULES:
        for path in sorted(ROOT.glob(pattern)):
            start = DOCSTRING.match(path.read_text())  # to parse the whole files takes seconds
            text = ast.get_docstring(ast.parse(start[0] if start else ""), clean=False) or ""
            found += at(path, indented(text.splitlines(), ""))
    return tuple(found)


def at(path: Path, commands: Iterable[str], root: Path = ROOT) -> list[Documented]:
    return [Documented(path.relative_to(root).as_posix(), command) for command in commands]


def in_document(path: Path, root: Path = ROOT) -> list[Documented]:
    """The indented lines, the examples in Python and the commands in running text of a Markdown file."""
    text = path.read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return at(path, [*examples, *indented(prose.splitlines(), "    "), *in_text(prose)], root)


def in_text(text: str) -> list[str]:
    found = [" ".join(command.split()) for command in IN_TEXT.findall(text)]
    return [command for command in found if not NAME_ONLY.fullmatch(command)]


def indented(lines: list[str], indent: str) -> Iterator[str]:
    """The commands of an indented block: continued lines are joined, comments dropped, shell variables filled in."""
    variables: dict[str, str] = {}
    rest = iter(lines)
    for line in rest:
        if not line.startswith(indent):
            continue
        command = line.strip()
        is_assignment = re.match(r"[A-Z]+=(?:\"|\S+$)", command) is not None
        while command.endswith("\\") or (is_assignment and command.count('"') == 1):
            command = f"{command.removesuffix(chr(92)).strip()} {next(rest).strip()}"
        if is_assignment:
            name, _, value = command.partition("=")
            variables[name] = value.strip('"')
        elif EXAMPLE.match(command):
            command = re.sub(r"\s+# .*", "", command)
            for name, value in variables.items():
                command = command.replace(f"${name}", value)
            yield " ".join(command.split())
