"""What a model's configuration tells about it as a target; no weights are read."""

import difflib
from collections import Counter
from collections.abc import Iterator
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
from headstart.inference.targets.architecture import CacheLayout, attention_windows, cache_layout, position_limit
from headstart.inference.targets.loading import in_one_line, load_config
from headstart.recipes.target_sizes import text_section

MODEL_TYPES = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


def find_model(name: str) -> tuple[Path | None, str]:
    """The folder with a model's config.json, None for a model type's default configuration; and the model type.

    Raises ValueError if `name` is neither a folder, its config.json, a name on the hub, nor a model type.
    """
    folder = folder_of(name)
    return folder, name if folder is None else str(read_json_object(folder / "config.json", "target").get("model_type"))


def folder_of(name: str) -> Path | None:
    """The folder with a model's config.json, fetched if it is on the hub; None for a model type."""
    path = Path(name).expanduser()
    folder = path.parent if path.name == "config.json" and path.is_file() else path
    if path.suffix == ".gguf" or folder.is_dir():
        folder = locate_target(str(folder), field="NAME")
    if (folder / "config.json").is_file():
        return folder
    if name in MODEL_TYPES:
        return None
    if "/" in name and not path.exists():
        return locate_target(name, None, ["config.json"], field="NAME")
    near = difflib.get_close_matches(name, MODEL_TYPES, n=1)
    advice = f"did you mean {near[0]}?" if near else "`headstart targets` lists the model types"
    allowed = "a folder with config.json, that file, a GGUF file, a hub name (org/name) or a model type of transformers"
    raise wrong_value("NAME", repr(name), f"{allowed} {__version__} is", advice)


def config_of(folder: Path | None, model_type: str) -> PreTrainedConfig:
    """The configuration in a folder, or without one the default of a model type."""
    if folder is not None:
        return load_config(folder, trust_remote_code=False)
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception as error:  # a class without usable defaults may raise anything
        allowed = "the folder of a model is, as this type has no default configuration"
        raise wrong_value("NAME", repr(model_type), allowed, f"give one ({in_one_line(error)})") from error


def engines(config: PreTrainedConfig) -> str:
    """Which engines refuse EAGLE-3 heads for a model."""
    by = refusing(text_section(config.to_dict()).get("model_type", config.model_type))
    others = [label for label, _ in REFUSED.values() if label not in by]
    refused = f"{' and '.join(by)} refuse{'s' * (len(by) == 1)} EAGLE-3 heads for this family" if by else ""
    unknown = f"nothing is known against EAGLE-3 heads in {' and '.join(others)}" if others else ""
    return "; ".join(filter(None, (refused, unknown)))


def memory(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """What the target caches in memory."""
    try:
        model = model_on_meta(config)
        layout = described_layout(model)
        windows, limit = attention_windows(model)[0], position_limit(model)
    except Exception as error:  # a model may raise anything when it runs without weights
        yield "memory", f"known when it is loaded ({type(error).__name__}: {in_one_line(error)})"
        return
    layers = Counter(
        cached_by(bool(shape), layer) for shape, layer in zip(layout.shapes, layout.empty or (), strict=True)
    )
    yield "layers", ", ".join(f"{count} keep {cached}" for cached, count in layers.items())
    sizes = {kind: window if isinstance(window, int) else window and window.size for kind, window in windows.items()}
    limited = [f"{kind} {size}" for kind, size in sizes.items() if size is not None]
    if limited:
        yield "windows", f"{', '.join(limited)} tokens, by a mask; the cache keeps every token"
    if limit is not None:
        yield "limit", f"texts end at position {limit}: after it, several passes would compute something else than one"
    of_token = layout.token_elements * model.dtype.itemsize
    each = f"{decimal(of_token)} a token" if of_token else ""
    row = f"{decimal(layout.state_bytes)} a row, however long its text is" if layout.state_bytes else ""
    yield "cache", f"{' and '.join(filter(None, (each, row)))}, in {str(model.dtype).removeprefix('torch.')}"


def model_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of this configuration without weights."""
    with torch.device("meta"):
        dtype = config.get_text_config().dtype or torch.bfloat16
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
    model.set_experts_implementation("batched_mm")  # other implementations ask which tokens an expert gets
    return model


def described_layout(model: PreTrainedModel) -> CacheLayout:
    """What a model caches; raises ValueError if its code does not tell without weights."""
    layout = cache_layout(model, TargetConfig.from_dict(model.config.to_dict()).num_layers)
    if layout.empty is None:
        raise ValueError("its cache is not made of layers that transformers describes")
    return layout


def cached_by(has_slots: bool, layer: Any) -> str:
    """What a layer caches, in words."""
    is_recurrent = isinstance(layer, LinearAttentionLayer)
    if has_slots:
        return "keys, values and recurrent states" if is_recurrent else "keys and values"
    return "recurrent states" if is_recurrent else "nothing"
