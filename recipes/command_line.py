"""The command line shared by every command: a recipe, then `section.key=value` overrides, and nothing else."""

import argparse
import io
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.table import Table

from headstart.common.errors import STARTS_OVER, errors_as_messages, named_errors
from headstart.common.process import keep_freed_memory
from headstart.common.remote import pull
from headstart.recipes.fields import recipe_fields
from headstart.recipes.load import RecipeError, load_recipe
from headstart.recipes.schema import Recipe

Item = TypeVar("Item")


@dataclass(frozen=True)
class DeviceMemory:
    """Devices of a machine that need not be here."""

    count: int
    size: int  # bytes of each

    @classmethod
    def parse(cls, text: str) -> "DeviceMemory":
        """Read `80GB` or `8x80GB`; argparse reports a ValueError with the option's name."""
        found = re.fullmatch(r"(?:([1-9]\d*)x)?(\d+(?:\.\d+)?)(GB|GiB)", text)
        if found is None or not float(found[2]):
            allowed = "the memory of one device is allowed, such as 80GB, or of several, such as 8x80GB; write one"
            raise argparse.ArgumentTypeError(f"{text} given, {allowed}")
        return cls(int(found[1] or 1), int(float(found[2]) * (10**9 if found[3] == "GB" else 2**30)))


@dataclass(frozen=True)
class Share:
    """One of the parts into which work is divided, such as 3/64; numbers begin at 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Share":
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise argparse.ArgumentTypeError(f"{text} given, 1/N to N/N of any N are allowed; write one, such as 3/64")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def lock(self) -> str:
        """The name of its lock, which ends in that of the division."""
        return f"{self.number}-of-{self.count}"

    def share(self, work: Sequence[Item]) -> Sequence[Item]:
        return work[self.number - 1 :: self.count]


def own_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser for a command with arguments of its own; `doc` opens --help."""
    style = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=command_name(), description=doc, formatter_class=style)


class RecipeParser(argparse.ArgumentParser):
    """A parser for a recipe and overrides of its fields, to which a command may add options; `doc` opens --help."""

    def __init__(self, doc: str | None) -> None:
        command = command_name()
        examples = f"{command} recipes/tiny.yaml\n  {command} recipes/tiny.yaml run_dir=runs/other "
        super().__init__(
            prog=command,
            description=(doc or "").strip(),
            epilog=f"examples:\n  {examples}'report.temperatures=[0, 1]'",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("recipe", help="YAML file, such as recipes/tiny.yaml")
        value = "replaces the file's value; written as YAML"
        self.add_argument("overrides", nargs="*", metavar="section.key=value", help=value)

    def format_help(self) -> str:
        return f"{super().format_help()}\nfields of a recipe:\n{field_table()}"

    def error(self, message: str) -> NoReturn:
        """End the process; argparse's own message says what is wrong, but not what to do."""
        allowed = "a recipe and then section.key=value are allowed"
        super().error(f"{message}; {allowed}; {self.prog} --help lists the fields")

    def read(self, argv: Sequence[str] | None) -> tuple[Recipe, dict[str, Any]]:
        """Load the recipe, and the other options by name; mistakes go to stderr and exit with status 2."""
        given = vars(self.parse_intermixed_args(argv))
        try:
            return load_recipe(given.pop("recipe"), given.pop("overrides")), given
        except RecipeError as error:
            self.exit(2, f"{error}\n")


def recipe_from_command_line(doc: str | None, argv: Sequence[str] | None = None) -> Recipe:
    """Load the recipe named on the command line; mistakes go to stderr and exit with status 2. `doc` opens --help."""
    return RecipeParser(doc).read(argv)[0]


def recipe_and_devices(doc: str | None, argv: Sequence[str] | None = None) -> tuple[Recipe, DeviceMemory | None]:
    """The same for a command that trains, whose dry run may plan for devices that are not here."""
    parser = RecipeParser(doc)
    about = "plan for devices that are not here: the memory of one, such as 80GB, or 8x80GB (with train.dry_run=true)"
    parser.add_argument("--device-memory", type=DeviceMemory.parse, metavar="[COUNTx]SIZE", help=about)
    recipe, options = parser.read(argv)
    if options["device_memory"] is not None and not recipe.train.dry_run:
        parser.error("argument --device-memory: it plans and does not train; write train.dry_run=true, or leave it out")
    return recipe, options["device_memory"]


def harvest_arguments(doc: str | None, argv: Sequence[str] | None = None) -> tuple[Recipe, Share | None, str | None]:
    """The same for a harvest, of which a process may make one part, or Ray's workers all; `doc` opens --help."""
    parser = RecipeParser(doc)
    way = parser.add_mutually_exclusive_group()
    about = (
        "make one part of the shards, in this process alone: 1/64 is the first of 64, which run in any order, at any "
    )
    about += "time; the last one to finish writes the manifest, or the same command without --part does"
    way.add_argument("--part", type=Share.parse, metavar="K/N", help=about)
    about = (
        "let the workers of a Ray cluster make the shards: the one that RAY_ADDRESS names or this machine is part of, "
    )
    about += "else one started here; needs pip install -e '.[ray]'"
    way.add_argument("--on", choices=["ray"], help=about)
    recipe, options = parser.read(argv)
    return recipe, options["part"], options["on"]


def run_command(
    doc: str | None,
    run: Callable[..., object],
    interrupted: str = STARTS_OVER,
    read: Callable[[str | None], object] = recipe_from_command_line,
) -> None:
    """Run a command on what `read` makes of the command line; `interrupted` is the message for Ctrl-C."""
    with errors_as_messages(interrupted):
        carry_out(run, read(doc), interrupted)


def carry_out(run: Callable[..., object], given: object, interrupted: str) -> None:
    """Run a command on its argument or tuple of them, of which the first may be a recipe, whose stores are fetched.

    Errors of users, disks and networks end it with one message, which names the recipe's field.
    """
    arguments = given if isinstance(given, tuple) else (given,)
    recipe = arguments[0] if isinstance(arguments[0], Recipe) else None
    with errors_as_messages(interrupted, recipe):
        if recipe is not None:
            keep_freed_memory()
            folders = {"run_dir": recipe.run_dir, "data.folder": recipe.data.folder, "data.store": recipe.data.store}
            for field, folder in folders.items():
                if folder is not None:
                    with named_errors(field):
                        pull(folder)
        run(*arguments)


def command_name() -> str:
    """How the user started the running command: `headstart NAME`, `python -m MODULE` or `python SCRIPT`."""
    if sys.argv[0].startswith("headstart "):  # put there by headstart/cli.py
        return sys.argv[0]
    spec = sys.modules["__main__"].__spec__
    return f"python {sys.argv[0]}" if spec is None else f"python -m {spec.name}"


def field_table() -> str:
    """The table of all recipe fields with type, default and description, as wide as the terminal."""
    table = Table("field", "type", "default", "description", box=None, pad_edge=False, header_style="")
    for path, field in recipe_fields().items():
        table.add_row(path, field.allowed, field.default or "required", field.description)
    text = io.StringIO()
    Console(file=text, width=shutil.get_terminal_size((120, 40)).columns, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
