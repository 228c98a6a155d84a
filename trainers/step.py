"""A training run, and one optimizer step of it; ranks and micro-batches change the step's rounding and nothing else."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor

from headstart.data_pipelines.features.batches import SampleStore, TrainingBatch, pack
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.recipes import Recipe
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.evaluation import BLOCKS_SEED, HeldOutDecoding
from headstart.trainers.objectives.block import BlockSupervision, TrainedBlocks
from headstart.trainers.objectives.medusa2 import JointHead, TrainableTarget
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.peagle import ChainSupervision, TrainedChains
from headstart.trainers.objectives.unrolled import HeadInTraining, Supervision, Teacher, UnrolledHead, input_noise
from headstart.trainers.parallel.head_on_ranks import HeadOnRanks
from headstart.trainers.parallel.joint import JointHeadOnRanks
from headstart.trainers.parallel.launch import distribute_head
from headstart.trainers.run_checkpoints import Checkpoints, Snapshot

TRAINED: dict[str, type[HeadInTraining]] = {
    "unroll": UnrolledHead,
    "blocks": TrainedBlocks,
    "mask entries": TrainedChains,
}  # by DraftHead.trained_by
AnySupervision = Supervision | BlockSupervision | ChainSupervision


@dataclass(frozen=True)
class TrainingInputs:
    """The inputs of a training run other than the recipe."""

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
        """Start a new run, or continue from a snapshot of this head."""
        if found is not None:
            head.load_state_dict(found.weights)
        teacher = Teacher(inputs.frozen, head.vocab, getattr(torch, recipe.train.precision))
        head_on_ranks: HeadOnRanks
        if inputs.target is None:
            head_on_ranks = distribute_head(accelerator, head_in_training(recipe, head, teacher), recipe.train)
        else:
            joint = JointHead(head, teacher, Objective.from_recipe(recipe), recipe.train, inputs.target)
            head_on_ranks = JointHeadOnRanks(accelerator, joint, recipe.train)
        if found is not None:
            head_on_ranks.restore_optimizers(found.optimizers)
            head_on_ranks.restore_target(found.target)
        return cls(recipe, inputs, accelerator, head_on_ranks)

    def autocast(self) -> torch.autocast:
        return autocast(self.recipe.train, self.accelerator.device)

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        """Write a checkpoint on the main rank; every rank must call this.

        Raises ValueError if a sample that was trained on, or measured on, comes from a damaged shard.
        """
        for store in (self.inputs.train, self.inputs.heldout):
            store.finish_checks()
        whole, optimizers = self.head.whole(), self.head.optimizer_state()
        if whole is not None:
            checkpoints.save(Snapshot(step, whole.head.state_dict(), optimizers, self.head.target_state()))
        self.accelerator.wait_for_everyone()


def autocast(section: TrainSection, device: torch.device) -> torch.autocast:
    """Matrix products in `train.precision`; weights, softmaxes, losses and the sums of norms stay in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=section.precision == "bfloat16")


@contextmanager
def tf32_allowed(device: torch.device) -> Iterator[None]:
    """On a GPU, let float32 matrix products round their inputs to TF32 (10 bits), at about eight times the speed.

    Training tolerates that. Harvest and decoding do not ask for it: they keep the target's exact numbers.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def head_in_training(recipe: Recipe, head: DraftHead, teacher: Teacher) -> HeadInTraining:
    """The module that computes the loss of a head of any kind but one that trains with its target."""
    return TRAINED[head.trained_by](head, teacher, Objective.from_recipe(recipe), recipe.train)


def refuse_nothing_to_learn(training: Training) -> None:
    """Raise ValueError unless the head can predict a token of some training sample, and of some held-out one.

    Usually this reads one sample of each.
    """
    unrolled, device = training.head.unrolled, training.accelerator.device
    dtype = training.inputs.frozen.embedding.dtype
    for name, store in (("training", training.inputs.train), ("held-out", training.inputs.heldout)):
        outside = 0
        for sample in (store[number] for number in range(len(store))):
            with training.autocast():
                supervision = unrolled.supervise(TrainingBatch.collate([sample], dtype, device), BLOCKS_SEED)
            if supervision.counts(unrolled.objective.unroll)[0] > 0:
                break
            outside += supervision.outside
        else:
            raise ValueError(
                f"the {len(store)} {name} samples hold no token to learn: {unrolled.learns_from} that is trained on, "
                f"after the second of its text, is needed, and the target's choice for it in the draft vocabulary "
                f"({outside} are not); train on more of each text (loss_mask, data.turns), or raise "
                "head.draft_vocab_size"
            )


@dataclass(frozen=True)
class StepResult:
    """The measurements of a step, summed over all ranks."""

    sums: Tensor  # [4, unroll], see UnrollScores.sums; two rows are zeros where hits were not counted
    num_tokens: int  # tokens read, without padding
    gradient_norm: float  # before clipping
    interrupted: bool  # whether any rank received a signal to stop
    divergence: float | None  # KL(original || tuned) in nats per token; None unless Medusa-2 tunes the target


def train_step(
    training: Training, step: int, numbers: list[int], interrupted: bool = False, counts_hits: bool = True
) -> StepResult:
    """Update the weights once from the samples of a global batch; with `interrupted`, every rank stops after it.

    The loss is a sum over supervised tokens divided by their number in the global batch, so it does not depend on the
    number of ranks or micro-batches. Raises ValueError before the update if it would make a weight non-finite.
    """
    accelerator, head = training.accelerator, training.head
    unroll = head.unrolled.objective.unroll
    with training.autocast():
        micro_batches = count_micro_batches(training, step, numbers)
        counts = torch.stack([each.supervision.counts(unroll) for each in micro_batches]).sum(0)
        counts = accelerator.reduce(counts, "sum")  # [unroll], known before the first gradient is taken
    num_tokens = sum(sum(each.lengths) for each in micro_batches)
    head.unrolled.counts_hits = counts_hits
    sums, divergences = torch.zeros(4, unroll, device=accelerator.device), []
    while micro_batches:  # backwards: the features of the last one counted are still in memory
        micro_batch = with_features(training, micro_batches.pop())
        noise = draw_input_noise(training, step, micro_batch)
        with head.micro_batch(is_last=not micro_batches):
            with training.autocast():
                scores = head.forward(micro_batch.features, micro_batch.supervision, counts, noise)
            head.backward(scores.loss)
        sums += scores.sums()
        if scores.divergence is not None:  # only where one process trains the target too, so it needs no reduction
            divergences.append(float(scores.divergence))
    head.unrolled.counts_hits = True
    more = torch.tensor([num_tokens, interrupted], device=accelerator.device, dtype=sums.dtype)
    *flat, num_tokens, stops = accelerator.reduce(torch.cat([sums.flatten(), more]), "sum").tolist()
    refuse_non_finite(training, "loss", sum(flat), step, numbers)
    gradient_norm = head.update()
    refuse_non_finite(training, "gradient", gradient_norm, step, numbers)
    divergence = sum(divergences) / max(flat[0], 1) if divergences else None  # flat[0]: positions of unroll step 0
    return StepResult(torch.tensor(flat).view(sums.shape), int(num_tokens), gradient_norm, stops > 0, divergence)


def expect_step(training: Training, numbers: list[int]) -> None:
    """Announce what `train_step` will read: each micro-batch to count, then again all but the last, backwards."""
    own = numbers_of_micro_batches(training, numbers)
    training.inputs.train.expect([*own, *own[-2::-1]], training.recipe.train.pack_tokens)


def numbers_of_micro_batches(training: Training, numbers: list[int]) -> list[list[int]]:
    """The samples of each micro-batch of this rank, given those of a global batch."""
    accelerator, accumulate = training.accelerator, training.recipe.train.micro_batches
    own = numbers[accelerator.process_index :: accelerator.num_processes]
    return [own[first::accumulate] for first in range(accumulate)]


@dataclass(frozen=True)
class MicroBatch:
    """The samples of a rank that are in memory together; the gradients of a step's micro-batches add up."""

    numbers: list[int]  # numbers of its samples in the store
    lengths: tuple[int, ...]  # tokens of each sample
    supervision: AnySupervision  # its last_hidden is empty while the features are not in memory
    features: TrainingBatch | None


