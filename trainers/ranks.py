"""The head as all ranks of a launch train it: each holds all of it, and gradients are added up over the ranks."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor

from recipes.schema import TrainSection
from trainers.objective import UnrolledHead, UnrollScores
from trainers.optimizers import build_optimizers, optimizer_state, restore_optimizer_state


def start_ranks() -> Accelerator:
    """The ranks as `accelerate launch` asked for them; number formats and accumulation are the recipe's, not its."""
    # The only buffers are the target's and the same everywhere; sending them at each step would cost gigabytes.
    return Accelerator(mixed_precision="no", kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])


class HeadOnRanks:
    """An unrolled head with its optimizers. Its methods are for all ranks at once."""

    def __init__(self, accelerator: Accelerator, unrolled: UnrolledHead, section: TrainSection) -> None:
        self.accelerator, self.unrolled, self.clip_norm = accelerator, unrolled, section.clip_norm
        self.optimizers = build_optimizers(unrolled.head, section)
        self._prepared, *self._stepped = accelerator.prepare(unrolled, *self.optimizers)

    def forward(self, *inputs: Any) -> UnrollScores:
        """What `UnrolledHead.forward` gives for this rank's share."""
        scores: UnrollScores = self._prepared(*inputs)
        return scores

    def part(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a part of the share; the gradient is complete after the last one."""
        return nullcontext() if last else self.accelerator.no_sync(self._prepared)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's part of the loss, which is a sum over all ranks."""
        self.accelerator.backward(loss * self.accelerator.num_processes)  # undoes data-parallel averaging

    def update(self, scale: float = 1.0) -> float:
        """Undo the loss's scale, clip the gradient, step and forget it; returns its norm before clipping.

        Where the norm is not finite the weights stay as they are.
        """
        parameters = [each for each in self._prepared.parameters() if each.grad is not None]
        if scale != 1.0:
            torch._foreach_div_([each.grad for each in parameters], scale)
        norm = float(self.accelerator.clip_grad_norm_(parameters, self.clip_norm))
        for optimizer in self._stepped:
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        return norm

    def whole(self) -> UnrolledHead | None:
        """The head with all its weights on the main rank, None on others; valid until the next update."""
        return self.unrolled if self.accelerator.is_main_process else None

    def state(self) -> dict[str, Tensor]:
        """The optimizers' state as `fc.weight.exp_avg`, on the main rank; empty on others."""
        return optimizer_state(self.unrolled.head, self.optimizers) if self.accelerator.is_main_process else {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave, however many ranks there were."""
        restore_optimizer_state(self.unrolled.head, self.optimizers, state)
