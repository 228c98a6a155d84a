"""Medusa heads and their target, trained together in one process."""

import torch
from accelerate import Accelerator

from headstart.heads.files import Tensors
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.medusa2 import JointHead
from headstart.trainers.parallel.head_on_ranks import (
    BETAS,
    ReplicatedHead,
    clip_and_step,
    named_optimizer_state,
    set_learning_rates,
    set_optimizer_state,
)


class JointHeadOnRanks(ReplicatedHead):
    """Heads and target in one process; their gradients are clipped together."""

    def __init__(self, accelerator: Accelerator, joint: JointHead, section: TrainSection) -> None:
        super().__init__(accelerator, joint, section)
        self.joint, self.target = joint, joint.target
        rate = self.target.section.learning_rate
        self.target_optimizer = torch.optim.AdamW(self.target.trained.values(), lr=rate, betas=BETAS, weight_decay=0.0)

    def update(self) -> float:
        return clip_and_step(self.joint, [*self.optimizers, self.target_optimizer], self.clip_norm)

    def set_learning_rates(self, section: TrainSection, step: int) -> float:
        """Set the rates of a step for heads and target, which share a schedule; the target joins after its warm-up."""
        factor = set_learning_rates(self.optimizers, section, step)
        self.joint.tunes_target = step >= self.target.section.warmup_steps
        for group in self.target_optimizer.param_groups:
            group["lr"] = self.target.section.learning_rate * factor
        return factor

    def target_state(self) -> Tensors:
        trained = {name: each.detach() for name, each in self.target.trained.items()}
        return trained | dict(named_optimizer_state(self.target.model, [self.target_optimizer]))

    def restore_target(self, state: Tensors) -> None:
        self.target.restore(state)
        optimizer_state = {name: each for name, each in state.items() if name not in self.target.trained}
        set_optimizer_state(self.target.model, [self.target_optimizer], optimizer_state)
