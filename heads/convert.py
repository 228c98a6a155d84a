"""Bring a head from elsewhere in: EAGLE-1, EAGLE-3 (the authors', NVIDIA's, SpecForge's), speculators' eagle3, Medusa.

    python -m heads.convert path/to/head runs/imported --target meta-llama/Llama-3.1-8B-Instruct

The layout is recognised by what the files hold. What they do not say is inferred and printed; what our heads have no
place for is refused, all of it at once. Nothing in the folder is executed: pickles may hold tensors alone.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from heads.checkpoint import save_head
from heads.formats.files import HeadFiles, check_free
from heads.formats.published import import_head, widest_dtype
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from recipes.command_line import command_name


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="folder with a head's config.json and weights")
    parser.add_argument("out", type=Path, help="folder to write, which must not exist yet")
    parser.add_argument("--target", required=True, help="folder or hub name of the model that the head drafts for")
    arguments = parser.parse_args(argv)
    try:
        inferred = convert(arguments.path, arguments.out, arguments.target)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print("\n".join(inferred))
    print(f"head written to {arguments.out}; next: python -m inference.report RECIPE report.head={arguments.out}")


def convert(path: Path, out: Path, target: str) -> list[str]:
    """Write the head in our own layout, which every command here reads; returns what was inferred.

    Raises ValueError for a head that cannot be brought in, and for a folder that is there already.
    """
    check_free(out, overwrite=False)
    files = HeadFiles.read(path)
    frozen = FrozenTarget.from_folder(locate_target(target), widest_dtype(files))
    head, inferred = import_head(files, frozen)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_head(head, out)
    return inferred


if __name__ == "__main__":
    main()
