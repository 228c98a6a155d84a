"""torch.compile for decoder layers, only in steps with fixed shapes; elsewhere every new shape would recompile.

Layers are compiled one at a time. The layers of a model share the compiler's result, so that it takes seconds and not
minutes. The cache is left out, as every layer writes to a different place in it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

SHAPES = 16  # trees, batches and capacities that a layer may be compiled for; beyond these it runs uncompiled
Result = TypeVar("Result")


class CompiledLayers:
    """Layers, possibly none, that run compiled inside functions from `within` and uncompiled elsewhere."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(dict.fromkeys(layers))  # an early exit shares its target's layers
        self.forwards = [torch.compile(layer.forward, dynamic=False) for layer in self.layers]
        # The default is 8, and a layer's number, its only difference from the others, counts as a shape.
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, SHAPES * len(self.layers))
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, SHAPES * len(self.layers))

    def within(self, function: Callable[..., Result]) -> Callable[..., Result]:
        if not self.layers:
            return function

        def with_compiled_layers(*inputs: Any) -> Result:
            own = [vars(layer).get("forward") for layer in self.layers]  # accelerate may have replaced it
            for layer, forward in zip(self.layers, self.forwards, strict=True):
                layer.forward = forward
            try:
                return function(*inputs)
            finally:
                for layer, before in zip(self.layers, own, strict=True):
                    del layer.forward
                    if before is not None:
                        layer.forward = before

        return with_compiled_layers
