"""The command lines of `headstart lint`, `convert`, `doctor`, `store` and `adapt`; torch is not loaded."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from headstart.common.remote import is_url, without_secrets
from headstart.recipes.command_line import RecipeParser, own_parser
from headstart.recipes.schema import Recipe
from headstart.recipes.values import Dtype

# The engines that can serve a head: the name that a recipe and a command line give them, and their own.
ENGINE_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt_llm": "TensorRT-LLM",
    "speculators": "speculators",
    "llama_cpp": "llama.cpp",
}
TARGET = "folder or hub name of the model that the head drafts for"
OWN_FORMAT = ("llama_cpp",)  # reads only files exported in a format of its own


def lint_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The head to check, and for which engines; `doc` opens --help."""
    parser = own_parser(doc)
    parser.add_argument("--target", required=True, help=TARGET)
    parser.add_argument("export", type=Path, help="folder with the head's config.json and weights")
    parser.add_argument(
        "--engine",
        action="append",
        choices=ENGINE_NAMES,
        help="check for this engine only; repeat it to check for several",
    )
    return parser.parse_args(argv)


def convert_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The head to convert, and where to; `doc` opens --help."""
    parser = own_parser(doc)
    parser.add_argument("--target", required=True, help=TARGET)
    parser.add_argument("path", type=Path, help="folder with the published head's config.json and weights")
    parser.add_argument("out", type=Path, help="folder to write the converted head to; it must not exist yet")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Options:
    """The texts to replay, and the engine that serves EXPORT."""

    samples: Path | None = None  # JSONL file; None: the run's held-out prompts, else the target's
    count: int = 8
    new_tokens: int = 64
    depth: int = 4
    engine: str | None = None  # serves EXPORT; None: the first engine that EXPORT is meant for
    adapter: Path | None = None  # a PEFT LoRA adapter of the target


def doctor_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the doctor's command line; `doc` opens --help."""
    parser = own_parser(doc)
    parser.add_argument("head", type=Path, nargs="?", help="folder of the trained head")
    parser.add_argument("target", nargs="?", help=TARGET)
    parser.add_argument("export", type=Path, nargs="?", help="folder of the exported head that an engine serves")
    parser.add_argument("--adapter", type=Path, help="folder of a PEFT LoRA adapter to merge into TARGET")
    rows = "JSONL file of held-out prompts: tokens, or a prompt, which is a user turn if there is a chat template"
    rows += "; default: the run's, else the target's"
    parser.add_argument("--samples", type=Path, help=rows)
    add = partial(parser.add_argument, type=positive)
    add("--count", default=Options.count, help="prompts to replay (default: %(default)s)")
    add("--new-tokens", default=Options.new_tokens, help="new tokens per prompt (default: %(default)s)")
    add("--depth", default=Options.depth, help="depths (default: %(default)s)")
    engine = "engine that serves EXPORT; default: the first it is meant for"
    parser.add_argument("--engine", choices=ENGINE_NAMES, help=engine)
    bits = "compare the bits of a token's logits in all passes of this target instead; HEAD is not given"
    parser.add_argument("--bits", metavar="TARGET", help=bits)
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16", help="of --bits (default: %(default)s)")
    given = parser.parse_args(argv)
    if (given.target is None) == (given.bits is None):
        parser.error(
            "HEAD and TARGET, or --bits TARGET alone, are required: give a head's folder and then its target's"
        )
    return given


@dataclass(frozen=True)
class AdaptOptions:
    """Where a head learns from its traffic, and when."""

    server: str
    versions: Path | None  # None: RUN_DIR/versions
    steps: int
    after: int
    once: bool
    roll_back: bool


def adapt_options(doc: str | None, argv: Sequence[str] | None = None) -> tuple[Recipe, AdaptOptions]:
    """The recipe of the served head, and the options of `headstart adapt`; `doc` opens --help."""
    parser = RecipeParser(doc)
    add = parser.add_argument
    add("--server", default="http://127.0.0.1:8000", help="a server with --adapt-memory (default: %(default)s)")
    add("--versions", type=Path, metavar="FOLDER", help="folder of the heads served so far (default: RUN_DIR/versions)")
    add("--steps", type=positive, default=200, help="training steps of a candidate (default: %(default)s)")
    after = "new tokens that the target has written, after which a candidate is trained (default: %(default)s)"
    add("--after", type=positive, default=20_000, metavar="TOKENS", help=after)
    add("--once", action="store_true", help="train one candidate on what the server has now, and end")
    add("--roll-back", action="store_true", help="serve the head that was served before the present one, and end")
    recipe, options = parser.read(argv)
    return recipe, AdaptOptions(**options)


def positive(text: str) -> int:
    """A number from 1 on; argparse reports others with the option's name."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} given, 1 or more is allowed; correct it or leave it out")
    return int(text)


def local_folder(text: str) -> Path:
    """A folder on this machine; argparse reports a URL with the argument's name."""
    if is_url(text):
        allowed = "a folder on this machine is allowed; copy the store here first: training checks what it reads by URL"
        raise argparse.ArgumentTypeError(f"{without_secrets(text)} given, {allowed}")
    return Path(text)


def store_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command and its stores; `doc` opens --help."""
    parser = own_parser(doc)
    parser.add_argument("command", choices=["verify", "merge"])
    parser.add_argument("folder", type=local_folder, help="the store; for merge, the folder of the new store")
    parser.add_argument("sources", type=local_folder, nargs="*", help="for merge: the stores to merge")
    return parser.parse_args(argv)
