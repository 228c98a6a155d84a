"""The command lines of `headstart lint` and `headstart convert`, readable without torch."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from headstart.heads.formats.engines import ENGINES
from headstart.recipes.command_line import command_name


def lint_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What to check, and for which engines; `doc` opens --help."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path, help="folder with the head's config.json and weights")
    parser.add_argument("--target", required=True, help="folder or hub name of the model that the head drafts for")
    parser.add_argument(
        "--engine", action="append", choices=ENGINES, help="check for this engine only; repeat it to check for several"
    )
    return parser.parse_args(argv)


def convert_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What to convert, and where to; `doc` opens --help."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="folder with the published head's config.json and weights")
    parser.add_argument("out", type=Path, help="folder to write the converted head to; it must not exist yet")
    parser.add_argument("--target", required=True, help="folder or hub name of the model that the head drafts for")
    return parser.parse_args(argv)
