"""Reads and writes a head's folder: config.json and named tensors. Nothing in a folder is ever executed.

The types of the keys in config.json, ours or published, are at the end; the rules of engines check the values.
"""

import json
import os
import re
import reprlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.common.files import naming, read_json, remove, removed_on_failure, whole_folder, write_text
from headstart.common.remote import publish
from headstart.heads.calibration import Calibration
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

    @property
    def is_speculators(self) -> bool:
        """Whether they have speculators' layout, whose config.json has the layer's keys in a section of their own."""
        return "speculators_model_type" in self.config

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
    if wrong := [*wrong_keys(config)]:
        raise ValueError(f"{path}: {'; '.join(wrong)}; correct the file")
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


Size = Annotated[int, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Number = Annotated[float, Field(gt=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
LayerOutputs = list[Annotated[int, Field(strict=True)]]  # -1 is the input of the first layer
Layers = list[Count]  # or hidden states
SIZES = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
    max_position_embeddings num_aux_hidden_states target_hidden_size draft_vocab_size num_target_layers sliding_window
    original_max_position_embeddings block_size swa_window_size target_num_layers
"""
NUMBERS = "rms_norm_eps rope_theta factor low_freq_factor high_freq_factor"
FLAGS = """
    sample_from_anchor causal use_swa enable_confidence_head confidence_head_with_markov fc_norm norm_output
    norm_before_fc norm_before_residual sliding_window_non_causal is_causal
"""
TEXTS = "model_type hidden_act rope_type type markov_head_type kind source name_or_path speculators_model_type"
SECTIONS = """
    rope_parameters rope_scaling eagle_config dflash_config transformer_layer_config speculators_config verifier
    headstart target
"""
KEYS: dict[str, Any] = {  # in whichever section a key is; other keys may hold anything
    **dict.fromkeys(SIZES.split(), Size),
    **dict.fromkeys(NUMBERS.split(), Number),
    **dict.fromkeys(FLAGS.split(), Flag),
    **dict.fromkeys(TEXTS.split(), str),
    **dict.fromkeys(SECTIONS.split(), dict[str, Any]),
    **dict.fromkeys(("mask_token_id", "markov_rank"), Count),
    **dict.fromkeys(("architectures", "layer_types", "engines"), list[str]),
    "target_layer_ids": LayerOutputs,
    "eagle_aux_hidden_state_layer_ids": LayerOutputs,
    "aux_hidden_state_layer_ids": Layers,
    "taps": Annotated[Layers, Field(min_length=1)],
    "proposal_methods": list[dict[str, Any]],
    "sha256": Annotated[str, Field(pattern="^[0-9a-f]{64}$")],
    "acceptance_length": dict[str, Number],  # on held-out prompts, by temperature
    "target_rope": dict[str, Any],
    "calibration": Calibration,
}
fields: Any = {key: (kind | None, None) for key, kind in KEYS.items()}
HEAD_KEYS = create_model("HEAD_KEYS", __config__=ConfigDict(extra="allow"), **fields)


def wrong_keys(config: dict[str, Any], place: str = "") -> Iterator[str]:
    """Each key of a head's config.json, or of a section of it, that has a wrong type."""
    try:
        HEAD_KEYS.model_validate(config)
    except ValidationError as failed:
        for each in failed.errors():
            key = ".".join(map(str, each["loc"]))
            yield f"{place}{key}: {reprlib.repr(each['input'])} given, {each['msg']}"
    for section in SECTIONS.split():
        if isinstance(config.get(section), dict):
            yield from wrong_keys(config[section], f"{place}{section}.")
