"""A head as the ranks of a launch train it together: whole on every rank, or in slices (FSDP2); zero.py has ZeRO."""

import copy
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from headstart.heads.files import Tensors
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.unrolled import HeadInTraining, UnrollScores
from headstart.trainers.parallel.muon import Muon

BETAS = (0.9, 0.95)  # AdamW's decay per step of the gradient's mean and mean square
BY_TOKEN = ("embed_tokens", "lm_head", "markov_head.markov_w")  # prefixes of the matrices that have a row per token


class HeadOnRanks(ABC):
    """An unrolled head and its optimizers, trained by all ranks together.

    Every rank must call each method. The loss is a sum over the ranks, so gradients are summed too, not averaged.
    """

    unrolled: HeadInTraining  # this rank's copy or slices
    module: nn.Module  # runs the forward of `unrolled` on this rank's samples
    optimizers: list[Optimizer]  # their learning rates are the ones in effect

    def __init__(self, accelerator: Accelerator, section: TrainSection) -> None:
        self.accelerator, self.clip_norm = accelerator, section.clip_norm

    def set_learning_rates(self, section: TrainSection, step: int) -> float:
        """Set the rates of a step; returns their ratio to the peak rates."""
        return set_learning_rates(self.optimizers, section, step)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        """Encloses forward and backward of one micro-batch; the gradient is complete after the last one."""
        return nullcontext()

    def forward(self, *inputs: object) -> UnrollScores:
        """`HeadInTraining.forward` on this rank's samples."""
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of the loss."""
        self.accelerator.backward(loss * self.accelerator.num_processes)  # undoes the averaging over ranks

    def update(self) -> float:
        """Clip the gradient, step if it is finite, and clear it; returns its norm before clipping."""
        return clip_and_step(self.unrolled, self.optimizers, self.clip_norm)

    @abstractmethod
    def whole(self) -> HeadInTraining | None:
        """The head with all its weights on the main rank, None on the others; valid until the next update."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """Every optimizer tensor by name, such as `fc.weight.exp_avg`, on the main rank's CPU; empty on the others."""
        state = named_optimizer_state(self.unrolled.head, self.optimizers)
        return copy_to_main_cpu(self.accelerator, ((name, full_tensor(value)) for name, value in state))

    def restore_optimizers(self, state: dict[str, Tensor]) -> None:
        """Load what `optimizer_state` returned, under any number of ranks and any launch."""
        set_optimizer_state(self.unrolled.head, self.optimizers, state)

    def target_state(self) -> Tensors:
        """The weights that training changes in the target, and their optimizer state, named NAME and NAME.exp_avg."""
        return {}

    def restore_target(self, state: Tensors) -> None:
        """Load what `target_state` returned."""
        assert not state


class ReplicatedHead(HeadOnRanks):
    """One process, or data parallel: every rank holds the whole head."""

    def __init__(self, accelerator: Accelerator, unrolled: HeadInTraining, section: TrainSection) -> None:
        super().__init__(accelerator, section)
        self.unrolled = unrolled
        self.optimizers = build_optimizers(unrolled.head, section)
        self.module = accelerator.prepare(unrolled)
        if isinstance(self.module, DistributedDataParallel):
            # The only buffers are the target's and never change; broadcasting them each step would cost gigabytes.
            self.module.broadcast_buffers = False

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else self.accelerator.no_sync(self.module)

    def whole(self) -> HeadInTraining | None:
        return self.unrolled if self.accelerator.is_main_process else None


