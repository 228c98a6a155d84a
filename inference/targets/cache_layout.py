"""What each layer of a model caches: keys and values in slots, recurrent states, both, or neither."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from headstart.inference.core.cache import HoldsTarget, KVCache, SlotLayer
from headstart.inference.core.cache_memory import LayerShape
from headstart.inference.core.recurrent import LayerStates, OwnCaches, RecurrentStates, states_of

# A sliding window is part of the mask here, so its layers keep every position.
SLOTS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
SLOTS_AND_STATES = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
NO_CACHE = "DummyLayer"  # a layer without attention, or with another's keys; older transformers lack the class


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
    def token_elements(self) -> int:
        """Numbers in the slots of one token."""
        return sum(heads * size for shape in self.shapes for heads, size in shape)

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
