"""A training run between two steps: what it reads, what it changes, and how checkpoints restore and hold it."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn

from headstart.data_pipelines.features.sample_stores import SampleStore
from headstart.heads.base import DraftHead
from headstart.heads.block import BlockHead
from headstart.heads.frozen import FrozenTarget
from headstart.recipes import Recipe
from headstart.trainers.evaluation import HeldOutDecoding
from headstart.trainers.objectives.block import TrainedBlocks
from headstart.trainers.objectives.medusa2 import JointHead, JointHeadOnRanks, TrainableTarget
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.unrolled import Teacher, UnrolledHead
from headstart.trainers.ranks.head_on_ranks import HeadOnRanks
from headstart.trainers.ranks.launch import distribute_head
from headstart.trainers.run_checkpoints import Snapshot


@dataclass(frozen=True)
class TrainingInputs:
    """What a training run reads besides the recipe."""

    frozen: FrozenTarget
    train: SampleStore
    heldout: SampleStore
    decoding: HeldOutDecoding | None  # measures acceptance length on the main rank; None without train.eval_prompts
    target: TrainableTarget | None = None  # the whole target, if joint.mode trains it together with the heads


@dataclass(frozen=True)
class Training:
    """A training run between two steps."""

    recipe: Recipe
    inputs: TrainingInputs
    accelerator: Accelerator
    head: HeadOnRanks

    @classmethod
    def start(
        cls, recipe: Recipe, head: DraftHead, inputs: TrainingInputs, accelerator: Accelerator, found: Snapshot | None
    ) -> "Training":
        """Start a new run, or continue from a snapshot; raises ValueError if the snapshot does not fit the head."""
        if found is not None:
            refuse_misfit(head, found)
            head.load_state_dict(found.weights)
            if inputs.target is not None:
                inputs.target.restore(found.target)
        head_on_ranks = start_head(recipe, head, inputs, accelerator)
        if found is not None:
            head_on_ranks.restore_optimizers(found.optimizers)
        return cls(recipe, inputs, accelerator, head_on_ranks)

    def autocast(self) -> torch.autocast:
        """Matrix products in `train.precision`; weights, softmaxes, losses and the sums of norms stay in float32."""
        half = self.recipe.train.precision == "bfloat16"
        return torch.autocast(self.accelerator.device.type, dtype=torch.bfloat16, enabled=half)

    def snapshot(self, step: int) -> Snapshot | None:
        """Everything that a checkpoint holds, on the main rank; every rank must call it, the others get None."""
        whole, optimizers = self.head.whole(), self.head.optimizer_state()
        if whole is None:
            return None
        target = {} if self.inputs.target is None else self.inputs.target.state()
        return Snapshot(step, whole.head.state_dict(), optimizers, target)


def start_head(recipe: Recipe, head: DraftHead, inputs: TrainingInputs, accelerator: Accelerator) -> HeadOnRanks:
    """Put the head on the ranks, together with the target if joint.mode trains it too."""
    teacher = Teacher(inputs.frozen, head.vocab, getattr(torch, recipe.train.precision))
    if inputs.target is None:
        return distribute_head(accelerator, head_in_training(recipe, head, teacher), recipe.train)
    checkpointing = recipe.train.activation_checkpointing
    joint = JointHead(head, teacher, Objective.from_recipe(recipe), inputs.target, checkpointing)
    return JointHeadOnRanks(accelerator, joint, recipe.train)


def head_in_training(recipe: Recipe, head: DraftHead, teacher: Teacher) -> UnrolledHead:
    """The module that computes the loss of a head of any kind but one that trains with its target."""
    section, objective = recipe.train, Objective.from_recipe(recipe)
    if isinstance(head, BlockHead):
        return TrainedBlocks(head, teacher, objective, section.anchors, section.activation_checkpointing)
    return UnrolledHead(head, teacher, objective, section.activation_checkpointing)


def refuse_misfit(head: nn.Module, found: Snapshot) -> None:
    """Raise ValueError unless the snapshot has exactly the head's tensors, each of the same shape."""
    shapes, tensors = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}, found.weights
    wrong = [
        f"{name}: checkpoint {tuple(tensors[name].shape) if name in tensors else 'nothing'}, head {shapes.get(name)}"
        for name in sorted(shapes.keys() | tensors.keys())
        if name not in tensors or tuple(tensors[name].shape) != shapes.get(name)
    ]
    wrong += [f"{key}: no such weight" for key in sorted(found.optimizers) if key.rpartition(".")[0] not in shapes]
    if wrong:
        raise ValueError(
            f"the checkpoint of step {found.step} does not fit the head: "
            + "; ".join(wrong[:8])
            + "; choose another run_dir"
        )
