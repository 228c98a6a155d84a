"""The training loop of draft heads: deterministic, resumable after any step, the same on one rank or many."""

import time
from functools import lru_cache

import torch
from accelerate import Accelerator

from headstart.common.process import Interrupts
from headstart.heads.base import DraftHead
from headstart.recipes import Recipe
from headstart.trainers.evaluation import TEMPERATURES, decoding_metrics, held_out_metrics, metrics_by_depth
from headstart.trainers.run_checkpoints import Checkpoints
from headstart.trainers.step import (
    StepResult,
    Training,
    TrainingInputs,
    expect_step,
    refuse_nothing_to_learn,
    tf32_allowed,
    train_step,
)
from headstart.trainers.tracking import Tracker

LOG_EVERY = 10  # steps between logged metrics
WINDOW = 16_384  # samples


def train(
    recipe: Recipe, head: DraftHead, inputs: TrainingInputs, accelerator: Accelerator, checkpoints: Checkpoints
) -> None:
    """Fit the head, starting from the newest checkpoint if there is one; the last checkpoint is the result.

    Raises ValueError if there is nothing to learn, if a loss or a gradient is not finite, naming the step and its
    samples, or if a checkpoint cannot be read or written. Raises SystemExit with a shell's exit code after the step in
    which SIGTERM or Ctrl-C arrived.
    """
    section, found = recipe.train, checkpoints.load()
    done = 0 if found is None else found.step
    is_due = done >= section.steps or done % section.checkpoint_every == 0
    measured = done == 0 or not is_due or Tracker.has_measured(recipe, done)
    if done >= section.steps and measured:
        return
    training = Training.start(recipe, head, inputs, accelerator, found)
    refuse_nothing_to_learn(training)
    order = SampleOrder(inputs.train.shard_sizes, recipe.seed)
    with Tracker(recipe, done, accelerator.is_main_process) as tracker, Interrupts() as interrupts:
        if done:
            tracker.say(f"resuming after step {done}")
        if not done and section.start_from is not None:  # what the run has to improve on
            measure(training, tracker, 0)
        if not measured:  # the process was stopped between saving and measuring
            measure(training, tracker, done)
        seconds, num_tokens = 0.0, 0  # spent in steps since the last logged one
        inputs.train.follow(order.__getitem__, done * section.batch_size)
        expect_step(training, order.of_step(done, section.batch_size))
        for step in range(done, section.steps):
            factor = training.head.set_learning_rates(section, step)
            started = time.perf_counter()
            inputs.train.follow(order.__getitem__, step * section.batch_size)
            numbers = order.of_step(step, section.batch_size)
            if step + 1 < section.steps:  # read while this step is computed
                expect_step(training, order.of_step(step + 1, section.batch_size))
            with tf32_allowed(accelerator.device):
                logged = (step + 1) % LOG_EVERY == 0
                result = train_step(training, step, numbers, interrupts.received is not None, logged)
            seconds += time.perf_counter() - started
            num_tokens += result.num_tokens
            if logged:
                metrics = step_metrics(result, section.learning_rate * factor, num_tokens / seconds)
                seconds, num_tokens = 0.0, 0
                tracker.log(step + 1, metrics, progress_text(metrics, recipe.unroll))
            due = step + 1 == section.steps or (step + 1) % section.checkpoint_every == 0
            if due and not result.interrupted:
                measure(training, tracker, step + 1)
            if due or result.interrupted:
                training.save(checkpoints, step + 1)
            tracker.advance(step + 1)
            if result.interrupted:
                name = interrupts.number.name
                tracker.say(f"{name}: saved after step {step + 1} and stopped; the same command continues")
                raise SystemExit(128 + interrupts.number)  # as shells report it


class SampleOrder:
    """An endless sequence of sample numbers, a function of the seed alone; each epoch is a new permutation.

    Samples are drawn from shards of WINDOW samples or more at a time, so a cache need not hold a large store whole.
    """

    def __init__(self, shard_sizes: list[int], seed: int) -> None:
        assert sum(shard_sizes) > 0
        self.shard_sizes, self.seed = shard_sizes, seed
        self.num_samples = sum(shard_sizes)
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, place: int) -> int:
        epoch, offset = divmod(place, self.num_samples)
        return self._epoch(epoch)[offset]

    def of_step(self, step: int, batch_size: int) -> list[int]:
        """The samples of a step's global batch, which the ranks divide."""
        return [self[place] for place in range(step * batch_size, (step + 1) * batch_size)]

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        starts = torch.tensor([0, *self.shard_sizes]).cumsum(0).tolist()
        shards = torch.randperm(len(self.shard_sizes), generator=generator).tolist()
        order: list[int] = []
        window: list[int] = []
        for shard in shards:
            window += range(starts[shard], starts[shard + 1])
            if len(window) >= WINDOW or shard == shards[-1]:
                order += [window[place] for place in torch.randperm(len(window), generator=generator).tolist()]
                window = []
        return order


def measure(training: Training, tracker: Tracker, step: int) -> None:
    """Log the held-out metrics, computed on the main rank alone."""
    recipe, inputs = training.recipe, training.inputs
    whole = training.head.whole()
    if whole is not None:
        tracker.progress.skip(0, "measuring on held-out prompts")
        with training.autocast():
            samples = recipe.train.samples_at_once(training.accelerator.num_processes)
            metrics = held_out_metrics(whole, inputs.heldout, samples)
        if inputs.decoding is not None:
            weights = {} if inputs.target is None else inputs.target.weights()
            inputs.decoding.load_weights(whole.head.state_dict(), weights)
            metrics |= decoding_metrics(inputs.decoding)
        store = inputs.train  # the tokens read so far follow from the mean length of a sample
        metrics["train/tokens"] = round(step * recipe.train.batch_size * store.num_tokens / len(store))
        tracker.log(step, metrics, f"measured after step {step}")
        tracker.say(f"step {step}: {measured_text(recipe, metrics)}")
    training.accelerator.wait_for_everyone()


def measured_text(recipe: Recipe, metrics: dict[str, float]) -> str:
    """The held-out metrics as one line of the console."""
    accuracies = " ".join(f"{metrics[f'heldout/accuracy_{k}']:.3f}" for k in range(recipe.unroll))
    text = f"held-out loss {metrics['heldout/loss_0']:.3f}, accuracy by depth {accuracies}"
    if "heldout/tau" in metrics:
        text += ", acceptance length " + ", ".join(
            f"{metrics[f'heldout/{name}']:.2f} at temperature {temperature:g}"
            for name, temperature in TEMPERATURES.items()
        )
    if "heldout/divergence" in metrics:
        text += f", KL(original || tuned target) {metrics['heldout/divergence']:.4f} nats per token"
    return text


def step_metrics(result: StepResult, learning_rate: float, tokens_per_second: float) -> dict[str, float]:
    metrics = {**metrics_by_depth("train", result.sums), "train/learning_rate": learning_rate}
    metrics["train/gradient_norm"] = result.gradient_norm
    if result.divergence is not None:
        metrics["train/divergence"] = result.divergence
    return {**metrics, "train/tokens_per_second": tokens_per_second}


def progress_text(metrics: dict[str, float], unroll: int) -> str:
    """A step's metrics as the progress bar shows them."""
    rates = " ".join(f"{metrics[f'train/acceptance_{k}']:.2f}" for k in range(unroll))
    speed = f"{metrics['train/tokens_per_second']:.0f} tokens/s"
    return f"loss {metrics['train/loss_0']:.3f}, acceptance by depth {rates}, {speed}"
