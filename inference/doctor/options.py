"""The doctor's command line, readable without torch."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.heads.formats.options import ENGINES
from headstart.recipes.command_line import command_name


@dataclass(frozen=True)
class Options:
    """What is replayed, and how much of it."""

    samples: Path | None = None  # JSONL file; None: the run's held-out prompts, else the target's
    manifest: Path | None = None  # of the features trained on; None: the run's, if it has one
    count: int = 8
    new_tokens: int = 64
    depth: int = 4
    engine: str | None = None  # serves EXPORT; None: the first engine that EXPORT is meant for


def doctor_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks the doctor for; `doc` opens --help."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("head", type=Path, help="folder of the trained head")
    parser.add_argument("target", help="folder or hub name of the model that the head drafts for")
    parser.add_argument("export", type=Path, nargs="?", help="folder of the exported head that an engine serves")
    parser.add_argument(
        "--samples",
        type=Path,
        help="JSONL file of held-out prompts, rows with tokens or prompt; default: the run's, else the target's",
    )
    parser.add_argument(
        "--manifest", type=Path, help="manifest.json of the features that the head was trained on; default: the run's"
    )
    parser.add_argument("--count", type=int, default=Options.count, help="prompts to replay (default: %(default)s)")
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=Options.new_tokens,
        help="new tokens per prompt (default: %(default)s)",
    )
    parser.add_argument("--depth", type=int, default=Options.depth, help="depths to measure (default: %(default)s)")
    parser.add_argument(
        "--engine", choices=ENGINES, help="engine that serves EXPORT; default: the first it is meant for"
    )
    return parser.parse_args(argv)
