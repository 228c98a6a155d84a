"""Convert a published head into headstart's own layout, which every headstart command reads.

    headstart convert path/to/head runs/imported --target meta-llama/Llama-3.1-8B-Instruct

Reads EAGLE-1 and EAGLE-3 heads as their authors, NVIDIA and SpecForge save them, speculators' eagle3, and Medusa heads
in the authors' layout and in vLLM's, also inside a whole Medusa-2 model. Of a whole target it takes the MTP layer. The
layout is recognised from the files. Facts that the files do not state, such as the rotary base or the hidden states
that the head reads, are inferred and printed: check them against the head's documentation. A head that headstart cannot
represent is refused with every reason at once. Nothing in the folder is executed: a pickle may hold nothing but
tensors.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch

from headstart.common.errors import errors_as_messages
from headstart.heads.files import MODEL, HeadFiles, has_weight_dtype, read_config
from headstart.heads.formats.published import import_head
from headstart.heads.frozen import SCALE_SUFFIXES, FrozenTarget, SafetensorsFolder, hold_attention
from headstart.heads.kinds.checkpoint import new_head, save_head
from headstart.heads.kinds.mtp import mtp_names
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.heads.vocab import DraftVocab
from headstart.recipes.other_commands import convert_options
from headstart.recipes.schema_heads import MtpSection
from headstart.recipes.target_sizes import text_section


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
    found = HeadFiles.read(path)
    files = without_target(found, folder)
    head, inferred = import_head(files, FrozenTarget.from_folder(folder, widest_dtype(files)))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_head(head, out)
    if count := len(found.tensors) - len(files.tensors):
        inferred.insert(0, f"a whole Medusa-2 model: its other {count} tensors are the target's, left out")
    return inferred


def own_layer(path: Path, target: Path) -> list[str]:
    """The names of the MTP layer's tensors in a folder with a whole model like the target; none in a head's folder."""
    has_weights = any((path / name).is_file() for name in (MODEL, f"{MODEL}.index.json"))
    if not has_weights or "headstart" in (config := read_config(path)):
        return []
    sizes = TargetConfig.from_folder(target)
    is_like = text_section(config).get("model_type") == sizes.model_type
    return mtp_names(SafetensorsFolder(path).files, sizes.num_layers) if is_like else []


def without_target(files: HeadFiles, folder: Path) -> HeadFiles:
    """The heads of a whole Medusa-2 model, and any other files as they are; `folder` is the target's.

    Raises ValueError for a Medusa-2 model whose own weights are not the target's: its heads draft for these alone.
    """
    rest = {
        name: tensor for name, tensor in files.tensors.items() if not name.startswith(("medusa_head.", "medusa_heads."))
    }
    if len(rest) == len(files.tensors) or not hold_attention(rest):
        return files
    target = SafetensorsFolder(folder)
    differing = [
        name
        for name, own in rest.items()
        if name not in target.files or not torch.equal(target.read(name).to(own.dtype), own)
    ]
    if differing:
        differ = f"{len(differing)} of its {len(rest)} other tensors are not those of --target, such as {differing[0]}"
        remedy = f"name the model itself as the target, here and wherever its heads draft: --target {files.folder}"
        raise ValueError(f"{files.folder} is a whole Medusa-2 model, and {differ}; {remedy}")
    return replace(files, tensors={name: tensor for name, tensor in files.tensors.items() if name not in rest})


def widest_dtype(files: HeadFiles) -> torch.dtype:
    """The dtype that can hold every number of the file without losing a bit."""
    floats = {tensor.dtype for tensor in files.tensors.values() if has_weight_dtype(tensor)}
    return reduce(torch.promote_types, sorted(floats, key=str)) if floats else torch.float32
