"""The head as the ranks of a launch hold it, and the way back to plain tensors by parameter name.

Here is the plain case, where every rank holds all of it; fsdp2.py and zero.py share the weights out.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from recipes.schema import TrainSection
from trainers.objective import UnrolledHead, UnrollScores
from trainers.optimizers import build_optimizers, set_learning_rates


class HeadOnRanks(ABC):
    """An unrolled head under training by all ranks together, with its optimizers.

    Its methods are for all ranks at once. Losses are parts of a sum over all ranks: gradients are added up.
    """

    unrolled: UnrolledHead  # what this rank holds of it
    optimizers: list[Optimizer]  # whose learning rates count

    def __init__(self, accelerator: Accelerator, section: TrainSection) -> None:
        self.accelerator, self.clip_norm = accelerator, section.clip_norm

    def set_learning_rates(self, section: TrainSection, step: int) -> float:
        """As the step wants them; returns the factor on the peak rates."""
        return set_learning_rates(self.optimizers, section, step)

    @abstractmethod
    def forward(self, *inputs: object) -> UnrollScores:
        """What `UnrolledHead.forward` gives for this rank's share."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's part of the loss."""

    @abstractmethod
    def update(self, scale: float = 1.0) -> float:
        """Undo the loss's scale, clip the gradient, step and forget it; returns its norm before clipping.

        Where the norm is not finite the weights stay as they are.
        """

    @abstractmethod
    def whole(self) -> UnrolledHead | None:
        """The head with all its weights on the main rank, None on others; valid until the next update."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The optimizers' state as `fc.weight.exp_avg`, on the main rank's CPU; empty on others."""

    @abstractmethod
    def restore(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave, however many ranks there were and however they shared."""

    def part(self, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a part of the batch; the gradient is complete after the last one."""
        return nullcontext()


class ReplicatedHead(HeadOnRanks):
    """One process, or data parallel: every rank holds everything."""

    def __init__(self, accelerator: Accelerator, unrolled: UnrolledHead, section: TrainSection) -> None:
        super().__init__(accelerator, section)
        self.unrolled = unrolled
        self.optimizers = build_optimizers(unrolled.head, section)
        self.module, *self.prepared = accelerator.prepare(unrolled, *self.optimizers)
        if isinstance(self.module, DistributedDataParallel):
            # The only buffers are the target's and never change; sending them at each step would cost gigabytes.
            self.module.broadcast_buffers = False

    def forward(self, *inputs: object) -> UnrollScores:
        scores: UnrollScores = self.module(*inputs)
        return scores

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss * self.accelerator.num_processes)  # undoes the averaging over ranks

    def update(self, scale: float = 1.0) -> float:
        norm = unscale_and_clip(self.unrolled, scale, self.clip_norm)
        step_if_finite(self.prepared, norm)
        return norm

    def whole(self) -> UnrolledHead | None:
        return self.unrolled if self.accelerator.is_main_process else None

    def state(self) -> dict[str, Tensor]:
        state = named_state(self.unrolled.head, self.optimizers)
        return {name: value.detach().cpu() for name, value in state} if self.accelerator.is_main_process else {}

    def restore(self, state: dict[str, Tensor]) -> None:
        put_state(self.unrolled.head, self.optimizers, state)

    def part(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.accelerator.no_sync(self.module)


def unscale_and_clip(module: nn.Module, scale: float, clip_norm: float) -> float:
    """The gradient's norm over all ranks, before clipping."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if scale != 1.0:
        torch._foreach_div_(gradients, scale)
    return float(gathered(nn.utils.clip_grad_norm_(module.parameters(), clip_norm)))


def step_if_finite(optimizers: list[Optimizer], norm: float) -> None:
    for optimizer in optimizers:
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()


def spare_and_shared(accelerator: Accelerator, unrolled: UnrolledHead) -> tuple[UnrolledHead | None, UnrolledHead]:
    """What stays whole, on the main rank alone, and what is to be shared out; they have the same buffers."""
    if not accelerator.is_main_process:
        return None, unrolled
    common = [*unrolled.buffers(), unrolled.teacher]
    return unrolled, copy.deepcopy(unrolled, {id(each): each for each in common})


@torch.no_grad()
def filled(spare: UnrolledHead | None, weights: Iterator[tuple[str, Tensor]]) -> UnrolledHead | None:
    """Take the weights into the spare; without one they are gathered all the same, as every rank must."""
    goals = {} if spare is None else dict(spare.head.named_parameters())
    for name, weight in weights:
        if name in goals:
            goals[name].copy_(weight)
    return spare


def on_main_rank(accelerator: Accelerator, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Gather one tensor after the other, on all ranks; the main rank's CPU keeps them."""
    kept = {}
    for name, tensor in tensors:
        if accelerator.is_main_process:
            kept[name] = tensor.detach().to("cpu", copy=True)  # ZeRO has one number of steps for many parameters
    return kept


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_state(head: nn.Module, optimizers: list[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the optimizers' state as (parameter.what, tensor)."""
    for optimizer in optimizers:
        for name, parameter in head.named_parameters():
            for what, value in optimizer.state.get(parameter, {}).items():
                yield f"{name}.{what}", torch.as_tensor(value)


def put_state(head: nn.Module, optimizers: list[Optimizer], state: dict[str, Tensor]) -> None:
    """The inverse of `named_state`; what has its parameter's shape is shared out as that is."""
    owners = {parameter: optimizer for optimizer in optimizers for parameter in held(optimizer)}
    for name, parameter in head.named_parameters():
        own: dict[str, Any] = {}
        for what, value in state_of(name, state).items():
            if value.shape != parameter.shape:
                own[what] = value.clone()  # the number of steps, which torch keeps on the CPU
            elif isinstance(parameter, DTensor):
                # Every rank has read the same file, so nothing needs to be sent.
                whole = value.to(parameter.device)
                own[what] = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            else:
                own[what] = value.to(parameter.device, copy=True)
        if own:
            owners[parameter].state[parameter] = own


def held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What belongs to a parameter: `exp_avg` for `fc.weight.exp_avg`."""
    return {key.rpartition(".")[2]: value for key, value in state.items() if key.rpartition(".")[0] == name}
