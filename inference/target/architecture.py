"""What a runtime must know of a model's architecture, read from its configuration and from one probing pass."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
GROWING_ROPES = frozenset({"dynamic", "longrope"})  # all frequencies change with the longest position of a pass
MAY_ROLL_BACK = "choose a target whose layers all are attention over keys and values that are kept"


def text_config(model: PreTrainedModel) -> dict[str, Any]:
    """The language model's part of the configuration."""
    found: dict[str, Any] = model.config.get_text_config().to_dict()
    return found


def refuse_unknown_state(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that keeps more than keys and values, or attends in a way not known here.

    First of all checks, as such a model may have no attention heads at all.
    """
    config = text_config(model)
    kept = {type(layer) for layer in DynamicCache(config=model.config).layers} - {
        DynamicLayer,
        DynamicSlidingWindowLayer,
    }
    if kept or model._is_stateful:
        raise ValueError(
            f"target.path: a {config['model_type']!r} model keeps a recurrent state "
            f"({', '.join(sorted(kind.__name__ for kind in kept)) or 'stateful'}), which cannot be rolled back after a "
            f"rejected draft; {MAY_ROLL_BACK}"
        )
    unknown = set(config.get("layer_types") or ()) - KNOWN_LAYER_TYPES
    if unknown:
        raise ValueError(
            f"target.path: a {config['model_type']!r} model has layers of type {', '.join(sorted(unknown))}; "
            f"{' and '.join(sorted(KNOWN_LAYER_TYPES))} are known; {MAY_ROLL_BACK}"
        )


@torch.inference_mode()
def cached_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """(layers, kv_heads, head_dim) of what one token leaves in the cache.

    Raises ValueError where layers or keys and values differ, as with multi-head latent attention.
    """
    cache, num_layers = DynamicCache(), model.config.get_text_config().num_hidden_layers
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers  # their keys and values are typed as if there might be none
    shapes = {tuple(part.shape) for layer in layers for part in (layer.keys, layer.values)}
    if len(cache.layers) != num_layers or len(shapes) != 1:
        raise ValueError(
            f"target.path: the {len(cache.layers)} cached layers of a {model.config.model_type!r} model hold keys and "
            f"values of shapes {sorted(shapes)}; one shape for all of its {num_layers} layers is supported"
        )
    _, kv_heads, _, head_dim = shapes.pop()
    return num_layers, kv_heads, head_dim


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """How far back each type of layer sees, in positions; None is all the way.

    Models with several types take a dict of masks by these names, others one mask.
    """
    config = text_config(model)
    kinds = set(config.get("layer_types") or ())
    if kinds:
        return {kind: config["sliding_window"] if kind == "sliding_attention" else None for kind in sorted(kinds)}
    # A stray key of another family's is ignored by the model, so by us.
    declared = "sliding_window" in type(model.config.get_text_config())().to_dict()
    return {"all layers": config.get("sliding_window") if declared else None}


def rope_limit(model: PreTrainedModel) -> int | None:
    """Positions beyond which earlier keys would have to be rotated anew; None if they never must."""
    config = text_config(model)
    found = config.get("rope_parameters") or {}
    kinds = {found.get("rope_type")} | {part.get("rope_type") for part in found.values() if isinstance(part, dict)}
    if not kinds & GROWING_ROPES:
        return None
    limit: int = found.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return limit


def attention_code(config: Any) -> str | None:
    """The attention that computes this model exactly; None leaves the choice to transformers.

    Fused kernels leave out the soft cap of Gemma 2's attention scores, and transformers 5.17 would take one.
    """
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping")
    return "eager" if capped else None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of decoder layers: the first module list as long as the configuration says."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():  # not the whole model's: a vision tower may be as deep
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {num_layers} layers to tap; it is not a known decoder")


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The same model cut short behind `count` layers, norm and lm_head kept; it shares all of its modules.

    Raises ValueError for a number of layers that leaves none, or none out.
    """
    layers = decoder_layers(model)
    if not 1 <= count < len(layers):
        raise ValueError(f"decode.exit_layers: {count} given, 1 to {len(layers) - 1} of the target's layers is allowed")
    path = next(name for name, module in model.named_modules() if module is layers).split(".")
    short = node = own_children(model)
    for name in path[:-1]:
        node._modules[name] = own_children(node.get_submodule(name))
        node = node.get_submodule(name)
    node._modules[path[-1]] = layers[:count]
    return short


def own_children(module: Any) -> Any:
    """A copy of a module that shares all that it has, but whose children can be exchanged without touching it."""
    copied = copy.copy(module)
    # Its own tables of children, and of hooks; what is in them stays shared.
    copied.__dict__.update({name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)})
    return copied
