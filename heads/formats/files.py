"""A head's folder from anywhere: config.json and named tensors; nothing in it is ever executed."""

import json
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.formats.keys import read_config

MODEL = "model.safetensors"
SAFETENSORS = (MODEL, "medusa_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")


@dataclass(frozen=True)
class HeadFiles:
    """What a folder holds, under the names that it has there."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> "HeadFiles":
        """Single-file and sharded safetensors, or pickles that hold tensors alone.

        Raises ValueError for a folder without config.json or weights, for keys whose values are of another type than
        any engine reads, and for a pickle that holds anything else.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} holds no head (no config.json); give the folder that a head was saved to")
        return cls(folder, read_config(path), read_tensors(folder))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    for name in SAFETENSORS + PICKLES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            parts = shards(index)
        elif (folder / name).is_file():
            parts = [name]
        else:
            continue
        tensors: dict[str, Tensor] = {}
        for part in parts:
            tensors |= read_pickle(folder / part) if name in PICKLES else read_safetensors(folder / part)
        return tensors
    known = ", ".join(SAFETENSORS + PICKLES)
    raise ValueError(f"{folder} holds no weights; one of {known}, or its index of shards, is allowed")


def shards(index: Path) -> list[str]:
    """The files beside an index that it names; raises ValueError for an index that names none."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} names no shards ({error!r}); copy or download the head again") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or download the head again") from error


def read_pickle(path: Path) -> dict[str, Tensor]:
    """A state dict, by torch's reader that builds tensors and plain containers and calls nothing else."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} is refused: it holds more than tensors, or is damaged ({reason}); ask for safetensors instead"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} is refused: a mapping of names to tensors is allowed; ask for safetensors instead")
    return {str(name): tensor for name, tensor in found.items()}


def write_folder(files: HeadFiles, weights: str, readme: str, overwrite: bool) -> None:
    """Write all files next to their folder, then rename: whoever looks sees the whole folder or none.

    `weights` is the name of the tensors' file, one of SAFETENSORS and PICKLES.

    Raises ValueError for a folder that is there already, unless it may be overwritten.
    """
    folder = files.folder
    check_free(folder, overwrite)
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)  # of a run that was killed
    partial.mkdir(parents=True)
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in files.tensors.items()}
    if weights in PICKLES:
        torch.save(contiguous, partial / weights)
    else:
        save_file(contiguous, partial / weights, metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(files.config, indent=2) + "\n")
    (partial / "README.md").write_text(readme)
    replaced = folder.with_name(folder.name + ".replaced.partial")
    if replaced.exists():
        shutil.rmtree(replaced)  # of a run that was killed behind its last rename
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    if replaced.exists():
        shutil.rmtree(replaced)


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuse, before any work, to write over what is there."""
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} is there already; choose another folder, or say that it may be overwritten")
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is there and holds no head, so it is not overwritten; choose another folder")
