"""Operations that a compiled layer leaves to Python: products with packed weights, and attention to the cache.

While a layer is traced, `outside_graph` notes such an operation and puts a call of `headstart::outside_graph` into the
graph. When the compiled layer runs, that call finds the operation of the layer at hand.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

Operation = Callable[..., Tensor]  # from tensors to a contiguous one


class CannotTrace(Exception):
    """A layer with an effect that tracing would lose."""


@dataclass
class LayerTrace:
    """The operations that a layer's trace has met. It also stands in for the layer's cache, a target's or a head's."""

    calls: list[tuple[nn.Module | None, Callable[[Any], Operation]]] = field(default_factory=list)
    copies: dict[int, Any] = field(default_factory=dict)  # of objects that layers share, by the original's id
    updated: tuple[Tensor, Tensor, int] | None = None  # keys and values that no attention has read yet

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.updated is not None:
            raise CannotTrace("keys that no attention of ours reads")
        self.updated = key, value, layer
        return key, value

    def take_updated(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Check that these are the keys and values that went through this layer's cache, unchanged."""
        before, self.updated = self.updated, None
        if before is None or before[0] is not key or before[1] is not value or before[2] != layer:
            raise CannotTrace("attention to other keys than the cache's")

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: None) -> Tensor:
        """A head's attention to its slots. [batch, heads, tokens, size]"""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            call = CURRENT.call
            assert call is not None
            return call.cache.attend(layer, query, key, value, call.mask).contiguous()

        return outside_graph(None, lambda _: attend, [query, key, value], query.shape)


@dataclass
class Call:
    """A call of a compiled layer."""

    operations: list[Operation]
    cache: Any
    mask: Any


class Current(threading.local):
    """What this thread traces or runs at the moment."""

    trace: LayerTrace | None = None
    call: Call | None = None


CURRENT = Current()
LIBRARY = Library("headstart", "DEF")
LIBRARY.define("outside_graph(Tensor[] inputs, int number, SymInt[] size) -> Tensor")


def run_operation(inputs: list[Tensor], number: int, size: Sequence[int]) -> Tensor:
    call = CURRENT.call
    assert call is not None
    return call.operations[number](*inputs)


LIBRARY.impl("outside_graph", run_operation, "CPU")
LIBRARY.impl("outside_graph", lambda inputs, number, size: inputs[0].new_empty(size), "Meta")


def outside_graph(
    owner: nn.Module | None, operation: Callable[[Any], Operation], inputs: list[Tensor], size: Sequence[int]
) -> Tensor:
    """Note, while a layer is traced, the operation that `operation(owner)` makes; returns a stand-in for its result.

    Layers of the same form have their own owners; None is the layer itself. The result has the first input's dtype.
    """
    trace = CURRENT.trace
    assert trace is not None
    trace.calls.append((owner, operation))
    return torch.ops.headstart.outside_graph(inputs, len(trace.calls) - 1, size)


def is_tracing() -> bool:
    """Whether this thread traces a layer."""
    return CURRENT.trace is not None


def attention_outside_graph(
    attend: Callable[..., tuple[Tensor, None]], module: Any, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Leave a traced layer's attention to its cache to Python; returns a stand-in, [batch, seq, num_heads, value_dim].

    The compiled layer will call attend(module, query, keys, values, mask) with the cache's keys and values.
    """
    assert CURRENT.trace is not None
    CURRENT.trace.take_updated(key, value, module.layer_idx)

    def operation(module: Any) -> Operation:
        def attend_to_cache(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            call = CURRENT.call
            assert call is not None
            keys, values = call.cache.update(key, value, module.layer_idx)
            return attend(module, query, keys, values, call.mask)[0].contiguous()

        return attend_to_cache

    size = query.shape[0], query.shape[2], query.shape[1], value.shape[3]
    return outside_graph(module, operation, [query, key, value], size)
