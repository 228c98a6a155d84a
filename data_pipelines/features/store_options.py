"""The command line of `headstart store`, readable without torch."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from headstart.recipes.command_line import own_parser


def store_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command and its stores; `doc` opens --help."""
    parser = own_parser(doc)
    parser.add_argument("command", choices=["verify", "stats", "merge"])
    parser.add_argument("folder", type=Path, help="the store; for merge, the folder of the new store")
    parser.add_argument("sources", type=Path, nargs="*", help="for merge: the stores to merge")
    return parser.parse_args(argv)
