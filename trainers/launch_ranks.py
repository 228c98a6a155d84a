"""Run `headstart train` or `headstart harvest` on several ranks: `accelerate launch` that ends as a command should.

    headstart launch --num_processes 8 train recipes/llama3_8b.yaml
    headstart launch --config_file fsdp2 --num_processes 8 train recipes/llama3_70b.yaml
    headstart launch --num_processes 8 harvest recipes/llama3_8b.yaml

The options before `train` or `harvest` are those of `accelerate launch`. --config_file takes a file, or the name of one
in recipes/launch/: ddp (the default), fsdp2, zero2, zero3 or one. A mistake in the recipe is reported before any rank
starts. SIGTERM and Ctrl-C let the ranks finish their step and save; the exit code is then 143 or 130. If a rank fails,
its message is the last one, and its exit code is the command's.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CalledProcessError

import psutil

from headstart.recipes import recipe_from_command_line
from headstart.recipes.command_line import command_name
from headstart.recipes.schema import Recipe
from headstart.trainers.scripts import training_module

COMMANDS = ("train", "harvest")
LAUNCH_FILES = Path(__file__).resolve().parents[1] / "recipes" / "launch"


def main() -> None:
    raise SystemExit(launch(launch_arguments(__doc__)))


def launch_arguments(doc: str | None, argv: Sequence[str] | None = None) -> list[str]:
    """The arguments for `accelerate launch`; --help and mistakes end the process here, before torch is loaded."""
    words = sys.argv[1:] if argv is None else argv
    place = next((place for place, word in enumerate(words) if word in COMMANDS), len(words))
    parser = argparse.ArgumentParser(
        prog=command_name(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config_file", default="ddp", metavar="FILE", help="how the ranks share the head")
    parser.add_argument("--num_processes", type=int, required=True, metavar="N", help="ranks of all machines together")
    options, others = parser.parse_known_args(words[:place])
    if place == len(words):
        parser.error(f"no command given; end with {' or '.join(COMMANDS)} and a recipe")
    command, own = words[place], words[place + 1 :]
    recipe = recipe_from_command_line(f"What `headstart {command}` takes.", own)
    file = Path(options.config_file) if "." in options.config_file else LAUNCH_FILES / f"{options.config_file}.yaml"
    if not file.is_file():
        names = ", ".join(sorted(path.stem for path in LAUNCH_FILES.glob("*.yaml")))
        parser.error(f"--config_file: {options.config_file} given; a file of accelerate, or {names}, is allowed")
    ranks = ["--config_file", str(file), "--num_processes", str(options.num_processes)]
    return [*ranks, *others, "-m", module_of(command, recipe), *own]


def module_of(command: str, recipe: Recipe) -> str:
    if command == "harvest":
        return "headstart.data_pipelines.harvest"
    return training_module(recipe.head.kind)


def launch(arguments: Sequence[str]) -> int:
    """Run accelerate's launcher in this process; returns the exit code, 128 plus the signal's number for a signal."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parsed = launch_command_parser().parse_args(list(arguments))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank's own message says it better
    if parsed.num_processes == 1:  # torch's launcher of several ranks installs handlers of its own
        signal.signal(signal.SIGTERM, pass_on)
        signal.signal(signal.SIGINT, lambda number, frame: None)  # the terminal sends it to the rank as well
    try:
        launch_command(parsed)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        return exit_code(failed.get_first_failure()[1].exitcode)
    except CalledProcessError as failed:
        return exit_code(failed.returncode)
    return 0


def pass_on(number: int, frame: object) -> None:
    """Give a signal to the rank, and go on waiting for it."""
    for process in psutil.Process().children():
        process.send_signal(number)


def exit_code(code: int) -> int:
    """A process's exit code as shells report it: a negative one is a signal."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
