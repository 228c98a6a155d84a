"""torch.compile for decoder layers, in steps of fixed shapes alone; elsewhere each new shape would be compiled anew.

A layer at a time: layers of one model share what the compiler made, so that it takes seconds and not minutes. The cache
stays outside, as every layer writes to another place in it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

SHAPES = 16  # of trees, batches and capacities that one layer may be compiled for; then it runs as it is
Result = TypeVar("Result")


class CompiledLayers:
    """Layers, maybe none, that run compiled `within` some function, and as they are elsewhere."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(dict.fromkeys(layers))  # an early exit's are its target's own
        self.forwards = [torch.compile(layer.forward, dynamic=False) for layer in self.layers]
        # 8 by default, where a layer's number, its only difference from the others, counts as a shape.
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, SHAPES * len(self.layers))
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, SHAPES * len(self.layers))

    def within(self, function: Callable[..., Result]) -> Callable[..., Result]:
        if not self.layers:
            return function

        def with_compiled_layers(*inputs: Any) -> Result:
            own = [vars(layer).get("forward") for layer in self.layers]  # accelerate may have put another one there
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
