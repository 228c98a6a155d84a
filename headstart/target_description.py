"""What is known of one model as a target, from its configuration and the table of families; no weights are read."""

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel, __version__
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from headstart.common.errors import wrong_value
from headstart.heads.files import read_json_object
from headstart.heads.formats.config_rules import REFUSED, refusing
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.heads.target_ends import auto_class
from headstart.inference.core.tree import Window
from headstart.inference.targets.architecture import attention_windows, position_limit
from headstart.inference.targets.cache_layout import cache_layout
from headstart.inference.targets.loading import in_one_line, load_config
from headstart.recipes.target_sizes import text_section
from headstart.target_families import WAYS, FamilyTable

MODEL_TYPES = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
HEADS = {
    "yes": "can be trained for it",
    "on text alone": "can be trained for it, on text alone: images and sounds are not read",
    None: "training was not tried; a harvest checks it before its first sample",
}


def description(name: str, table: FamilyTable) -> Iterator[tuple[str, str]]:
    """Labels with their texts. `name` is a folder, its config.json, a name on the hub, or a model type.

    Raises ValueError for any other.
    """
    folder = folder_of(name)
    model_type = name if folder is None else str(read_json_object(folder / "config.json", "target").get("model_type"))
    family = table.of(model_type)
    yield "model type", model_type if folder is not None else f"{model_type}, in its default configuration"
    yield "decodes by", f"{family.way}: {WAYS[family.way]}"
    if family.why is not None:
        yield "because", family.why
    if model_type not in MODEL_TYPES:
        yield (
            "code",
            f"not of transformers {__version__}: it is tried when it is loaded with target.trust_remote_code=true",
        )
        return
    if family.is_target or family.way == "not tried":
        config = config_of(folder, model_type)
        if family.harvest in HEADS:
            yield "heads", HEADS[family.harvest]
            yield "exports", engines(text_section(config.to_dict()).get("model_type", model_type))
        else:
            yield "heads", f"cannot be trained for it: {str(family.harvest).removeprefix('no: ')}"
        yield from memory(config)
    yield "known from", f"{table.source}; loading a model tries its own weights"


def folder_of(name: str) -> Path | None:
    """The folder with a model's config.json, fetched if it is on the hub; None for a model type."""
    path = Path(name).expanduser()
    folder = path.parent if path.name == "config.json" and path.is_file() else path
    if (folder / "config.json").is_file():
        return folder
    if name in MODEL_TYPES:
        return None
    if "/" in name and not path.exists() and path.suffix != ".gguf":
        return locate_target(name, None, ["config.json"], field="NAME")
    near = difflib.get_close_matches(name, MODEL_TYPES, n=1)
    advice = f"did you mean {near[0]}?" if near else "`headstart targets` lists the model types"
    allowed = "a folder with config.json, that file, a hub name (org/name) or a model type of transformers"
    raise wrong_value("NAME", repr(name), f"{allowed} {__version__} is", advice)


def config_of(folder: Path | None, model_type: str) -> PreTrainedConfig:
    """The configuration in a folder, or without one the default of a model type."""
    if folder is not None:
        return load_config(folder, trust_remote_code=False)
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception as error:  # whatever a class without usable defaults raises
        allowed = "the folder of a model is, as this type has no default configuration"
        raise wrong_value("NAME", repr(model_type), allowed, f"give one ({in_one_line(error)})") from error


def engines(family: str) -> str:
    """Which engines refuse EAGLE-3 heads for a family of decoders."""
    by = refusing(family)
    others = [label for label, _ in REFUSED.values() if label not in by]
    refused = f"{' and '.join(by)} refuse{'s' * (len(by) == 1)} EAGLE-3 heads for this family" if by else ""
    unknown = f"nothing is known against EAGLE-3 heads in {' and '.join(others)}" if others else ""
    return "; ".join(filter(None, (refused, unknown)))


@dataclass(frozen=True)
class Kept:
    """What all layers of a target keep together."""

    layers: dict[str, int]  # how many layers keep what
    of_token: int  # bytes of each token
    of_row: int  # bytes of each row, however long
    dtype: torch.dtype
    windows: dict[str, Window | None]  # by type of attention; None: it sees all tokens before it
    limit: int | None  # positions up to which a text is read the same in one pass and in several; None: all


def memory(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """What the target keeps in memory."""
    try:
        kept = kept_by(config)
    except ValueError as error:
        yield "memory", f"known when it is loaded ({error})"
        return
    yield "layers", ", ".join(f"{count} keep {what}" for what, count in kept.layers.items())
    sizes = {
        kind: window if isinstance(window, int) else window and window.size for kind, window in kept.windows.items()
    }
    windows = [f"{kind} {size}" for kind, size in sizes.items() if size is not None]
    if windows:
        yield "windows", f"{', '.join(windows)} tokens, by a mask; the cache keeps every token"
    if kept.limit is not None:
        yield "limit", f"texts end at position {kept.limit}: after it, several passes would not read as one does"
    each = f"{decimal(kept.of_token)} a token" if kept.of_token else ""
    row = f"{decimal(kept.of_row)} a row, however long its text is" if kept.of_row else ""
    yield "cache", f"{' and '.join(filter(None, (each, row)))}, in {str(kept.dtype).removeprefix('torch.')}"


def kept_by(config: PreTrainedConfig) -> Kept:
    """What a model of this configuration keeps; raises ValueError if its code does not tell without weights."""
    try:
        given = config.get_text_config().dtype or torch.bfloat16
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config).from_config(config, dtype=given)
        model.set_experts_implementation("batched_mm")  # the others ask which tokens an expert gets
        layout = cache_layout(model, TargetConfig.from_dict(config.to_dict()).num_layers)
        windows, limit = attention_windows(model)[0], position_limit(model)
    except Exception as error:  # whatever a model raises when it is run so
        raise ValueError(f"{type(error).__name__}: {in_one_line(error)}") from error
    if layout.empty is None:
        raise ValueError("its cache is not made of layers that transformers describes")
    layers = Counter(kind_of(bool(shape), layer) for shape, layer in zip(layout.shapes, layout.empty, strict=True))
    of_token = sum(heads * size for shape in layout.shapes for heads, size in shape) * model.dtype.itemsize
    return Kept(dict(layers), of_token, layout.state_bytes, model.dtype, windows, limit)


def kind_of(has_slots: bool, layer: Any) -> str:
    """What a layer keeps, in words."""
    has_states = isinstance(layer, LinearAttentionLayer)
    if has_slots:
        return "keys, values and states" if has_states else "keys and values"
    return "states" if has_states else "nothing"
