"""The doctor's command line, read without torch."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.heads.formats.options import ENGINE_NAMES
from headstart.recipes.command_line import own_parser


@dataclass(frozen=True)
class Options:
    """The texts to replay, and the engine that serves EXPORT."""

    samples: Path | None = None  # JSONL file; None: the run's held-out prompts, else the target's
    manifest: Path | None = None  # the features' manifest; None: the run's, if it has one
    count: int = 8
    new_tokens: int = 64
    depth: int = 4
    engine: str | None = None  # serves EXPORT; None: the first engine that EXPORT is meant for


def doctor_options(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the doctor's command line; `doc` opens --help."""
    parser = own_parser(doc)
    parser.add_argument("head", type=Path, help="folder of the trained head")
    parser.add_argument("target", help="folder or hub name of the model that the head drafts for")
    parser.add_argument("export", type=Path, nargs="?", help="folder of the exported head that an engine serves")
    rows = "JSONL file of held-out prompts: tokens, or a prompt, which is a user turn if there is a chat template"
    rows += "; default: the run's, else the target's"
    parser.add_argument("--samples", type=Path, help=rows)
    parser.add_argument("--manifest", type=Path, help="manifest.json of the training features; default: the run's")
    parser.add_argument("--count", type=int, default=Options.count, help="prompts to replay (default: %(default)s)")
    per_prompt = "new tokens per prompt (default: %(default)s)"
    parser.add_argument("--new-tokens", type=int, default=Options.new_tokens, help=per_prompt)
    parser.add_argument("--depth", type=int, default=Options.depth, help="depths to measure (default: %(default)s)")
    engine = "engine that serves EXPORT; default: the first it is meant for"
    parser.add_argument("--engine", choices=ENGINE_NAMES, help=engine)
    return parser.parse_args(argv)
