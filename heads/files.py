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

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.common.files import naming, read_json, remove, removed_on_failure, whole_folder, write_text
from headstart.common.remote import publish

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
        """Read the folder; raises ValueError that names whatever is missing or damaged."""
        return cls(folder, read_config(folder), read_weights(folder))


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


Size = Annotated[int, Field(gt=0)]
Number = Annotated[float, Field(gt=0)]
Layers = list[Annotated[int, Field(ge=0)]]


class Keys(BaseModel):
    """A section of config.json; keys that are not named here may hold anything."""

    model_config = ConfigDict(extra="allow", strict=True)


class RopeKeys(Keys):
    rope_type: str = "default"
    type: str = "default"
    rope_theta: Number = 1e4
    factor: Number | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    original_max_position_embeddings: Size | None = None


class LayerKeys(Keys):
    """The layer's keys: at the top level in most layouts, under `transformer_layer_config` in speculators'."""

    model_type: str | None = None
    hidden_act: str | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    rms_norm_eps: Number = 1e-6
    rope_theta: Number = 1e4
    rope_parameters: RopeKeys | None = None
    rope_scaling: RopeKeys | None = None
    layer_types: list[str] | None = None
    num_aux_hidden_states: Size | None = None


class EagleKeys(Keys):
    eagle_aux_hidden_state_layer_ids: list[int] | None = None  # layer outputs; -1 is the input of the first layer
    norm_before_fc: bool | None = None


class HeadstartKeys(Keys):
    """Our own section, written by heads.checkpoint."""

    kind: str | None = None
    taps: Annotated[Layers, Field(min_length=1)] = [0]
    block_size: Size | None = None
    engines: list[str] | None = None
    target: "OriginKeys | None" = None
    target_num_layers: Size = 1
    acceptance_length: dict[str, Number] = {}  # on held-out prompts, by temperature
    target_rope: dict[str, Any] = {}
    calibration: "CalibrationKeys | None" = None


class OriginKeys(Keys):
    """The target that the head was trained for."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    source: str | None = None


class TreeKeys(Keys):
    """A searched draft tree: its nodes as ranks from the root, and the chance of each."""

    paths: Annotated[list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]], Field(min_length=1)]
    chances: list[Annotated[float, Field(ge=0, le=1)]]

    @model_validator(mode="after")
    def one_chance_each(self) -> "TreeKeys":
        if len(self.paths) != len(self.chances):
            raise ValueError(f"{len(self.paths)} paths have {len(self.chances)} chances; one for each is allowed")
        return self


class CalibrationKeys(Keys):
    greedy: Annotated[list[Number], Field(min_length=1)]
    sampled: Annotated[list[Number], Field(min_length=1)]
    noise: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = [1.0]
    tree: TreeKeys | None = None


class ProposalKeys(Keys):
    speculative_tokens: int | None = None


class VerifierKeys(Keys):
    name_or_path: str | None = None


class SpeculatorsKeys(Keys):
    proposal_methods: list[ProposalKeys] | None = None
    verifier: VerifierKeys | None = None


class BlockKeys(Keys):
    """The keys of block heads: in a section of their own in DFlash's files, at the top level in others."""

    block_size: Size | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    target_layer_ids: list[int] | None = None  # layer outputs; -1 is the input of the first layer
    sample_from_anchor: bool | None = None
    causal: bool | None = None
    use_swa: bool | None = None
    swa_window_size: Size | None = None
    markov_rank: Annotated[int, Field(ge=0)] | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None


class HeadKeys(LayerKeys, BlockKeys):
    """A whole config.json, in any layout."""

    architectures: list[str] | None = None
    target_hidden_size: Size | None = None
    draft_vocab_size: Size | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    eagle_aux_hidden_state_layer_ids: Layers | None = None
    eagle_config: EagleKeys | None = None
    dflash_config: BlockKeys | None = None
    aux_hidden_state_layer_ids: Layers | None = None
    num_target_layers: Size | None = None
    sliding_window: Size | None = None
    sliding_window_non_causal: bool | None = None
    is_causal: bool | None = None
    speculators_model_type: str | None = None
    transformer_layer_config: LayerKeys = LayerKeys()
    speculators_config: SpeculatorsKeys | None = None
    headstart: HeadstartKeys = HeadstartKeys()