class FullyShardedHead(HeadOnRanks):
    """FSDP2: every rank holds a slice of each weight and of its optimizer state, and every machine has all slices.

    So weights are gathered within a machine, and only gradients cross the network (HSDP: Zhao et al. 2023, PyTorch
    FSDP, arXiv 2304.11277, section 3.2.2). The head is a single FSDP unit, whole while it computes: the unroll runs its
    one layer many times, and the loss takes gradients of norm and lm_head during the forward pass. accelerate shards on
    GPUs only, so it is done here.
    """

    def __init__(self, accelerator: Accelerator, unrolled: HeadInTraining, section: TrainSection) -> None:
        super().__init__(accelerator, section)
        self.whole_head, self.unrolled = whole_and_sharded(accelerator, unrolled)
        ranks, slices = accelerator.num_processes, ranks_of_a_machine(accelerator)
        shape, names = (
            ((ranks,), ("shard",)) if slices == ranks else ((ranks // slices, slices), ("replicate", "shard"))
        )
        fully_shard(self.unrolled, mesh=init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names))
        self.module = self.unrolled
        self.optimizers = build_optimizers(self.unrolled.head, section)

    def whole(self) -> HeadInTraining | None:
        named = self.unrolled.head.named_parameters()
        return copy_weights(((name, full_tensor(parameter)) for name, parameter in named), self.whole_head)


def ranks_of_a_machine(accelerator: Accelerator) -> int:
    """The ranks that share slices: those of each machine, or all, if machines differ or have a rank each."""
    ranks = accelerator.num_processes
    found = set(gather_object([int(os.environ.get("LOCAL_WORLD_SIZE", ranks))]))
    return min(found) if len(found) == 1 and found != {1} else ranks


def clip_and_step(module: nn.Module, optimizers: list[Optimizer], clip_norm: float) -> float:
    """Clip the gradient, step if it is finite, and clear it; returns its norm over all ranks before clipping."""
    norm = float(full_tensor(nn.utils.clip_grad_norm_(module.parameters(), clip_norm)))
    for optimizer in optimizers:
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
    return norm


def whole_and_sharded(
    accelerator: Accelerator, unrolled: HeadInTraining
) -> tuple[HeadInTraining | None, HeadInTraining]:
    """The head that stays whole, on the main rank only, and the one to shard; both use the same buffers."""
    if not accelerator.is_main_process:
        return None, unrolled
    shared = [*unrolled.buffers(), unrolled.teacher]
    return unrolled, copy.deepcopy(unrolled, {id(each): each for each in shared})


@torch.no_grad()
def copy_weights(weights: Iterator[tuple[str, Tensor]], whole: HeadInTraining | None) -> HeadInTraining | None:
    """Copy gathered weights into the whole head; ranks without one consume the iterator too, as gathering needs all."""
    parameters = {} if whole is None else dict(whole.head.named_parameters())
    for name, weight in weights:
        if name in parameters:
            parameters[name].copy_(weight)
    return whole


def copy_to_main_cpu(accelerator: Accelerator, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Gather the tensors one after another, on every rank; only the main rank keeps them, on its CPU."""
    kept = {}
    for name, tensor in tensors:
        if accelerator.is_main_process:
            kept[name] = tensor.detach().to("cpu", copy=True)  # a copy: under ZeRO many parameters share one step count
    return kept


def full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build_optimizers(head: nn.Module, section: TrainSection) -> list[Optimizer]:
    """AdamW for everything, or Muon for the inner matrices and AdamW for norms, biases and what has a row per token."""
    named = [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]
    inner = [p for name, p in named if p.ndim == 2 and not name.startswith(BY_TOKEN)]
    matrices = inner if section.optimizer == "muon" else []
    matrix_ids = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in matrix_ids]
    optimizers: list[Optimizer] = [torch.optim.AdamW(rest, lr=section.learning_rate, betas=BETAS, weight_decay=0.0)]
    if matrices:
        optimizers.append(Muon(matrices, lr=section.muon_learning_rate, weight_decay=0.0))
    return optimizers


def set_learning_rates(optimizers: list[Optimizer], section: TrainSection, step: int) -> float:
    """Linear warm-up, then a cosine down to zero: a function of the step alone. Returns the ratio to the peak rates."""
    warmup = min(1.0, (step + 1) / max(section.warmup_steps, 1))
    done = max(step - section.warmup_steps, 0) / max(section.steps - section.warmup_steps, 1)
    factor = warmup * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    for optimizer, peak in zip(optimizers, (section.learning_rate, section.muon_learning_rate), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * factor
    return factor


def named_optimizer_state(module: nn.Module, optimizers: list[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the optimizers' state, named PARAMETER.KEY."""
    for optimizer in optimizers:
        for name, parameter in module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{name}.{key}", torch.as_tensor(value)


def set_optimizer_state(module: nn.Module, optimizers: list[Optimizer], state: dict[str, Tensor]) -> None:
    """The inverse of `named_optimizer_state`; a tensor of its parameter's shape is sharded like the parameter."""
    owners = {
        each: optimizer for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]
    }
    for name, parameter in module.named_parameters():
        own: dict[str, Any] = {}
        for key, value in state_of_parameter(name, state).items():
            if value.shape != parameter.shape:
                own[key] = value.clone()  # the step count, which torch keeps on the CPU
            elif isinstance(parameter, DTensor):
                # Every rank has read the same file, so nothing needs to be sent.
                whole = value.to(parameter.device)
                own[key] = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            else:
                own[key] = value.to(parameter.device, copy=True)
        if own:
            owners[parameter].state[parameter] = own


def state_of_parameter(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries of one parameter by key: `exp_avg` for `fc.weight.exp_avg`."""
    return {key.rpartition(".")[2]: value for key, value in state.items() if key.rpartition(".")[0] == name}