def count_micro_batches(training: Training, step: int, numbers: list[int]) -> list[MicroBatch]:
    """Read a rank's samples once to find the supervised positions; only the last micro-batch keeps its features."""
    found: list[MicroBatch] = []
    for own in numbers_of_micro_batches(training, numbers):
        found = [without_features(each) for each in found]
        features = read_features(training, own)
        supervision = training.head.unrolled.supervise(features, f"{training.recipe.seed} {step}")
        found.append(MicroBatch(own, features.lengths, supervision, features))
    return found


def without_features(micro_batch: MicroBatch) -> MicroBatch:
    supervision = micro_batch.supervision
    empty = supervision.last_hidden.new_empty(0)
    return replace(micro_batch, supervision=replace(supervision, last_hidden=empty), features=None)


def with_features(training: Training, micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch with its features in memory, read again unless they still are."""
    if micro_batch.features is not None:
        return micro_batch
    features = read_features(training, micro_batch.numbers)
    places = micro_batch.supervision
    supervision = replace(places, last_hidden=features.last_hidden[places.rows, places.columns])
    return replace(micro_batch, supervision=supervision, features=features)


def read_features(training: Training, numbers: list[int]) -> TrainingBatch:
    """A batch of these samples on the rank's device."""
    store, limit = training.inputs.train, training.recipe.train.pack_tokens
    batch = store.batch_of(numbers, limit).to(training.accelerator.device, training.inputs.frozen.embedding.dtype)
    packing = pack([*batch.lengths], limit)
    with training.autocast():
        return training.head.unrolled.teacher.with_drafted(store, numbers, batch, packing)


def draw_input_noise(training: Training, step: int, micro_batch: MicroBatch) -> Tensor | None:
    """EAGLE-1's input noise, a function of seed, step and sample; None if the objective has none."""
    head = training.head.unrolled
    if not head.objective.input_noise:
        return None
    recipe, lengths = training.recipe, [*micro_batch.lengths]
    keys = [f"{recipe.seed} {step} {number}" for number in micro_batch.numbers]
    packing, size = pack(lengths, recipe.train.pack_tokens), head.head.feature_size
    return input_noise(head.objective.input_noise, lengths, keys, size, training.accelerator.device, packing)


def refuse_non_finite(training: Training, what: str, value: float, step: int, numbers: list[int]) -> None:
    """Raise ValueError with the samples of the step if `value` is not finite."""
    if math.isfinite(value):
        return
    store = training.inputs.train
    store.finish_checks()  # a damaged shard is the cause, if there is one
    samples = ((number, store[number]) for number in numbers)
    spoiled = [n for n, each in samples if not (each.taps.isfinite().all() and each.last_hidden.isfinite().all())]
    if spoiled:
        advice = f"the features of samples {named(store, spoiled)} are not finite; harvest again, in another data.dtype"
    else:
        advice = (
            f"its features are finite (samples {named(store, numbers)}); lower train.learning_rate, or choose "
            "train.precision float32"
        )
    raise ValueError(f"the {what} of step {step + 1} is not finite: {advice}; the last checkpoint is good")


def named(store: SampleStore, numbers: list[int]) -> str:
    return ", ".join(f"{number} ({store.place_of(number)})" for number in numbers)
