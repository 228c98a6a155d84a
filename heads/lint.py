"""Check a head's folder, ours or anyone's, against what each engine's loader reads, without running it.

    python -m heads.lint runs/tiny/export/vllm --target assets/demo_target
    python -m heads.lint runs/tiny/export/vllm --target assets/demo_target --engine sglang

Prints one line for each finding: engine, severity, key or tensor, what was found, what is allowed. Exit code 1 if one
of them is an error, 0 otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from heads.formats.contracts import ENGINES, engines_of, findings
from heads.formats.files import HeadFiles
from heads.formats.subject import Finding
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from recipes.command_line import command_name


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path, help="folder with a head's config.json and weights")
    parser.add_argument("--target", required=True, help="folder or hub name of the model that the head drafts for")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="check for this one; may be given often")
    arguments = parser.parse_args(argv)
    try:
        found = lint(arguments.export, arguments.target, arguments.engine)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    for finding in found:
        print(finding)
    sys.exit(1 if any(finding.severity == "error" for finding in found) else 0)


def lint(export: Path, target: str, engines: Sequence[str] | None = None) -> list[Finding]:
    """What is wrong for these engines; without any named, for those that the head is meant for."""
    files = HeadFiles.read(export)
    frozen = FrozenTarget.from_folder(locate_target(target), torch.float32)
    return findings(files, frozen, engines or engines_of(files))


if __name__ == "__main__":
    main()
