"""The facts about a model's architecture that decoding needs: its masks, and what each layer caches."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from headstart.heads.target_config import TargetConfig
from headstart.inference.core.cache import HoldsTarget, KVCache, SlotLayer
from headstart.inference.core.cache_memory import LayerShape
from headstart.inference.core.recurrent import LayerStates, OwnCaches, RecurrentStates, states_of
from headstart.inference.core.tree import Chunk, Window

UNMASKED = frozenset({"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"})  # layers without attention
GROWING_ROPES = frozenset({"dynamic", "longrope"})  # all frequencies depend on the longest position of a forward pass
# A sliding window is part of the mask here, so its layers keep every position.
SLOTS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
SLOTS_AND_STATES = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
NO_CACHE = "DummyLayer"  # a layer without attention, or with another's keys; older transformers lack the class


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


class SlotAndStateLayer(LinearAttentionLayer, SlotLayer):  # type: ignore[override]  # as transformers' own
    """A layer with attention and recurrent states: keys and values in slots, the states as transformers keeps them."""

    is_compileable = False

    def __init__(self, cache: HoldsTarget, layer: int, empty: Any) -> None:
        """`empty` is transformers' own layer, before its first token."""
        SlotLayer.__init__(self, cache, layer)
        self.__dict__.update({name: copy.copy(value) for name, value in vars(empty).items() if isinstance(value, dict)})
        self.record_past, self.device, self.dtype = False, None, None


@dataclass(frozen=True)
class CacheLayout:
    """What the layers of a model cache; a layer's shape is empty if it has no slots."""

    shapes: tuple[LayerShape, ...]
    devices: list[torch.device]
    empty: tuple[Any, ...] | None  # transformers' own layers before their first token; None: a cache of its own class
    state_bytes: int = 0  # of one row's states

    @property
    def is_recurrent(self) -> bool:
        return self.empty is None or any(isinstance(layer, LinearAttentionLayer) for layer in self.empty)

    @property
    def has_indexers(self) -> bool:
        """Whether sparse attention caches more of a token than a key and a value."""
        return any(len(shape) > 2 for shape in self.shapes)

    def new_recurrent_states(self, rows: int) -> RecurrentStates | None:
        """The recurrent states of rows; None if the model has none."""
        if self.empty is None:
            return OwnCaches(rows)
        return LayerStates(rows) if self.is_recurrent else None

    def layers(self, cache: KVCache) -> list[Any]:
        """The layers that the model sees in a cache."""
        return [self._layer(cache, number, empty) for number, empty in enumerate(self.empty or ())]

    def _layer(self, cache: KVCache, number: int, empty: Any) -> Any:
        if isinstance(empty, SLOTS_AND_STATES):
            return SlotAndStateLayer(cache, number, empty)
        return SlotLayer(cache, number) if isinstance(empty, SLOTS) else copy.deepcopy(empty)

    def without_slots(self) -> "CacheLayout":
        """The layout of a model that is run with a cache of its own."""
        return CacheLayout(((),) * len(self.shapes), self.devices, None)


@torch.inference_mode()
def cache_layout(model: PreTrainedModel, num_layers: int) -> CacheLayout:
    """What a model caches, found with one token; for layers of an unknown class, a cache of the model's own."""
    own_cache = CacheLayout(((),) * num_layers, [model.device] * num_layers, None)
    try:
        cache = DynamicCache(config=model.config)
        empty = copy.deepcopy(cache.layers)
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        returned = model(input_ids=token, past_key_values=cache, use_cache=True).past_key_values
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
        return own_cache  # the check of its passes decides whether it decodes at all
    if returned is not cache or not all(map(is_known, empty)) or windows_by_slot(model):
        return own_cache
    shapes, devices, state_bytes = [], [], 0
    for layer in cache.layers:
        known = slots_of(layer)
        if known and len({(part.shape[0], part.shape[2]) for part in known}) > 1:
            return own_cache
        shapes.append(tuple((part.shape[1], part.shape[3]) for part in known))
        states = [*states_of(layer).values()]
        state_bytes += sum(state.nbytes for state in states)
        devices.append(next((part.device for part in (*known, *states)), model.device))
    return CacheLayout(tuple(shapes), devices, tuple(empty), state_bytes)


def slots_of(layer: Any) -> list[torch.Tensor]:
    """The tensors of a cache's layer that have an axis of tokens: [rows, heads, tokens, size] each."""
    parts = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    parts = [part if part is None or part.ndim == 4 else part.unsqueeze(1) for part in parts]
    return [part for part in parts if part is not None and part.numel()]


def windows_by_slot(model: PreTrainedModel) -> bool:
    """Whether the model computes windows from slot numbers by a mask of its own, as GPT-Neo does."""
    squares = [mask for mask in model.buffers() if mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[2] > 1]
    return any(not mask.equal(torch.ones_like(mask).tril()) for mask in squares if mask.shape[2] == mask.shape[3])


def is_known(layer: Any) -> bool:
    return type(layer) in (*SLOTS, *SLOTS_AND_STATES, LinearAttentionLayer) or type(layer).__name__ == NO_CACHE
