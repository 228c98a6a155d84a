"""Creates a head from a recipe, and saves and loads heads as folders."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from headstart.common.errors import named_errors
from headstart.common.files import remove, removed_on_failure
from headstart.common.remote import publish
from headstart.heads.base import DraftHead
from headstart.heads.calibration import Calibration
from headstart.heads.files import MODEL, HeadFiles, has_weight_dtype, read_config, write_files
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.eagle1 import Eagle1Head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.kinds.medusa import MedusaHead
from headstart.heads.kinds.mtp import MtpHead
from headstart.heads.kinds.peagle import PEagleHead
from headstart.heads.target_config import Rope, TargetConfig, TargetOrigin
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import HeadSection
from headstart.recipes.values import Dtype

SHOWN = 12  # wrong tensors that a message names
KINDS: dict[str, type[DraftHead]] = {
    each.kind: each for each in (Eagle1Head, Eagle3Head, PEagleHead, MedusaHead, BlockHead, MtpHead)
}


def head_taps(section: HeadSection, target: TargetConfig) -> tuple[int, ...]:
    """The target's hidden states that the recipe's head reads."""
    return KINDS[section.kind].section_taps(section, target)


def draft_vocab(section: HeadSection, counts: Int[Tensor, " vocab"]) -> DraftVocab:
    """The tokens that the recipe's head may draft, given how often the target wrote each token."""
    return KINDS[section.kind].section_vocab(section, counts)


def new_head(section: HeadSection, frozen: FrozenTarget, vocab: DraftVocab, seed: int) -> DraftHead:
    """An initialised, untrained head; its weights depend on the seed alone."""
    head = KINDS[section.kind].from_section(section, frozen, vocab)
    head.initialise(frozen, torch.Generator().manual_seed(seed))
    return head


def save_head(head: DraftHead, folder: Path) -> None:
    """Write config.json and model.safetensors, to a temporary folder first so that readers never see half a file."""
    partial = folder.with_name(folder.name + ".partial")
    with removed_on_failure(partial):
        remove(partial)  # left by a killed run
        partial.mkdir(parents=True)
        write_files(HeadFiles(partial, head_config(head), head.engine_tensors()))
        folder.mkdir(exist_ok=True)
        for file in (MODEL, "config.json"):
            publish(partial / file, folder / file)
        partial.rmdir()


def head_config(head: DraftHead) -> dict[str, Any]:
    """config.json of a saved head: the keys that engines read and, under `headstart`, those that only we read."""
    config = head.engine_config()
    note = {
        "kind": head.kind,
        "taps": list(head.taps),
        "target_num_layers": head.target.num_layers,
        "calibration": head.calibration.to_config(),
        **head.own_keys(),
    }
    if head.origin is not None:
        note["target"] = head.origin.to_config()
    if head.has_rope and Rope.from_config(config) != head.target.rope:
        note["target_rope"] = asdict(head.target.rope)  # the engines' keys hold the head's own rope
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    return {**config, "torch_dtype": dtype, "headstart": note}


def load_head(folder: str | Path, target_folder: str | Path) -> DraftHead:
    """A saved head for the target in another folder, in the number format of the head's weights.

    Raises ValueError as `load_head_for` does, and for a target without embedding, final norm or lm_head.
    """
    target_path = Path(target_folder).expanduser()
    dtype = getattr(torch, stored_dtype(Path(folder).expanduser()))
    return load_head_for(folder, FrozenTarget.from_folder(target_path, dtype))


def stored_dtype(folder: Path) -> str:
    """The number format that a head was saved in; raises ValueError for one that no head of ours has."""
    name = read_config(folder).get("torch_dtype", "float32")
    if name not in get_args(Dtype):
        allowed = "float32, bfloat16 or float16 is allowed: correct the file, or set export.dtype"
        raise ValueError(f"{folder}/config.json: torch_dtype is {name!r}; {allowed}")
    return str(name)


def load_head_for(folder: str | Path, frozen: FrozenTarget) -> DraftHead:
    """A saved head for this target, with the dtype and device of the target's embedding.

    Raises ValueError that names every mismatch: wrong types in config.json, sizes, vocabulary, taps, missing, misshapen
    or unknown tensors.
    """
    folder = Path(folder).expanduser()
    files = HeadFiles.read(folder)
    head = head_from_files(folder, files.config, files.tensors, frozen)
    refuse_broken_numbers(folder / MODEL, head)
    return head


def load_taps(folder: Path, target: TargetConfig) -> tuple[int, ...]:
    """The taps of a saved head, from its config.json alone; raises ValueError if the head does not fit the target."""
    config = read_config(folder)
    kind = kind_of(folder, config)
    check_fit(folder, kind, config, target)
    return kind.config_taps(config, target)


