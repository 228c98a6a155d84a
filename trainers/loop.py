"""The training loop of draft heads: deterministic, resumable after any step, the same on one rank or many."""

import math
import time

from accelerate import Accelerator

from headstart.heads.base import DraftHead
from headstart.recipes import Recipe
from headstart.trainers.checkpoint import Checkpoints
from headstart.trainers.evaluation import TEMPERATURES, decoding_metrics, held_out_metrics, metrics_by_depth
from headstart.trainers.interrupt import Interrupts
from headstart.trainers.precision import autocast
from headstart.trainers.run_state import Training, TrainingInputs, weights_on_cpu
from headstart.trainers.sample_order import SampleOrder
from headstart.trainers.step import StepResult, samples_of_rank, train_step
from headstart.trainers.tracking import Tracker


def train(
    recipe: Recipe, head: DraftHead, inputs: TrainingInputs, accelerator: Accelerator, checkpoints: Checkpoints
) -> None:
    """Fit the head, starting from the newest checkpoint if there is one; the last checkpoint is the result.

    Raises ValueError if a loss or a gradient is not finite, naming the step and its samples, or if a checkpoint cannot
    be read or written. Raises SystemExit with a shell's exit code after the step in which SIGTERM or Ctrl-C arrived.
    """
    section, found = recipe.train, checkpoints.load()
    done = 0 if found is None else found.step
    measured = done == 0 or done % section.eval_every or Tracker.has_measured(recipe, done)
    if done >= section.steps and measured:
        return
    training = Training.start(recipe, head, inputs, accelerator, found)
    order = SampleOrder(inputs.train.shard_sizes, recipe.seed)
    with Tracker(recipe, done, accelerator.is_main_process) as tracker, Interrupts() as interrupts:
        if done:
            tracker.say(f"resuming after step {done}")
        if not done and section.start_from is not None:  # what the run has to improve on
            measure(training, checkpoints, tracker, 0)
        if not measured:  # the process was stopped between saving and measuring
            measure(training, checkpoints, tracker, done)
        speed = Speed()
        inputs.train.expect(samples_of_rank(accelerator, order.of_step(done, section.batch_size)))
        for step in range(done, section.steps):
            factor = training.head.set_learning_rates(section, step)
            with speed:
                numbers = order.of_step(step, section.batch_size)
                if step + 1 < section.steps:  # read while this step is computed
                    inputs.train.expect(samples_of_rank(accelerator, order.of_step(step + 1, section.batch_size)))
                result = train_step(training, step, numbers, interrupts.received is not None)
            speed.num_tokens += result.num_tokens
            if (step + 1) % section.log_every == 0:
                metrics = step_metrics(training, result, section.learning_rate * factor, speed.tokens_per_second())
                tracker.log(step + 1, metrics, progress_text(metrics, section.unroll))
            last = step + 1 == section.steps
            if not result.interrupted and (last or (step + 1) % section.eval_every == 0):
                measure(training, checkpoints, tracker, step + 1)
            if result.interrupted or last or (step + 1) % section.checkpoint_every == 0:
                save(training, checkpoints, step + 1)
            tracker.advance(step + 1)
            if result.interrupted:
                tracker.say(f"{interrupts.name}: saved after step {step + 1} and stopped; the same command continues")
                raise SystemExit(interrupts.exit_code)


def save(training: Training, checkpoints: Checkpoints, step: int) -> None:
    snapshot = training.snapshot(step)
    if snapshot is not None:
        checkpoints.save(snapshot)
    training.accelerator.wait_for_everyone()


def measure(training: Training, checkpoints: Checkpoints, tracker: Tracker, step: int) -> None:
    """Log the held-out metrics, computed on the main rank alone, and keep the best weights so far."""
    recipe, inputs = training.recipe, training.inputs
    with training.exported_head() as exported:
        if exported is not None:
            with autocast(recipe.train, training.accelerator.device):
                metrics = held_out_metrics(exported, inputs.heldout, recipe.train.batch_size)
            if inputs.decoding is not None:
                weights = weights_on_cpu(exported.head)
                inputs.decoding.load_weights(weights, {} if inputs.target is None else inputs.target.weights())
                metrics |= decoding_metrics(inputs.decoding)
                checkpoints.offer_best(step, weights, metrics["heldout/score"], inputs.decoding.conditions())
            metrics["train/tokens"] = tokens_read(training, step)
            tracker.log(step, metrics, f"measured after step {step}")
            tracker.chart_acceptance(step, metrics)
            tracker.say(f"step {step}: {measured_text(recipe, metrics)}")
    training.accelerator.wait_for_everyone()


def tokens_read(training: Training, step: int) -> int:
    """About how many tokens the first `step` steps read, from the mean length of a sample."""
    store = training.inputs.train
    return round(step * training.recipe.train.batch_size * store.num_tokens / len(store))


def measured_text(recipe: Recipe, metrics: dict[str, float]) -> str:
    """The held-out metrics as one line of the console."""
    accuracies = " ".join(f"{metrics[f'heldout/accuracy_{k}']:.3f}" for k in range(recipe.train.unroll))
    text = f"held-out loss {metrics['heldout/loss_0']:.3f}, accuracy by depth {accuracies}"
    if "heldout/score" in metrics:
        text += ", acceptance length " + ", ".join(
            f"{metrics[f'heldout/{name}']:.2f} at temperature {temperature:g}"
            for name, temperature in TEMPERATURES.items()
        )
    if "heldout/divergence" in metrics:
        text += f", KL(original || tuned target) {metrics['heldout/divergence']:.4f} nats per token"
    return text


def step_metrics(
    training: Training, result: StepResult, learning_rate: float, tokens_per_second: float
) -> dict[str, float]:
    metrics = {**metrics_by_depth("train", result.sums), "train/learning_rate": learning_rate}
    if math.isfinite(result.gradient_norm):
        metrics["train/gradient_norm"] = result.gradient_norm
    if result.divergence is not None:
        metrics["train/divergence"] = result.divergence
    return {**metrics, **training.loss_scale.metrics(), "train/tokens_per_second": tokens_per_second}


def progress_text(metrics: dict[str, float], unroll: int) -> str:
    """A step's metrics as the progress bar shows them."""
    rates = " ".join(f"{metrics[f'train/acceptance_{k}']:.2f}" for k in range(unroll))
    speed = f"{metrics['train/tokens_per_second']:.0f} tokens/s"
    return f"loss {metrics['train/loss_0']:.3f}, acceptance by depth {rates}, {speed}"


class Speed:
    """Measures tokens per second while its context is open, so time for saving and measuring is not counted."""

    def __init__(self) -> None:
        self.num_tokens, self._seconds, self._started = 0, 0.0, 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def tokens_per_second(self) -> float:
        rate = self.num_tokens / self._seconds
        self.num_tokens, self._seconds = 0, 0.0
        return rate
