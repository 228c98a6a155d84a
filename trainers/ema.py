"""An exponential moving average of a head's weights, which fluctuates less than the weights of any one step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingAverage:
    """Averages the trained parameters of a module, elementwise and in their own number format.

    Each step keeps `decay` of the average, and less during the first steps so that the initial weights fade quickly.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self.decay = decay
        self.tensors = {name: each.detach().clone() for name, each in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step to the average; steps are counted from 0."""
        keep = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.tensors.values()), list(self.parameters.values()), 1 - keep)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module holds the average inside the context, and its own weights again afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            own = parameter.clone()
            parameter.copy_(self.tensors[name])
            self.tensors[name].copy_(own)

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        for name, own in self.tensors.items():
            own.copy_(tensors[name])