def head_from_files(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], frozen: FrozenTarget
) -> DraftHead:
    """The head that a config.json and tensors describe; raises ValueError as `load_head_for` does, naming `folder`."""
    kind = kind_of(folder, config)
    check_fit(folder, kind, config, frozen.config)
    # Without memory for the weights, or numbers drawn for them: all of them come from the tensors.
    with named_errors(folder), torch.device("meta"):
        head = kind.from_engine(config, tensors, frozen)
    check_tensors(folder, head, tensors)
    head.load_state_dict(tensors, assign=True)
    if head.has_rope:
        head.add_rotary(head.shape)
    head.calibration = Calibration.from_config(config.get("headstart", {}).get("calibration"))
    head.origin = TargetOrigin.from_config(config)
    return head.to(frozen.embedding.device, frozen.embedding.dtype).eval().requires_grad_(False)


def kind_of(folder: Path, config: dict[str, Any]) -> type[DraftHead]:
    """The class of the head that a config.json describes, ours or published; raises ValueError for an unknown kind."""
    guess = next(name for name, kind in reversed(KINDS.items()) if kind.describes(config))  # EAGLE-1 is the last
    kind = config.get("headstart", {}).get("kind", guess)
    if kind not in KINDS:
        allowed = f"only {', '.join(KINDS)} are allowed: correct the kind"
        raise ValueError(f"{folder}/config.json: a head of kind {kind!r}; {allowed}")
    return KINDS[kind]


def target_misfits(config: dict[str, Any], target: TargetConfig) -> Iterator[tuple[str, Any, Any]]:
    """Each key of a head's config.json that describes another target: the key, its value, and this target's value."""
    note, rope = config.get("headstart", {}), asdict(target.rope)
    hidden = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
    facts = {
        hidden: (config.get(hidden), target.hidden_size),
        "vocab_size": (config.get("vocab_size"), target.vocab_size),
        "num_target_layers": (config.get("num_target_layers", target.num_layers), target.num_layers),
        "headstart.target_num_layers": (note.get("target_num_layers", target.num_layers), target.num_layers),
        "headstart.target_rope": (note.get("target_rope", rope), rope),
    }
    yield from ((key, value, its) for key, (value, its) in facts.items() if value != its)


def check_fit(folder: Path, kind: type[DraftHead], config: dict[str, Any], target: TargetConfig) -> None:
    """Raise one ValueError that names every mismatch between a head's config.json and its target, with both values."""
    rope, taps = Rope.from_config(config), kind.config_taps(config, target)
    wrong = [f"{key}: head {value}, target {its}" for key, value, its in target_misfits(config, target)]
    if kind.has_rope and rope != target.rope and "target_rope" not in config.get("headstart", {}):
        wrong.append(f"rope: head {asdict(rope)}, target {asdict(target.rope)}")
    layers = config.get("num_hidden_layers") or 1
    if kind.has_rope and kind.max_layers is not None and layers > kind.max_layers:
        wrong.append(f"num_hidden_layers: {layers} in config.json, but a head has 1 layer; this may be a whole model")
    if max(taps) > target.num_layers:
        wrong.append(f"taps: head {list(taps)}, target hidden_states 0 to {target.num_layers}")
    if wrong:
        advice = "train one for this target, or convert a published one with headstart convert"
        allowed = f"only a head of these sizes is allowed: {advice}"
        raise ValueError(f"the head in {folder} does not fit the target: {'; '.join(wrong)}; {allowed}")


def refuse_broken_numbers(path: Path, head: DraftHead) -> None:
    """Raise ValueError for weights that are NaN or infinite in the head's number format: no token would be accepted."""
    tensors = {name: tensor for name, tensor in head.engine_tensors().items() if tensor.is_floating_point()}
    if broken := sorted(name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())):
        dtype = str(tensors[broken[0]].dtype).removeprefix("torch.")
        allowed = "only finite numbers are allowed; copy the head again, or train it again, or choose a wider dtype"
        raise ValueError(f"{path}: {', '.join(broken[:4])} holds NaN or infinity in {dtype}, {allowed}")


def misfits(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, object, str]]:
    """Each missing, misshapen or unknown tensor by name: its shape, None for a missing one, and what is allowed."""
    for name in sorted(expected.keys() | tensors.keys()):
        found, needed = (list(each[name].shape) if name in each else None for each in (tensors, expected))
        if found != needed:
            allowed = "no such tensor is allowed" if needed is None else f"shape {needed} is required"
            yield name, found, allowed


def check_tensors(folder: Path, head: DraftHead, tensors: dict[str, Tensor]) -> None:
    found = misfits(head.state_dict(), tensors)
    wrong = [f"{name}: {'missing' if shape is None else shape}, {allowed}" for name, shape, allowed in found]
    for name, tensor in tensors.items():
        if not has_weight_dtype(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            wrong.append(f"{name} is {dtype} but should be floating point of 16 bits or more")
    if wrong:
        shown = "; ".join(sorted(wrong)[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        allowed = "exactly the tensors that config.json describes are allowed: copy or export the head again"
        raise ValueError(f"{folder}/model.safetensors: {shown}; {allowed}")
