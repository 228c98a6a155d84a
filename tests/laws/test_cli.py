"""Laws of the `headstart` command: each subcommand runs its function, and --help is quick."""

import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from bad_inputs import Typed, assert_refused

from headstart import cli
from headstart.recipes import Recipe, command_line, load_recipe
from headstart.recipes.command_line import recipe_from_command_line
from headstart.trainers import eagle

ROOT = Path(__file__).resolve().parents[2]
FIELDS = cache(command_line.field_table)
MODULES = {name: command.runs.partition(":")[0] for name, command in cli.COMMANDS.items()}


@pytest.mark.parametrize("name", MODULES)
def test_a_subcommand_runs_its_function_with_what_was_read_from_the_arguments(name, monkeypatch, typed) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.chdir(ROOT)
    command = cli.COMMANDS[name]
    monkeypatch.setattr(command.runs.replace(":", "."), lambda *given: seen.append(given))
    typed(name, *command.example.split())
    monkeypatch.setattr(sys, "argv", [f"headstart {name}", *command.example.split()])
    expected = command.read_arguments("")
    assert seen == [expected if isinstance(expected, tuple) else (expected,)]


SCRIPTS = {"tiny": "eagle", "tiny_eagle1": "eagle", "tiny_medusa": "medusa", "tiny_block": "block"}


@pytest.mark.parametrize(("recipe", "script"), SCRIPTS.items())
def test_train_runs_the_script_of_the_recipes_kind_of_head(recipe, script, monkeypatch, typed) -> None:
    seen: list[tuple[Recipe, str]] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(eagle, "train", lambda recipe, given, script: seen.append((recipe, script)))
    outcome = typed("train", f"recipes/{recipe}.yaml", "train.steps=1")
    assert seen == [(load_recipe(f"recipes/{recipe}.yaml", ["train.steps=1"]), f"trainers/{script}.py")]
    assert f"--num_processes N trainers/{script}.py RECIPE" in outcome.out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_subcommand_is_the_modules_own_and_names_the_command_that_was_typed(name, typed, monkeypatch) -> None:
    monkeypatch.setattr(command_line, "field_table", FIELDS)
    printed = typed(name, "--help").out
    assert printed.startswith(f"usage: headstart {name} ")
    assert str(import_module(MODULES[name]).__doc__).splitlines()[0] in printed


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_lists_every_subcommand_in_the_order_of_the_data_flow(arguments: list[str], typed: Typed) -> None:
    printed = typed(*arguments).out
    places = [printed.index(f"\n  {name} ") for name in cli.COMMANDS]
    assert places == sorted(places)
    assert all(f"headstart {name} {command.example}".rstrip() in printed for name, command in cli.COMMANDS.items())
    assert max(map(len, printed.splitlines())) <= 120


# Type every command in one process, as `headstart NAME` or as a script or module that accelerate launches, and print
# those after which a slow library is loaded.
TYPE_EVERYTHING = """
import contextlib, functools, io, runpy, sys
from headstart import cli
from headstart.recipes import command_line
command_line.field_table = functools.cache(command_line.field_table)

def type_all(arguments):
    for start in ["headstart", *cli.COMMANDS, *LAUNCHED]:
        said = io.StringIO()
        wrong = [] if arguments == ["--help"] or start not in PLAIN else ["--stepz"]  # they take no recipe
        sys.argv = ["headstart"] * (start in cli.COMMANDS) + [start, *arguments, *wrong]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            if start == "headstart" or start in cli.COMMANDS:
                cli.main()
            elif start.endswith(".py"):
                runpy.run_path(start, run_name="__main__")
            else:
                runpy.run_module(start, run_name="__main__", alter_sys=True)
        slow = {"torch", "transformers", "accelerate", "numpy", "wandb"} & set(sys.modules)
        print(start, "says nothing" if not said.getvalue() else f"loads {slow}" if slow else "is quick")

type_all(["--help"])
type_all(["recipes/tiny.yaml", "train.stepz=3"])
"""


def test_neither_help_nor_the_message_about_a_typo_waits_for_torch() -> None:
    launched = ["headstart.data_pipelines.harvest", *(f"trainers/{name}.py" for name in ("eagle", "medusa", "block"))]
    plain = [name for name, command in cli.COMMANDS.items() if command.read_arguments is not recipe_from_command_line]
    program = f"LAUNCHED, PLAIN = {launched}, {plain}\n{TYPE_EVERYTHING}"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = ended.stdout.splitlines()
    assert len(lines) == 2 * (1 + len(cli.COMMANDS) + len(launched))
    assert not [line for line in lines if not line.endswith(" is quick")]


def test_the_command_tells_its_version(typed: Typed) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert typed("--version").out == f"headstart {project['version']}\n"


def test_help_into_head_is_no_broken_pipe() -> None:
    command = f"{sys.executable} -m headstart.cli report --help | head -1"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("usage: headstart ")
    assert ended.stderr == ""


def test_examples_in_help_call_the_command_as_its_usage_does() -> None:
    for name, module in MODULES.items():
        text = str(cli.docstring(module))
        assert "python -m" not in text
        assert f"headstart {name} " in text or "accelerate launch" in text


@pytest.mark.parametrize(("name", "advice"), [("reprot", "report?"), ("harvests", "harvest?"), ("zzz", "--help")])
def test_an_unknown_subcommand_is_refused_with_the_nearest_name(name: str, advice: str, typed: Typed) -> None:
    facts = f"unknown command {name!r}", advice, *cli.COMMANDS
    assert_refused(typed(name, "recipes/tiny.yaml"), " | ".join(facts))
