"""The training loop of draft heads: deterministic, resumable at any step, the same on one rank or many."""

import math
import time
from dataclasses import dataclass

from accelerate import Accelerator
from torch import Tensor

from data_pipelines.batches import Batch, SampleOrder
from data_pipelines.shards import FeatureStore
from heads.base import DraftHead
from heads.frozen import FrozenTarget
from inference.target import TargetModel
from recipes import Recipe
from trainers.checkpoint import Checkpoints
from trainers.measure import accepted_length, depth_metrics, held_out_scores
from trainers.objective import Objective, Teacher, UnrolledHead, input_noise
from trainers.optimizers import set_learning_rates
from trainers.ranks import HeadOnRanks, share_out
from trainers.tracking import Tracker


@dataclass(frozen=True)
class Materials:
    """What training works on besides the head."""

    frozen: FrozenTarget
    train: FeatureStore
    heldout: FeatureStore
    target: TargetModel | None  # to measure accepted length on the main rank; None when the recipe decodes no prompts


def train(
    recipe: Recipe, head: DraftHead, materials: Materials, accelerator: Accelerator, checkpoints: Checkpoints
) -> None:
    """Fit the head in place, from the newest checkpoint if there is one.

    Raises ValueError when a loss or a gradient is not finite, naming the step and its samples.
    """
    section = recipe.train
    done, state = checkpoints.resume(head)
    if done >= section.steps:
        return
    teacher = Teacher(materials.frozen, head.vocab)
    unrolled = UnrolledHead(head, teacher, Objective.from_recipe(recipe), section.activation_checkpointing)
    ranks = share_out(accelerator, unrolled, section)
    ranks.restore(state)
    order = SampleOrder(len(materials.train), recipe.seed)
    with Tracker(recipe, done, accelerator.is_main_process) as tracker:
        if done:
            tracker.say(f"resuming behind step {done}")
        started, tokens_seen = time.perf_counter(), 0
        for step in range(done, section.steps):
            numbers = order.of_step(step, section.batch_size)
            factor = set_learning_rates(ranks.optimizers, section, step)
            sums, num_tokens = train_step(recipe, materials, ranks, step, numbers)
            tokens_seen += num_tokens
            if (step + 1) % section.log_every == 0:
                metrics = depth_metrics("train", sums)
                metrics["train/learning_rate"] = section.learning_rate * factor
                metrics["train/tokens_per_second"] = tokens_seen / (time.perf_counter() - started)
                tracker.log(step + 1, metrics, headline(metrics, section.unroll))
            if (step + 1) % section.eval_every == 0 or step + 1 == section.steps:
                measure(recipe, materials, ranks.whole(), tracker, step + 1)
            if (step + 1) % section.checkpoint_every == 0 or step + 1 == section.steps:
                whole, state = ranks.whole(), ranks.state()
                if whole is not None:
                    checkpoints.save(step + 1, whole.head, state)
                accelerator.wait_for_everyone()
            tracker.advance(step + 1)


def train_step(
    recipe: Recipe, materials: Materials, ranks: HeadOnRanks, step: int, numbers: list[int]
) -> tuple[Tensor, int]:
    """One update from a global batch; returns the sums [4, unroll] over all ranks and the batch's tokens here.

    Raises ValueError before the update where it would put something not finite into the weights.
    """
    accelerator, unrolled = ranks.accelerator, ranks.unrolled
    share = numbers[accelerator.process_index :: accelerator.num_processes]
    samples = [materials.train[number] for number in share]
    batch = Batch.collate(samples, materials.frozen.embedding.dtype, accelerator.device)
    width, noise = unrolled.objective.input_noise, None
    if width:
        lengths, keys = [len(sample.tokens) for sample in samples], [f"{recipe.seed} {step} {n}" for n in share]
        noise = input_noise(width, lengths, keys, unrolled.head.feature_size, accelerator.device)
    supervision = unrolled.teacher.supervise(batch)
    # Every rank divides by the positions of all ranks, so that their losses add up.
    counts = accelerator.reduce(supervision.counts(unrolled.objective.unroll), "sum")
    scores = ranks.forward(batch, supervision, counts, noise)
    sums = accelerator.reduce(scores.sums(), "sum")
    refuse_non_finite("loss", float(sums.sum()), step, numbers)
    ranks.backward(scores.loss)
    refuse_non_finite("gradient", ranks.update(), step, numbers)
    return sums.cpu(), int(batch.tokens.numel())


def refuse_non_finite(name: str, value: float, step: int, numbers: list[int]) -> None:
    if not math.isfinite(value):
        raise ValueError(
            f"the {name} of step {step + 1} is not finite (samples {numbers}); lower train.learning_rate, or look "
            "at these samples' features; the last checkpoint is good"
        )


def measure(recipe: Recipe, materials: Materials, unrolled: UnrolledHead | None, tracker: Tracker, step: int) -> None:
    """Held-out numbers, on the main rank alone, which has the whole head."""
    if unrolled is None:
        return
    metrics = held_out_scores(unrolled, materials.heldout, recipe.train.batch_size)
    accuracies = " ".join(f"{metrics[f'heldout/accuracy_{k}']:.3f}" for k in range(recipe.train.unroll))
    said = f"step {step}: held-out loss {metrics['heldout/loss_0']:.3f}, accuracy by depth {accuracies}"
    if materials.target is not None:
        metrics["heldout/tau"] = accepted_length(recipe, materials.target, unrolled.head)
        said += f", accepted length {metrics['heldout/tau']:.2f}"
    tracker.log(
        step, metrics, f"accepted length {metrics['heldout/tau']:.2f}" if "heldout/tau" in metrics else "training"
    )
    tracker.say(said)


def headline(metrics: dict[str, float], unroll: int) -> str:
    accuracies = " ".join(f"{metrics[f'train/accuracy_{k}']:.2f}" for k in range(unroll))
    return (
        f"loss {metrics['train/loss_0']:.3f}, accuracy {accuracies}, {metrics['train/tokens_per_second']:.0f} tokens/s"
    )
