"""Reads and writes a head's folder: config.json and named tensors. Nothing in a folder is ever executed."""

import json
import os
import pickle
import re
import reprlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.common.files import naming, read_json, remove, removed_on_failure, whole_folder, write_text
from headstart.common.remote import publish
from headstart.heads.keys import HeadKeys

MODEL = "model.safetensors"
SAFETENSORS = (MODEL, "medusa_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")


@dataclass(frozen=True)
class HeadFiles:
    """A head's config.json and tensors, as its folder spells them."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> "HeadFiles":
        """Read single-file or sharded safetensors, or pickles that hold only tensors; raises ValueError for others."""
        return cls(folder, read_config(folder), read_tensors(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """A head's config.json; raises ValueError if it is missing, or one naming every key with a wrong type."""
    path, advice = folder / "config.json", "train one with headstart train RECIPE, or give the folder of a saved head"
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link to {path.readlink()}, which does not exist; a file is allowed: {advice}")
    if not path.is_file():
        raise ValueError(f"{folder} holds no head (no config.json); {advice}")
    config = read_json_object(path, "head")
    try:
        HeadKeys.model_validate(config)
    except ValidationError as failed:
        places = [(".".join(map(str, each["loc"])), each["input"], each["msg"]) for each in failed.errors()]
        wrong = "; ".join(f"{place}: {reprlib.repr(given)} given, {allowed}" for place, given, allowed in places)
        raise ValueError(f"{path}: {wrong}; correct the file") from failed
    return config


def read_json_object(path: Path, of: str) -> dict[str, Any]:
    """The JSON object in a file of a head or target (`of`); raises ValueError, naming the file, for anything else."""
    remedy = f"copy or download the {of} again"
    found = read_json(path, remedy)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; a JSON object is allowed: {remedy}")
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    for name in SAFETENSORS + PICKLES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            parts = sorted(set(read_index(index, "head").values()))
        elif (folder / name).is_file():
            parts = [name]
        else:
            continue
        tensors: dict[str, Tensor] = {}
        for part in parts:
            tensors |= read_pickle(folder / part) if name in PICKLES else read_safetensors(folder / part)
        return tensors
    known = ", ".join(SAFETENSORS + PICKLES)
    needed = f"one of {known}, or an index of its shards, is required"
    raise ValueError(f"{folder} holds no weights; {needed}: copy or download the head again")


def read_index(index: Path, of: str) -> dict[str, str]:
    """The file of each tensor, by an index of the shards of a head or target (`of`); ValueError if it is damaged."""
    try:
        return dict(read_json(index)["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} names no shards ({error!r}); copy or download the {of} again") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        needed = "a whole safetensors file is required: export it again, or copy or download the head again"
        raise ValueError(f"{path} cannot be read ({error}); {needed}") from error


def read_pickle(path: Path) -> dict[str, Tensor]:
    """A pickled state dict, read by torch's restricted loader, which calls no function of the file."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        why = f"it is damaged or holds more than tensors ({reason})"
        raise ValueError(f"{path} is refused: {why}; get the head as safetensors") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} is refused: only a mapping of names to tensors is allowed; get safetensors")
    return {str(name): tensor for name, tensor in found.items()}


def has_weight_dtype(tensor: Tensor) -> bool:
    """Is it in a number format that weights may have? 8-bit formats need scales, which no head of ours has."""
    return tensor.is_floating_point() and tensor.dtype.itemsize >= 2


def write_files(files: HeadFiles, weights: str = MODEL) -> None:
    """Write config.json and the tensors to a folder that exists; `weights` is one of SAFETENSORS and PICKLES."""
    if weights in PICKLES:
        # A pickled view would hold the whole tensor that it is taken from.
        copies = {name: tensor.detach().cpu().clone() for name, tensor in files.tensors.items()}
        write_pickle(copies, files.folder / weights)
    else:
        write_safetensors(files.tensors, files.folder / weights, {"format": "pt"})
    write_text(files.folder / "config.json", json.dumps(files.config, indent=2) + "\n")


def write_folder(files: HeadFiles, weights: str, readme: str, add: Callable[[Path], None] | None = None) -> None:
    """Write all files so that readers see the whole folder or none; raises ValueError if the folder exists.

    `add` may add files, from those that are written already.
    """
    refuse_existing(files.folder)
    with whole_folder(files.folder) as partial:
        write_files(HeadFiles(partial, files.config, files.tensors), weights)
        write_text(partial / "README.md", readme)
        if add is not None:
            add(partial)


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the tensors, from any device, to a temporary folder next to `path`, then rename the file to `path`.

    A folder, because safetensors writes to a temporary file of its own, which a killed process leaves behind; the next
    write removes it. Raises OSError that names `path`.
    """
    partial = path.with_name(path.name + ".partial")
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with removed_on_failure(partial), naming(path):
        remove(partial)
        partial.mkdir(parents=True)
        try:
            save_file(on_cpu, partial / path.name, metadata)
        except SafetensorError as error:
            raise as_os_error(error, path) from error
        give_umask_mode(partial / path.name)
        publish(partial / path.name, path)
        partial.rmdir()


def give_umask_mode(path: Path) -> None:
    """Give a file the permissions of any new file in its folder; safetensors makes its files readable to one user.

    The umask is seen in a new file, because asking for it changes it for a moment, in all threads.
    """
    new = path.with_name(path.name + ".new")
    new.touch()
    path.chmod(new.stat().st_mode)
    new.unlink()


def as_os_error(error: SafetensorError, path: Path) -> Exception:
    """The system's error that safetensors reports as text; the same error if it is none of the system's."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return error if found is None else OSError(int(found[1]), os.strerror(int(found[1])), str(path))


def write_pickle(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a state dict as torch's code reads it; raises OSError that names the file."""
    with naming(path), path.open("wb") as file:
        try:
            torch.save(tensors, file)
        except RuntimeError as error:  # torch's writer fails again when it is closed
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def refuse_existing(folder: Path) -> None:
    """Raise ValueError, before any work is done, if the folder of an export exists already."""
    if folder.exists() or folder.is_symlink():
        advice = f"remove this one (rm -r {shlex.quote(str(folder))}), or move it"
        raise ValueError(f"{folder} exists already; an export is written to a new folder only: {advice}")
