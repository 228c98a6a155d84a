"""The command lines of `headstart chat`, `smollm2` and `targets`, readable without torch."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headstart.common.process import user_cache
from headstart.inference.generate.options import ModelOptions, add_model, model_options
from headstart.recipes.command_line import own_parser
from headstart.recipes.other_commands import positive

FOLDER = Path("models/SmolLM2-135M-Instruct")
HEAD = Path("assets/smollm2_head")
ROOT = Path(__file__).resolve().parents[1]  # the clone of the repository, or the folder of installed packages
SOURCES = ("auto", "hub", "wheel")


def find_folder(path: Path) -> Path:
    """A model's folder below the current one, else the same in the clone, or without a clone in the user's cache."""
    if (path / "config.json").is_file():
        return path
    return (ROOT if (ROOT / "pyproject.toml").is_file() else user_cache("chat")) / path


@dataclass(frozen=True)
class ChatOptions:
    model: ModelOptions  # target None: SmolLM2-135M-Instruct, which is fetched if it is missing
    temperature: float | None  # None: the target's own, else 0
    seed: int
    prompt: str | None  # the only question; None: questions are read from standard input


def chat_options(doc: str | None, argv: Sequence[str] | None = None) -> ChatOptions:
    """Who is to talk; `doc` opens --help. Mistakes go to stderr and end the process with status 2."""
    parser = own_parser(doc)
    add_model(
        parser,
        target=f"folder or hub name of the model that talks (default: {FOLDER})",
        head=f"folder of its draft head (default: {HEAD}; without it, and with --target: prompt lookup)",
    )
    own = "default: what the target's generation_config.json says, else 0, which takes the likeliest token"
    parser.add_argument("--temperature", type=float, help=f"how freely tokens are sampled ({own})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    longest = "longest answer (default: 512, or what the target allows)"
    parser.add_argument("--max-new-tokens", type=positive, help=longest)
    parser.add_argument("--prompt", help="answer this question and exit")
    given = parser.parse_args(argv)
    if given.recipe is None and given.target is None and ((head := find_folder(HEAD)) / "config.json").is_file():
        given.head = given.head or head
    model = model_options(parser, given)
    if given.max_new_tokens is not None:
        model = replace(model, decode=model.decode.model_copy(update={"max_new_tokens": given.max_new_tokens}))
    return ChatOptions(model, given.temperature, given.seed, given.prompt)


def smollm2_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Where to put the model, and where it comes from; `doc` opens --help."""
    parser = own_parser(doc)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help=f"the new folder (default: {FOLDER})")
    parser.add_argument("--source", choices=SOURCES, default="auto", help="auto, the default, tries the hub first")
    return parser.parse_args(argv)


def targets_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The model to describe; `doc` opens --help."""
    parser = own_parser(doc)
    about = "folder, config.json, hub name (org/name) or model type; without it, all model types that were tried"
    parser.add_argument("name", nargs="?", metavar="NAME", help=about)
    return parser.parse_args(argv)
