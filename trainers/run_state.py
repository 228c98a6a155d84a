"""What training works on, what moves while it does, and the way from there to a checkpoint and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn

from data_pipelines.sample_stores import SampleStore
from heads.base import DraftHead
from heads.frozen import FrozenTarget
from recipes import Recipe
from trainers.checkpoint import Snapshot, Tensors
from trainers.ema import Average
from trainers.evaluation import Decoding
from trainers.medusa2 import JointHead, JointRanks, LiveTarget
from trainers.objective import Objective, Teacher, UnrolledHead
from trainers.precision import LossScale, autocast
from trainers.ranks.head_on_ranks import HeadOnRanks
from trainers.ranks.launch import share_out


@dataclass(frozen=True)
class Materials:
    """What training works on besides the head."""

    frozen: FrozenTarget
    train: SampleStore
    heldout: SampleStore
    decoding: Decoding | None  # to measure accepted length on the main rank; None when the recipe decodes no prompts
    live: LiveTarget | None = None  # the target itself where joint.mode trains it too


@dataclass(frozen=True)
class Training:
    """A run between its steps."""

    recipe: Recipe
    materials: Materials
    accelerator: Accelerator
    ranks: HeadOnRanks
    average: Average | None
    loss_scale: LossScale

    @classmethod
    def start(
        cls, recipe: Recipe, head: DraftHead, materials: Materials, accelerator: Accelerator, found: Snapshot | None
    ) -> "Training":
        """From a snapshot if there is one; raises ValueError where it does not fit the head."""
        section = recipe.train
        if found is not None:
            refuse_misfit(head, found)
            head.load_state_dict(found.weights)
            if materials.live is not None:
                materials.live.restore(found.target)
        ranks = start_head(recipe, head, materials, accelerator)
        average = None if section.ema_decay is None else Average(head, section.ema_decay)
        training = cls(recipe, materials, accelerator, ranks, average, LossScale(section))
        if found is not None:
            ranks.restore(found.moments)
            training.loss_scale.restore(found.loss_scale)
            if average is not None:
                average.restore(found.average)
        return training

    def target_weights(self) -> Tensors:
        """Those that training has changed."""
        return {} if self.materials.live is None else self.materials.live.weights()

    @property
    def objective(self) -> Objective:
        return self.ranks.unrolled.objective

    def autocast(self) -> torch.autocast:
        return autocast(self.recipe.train, self.accelerator.device)

    @contextmanager
    def measured(self) -> Iterator[UnrolledHead | None]:
        """The head with the weights that are measured and exported, on the main rank; all ranks enter."""
        if self.average is None:
            yield self.ranks.whole()
        else:
            with self.average.in_place():
                yield self.ranks.whole()

    def snapshot(self, step: int) -> Snapshot | None:
        """All that a checkpoint holds, on the main rank; all ranks enter."""
        average: Tensors = {}
        if self.average is not None:
            with self.measured() as whole:
                average = {} if whole is None else copied(whole.head)
        whole, moments = self.ranks.whole(), self.ranks.state()
        if whole is None:
            return None
        target = {} if self.materials.live is None else self.materials.live.state()
        return Snapshot(step, whole.head.state_dict(), moments, average, self.loss_scale.state(), target)


def start_head(recipe: Recipe, head: DraftHead, materials: Materials, accelerator: Accelerator) -> HeadOnRanks:
    """The head as the ranks hold it, alone or with the target that is trained beside it."""
    teacher, objective = Teacher(materials.frozen, head.vocab), Objective.from_recipe(recipe)
    section, checkpointing = recipe.train, recipe.train.activation_checkpointing
    if materials.live is None:
        return share_out(accelerator, UnrolledHead(head, teacher, objective, checkpointing), section)
    return JointRanks(accelerator, JointHead(head, teacher, objective, materials.live, checkpointing), section)


def copied(head: DraftHead) -> Tensors:
    """The weights, on the CPU and apart from the head's own."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in head.state_dict().items()}


def refuse_misfit(head: nn.Module, found: Snapshot) -> None:
    """Every tensor must belong to a weight of this head, and none may be missing."""
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    wrong = [
        f"{name}: checkpoint {tuple(tensors[name].shape) if name in tensors else 'nothing'}, head {shapes.get(name)}"
        for tensors in (found.weights, found.average or found.weights)
        for name in sorted(shapes.keys() | tensors.keys())
        if name not in tensors or tuple(tensors[name].shape) != shapes.get(name)
    ]
    wrong += [f"{key}: no such weight" for key in sorted(found.moments) if key.rpartition(".")[0] not in shapes]
    if wrong:
        raise ValueError(f"the checkpoint of step {found.step} does not fit the head: " + "; ".join(wrong[:8]))
