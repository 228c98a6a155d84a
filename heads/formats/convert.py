"""Convert a published head into headstart's own layout, which every headstart command reads.

    headstart convert path/to/head runs/imported --target meta-llama/Llama-3.1-8B-Instruct

Reads EAGLE-1 and EAGLE-3 heads as their authors, NVIDIA and SpecForge save them, speculators' eagle3, and Medusa heads
in the authors' layout and in vLLM's. The layout is recognised from the files. Facts that the files do not state, such
as the rotary base or the hidden states that the head reads, are inferred and printed: check them against the head's
documentation. A head that headstart cannot represent is refused with every reason at once. Nothing in the folder is
executed: a pickle may hold nothing but tensors.
"""

from headstart.heads.formats.options import convert_options

if __name__ == "__main__":
    convert_options(__doc__)  # --help and mistakes end the process here, before torch is loaded

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import torch

from headstart.common.errors import errors_as_messages
from headstart.heads.checkpoint import save_head
from headstart.heads.files import HeadFiles, has_weight_dtype
from headstart.heads.formats.published import import_head
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import locate_target


def main(argv: Sequence[str] | None = None) -> None:
    arguments = convert_options(__doc__, argv)
    with errors_as_messages():
        inferred = convert(arguments.path, arguments.out, arguments.target)
        print("\n".join(inferred))
        print(f"head written to {arguments.out}; next: headstart report RECIPE decode.head={arguments.out}")


def convert(path: Path, out: Path, target: str) -> list[str]:
    """Write the head in our layout and list what was inferred; raises ValueError for a head that it cannot hold."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"OUT: {out} exists already; a new folder is allowed: choose another, or remove this one")
    files = HeadFiles.read(path)
    frozen = FrozenTarget.from_folder(locate_target(target, field="--target"), widest_dtype(files))
    head, inferred = import_head(files, frozen)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_head(head, out)
    return inferred


def widest_dtype(files: HeadFiles) -> torch.dtype:
    """The dtype that can hold every number of the file without losing a bit."""
    floats = {tensor.dtype for tensor in files.tensors.values() if has_weight_dtype(tensor)}
    return reduce(torch.promote_types, sorted(floats, key=str)) if floats else torch.float32


if __name__ == "__main__":
    main()
