"""The training loop of draft heads: deterministic, resumable at any step, the same on one rank or many."""

import math
import time
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from data_pipelines.batches import Batch, SampleOrder
from data_pipelines.sources import SampleStore
from heads.base import DraftHead
from heads.frozen import FrozenTarget
from inference.target import TargetModel
from recipes import Recipe
from trainers.checkpoint import Checkpoints
from trainers.measure import accepted_length, depth_metrics, held_out_scores
from trainers.objective import Objective, Teacher, UnrolledHead, input_noise
from trainers.optimizers import build_optimizers, set_learning_rates
from trainers.tracking import Tracker


@dataclass(frozen=True)
class Materials:
    """What training works on besides the head."""

    frozen: FrozenTarget
    train: SampleStore
    heldout: SampleStore
    target: TargetModel | None  # to measure accepted length on the main rank; None when the recipe decodes no prompts


def train(
    recipe: Recipe, head: DraftHead, materials: Materials, accelerator: Accelerator, checkpoints: Checkpoints
) -> None:
    """Fit the head in place, from the newest checkpoint if there is one.

    Raises ValueError when a loss or a gradient is not finite, naming the step and its samples.
    """
    section = recipe.train
    optimizers = build_optimizers(head, section)
    done = checkpoints.resume(head, optimizers)
    if done >= section.steps:
        return
    teacher = Teacher(materials.frozen, head.vocab)
    unrolled = UnrolledHead(head, teacher, Objective.from_recipe(recipe), section.activation_checkpointing)
    prepared, *prepared_optimizers = accelerator.prepare(unrolled, *optimizers)
    order = SampleOrder(len(materials.train), recipe.seed)
    with Tracker(recipe, done, accelerator.is_main_process) as tracker:
        if done:
            tracker.say(f"resuming behind step {done}")
        started, tokens_seen = time.perf_counter(), 0
        for step in range(done, section.steps):
            numbers = order.of_step(step, section.batch_size)
            factor = set_learning_rates(optimizers, section, step)
            sums, num_tokens = train_step(recipe, materials, accelerator, prepared, prepared_optimizers, step, numbers)
            tokens_seen += num_tokens
            if (step + 1) % section.log_every == 0:
                metrics = depth_metrics("train", sums)
                metrics["train/learning_rate"] = section.learning_rate * factor
                metrics["train/tokens_per_second"] = tokens_seen / (time.perf_counter() - started)
                tracker.log(step + 1, metrics, headline(metrics, section.unroll))
            if (step + 1) % section.eval_every == 0 or step + 1 == section.steps:
                measure(recipe, materials, unrolled, tracker, step + 1)
            if (step + 1) % section.checkpoint_every == 0 or step + 1 == section.steps:
                if accelerator.is_main_process:
                    checkpoints.save(step + 1, head, optimizers)
                accelerator.wait_for_everyone()
            tracker.advance(step + 1)


def train_step(
    recipe: Recipe,
    materials: Materials,
    accelerator: Accelerator,
    prepared: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    numbers: list[int],
) -> tuple[Tensor, int]:
    """One update from a global batch; returns the sums [4, unroll] over all ranks and the batch's tokens here.

    Raises ValueError before the update where it would put something not finite into the weights.
    """
    share = numbers[accelerator.process_index :: accelerator.num_processes]
    samples = [materials.train[number] for number in share]
    batch = Batch.collate(samples, materials.frozen.embedding.dtype, accelerator.device)
    unrolled = accelerator.unwrap_model(prepared)
    width, noise = unrolled.objective.input_noise, None
    if width:
        lengths, keys = [len(sample.tokens) for sample in samples], [f"{recipe.seed} {step} {n}" for n in share]
        noise = input_noise(width, lengths, keys, unrolled.head.feature_size, accelerator.device)
    supervision = unrolled.teacher.supervise(batch)
    # Every rank divides by the positions of all ranks; data-parallel averaging is undone by the number of ranks.
    counts = accelerator.reduce(supervision.counts(unrolled.objective.unroll), "sum")
    scores = prepared(batch, supervision, counts, noise)
    accelerator.backward(scores.loss * accelerator.num_processes)
    gradient_norm = accelerator.clip_grad_norm_(prepared.parameters(), recipe.train.clip_norm)
    sums = accelerator.reduce(scores.sums(), "sum")
    refuse_non_finite({"loss": sums.sum(), "gradient": gradient_norm}, step, numbers)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return sums.cpu(), int(batch.tokens.numel())


def refuse_non_finite(values: dict[str, Tensor | None], step: int, numbers: list[int]) -> None:
    for name, value in values.items():
        if value is not None and not math.isfinite(float(value)):  # DeepSpeed may give no norm
            raise ValueError(
                f"the {name} of step {step + 1} is not finite (samples {numbers}); lower train.learning_rate, or look "
                "at these samples' features; the last checkpoint is good"
            )


def measure(recipe: Recipe, materials: Materials, unrolled: UnrolledHead, tracker: Tracker, step: int) -> None:
    """Held-out numbers, on the main rank alone."""
    if not tracker.active:
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
