"""The facts about a model's architecture that decoding needs, read from its configuration and from one forward pass."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
GROWING_ROPES = frozenset({"dynamic", "longrope"})  # all frequencies depend on the longest position of a forward pass
CHOOSE_ATTENTION = "choose a target that has only attention layers with a key and value per token"


def text_config(model: PreTrainedModel) -> dict[str, Any]:
    """The language model's section of the configuration; multimodal models have others."""
    found: dict[str, Any] = model.config.get_text_config().to_dict()
    return found


def refuse_unknown_state(model: PreTrainedModel) -> None:
    """Raise ValueError for a model with a recurrent state or with a type of attention that is not supported.

    Call it before any other check: such a model may have no attention heads, which would fail with a less clear error.
    """
    config = text_config(model)
    states = {type(layer) for layer in DynamicCache(config=model.config).layers} - {
        DynamicLayer,
        DynamicSlidingWindowLayer,
    }
    if states or model._is_stateful:
        raise ValueError(
            f"target.path: a {config['model_type']!r} model keeps a recurrent state "
            f"({', '.join(sorted(kind.__name__ for kind in states)) or 'stateful'}), which cannot be rolled back after "
            f"a rejected draft; {CHOOSE_ATTENTION}"
        )
    unknown = set(config.get("layer_types") or ()) - KNOWN_LAYER_TYPES
    if unknown:
        raise ValueError(
            f"target.path: a {config['model_type']!r} model with layers of type {', '.join(sorted(unknown))} given, "
            f"{' and '.join(sorted(KNOWN_LAYER_TYPES))} are allowed; {CHOOSE_ATTENTION}"
        )


@torch.inference_mode()
def cached_shape(model: PreTrainedModel) -> tuple[tuple[int, int, int], list[torch.device]]:
    """(layers, kv_heads, head_dim) of one token's entry in the KV cache, and the device of each layer.

    Raises ValueError if keys and values, or layers, differ in shape, as with multi-head latent attention.
    """
    cache, num_layers = DynamicCache(), model.config.get_text_config().num_hidden_layers
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers  # transformers types their keys and values as optional
    shapes = {tuple(part.shape) for layer in layers for part in (layer.keys, layer.values)}
    if len(cache.layers) != num_layers or len(shapes) != 1:
        raise ValueError(
            f"target.path: a {model.config.model_type!r} model given, whose {len(cache.layers)} cached layers have "
            f"keys and values of shapes {sorted(shapes)}; one shape for all of its {num_layers} layers is allowed; "
            f"choose another target"
        )
    _, kv_heads, _, head_dim = shapes.pop()
    return (num_layers, kv_heads, head_dim), [layer.keys.device for layer in layers]


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """The sliding window of each layer type, in positions; None means full attention.

    Models with several layer types take a dict of masks with these keys; other models take a single mask.
    """
    config = text_config(model)
    kinds = set(config.get("layer_types") or ())
    if kinds:
        return {kind: config["sliding_window"] if kind == "sliding_attention" else None for kind in sorted(kinds)}
    # A model ignores a sliding_window key that its family does not declare, so we must too.
    declared = "sliding_window" in type(model.config.get_text_config())().to_dict()
    return {"all layers": config.get("sliding_window") if declared else None}


def rope_limit(model: PreTrainedModel) -> int | None:
    """The number of positions after which cached keys would need another rotation; None if they never do."""
    config = text_config(model)
    found = config.get("rope_parameters") or {}
    kinds = {found.get("rope_type")} | {part.get("rope_type") for part in found.values() if isinstance(part, dict)}
    if not kinds & GROWING_ROPES:
        return None
    limit: int = found.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return limit


def attention_code(config: Any) -> str | None:
    """The attention implementation that computes this model exactly; None leaves the choice to transformers.

    Fused kernels ignore Gemma 2's soft cap of attention scores, yet transformers 5.17 would choose one.
    """
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping")
    return "eager" if capped else None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers: the first module list whose length is the configuration's number of layers."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():  # only the decoder: a vision tower may have as many layers
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(
        f"target.path: a {type(model).__name__} given, which has no list of {num_layers} decoder layers; choose a "
        f"causal language model of transformers"
    )


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model with only its first `count` layers, then norm and lm_head; it shares all modules with the original.

    Raises ValueError unless `count` is at least 1 and less than the number of layers.
    """
    layers = decoder_layers(model)
    if not 1 <= count < len(layers):
        raise ValueError(f"decode.exit_layers: {count} given, 1 to {len(layers) - 1} of the target's layers is allowed")
    path = next(name for name, module in model.named_modules() if module is layers).split(".")
    short = node = shallow_copy(model)
    for name in path[:-1]:
        node._modules[name] = shallow_copy(node.get_submodule(name))
        node = node.get_submodule(name)
    node._modules[path[-1]] = layers[:count]
    return short


def shallow_copy(module: Any) -> Any:
    """A copy that shares parameters and children with a module, but whose children can be replaced independently."""
    copied = copy.copy(module)
    copied.__dict__.pop("forward", None)  # accelerate's, of a target over several devices, runs the original
    # Copy the dictionaries of children and hooks, but share their contents.
    copied.__dict__.update({name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)})
    return copied
