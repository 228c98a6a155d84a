"""The facts about a model's architecture that decoding needs, read from its configuration."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headstart.heads.target_config import TargetConfig
from headstart.inference.core.tree import Chunk, Window

UNMASKED = frozenset({"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"})  # layers without attention
GROWING_ROPES = frozenset({"dynamic", "longrope"})  # all frequencies depend on the longest position of a forward pass


def text_config(model: PreTrainedModel) -> dict[str, Any]:
    """The language model's section of the configuration; multimodal models have others."""
    return model.config.get_text_config().to_dict()


def attention_windows(model: PreTrainedModel) -> tuple[dict[str, Window | None], tuple[str, ...]]:
    """The window of each type of attention, None for full attention, and the types of layers that take no mask.

    Models with several types of layers take a dict of masks with these keys; other models take a single mask.
    """
    config = model.config.get_text_config()
    kinds = sorted(set(config.layer_types or ())) if hasattr(config, "layer_types") else []
    if not kinds:
        # A model ignores a sliding_window key that its family does not declare, so we must too.
        declared = "sliding_window" in type(config)().to_dict()
        return {"all layers": text_config(model).get("sliding_window") if declared else None}, ()
    unmasked = tuple(kind for kind in kinds if kind in UNMASKED)
    return {kind: window_of(kind, config) for kind in kinds if kind not in UNMASKED}, unmasked


def window_of(kind: str, config: Any) -> Window | None:
    """The window of a type of attention."""
    if "sliding" in kind:
        return int(config.sliding_window)
    return Chunk(config.attention_chunk_size) if kind == "chunked_attention" else None


def position_limit(model: PreTrainedModel) -> int | None:
    """The number of positions up to which one pass and several compute the same; None for no limit.

    After it, some RoPEs would rotate cached keys differently, and Llama 4 scales queries by their index in the pass.
    """
    config = text_config(model)
    if config.get("attn_temperature_tuning"):
        return int(config["floor_scale"])
    rope = config.get("rope_parameters") or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if not kinds & GROWING_ROPES:
        return None
    return rope.get("original_max_position_embeddings") or config["max_position_embeddings"]


def attention_code(config: Any) -> str | None:
    """The attention implementation that computes this model exactly; None leaves the choice to transformers.

    Fused kernels ignore Gemma 2's soft cap of attention scores, yet transformers 5.17 would choose one.
    """
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping")
    return "eager" if capped else None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers: the first module list whose length is the configuration's number of layers."""
    num_layers = TargetConfig.from_dict(model.config.to_dict()).num_layers
    for part in (model.get_decoder(), model):  # first the decoder alone: a vision tower may have as many layers
        for module in part.modules():
            if isinstance(module, nn.ModuleList) and len(module) == num_layers:
                return module
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    if lists:  # of a model that runs its layers more than once
        return max(lists, key=len)
    raise ValueError(
        f"target.path: a {type(model).__name__} given, which has no list of {num_layers} decoder layers; choose a "
        f"causal language model of transformers"
    )
