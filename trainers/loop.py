"""The training loop of draft heads: deterministic, resumable at any step, the same on one rank or many."""

import math
import time

from accelerate import Accelerator

from data_pipelines.sample_order import SampleOrder
from heads.base import DraftHead
from recipes import Recipe
from trainers.checkpoint import Checkpoints
from trainers.evaluation import TEMPERATURES, decoded_scores, depth_metrics, held_out_scores
from trainers.interrupt import Interrupts
from trainers.run_state import Materials, Training, copied
from trainers.step import StepResult, share_of, train_step
from trainers.tracking import Tracker


def train(
    recipe: Recipe, head: DraftHead, materials: Materials, accelerator: Accelerator, checkpoints: Checkpoints
) -> None:
    """Fit the head, from the newest checkpoint if there is one; the result is the last checkpoint.

    Raises ValueError when a loss or a gradient is not finite, naming the step and its samples, or a checkpoint cannot
    be read or written; SystemExit with a shell's code behind the step in which SIGTERM or Ctrl-C came.
    """
    section, found = recipe.train, checkpoints.load()
    done = 0 if found is None else found.step
    measured = done == 0 or done % section.eval_every or Tracker.has_measured(recipe, done)
    if done >= section.steps and measured:
        return
    training = Training.start(recipe, head, materials, accelerator, found)
    order = SampleOrder(materials.train.shard_sizes, recipe.seed, recipe.data.shuffle_shards)
    with Tracker(recipe, done, accelerator.is_main_process) as tracker, Interrupts() as interrupts:
        if done:
            tracker.say(f"resuming behind step {done}")
        if not measured:  # the process was stopped just before
            measure(training, checkpoints, tracker, done)
        pace = Pace()
        materials.train.expect(share_of(accelerator, order.of_step(done, section.batch_size)))
        for step in range(done, section.steps):
            factor = training.ranks.set_learning_rates(section, step)
            with pace:
                numbers = order.of_step(step, section.batch_size)
                if step + 1 < section.steps:  # read while this one is computed
                    materials.train.expect(share_of(accelerator, order.of_step(step + 1, section.batch_size)))
                result = train_step(training, step, numbers, interrupts.received is not None)
            pace.num_tokens += result.num_tokens
            if (step + 1) % section.log_every == 0:
                metrics = step_metrics(training, result, section.learning_rate * factor, pace.tokens_per_second())
                tracker.log(step + 1, metrics, headline(metrics, section.unroll))
            last = step + 1 == section.steps
            if not result.interrupted and (last or (step + 1) % section.eval_every == 0):
                measure(training, checkpoints, tracker, step + 1)
            if result.interrupted or last or (step + 1) % section.checkpoint_every == 0:
                save(training, checkpoints, step + 1)
            tracker.advance(step + 1)
            if result.interrupted:
                tracker.say(f"{interrupts.name}: saved behind step {step + 1} and stopped; the same command goes on")
                raise SystemExit(interrupts.exit_code)


def save(training: Training, checkpoints: Checkpoints, step: int) -> None:
    snapshot = training.snapshot(step)
    if snapshot is not None:
        checkpoints.save(snapshot)
    training.accelerator.wait_for_everyone()


def measure(training: Training, checkpoints: Checkpoints, tracker: Tracker, step: int) -> None:
    """Held-out numbers, on the main rank alone; the best weights so far are kept."""
    recipe, decoding = training.recipe, training.materials.decoding
    with training.measured() as whole:
        if whole is not None:
            with training.autocast():
                metrics = held_out_scores(whole, training.materials.heldout, recipe.train.batch_size)
            accuracies = " ".join(f"{metrics[f'heldout/accuracy_{k}']:.3f}" for k in range(recipe.train.unroll))
            said = f"step {step}: held-out loss {metrics['heldout/loss_0']:.3f}, accuracy by depth {accuracies}"
            if decoding is not None:
                weights = copied(whole.head)
                decoding.take(weights, training.target_weights())
                metrics |= decoded_scores(decoding)
                said += ", accepted length " + ", ".join(
                    f"{metrics[f'heldout/{name}']:.2f} at temperature {temperature:g}"
                    for name, temperature in TEMPERATURES.items()
                )
                if recipe.decode.acceptance == "typical":
                    said += " (typical acceptance, LOSSY)"
                checkpoints.offer_best(step, weights, metrics["heldout/score"], decoding.conditions())
            if "heldout/divergence" in metrics:
                said += f", KL(original || tuned target) {metrics['heldout/divergence']:.4f} nats a token"
            tracker.log(step, metrics, f"measured behind step {step}")
            tracker.chart_acceptance(step, metrics)
            tracker.say(said)
    training.accelerator.wait_for_everyone()


def step_metrics(
    training: Training, result: StepResult, learning_rate: float, tokens_per_second: float
) -> dict[str, float]:
    metrics = {**depth_metrics("train", result.sums), "train/learning_rate": learning_rate}
    if math.isfinite(result.gradient_norm):
        metrics["train/gradient_norm"] = result.gradient_norm
    if result.divergence is not None:
        metrics["train/divergence"] = result.divergence
    return {**metrics, **training.loss_scale.metrics(), "train/tokens_per_second": tokens_per_second}


def headline(metrics: dict[str, float], unroll: int) -> str:
    chances = " ".join(f"{metrics[f'train/acceptance_{k}']:.2f}" for k in range(unroll))
    return f"loss {metrics['train/loss_0']:.3f}, accepts {chances}, {metrics['train/tokens_per_second']:.0f} tokens/s"


class Pace:
    """Tokens per second of the steps since the last question, without what measuring and saving take in between."""

    def __init__(self) -> None:
        self.num_tokens, self._seconds, self._began = 0, 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def tokens_per_second(self) -> float:
        rate = self.num_tokens / self._seconds
        self.num_tokens, self._seconds = 0, 0.0
        return rate
