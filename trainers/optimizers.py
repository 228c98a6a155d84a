"""The optimizers of a head: their learning rates, and their state as plain tensors by parameter name."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from headstart.recipes.schema import TrainSection

BETAS = (0.9, 0.95)  # AdamW's decay per step of the gradient's mean and mean square
BY_TOKEN = ("embed_tokens", "lm_head", "markov_head.markov_w")  # prefixes of the matrices that have a row per token


def build_optimizers(head: nn.Module, section: TrainSection) -> list[Optimizer]:
    """AdamW for everything, or Muon for the inner matrices and AdamW for norms, biases and what has a row per token."""
    named = [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]
    inner = [p for name, p in named if p.ndim == 2 and not name.startswith(BY_TOKEN)]
    matrices = inner if section.optimizer == "muon" else []
    matrix_ids = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in matrix_ids]
    optimizers: list[Optimizer] = [torch.optim.AdamW(rest, lr=section.learning_rate, betas=BETAS, weight_decay=0.0)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=section.muon_learning_rate, weight_decay=0.0))
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
