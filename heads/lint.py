"""Check a head's folder, ours or published, against what each engine's loader reads, without running the engine.

    python -m heads.lint runs/tiny/export/vllm --target assets/demo_target
    python -m heads.lint runs/tiny/export/vllm --target assets/demo_target --engine sglang

Mistakes in a head's files seldom raise an error in an engine; they silently cost acceptance. Each one found is a line:
engine, severity, config.json key or tensor, what the file holds, what is allowed. An error means that the engine fails
or drafts worse than the head was trained to; a warning marks a value that is correct only if the head was trained that
way. Without --engine, an export of ours is checked for the engines that its config.json names, and any other head for
every engine that reads its layout except the authors' own code (eagle, medusa). Exit code 1 if there is an error, 0
otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from headstart.heads.formats.contracts import ENGINES, engines_of, violations
from headstart.heads.formats.files import HeadFiles
from headstart.heads.formats.violation import Violation
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import locate_target
from headstart.recipes.command_line import command_name
from headstart.recipes.os_errors import errors_as_messages


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path, help="folder with the head's config.json and weights")
    parser.add_argument("--target", required=True, help="folder or hub name of the model that the head drafts for")
    parser.add_argument(
        "--engine", action="append", choices=ENGINES, help="check for this engine only; repeat it to check for several"
    )
    arguments = parser.parse_args(argv)
    with errors_as_messages():
        found = lint(arguments.export, arguments.target, arguments.engine)
        for violation in found:
            print(violation)
    sys.exit(1 if any(violation.severity == "error" for violation in found) else 0)


def lint(export: Path, target: str, engines: Sequence[str] | None = None) -> list[Violation]:
    """What keeps these engines from serving the head as it was trained; by default, the engines it is meant for."""
    files = HeadFiles.read(export)
    frozen = FrozenTarget.from_folder(locate_target(target), torch.float32)
    return violations(files, frozen, engines or engines_of(files))


if __name__ == "__main__":
    main()
