"""Reads and writes a head's folder: config.json and named tensors. Nothing in a folder is ever executed.

The types of the keys in config.json, ours or published, are at the end; the rules of engines check the values.
"""

import json
import os
import re
import reprlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.common.files import naming, read_json, remove, removed_on_failure, whole_folder, write_text
from headstart.common.remote import publish
from headstart.heads.quantised import without_scales

MODEL = "model.safetensors"
SAFETENSORS = (MODEL, "medusa_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class HeadFiles:
    """A head's config.json and tensors, as its folder spells them."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def names(self) -> set[str]:
        """The tensors' names, without the prefix that some files have."""
        return {name.removeprefix("model.") for name in self.tensors}

    @classmethod
    def read(cls, folder: Path) -> "HeadFiles":
        """Read the folder, with float8 weights made wide; raises ValueError that names what is missing or damaged."""
        return cls(folder, read_config(folder), without_scales(read_weights(folder), folder))


def read_config(folder: Path) -> dict[str, Any]:
    """A head's config.json; raises ValueError if it is missing, or one naming every key with a wrong type."""
    path, advice = folder / "config.json", "train one with headstart train RECIPE, or give the folder of a saved head"
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link to {path.readlink()}, which does not exist; a file is allowed: {advice}")
    if not path.is_file():
        raise ValueError(f"{folder} holds no head (no config.json); {advice}")
    config = read_json_object(path, "head")
    try:
        HEAD_KEYS.model_validate(config)
    except ValidationError as failed:
        places = [(".".join(map(str, each["loc"])), each["input"], each["msg"]) for each in failed.errors()]
        wrong = "; ".join(f"{place}: {reprlib.repr(given)} given, {allowed}" for place, given, allowed in places)
        raise ValueError(f"{path}: {wrong}; correct the file") from failed
    return config


def read_json_object(path: Path, of: str) -> dict[str, Any]:
    """The JSON object in a file of a head or target (`of`); raises ValueError, naming the file, for anything else."""
    remedy = f"copy or download the {of} again"
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; a JSON object is allowed: {remedy}")
    return content


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors in model.safetensors; raises ValueError for a head that must be converted first."""
    others = (file for name in SAFETENSORS + PICKLES for file in (name, f"{name}.index.json"))
    published = next((name for name in others if (folder / name).is_file()), None)
    if published is not None and not (folder / MODEL).is_file():
        convert = f"headstart convert {shlex.quote(str(folder))} NEW_FOLDER --target TARGET"
        raise ValueError(f"{folder} holds its weights in {published}, only {MODEL} is allowed; convert it: {convert}")
    return read_safetensors(folder / MODEL)


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


def has_weight_dtype(tensor: Tensor) -> bool:
    """Is it in a number format that weights may have? 8-bit formats need scales, which no head of ours has."""
    return tensor.is_floating_point() and tensor.dtype.itemsize >= 2


def write_files(files: HeadFiles) -> None:
    """Write config.json and the tensors to a folder that exists."""
    write_safetensors(files.tensors, files.folder / MODEL, {"format": "pt"})
    write_text(files.folder / "config.json", json.dumps(files.config, indent=2) + "\n")


def write_folder(files: HeadFiles, readme: str, *additions: Callable[[Path], None]) -> None:
    """Write all files so that readers see the whole folder or none; raises ValueError if the folder exists.

    The additions may add files, from those that are written already.
    """
    refuse_existing(files.folder)
    with whole_folder(files.folder) as partial:
        write_files(HeadFiles(partial, files.config, files.tensors))
        write_text(partial / "README.md", readme)
        for add in additions:
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
    number = re.search(r"\(os error (\d+)\)", str(error))
    return error if number is None else OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def refuse_existing(folder: Path) -> None:
    """Raise ValueError, before any work is done, if the folder of an export exists already."""
    if folder.exists() or folder.is_symlink():
        advice = f"remove this one (rm -r {shlex.quote(str(folder))}), or move it"
        raise ValueError(f"{folder} exists already; an export is written to a new folder only: {advice}")


Size = Annotated[int, Field(gt=0)] | None
Number = Annotated[float, Field(gt=0)]
Flag = bool | None
Text = str | None
Layers = list[Annotated[int, Field(ge=0)]]  # or hidden states
LayerOutputs = list[int] | None  # -1 is the input of the first layer
ANY_OTHERS = ConfigDict(extra="allow", strict=True)


def section(name: str, keys: dict[str, Any], *needed: str) -> Any:
    """A section of config.json whose keys, all but the needed ones optional, have these types; others hold anything."""
    fields: Any = {key: (kind, ... if key in needed else None) for key, kind in keys.items()}
    return create_model(name, __config__=ANY_OTHERS, **fields)


class TreeKeys(BaseModel):
    """A searched draft tree: its nodes as ranks from the root, and the chance of each."""

    model_config = ANY_OTHERS
    paths: Annotated[list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]], Field(min_length=1)]
    chances: list[Annotated[float, Field(ge=0, le=1)]]

    @model_validator(mode="after")
    def one_chance_each(self) -> "TreeKeys":
        if len(self.paths) != len(self.chances):
            raise ValueError(f"{len(self.paths)} paths have {len(self.chances)} chances; one for each is allowed")
        return self


ROPE = {
    **dict.fromkeys(("rope_type", "type"), str),
    "rope_theta": Number,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), Number | None),
    "original_max_position_embeddings": Size,
}
# The layer's keys: at the top level in most layouts, under `transformer_layer_config` in speculators'.
LAYER_COUNTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
LAYER = {
    **dict.fromkeys(("model_type", "hidden_act"), Text),
    **dict.fromkeys((*LAYER_COUNTS, "head_dim", "vocab_size", "max_position_embeddings"), Size),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), Number),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), section("RopeKeys", ROPE) | None),
    "layer_types": list[str] | None,
    "num_aux_hidden_states": Size,
}
# The keys of block heads: in a section of their own in DFlash's files, at the top level in others.
BLOCK = {
    **dict.fromkeys(("block_size", "swa_window_size"), Size),
    **dict.fromkeys(("mask_token_id", "markov_rank"), Annotated[int, Field(ge=0)] | None),
    "target_layer_ids": LayerOutputs,
    "markov_head_type": Text,
    **dict.fromkeys(("sample_from_anchor", "causal", "use_swa"), Flag),
    **dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), Flag),
}
CALIBRATION = {
    **dict.fromkeys(("greedy", "sampled"), Annotated[list[Number], Field(min_length=1)]),
    "noise": Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)],
    "tree": TreeKeys | None,
}
ORIGIN = {"sha256": Annotated[str, Field(pattern="^[0-9a-f]{64}$")], "source": Text}
OURS = {  # written by heads.kinds.checkpoint
    "kind": Text,
    "taps": Annotated[Layers, Field(min_length=1)],
    "block_size": Size,
    "engines": list[str] | None,
    "target": section("OriginKeys", ORIGIN, "sha256") | None,
    "target_num_layers": Annotated[int, Field(gt=0)],
    "acceptance_length": dict[str, Number],  # on held-out prompts, by temperature
    "target_rope": dict[str, Any],
    "calibration": section("CalibrationKeys", CALIBRATION, "greedy", "sampled") | None,
}
EAGLE = {"eagle_aux_hidden_state_layer_ids": LayerOutputs, "norm_before_fc": Flag}
SERVING = {
    "proposal_methods": list[section("ProposalKeys", {"speculative_tokens": int | None})] | None,  # type: ignore[misc]
    "verifier": section("VerifierKeys", {"name_or_path": Text}) | None,
}
HEAD_KEYS = section(
    "HeadKeys",
    {
        **LAYER,
        **BLOCK,
        "architectures": list[str] | None,
        **dict.fromkeys(("target_hidden_size", "draft_vocab_size", "num_target_layers", "sliding_window"), Size),
        **dict.fromkeys(("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"), Flag),
        **dict.fromkeys(("sliding_window_non_causal", "is_causal"), Flag),
        **dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"), Layers | None),
        "eagle_config": section("EagleKeys", EAGLE) | None,
        "dflash_config": section("BlockKeys", BLOCK) | None,
        "speculators_model_type": Text,
        "transformer_layer_config": section("LayerKeys", LAYER),
        "speculators_config": section("SpeculatorsKeys", SERVING) | None,
        "headstart": section("HeadstartKeys", OURS),
    },
)
