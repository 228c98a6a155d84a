"""Convert a published head into headstart's own layout, which every headstart command reads.

    headstart convert path/to/head runs/imported --target meta-llama/Llama-3.1-8B-Instruct

Reads EAGLE-1, EAGLE-3, P-EAGLE, Medusa, DFlash and DSpark heads in the layouts that vLLM reads, from safetensors or
pickles, sharded or not. From a full target it takes the MTP layer. The layout is recognised from the files. Facts that
the files do not state, such as the rotary base or the hidden states that the head reads, are inferred and printed:
check them against the head's documentation. A head that headstart cannot represent is refused with every reason at
once. Nothing in the folder is executed: a pickle may hold only tensors.
"""

import pickle
from argparse import Namespace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from headstart.heads.files import (
    MODEL,
    PICKLES,
    SAFETENSORS,
    HeadFiles,
    has_weight_dtype,
    read_config,
    read_index,
    read_safetensors,
)
from headstart.heads.formats.published import import_head
from headstart.heads.frozen import FrozenTarget, SafetensorsFolder
from headstart.heads.kinds.checkpoint import new_head, save_head
from headstart.heads.kinds.mtp import mtp_names
from headstart.heads.quantised import SCALE_SUFFIXES, without_scales
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import MtpSection
from headstart.recipes.target_sizes import text_section


def main(arguments: Namespace) -> None:
    inferred = convert(arguments.path, arguments.out, arguments.target)
    print("\n".join(inferred))
    print(f"head written to {arguments.out}; next: headstart report RECIPE decode.head={arguments.out}")


def convert(path: Path, out: Path, target: str) -> list[str]:
    """Write the head in our layout and list what was inferred; raises ValueError for a head that it cannot hold."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"OUT: {out} exists already; a new folder is allowed: choose another, or remove this one")
    folder = locate_target(target, field="--target")
    if str(path) == target:
        path = folder  # both name the target, perhaps as on the hub
    if names := own_layer(path, folder):
        frozen = FrozenTarget.from_folder(path, torch.float32)
        head = new_head(MtpSection(kind="mtp"), frozen, DraftVocab.full(frozen.config.vocab_size), seed=0)
        stored = map(SafetensorsFolder(path).read, (name for name in names if not name.endswith(SCALE_SUFFIXES)))
        wide = (each.dtype for each in stored if each.is_floating_point() and each.element_size() > 1)
        save_head(head.to(next(wide, torch.float32)), out)
        return ["a whole target with an MTP layer of its own, which is now a head; nothing was inferred"]
    files = read_published(path)
    head, inferred = import_head(files, FrozenTarget.from_folder(folder, widest_dtype(files)))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_head(head, out)
    return inferred


def own_layer(path: Path, target: Path) -> list[str]:
    """The names of the MTP layer's tensors in a folder with a whole model like the target; none in a head's folder."""
    has_weights = any((path / name).is_file() for name in (MODEL, f"{MODEL}.index.json"))
    if not has_weights or "headstart" in (config := read_config(path)):
        return []
    sizes = TargetConfig.from_folder(target)
    is_like = text_section(config).get("model_type") == sizes.model_type
    return mtp_names(SafetensorsFolder(path).files, sizes.num_layers) if is_like else []


def read_published(folder: Path) -> HeadFiles:
    """A head's files: single-file or sharded safetensors, or pickles that hold only tensors; ValueError for others."""
    config, tensors = read_config(folder), dict[str, Tensor]()
    for name in SAFETENSORS + PICKLES:
        index = folder / f"{name}.index.json"
        if not index.is_file() and not (folder / name).is_file():
            continue
        for part in sorted(set(read_index(index, "head").values())) if index.is_file() else [name]:
            tensors |= read_pickle(folder / part) if name in PICKLES else read_safetensors(folder / part)
        return HeadFiles(folder, config, without_scales(tensors, folder))
    needed = f"one of {', '.join(SAFETENSORS + PICKLES)}, or an index of its shards, is required"
    raise ValueError(f"{folder} holds no weights; {needed}: copy or download the head again")


def read_pickle(path: Path) -> dict[str, Tensor]:
    """A pickled state dict, read by torch's restricted loader, which calls no function of the file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        why = f"it is damaged or holds more than tensors ({reason})"
        raise ValueError(f"{path} is refused: {why}; get the head as safetensors") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} is refused: only a mapping of names to tensors is allowed; get safetensors")
    return {str(name): tensor for name, tensor in state.items()}


def widest_dtype(files: HeadFiles) -> torch.dtype:
    """The dtype that can hold every number of the file without losing a bit."""
    floats = {tensor.dtype for tensor in files.tensors.values() if has_weight_dtype(tensor)}
    return reduce(torch.promote_types, sorted(floats, key=str)) if floats else torch.float32
