"""One optimizer step from a global batch, the same on one rank or many, in one piece or several."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor

from data_pipelines.batches import Batch, pack
from data_pipelines.sample_stores import SampleStore
from data_pipelines.shards import Sample
from trainers.objective import Supervision, input_noise
from trainers.run_state import Training


@dataclass(frozen=True)
class StepResult:
    """What a step says about itself, all ranks together."""

    sums: Tensor  # [4, unroll], of UnrollScores
    num_tokens: int  # read, without padding
    gradient_norm: float  # before clipping; not finite if float16 overflowed and the step was skipped
    interrupted: bool  # whether a rank was told to stop
    divergence: float | None  # Medusa-2: KL(original || tuned) of a token, in nats; None in its warm-up and elsewhere


def train_step(training: Training, step: int, numbers: list[int], interrupted: bool = False) -> StepResult:
    """One update from the samples of a global batch; `interrupted` is what this rank has to tell the others.

    The loss is a sum over supervised tokens divided by their number in the whole batch, whatever the ranks and pieces.
    Raises ValueError before the update where it would put something not finite into the weights.
    """
    accelerator, ranks = training.accelerator, training.ranks
    share = Share(training, step, share_of(accelerator, numbers))
    with training.autocast():
        counts = accelerator.reduce(share.count(), "sum")
    sums, divergences = torch.zeros(4, training.objective.unroll, device=accelerator.device), []
    for batch, supervision, noise, last in share.pieces():
        with ranks.part(last):
            with training.autocast():
                scores = ranks.forward(batch, supervision, counts, noise)
            ranks.backward(scores.loss * training.loss_scale.factor)
        sums += scores.sums()
        if scores.divergence is not None:  # on one process alone
            divergences.append(float(scores.divergence))
    more = torch.tensor([share.num_tokens, interrupted], device=accelerator.device, dtype=sums.dtype)
    *flat, num_tokens, stops = accelerator.reduce(torch.cat([sums.flatten(), more]), "sum").tolist()
    refuse_non_finite(training, "loss", sum(flat), step, numbers)
    gradient_norm = ranks.update(training.loss_scale.factor)
    finite = math.isfinite(gradient_norm)
    if not training.loss_scale.active:
        refuse_non_finite(training, "gradient", gradient_norm, step, numbers)
    training.loss_scale.update(step, finite)
    if finite and training.average is not None:
        training.average.update(step)
    divergence = sum(divergences) / max(flat[0], 1) if divergences else None  # first of the sums is the first count
    return StepResult(torch.tensor(flat).view(sums.shape), int(num_tokens), gradient_norm, stops > 0, divergence)


def share_of(accelerator: Accelerator, numbers: list[int]) -> list[int]:
    """This rank's samples of a global batch."""
    return numbers[accelerator.process_index :: accelerator.num_processes]


class Share:
    """A rank's samples of a step, cut into pieces; the features of one piece at a time are in memory."""

    def __init__(self, training: Training, step: int, numbers: list[int]) -> None:
        self.training, self.step = training, step
        count = training.recipe.train.accumulate
        self.numbers = [numbers[piece::count] for piece in range(count)]
        self.found: list[Supervision] = []  # where each piece is supervised, without its hidden states
        self.lengths: list[list[int]] = []  # of each piece's samples

    def count(self) -> Tensor:
        """The positions that each unroll step can predict, [unroll]: known before the first gradient is taken."""
        for numbers in self.numbers:
            samples = self.samples(numbers)
            self.lengths.append([len(sample.tokens) for sample in samples])
            batch = self.collate(samples)
            supervision = self.training.ranks.unrolled.teacher.supervise(batch)
            self.found.append(replace(supervision, last_hidden=batch.last_hidden.new_empty(0)))
        self.held = batch, supervision  # with one piece nothing is read twice
        return torch.stack([each.counts(self.training.objective.unroll) for each in self.found]).sum(0)

    def pieces(self) -> Iterator[tuple[Batch, Supervision, Tensor | None, bool]]:
        """Each with its supervision, its noise, and whether it is the last; the one that was read last comes first."""
        batch, supervision = self.held
        del self.held
        for piece in reversed(range(len(self.numbers))):
            if piece + 1 < len(self.numbers):
                batch, places = self.collate(self.samples(self.numbers[piece])), self.found[piece]
                supervision = replace(places, last_hidden=batch.last_hidden[places.rows, places.columns])
            yield batch, supervision, self.noise(piece), piece == 0

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.lengths))

    def samples(self, numbers: list[int]) -> list[Sample]:
        return [self.training.materials.train[number] for number in numbers]

    def collate(self, samples: list[Sample]) -> Batch:
        dtype, device = self.training.materials.frozen.embedding.dtype, self.training.accelerator.device
        return Batch.collate(samples, dtype, device, self.packing([len(sample.tokens) for sample in samples]))

    def packing(self, lengths: list[int]) -> list[list[int]] | None:
        return pack(lengths, self.training.recipe.train.pack_tokens)

    def noise(self, piece: int) -> Tensor | None:
        width, head = self.training.objective.input_noise, self.training.ranks.unrolled.head
        if not width:
            return None
        keys = [f"{self.training.recipe.seed} {self.step} {number}" for number in self.numbers[piece]]
        lengths, device = self.lengths[piece], self.training.accelerator.device
        return input_noise(width, lengths, keys, head.feature_size, device, self.packing(lengths))


def refuse_non_finite(training: Training, what: str, value: float, step: int, numbers: list[int]) -> None:
    """Stop at a value that is not finite, and say which samples it came from."""
    if math.isfinite(value):
        return
    store = training.materials.train
    spoiled = [number for number in numbers if not is_finite(store[number])]
    if spoiled:
        advice = f"the features of samples {named(store, spoiled)} are not finite; harvest again, in another data.dtype"
    else:
        advice = (
            f"it comes of finite features (samples {named(store, numbers)}); lower train.learning_rate, or let "
            "train.precision be float32"
        )
    raise ValueError(f"the {what} of step {step + 1} is not finite: {advice}; the last checkpoint is good")


def is_finite(sample: Sample) -> bool:
    return bool(sample.taps.isfinite().all() and sample.last_hidden.isfinite().all())


def named(store: SampleStore, numbers: list[int]) -> str:
    return ", ".join(f"{number} ({store.place_of(number)})" for number in numbers)
