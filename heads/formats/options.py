"""The command lines of `headstart lint` and `headstart convert`, readable without torch."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from headstart.recipes.command_line import own_parser

# The engines that can serve a head: the name that a recipe and a command line give them, and their own.
ENGINE_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt_llm": "TensorRT-LLM",
    "eagle": "the EAGLE authors' code",
    "speculators": "speculators",
    "medusa": "the Medusa authors' code",
    "llama_cpp": "llama.cpp",
}
OWN_FORMAT = ("eagle", "medusa", "llama_cpp")  # they read only files exported in a format of their own


def command_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the option that both commands have; `doc` opens --help."""
    parser = own_parser(doc)
    parser.add_argument("--target", required=True, help="folder or hub name of the model that the head drafts for")
    return parser


def lint_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The head to check, and for which engines; `doc` opens --help."""
    parser = command_parser(doc)
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
    parser = command_parser(doc)
    parser.add_argument("path", type=Path, help="folder with the published head's config.json and weights")
    parser.add_argument("out", type=Path, help="folder to write the converted head to; it must not exist yet")
    return parser.parse_args(argv)
