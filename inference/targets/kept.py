"""What a target keeps of a text in memory, from its configuration alone: a model without weights reads one token."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PreTrainedConfig

from headstart.inference.core.states import states_of
from headstart.inference.core.tree import Window
from headstart.inference.passes.cache_layout import slots_of
from headstart.inference.targets.architecture import attention_windows


@dataclass(frozen=True)
class Kept:
    """What all layers of a target keep together."""

    layers: dict[str, int]  # how many layers keep what
    of_token: int  # bytes of each token
    of_row: int  # bytes of each row, however long
    dtype: torch.dtype
    windows: dict[str, Window | None]  # by type of attention; None: it sees all tokens before it


@torch.inference_mode()
def kept_by(config: PreTrainedConfig) -> Kept:
    """Raises whatever the model's code raises where it cannot run without weights."""
    dtype = config.get_text_config().dtype or torch.bfloat16
    auto: Any = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else None
    with torch.device("meta"):
        model = (auto or AutoModelForImageTextToText).from_config(config, dtype=dtype)
    model.set_experts_implementation("batched_mm")  # the others ask which expert gets which token
    cache: Any = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    found = model(input_ids=token, past_key_values=cache, use_cache=True).past_key_values
    if found is not cache:
        raise ValueError(f"a {type(model).__name__} keeps a cache of its own kind")
    layers, of_token, of_row = Counter[str](), 0, 0
    for layer in cache.layers:
        slots, states = slots_of(layer), states_of(layer)
        kinds = ["keys and values"] * bool(slots) + ["states"] * bool(states)
        layers[" and ".join(kinds).replace("keys and values and", "keys, values and") or "nothing"] += 1
        of_token += sum(part.nbytes for part in slots)
        of_row += sum(state.nbytes for state in states.values())
    return Kept(dict(layers), of_token, of_row, dtype, attention_windows(model)[0])
