"""Writes a copy of a target with a tuned multi-token-prediction layer: engines draft with the layer of their target."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.heads.files import MODEL, read_safetensors, write_safetensors
from headstart.heads.frozen import SafetensorsFolder

NOT_COPIED = ("README.md",)


def is_whole_target(head: DraftHead, export_format: str) -> bool:
    """Whether an export of this head is a whole target."""
    return head.kind == "mtp" and export_format != "native"


def write_whole_target(folder: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Make a folder the target's, with these of its tensors: files of weights that hold none of them become links.

    Raises ValueError for tensors that the target stores quantised, because their new values need new scales.
    """
    changed = {SafetensorsFolder(target).files[name] for name in tensors}
    (folder / MODEL).unlink()
    for file in sorted(target.iterdir()):
        if not file.is_file() or file.name in NOT_COPIED:
            continue
        if file.name in changed:
            write_safetensors(replaced(file, tensors), folder / file.name, {"format": "pt"})
        elif file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file.resolve())
        else:
            shutil.copyfile(file, folder / file.name)


def replaced(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, with those of the same name in their stead, in the number formats of the file."""
    found = read_safetensors(file)
    for name in found.keys() & tensors.keys():
        if not found[name].is_floating_point() or found[name].element_size() == 1:
            allowed = "floating point of 16 bits or more is allowed: use export.format=native, or an unquantised target"
            raise ValueError(f"{file}: {name} is stored as {found[name].dtype}; {allowed}")
        found[name] = tensors[name].to(found[name].dtype)
    return found
