"""Operations that a compiled layer leaves to Python: products with packed weights, and attention to the cache.

While a layer is traced, `apart` notes such an operation and puts one call of `headstart::apart` into the graph. When
the compiled layer runs, that call finds the operation of the layer at hand.
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
    """A layer that computes something that its graph would not hold."""


@dataclass
class Trace:
    """The operations that a layer's trace has met. It also stands in for the layer's cache, a target's or a head's."""

    calls: list[tuple[nn.Module | None, Callable[[Any], Operation]]] = field(default_factory=list)
    copies: dict[int, Any] = field(default_factory=dict)  # of what layers share, by the original's id
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
            run = HERE.run
            assert run is not None
            return run.cache.attend(layer, query, key, value, run.mask).contiguous()

        return apart(None, lambda _: attend, [query, key, value], query.shape)


@dataclass
class Run:
    """A pass through a compiled layer."""

    calls: list[Operation]
    cache: Any
    mask: Any


class Here(threading.local):
    """What this thread does at the moment."""

    trace: Trace | None = None
    run: Run | None = None


HERE = Here()
LIBRARY = Library("headstart", "DEF")
LIBRARY.define("apart(Tensor[] inputs, int number, SymInt[] size) -> Tensor")


def carry_out(inputs: list[Tensor], number: int, size: Sequence[int]) -> Tensor:
    run = HERE.run
    assert run is not None
    return run.calls[number](*inputs)


LIBRARY.impl("apart", carry_out, "CPU")
LIBRARY.impl("apart", lambda inputs, number, size: inputs[0].new_empty(size), "Meta")


def apart(
    owner: nn.Module | None, operation: Callable[[Any], Operation], inputs: list[Tensor], size: Sequence[int]
) -> Tensor:
    """Note, while a layer is traced, the operation that `operation(owner)` makes; returns a stand-in for its result.

    Layers of the same form have their own owners; None is the layer itself. The result has the first input's dtype.
    """
    trace = HERE.trace
    assert trace is not None
    trace.calls.append((owner, operation))
    return torch.ops.headstart.apart(inputs, len(trace.calls) - 1, size)
