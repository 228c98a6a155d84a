"""Convert a published head into headstart's own layout, which every headstart command reads.

    python -m heads.convert path/to/head runs/imported --target meta-llama/Llama-3.1-8B-Instruct

Reads EAGLE-1 and EAGLE-3 heads as their authors, NVIDIA and SpecForge save them, speculators' eagle3, and Medusa heads
in the authors' layout and in vLLM's. The layout is recognised from the files. Facts that the files do not state, such
as the rotary base or the hidden states that the head reads, are inferred and printed: check them against the head's
documentation. A head that headstart cannot represent is refused with every reason at once. Nothing in the folder is
executed: a pickle may hold nothing but tensors.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from headstart.heads.checkpoint import save_head
from headstart.heads.formats.files import HeadFiles, check_can_write
from headstart.heads.formats.published import import_head, widest_dtype
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import locate_target
from headstart.recipes.command_line import command_name
from headstart.recipes.os_errors import errors_as_messages


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="folder with the published head's config.json and weights")
    parser.add_argument("out", type=Path, help="folder to write the converted head to; it must not exist yet")
    parser.add_argument("--target", required=True, help="folder or hub name of the model that the head drafts for")
    arguments = parser.parse_args(argv)
    with errors_as_messages():
        inferred = convert(arguments.path, arguments.out, arguments.target)
        print("\n".join(inferred))
        print(f"head written to {arguments.out}; next: headstart report RECIPE report.head={arguments.out}")


def convert(path: Path, out: Path, target: str) -> list[str]:
    """Write the head in our own layout; returns a line for each fact that had to be inferred.

    Raises ValueError for a head that our layout cannot represent, and if `out` exists already.
    """
    check_can_write(out, overwrite=False)
    files = HeadFiles.read(path)
    frozen = FrozenTarget.from_folder(locate_target(target), widest_dtype(files))
    head, inferred = import_head(files, frozen)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_head(head, out)
    return inferred


if __name__ == "__main__":
    main()
