"""What a target keeps of a text in memory, from its configuration alone: a model without weights reads one token."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from headstart.heads.target_config import TargetConfig
from headstart.heads.target_ends import auto_class
from headstart.inference.core.tree import Window
from headstart.inference.passes.cache_layout import cache_layout
from headstart.inference.targets.architecture import attention_windows
from headstart.inference.targets.loading import in_one_line, load_config

MODEL_TYPES = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


@dataclass(frozen=True)
class Kept:
    """What all layers of a target keep together."""

    layers: dict[str, int]  # how many layers keep what
    of_token: int  # bytes of each token
    of_row: int  # bytes of each row, however long
    dtype: torch.dtype
    windows: dict[str, Window | None]  # by type of attention; None: it sees all tokens before it


def config_of(folder: Path | None, model_type: str) -> PreTrainedConfig:
    """The configuration in a folder, or without one the default of a model type."""
    if folder is not None:
        return load_config(folder, trust_remote_code=False)
    config: PreTrainedConfig = CONFIG_MAPPING[model_type]()
    return config


def kept_by(config: PreTrainedConfig) -> Kept:
    """What a model of this configuration keeps; raises ValueError if its code does not tell without weights."""
    dtype = config.get_text_config().dtype or torch.bfloat16
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
        model.set_experts_implementation("batched_mm")  # the others ask which tokens an expert gets
        layout = cache_layout(model, TargetConfig.from_dict(config.to_dict()).num_layers)
        windows = attention_windows(model)[0]
    except Exception as error:  # whatever a model raises when it is run so
        raise ValueError(f"{type(error).__name__}: {in_one_line(error)}") from error
    if layout.empty is None:
        raise ValueError("its cache is not made of layers that transformers describes")
    layers = Counter(kind_of(bool(shape), layer) for shape, layer in zip(layout.shapes, layout.empty, strict=True))
    of_token = sum(heads * size for shape in layout.shapes for heads, size in shape) * dtype.itemsize
    return Kept(dict(layers), of_token, layout.state_bytes, dtype, windows)


def kind_of(has_slots: bool, layer: Any) -> str:
    """What a layer keeps, in words."""
    has_states = isinstance(layer, LinearAttentionLayer)
    if has_slots:
        return "keys, values and states" if has_states else "keys and values"
    return "states" if has_states else "nothing"
