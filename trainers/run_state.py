"""What training reads, what it changes, and how a run starts from a checkpoint and is saved to one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from accelerate import Accelerator
from torch import nn

from headstart.data_pipelines.features.batches import SampleStore
from headstart.heads.base import DraftHead
from headstart.heads.block import BlockHead
from headstart.heads.frozen import FrozenTarget
from headstart.recipes import Recipe
from headstart.trainers.checkpoint import Snapshot, Tensors
from headstart.trainers.ema import MovingAverage
from headstart.trainers.evaluation import HeldOutDecoding
from headstart.trainers.objectives.block import TrainedBlocks
from headstart.trainers.objectives.medusa2 import JointHead, JointHeadOnRanks, TrainableTarget
from headstart.trainers.objectives.unrolled import Objective, Teacher, UnrolledHead
from headstart.trainers.precision import LossScale, compute_dtype
from headstart.trainers.ranks.head_on_ranks import HeadOnRanks
from headstart.trainers.ranks.launch import distribute_head


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
    average: MovingAverage | None
    loss_scale: LossScale

    @classmethod
    def start(
        cls, recipe: Recipe, head: DraftHead, inputs: TrainingInputs, accelerator: Accelerator, found: Snapshot | None
    ) -> "Training":
        """Start a new run, or continue from a snapshot; raises ValueError if the snapshot does not fit the head."""
        section = recipe.train
        if found is not None:
            refuse_misfit(head, found)
            head.load_state_dict(found.weights)
            if inputs.target is not None:
                inputs.target.restore(found.target)
        head_on_ranks = start_head(recipe, head, inputs, accelerator)
        average = None if section.ema_decay is None else MovingAverage(head, section.ema_decay)
        training = cls(recipe, inputs, accelerator, head_on_ranks, average, LossScale(section))
        if found is not None:
            head_on_ranks.restore_optimizers(found.optimizers)
            training.loss_scale.restore(found.loss_scale)
            if average is not None:
                average.restore(found.average)
        return training

    @contextmanager
    def exported_head(self) -> Iterator[UnrolledHead | None]:
        """The head with the weights that are measured and exported, on the main rank; every rank must enter."""
        if self.average is None:
            yield self.head.whole()
        else:
            with self.average.in_place():
                yield self.head.whole()

    def snapshot(self, step: int) -> Snapshot | None:
        """Everything that a checkpoint holds, on the main rank; every rank must call it, the others get None."""
        average: Tensors = {}
        if self.average is not None:
            with self.exported_head() as exported:
                average = {} if exported is None else weights_on_cpu(exported.head)
        whole, optimizers = self.head.whole(), self.head.optimizer_state()
        if whole is None:
            return None
        target = {} if self.inputs.target is None else self.inputs.target.state()
        return Snapshot(step, whole.head.state_dict(), optimizers, average, self.loss_scale.state(), target)


def start_head(recipe: Recipe, head: DraftHead, inputs: TrainingInputs, accelerator: Accelerator) -> HeadOnRanks:
    """Put the head on the ranks, together with the target if joint.mode trains it too."""
    teacher = Teacher(inputs.frozen, head.vocab, compute_dtype(recipe.train))
    objective = Objective.from_recipe(recipe)
    section, checkpointing = recipe.train, recipe.train.activation_checkpointing
    if inputs.target is None:
        return distribute_head(accelerator, head_in_training(recipe, head, teacher), section)
    return JointHeadOnRanks(accelerator, JointHead(head, teacher, objective, inputs.target, checkpointing), section)


def head_in_training(recipe: Recipe, head: DraftHead, teacher: Teacher) -> UnrolledHead:
    """The module that computes a head's loss, for a head of any kind."""
    section, objective = recipe.train, Objective.from_recipe(recipe)
    if isinstance(head, BlockHead):
        return TrainedBlocks(head, teacher, objective, section.anchors, section.activation_checkpointing)
    return UnrolledHead(head, teacher, objective, section.activation_checkpointing)


def weights_on_cpu(head: DraftHead) -> Tensors:
    """A copy of the head's weights on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in head.state_dict().items()}


def refuse_misfit(head: nn.Module, found: Snapshot) -> None:
    """Raise ValueError unless the snapshot has exactly the head's tensors, each of the same shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    wrong = [
        f"{name}: checkpoint {tuple(tensors[name].shape) if name in tensors else 'nothing'}, head {shapes.get(name)}"
        for tensors in (found.weights, found.average or found.weights)
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
