"""The optimizers of a head and their learning-rate schedules."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from headstart.recipes.schema import TrainSection

# The learning rate over its peak, as a function of the share of the steps after the warm-up that are done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "linear": lambda share: 1 - share,
    "constant": lambda share: 1.0,
}
BY_TOKEN = (
    "embed_tokens",
    "lm_head",
    "markov_head.markov_w",
)  # how the names of matrices begin that have a row per token


def build_optimizers(head: nn.Module, section: TrainSection) -> list[Optimizer]:
    """AdamW for everything, or Muon for the inner matrices and AdamW for norms, biases and what has a row per token."""
    named = [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]
    inner = [p for name, p in named if p.ndim == 2 and not name.startswith(BY_TOKEN)]
    matrices = inner if section.optimizer == "muon" else []
    matrix_ids = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in matrix_ids]
    optimizers: list[Optimizer] = [
        torch.optim.AdamW(rest, lr=section.learning_rate, betas=section.betas, weight_decay=section.weight_decay)
    ]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=section.muon_learning_rate, weight_decay=section.weight_decay))
    return optimizers


def set_learning_rates(optimizers: list[Optimizer], section: TrainSection, step: int) -> float:
    """Linear warm-up, then `train.schedule`: a function of the step alone. Returns the ratio to the peak rates."""
    warmup = min(1.0, (step + 1) / max(section.warmup_steps, 1))
    done = max(step - section.warmup_steps, 0) / max(section.steps - section.warmup_steps, 1)
    factor = warmup * SCHEDULES[section.schedule](min(done, 1.0))
    for optimizer, peak in zip(optimizers, (section.learning_rate, section.muon_learning_rate), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * factor
    return factor
