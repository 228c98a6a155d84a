"""The training-time test: unroll the head on its own features, as drafting will, and score every depth."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headstart.data_pipelines.features.batches import SampleStore, TrainingBatch, in_rows, of_samples, tapped
from headstart.heads.base import DraftHead, LevelHead
from headstart.heads.frozen import FrozenTarget, at_least_float32
from headstart.heads.losses import OBJECTIVES, acceptance, feature_distance
from headstart.heads.unroll_attention import UnrollCache
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.objective import Objective, score_in_chunks

CHUNK_LOGITS = 2**25  # logits scored at once: 128 MiB in float32, and a few times that in intermediate results
GPU_CHUNK_LOGITS = 2**27  # the limit on a GPU, where every chunk adds to the gradient of the whole lm_head
CACHED_LOGITS = 2**19  # the limit on a CPU, where a chunk that fits the cache takes two thirds of the time
CACHED_POSITIONS = 64  # the fewest that a CPU scores at once, since smaller matrix products are inefficient
CHOOSING_POSITIONS = 256  # the most whose logits over the target's whole vocabulary are computed at once
NOISE_LENGTH = 512  # sample length, in tokens, at which EAGLE-1's input noise has its nominal width


@dataclass(frozen=True)
class Supervision:
    """The positions whose next token the target wrote and the head can draft.

    At position j the target gives the distribution of token j + 1. Unroll step k predicts it from index j - 1 - k of
    the same sample.
    """

    rows: Tensor  # [positions], row in the batch
    columns: Tensor  # [positions], column in the row
    places: Tensor  # [positions], j: index within the sample
    last_hidden: Tensor  # [positions, hidden]; the target's distributions are computed from it a chunk at a time
    outside: int  # positions left out because the target's choice is not in the draft vocabulary
    first_column: int  # no position's column is smaller

    def counts(self, unroll: int) -> Tensor:
        """The number of positions that each unroll step can predict. [unroll]"""
        return self.can_predict(unroll).sum(1).float()

    def can_predict(self, unroll: int) -> Tensor:
        """Whether step k can predict each position, that is, whether index j - 1 - k exists. [unroll, positions]"""
        return self.places > torch.arange(unroll, device=self.places.device).unsqueeze(1)


class Teacher:
    """The target's distributions, which every unroll step is scored against."""

    def __init__(self, frozen: FrozenTarget, vocab: DraftVocab, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of the matrix products, to which autocast would convert lm_head again for every chunk."""
        frozen = frozen if dtype is None else replace(frozen, lm_head=frozen.lm_head.to(dtype))
        self.frozen, self.vocab = frozen, vocab
        self.within_vocab = frozen.within(vocab)
        self.column = vocab.columns().to(frozen.embedding.device)  # [vocab]
        self.drafted: dict[tuple[SampleStore, int], Tensor] = {}  # see `TrainingBatch.drafted`

    @torch.no_grad()
    def supervise(self, batch: TrainingBatch) -> Supervision:
        """Find the supervised positions of a batch."""
        written = torch.zeros_like(batch.loss_mask)
        written[:, :-1] = batch.loss_mask[:, 1:]
        if batch.documents is not None:
            written[:, :-1] &= batch.documents.places[:, 1:] > 0  # no sample predicts the first token of the next
        rows, columns = written.nonzero(as_tuple=True)
        places = columns if batch.documents is None else batch.documents.places[rows, columns]
        last_hidden = batch.last_hidden[rows, columns]  # [positions, hidden]
        inside = self.can_draft(batch, rows, columns)
        return Supervision(
            rows=rows[inside],
            columns=columns[inside],
            places=places[inside],
            last_hidden=last_hidden[inside],
            outside=int((~inside).sum()),
            first_column=int(columns.min()) if len(columns) else 0,
        )

    def with_drafted(
        self, store: SampleStore, numbers: Sequence[int], batch: TrainingBatch, packing: list[list[int]] | None = None
    ) -> TrainingBatch:
        """The batch of these samples with `drafted`, computed when a sample is read first.

        The logits over a vocabulary of 262,144 tokens can take 20 times as long as the rest of a training step.
        """
        if self.vocab.is_full:
            return batch
        keys = [(store, number) for number in numbers]
        if not all(key in self.drafted for key in keys):
            drafted = torch.zeros_like(batch.loss_mask)
            before = batch.loss_mask.roll(-1, dims=1)  # only what precedes a token to learn is ever asked about
            drafted[before] = self.in_vocab(batch.last_hidden[before])
            self.drafted |= zip(keys, of_samples(drafted, batch.lengths, packing), strict=True)
        return replace(batch, drafted=in_rows([self.drafted[key] for key in keys], packing))

    def can_draft(self, batch: TrainingBatch, rows: Tensor, columns: Tensor) -> Tensor:
        """Whether the target's choice after each of these positions is in the draft vocabulary."""
        if self.vocab.is_full:
            return torch.ones_like(rows, dtype=torch.bool)
        if batch.drafted is not None:
            return batch.drafted[rows, columns]
        return self.in_vocab(batch.last_hidden[rows, columns])

    @torch.no_grad()
    def in_vocab(self, last_hidden: Tensor) -> Tensor:
        """Whether the target's choice after each hidden state is in the draft vocabulary. [positions]"""
        chunk = max(min(CHUNK_LOGITS // self.vocab.target_size, CHOOSING_POSITIONS), 1)
        choices = torch.cat([self.frozen.choices(part) for part in last_hidden.split(chunk)])
        return self.column[choices] >= 0

    @torch.no_grad()
    def log_p(self, last_hidden: Tensor) -> Tensor:
        """The target's distribution within the draft vocabulary. [positions, draft_vocab]"""
        return self.within_vocab.logits(last_hidden).log_softmax(-1)


class UnrollScores(NamedTuple):
    """The loss, and sums over the positions that each unroll step could predict, [unroll] each.

    A tuple, because FSDP2 and DeepSpeed look for the loss in tuples: they gather the weights before its gradient.
    """

    loss: Tensor  # scalar; carries the gradient
    counts: Tensor
    losses: Tensor
    hits: Tensor  # how often the head's first choice is the target's
    accepted: Tensor  # expected acceptances: sum of min(p, q) over the draft vocabulary
    divergence: Tensor | None = None  # Medusa-2: KL(original || tuned), summed over the positions of unroll step 0

    def sums(self) -> Tensor:
        """Counts, losses, hits and expected acceptances, [4, unroll], to add up over batches and ranks."""
        return torch.stack([self.counts, self.losses, self.hits, self.accepted])


class HeadInTraining(nn.Module, ABC):
    """A head under training: one module with a single forward, as data-parallel wrappers need."""

    head: DraftHead
    learns_from: str = "one"  # the tokens of a text that a token to learn has to be among
    counts_hits: bool = True  # scores have hits and acceptances; without them a step reads its logits less often

    def __init__(self, head: Any, teacher: Teacher, objective: Objective, section: TrainSection | None = None) -> None:
        """`section` is the recipe's; without it nothing is computed again."""
        super().__init__()
        self.head, self.teacher, self.objective = head, teacher, objective
        self.checkpointing = section is not None and bool(section.activation_checkpointing)

    def supervise(self, batch: TrainingBatch, key: str) -> Any:
        """Find the supervised positions of a batch; `key` seeds whatever a kind of head draws at random."""
        return self.teacher.supervise(batch)

    def forward(
        self, batch: TrainingBatch, supervision: Supervision, counts: Tensor, noise: Tensor | None = None
    ) -> UnrollScores:
        """Score every unroll step; its loss is a sum divided by `counts`, [unroll], its positions on all ranks."""
        hidden = self.unroll(batch, supervision, noise)
        weights = torch.tensor(self.objective.unroll_weights, device=counts.device) / counts.clamp(min=1)  # [unroll]
        # The chunks add up losses with weights around 1: in half precision the gradients of a mean would vanish.
        largest = weights.max().clamp(min=torch.finfo(weights.dtype).tiny)
        score = partial(self.score, supervision, (weights / largest).unsqueeze(1))
        chunk = positions_at_once(self.objective.unroll * len(self.head.vocab.ids), hidden.device)
        loss, sums = score_in_chunks(score, hidden, self.head.logits_parameters, chunk)
        return UnrollScores(loss * largest, supervision.counts(self.objective.unroll), *sums)

    @abstractmethod
    def unroll(self, batch: TrainingBatch, supervision: Any, noise: Tensor | None) -> Tensor:
        """The head's hidden state that predicts each position, at each step. [unroll, positions, feature]"""

    @abstractmethod
    def score(self, supervision: Any, weights: Tensor, hidden: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The weighted loss of a chunk of positions, and its sums [3, unroll] of losses, hits and acceptances."""

    def weighted(
        self, weights: Tensor, losses: Tensor, log_q: Tensor, log_p: Tensor, predicted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss of a chunk, and the sums [3, unroll] of what counts of its losses, hits and acceptances."""
        losses = losses.where(predicted, 0.0)
        with torch.no_grad():
            found = (losses, *self.hits_and_acceptances(log_q, log_p))
            sums = torch.stack([each.where(predicted, 0.0).sum(1) for each in found])
        return (weights * losses).sum(), sums

    @torch.no_grad()
    def hits_and_acceptances(self, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Of each position; zeros if they are not counted."""
        if not self.counts_hits:
            zeros = log_q.new_zeros(log_q.shape[:-1])
            return zeros, zeros
        return (log_q.argmax(-1) == log_p.argmax(-1)).to(log_q.dtype), acceptance(log_q, log_p)


class UnrolledHead(HeadInTraining):
    """A head that drafts a level in each call, unrolled on its own features."""

    head: LevelHead

    def unroll(self, batch: TrainingBatch, supervision: Any, noise: Tensor | None) -> Tensor:
        head, target, cache = self.head, self.head.target, UnrollCache(documents=batch.documents)
        features = head.project(tapped(batch.taps, batch.last_hidden, head.taps, target.num_layers))
        features = features if noise is None else features + noise.to(features.dtype)  # [batch, seq, feature]
        step, scored, places, first = self.run_step, [], batch.places, 0
        if self.checkpointing:
            step = partial(checkpoint, self.run_step, use_reentrant=False, preserve_rng_state=False)
        for k in range(self.objective.unroll):
            if k == 1:  # what lies before all scored indices was needed as step 0's keys
                first = max(supervision.first_column - self.objective.unroll, 0)
                features, places = features[:, first:], places[..., first:]
            # Index t takes the ground-truth token t + 1 + k. At a sample's end `roll` brings in tokens from the row's
            # start or the next sample; only the sample's later indices see them, and none of those is scored.
            tokens = batch.tokens.roll(-1 - k, dims=1)[:, first:]
            hidden, cache = step(k, features, tokens, k + places, cache)
            # A position that step k cannot predict takes index 0 of its sample here, and `score` masks it out.
            scored.append(hidden[supervision.rows, supervision.columns - supervision.places.clamp(max=1 + k) - first])
            features = head.feedback(hidden, features)
        return torch.stack(scored)

    def run_step(
        self, k: int, features: Tensor, tokens: Tensor, positions: Tensor, cache: UnrollCache
    ) -> tuple[Tensor, UnrollCache]:
        """The hidden state at every index, and a cache with this step's keys; pure, for activation checkpointing."""
        grown = UnrollCache(cache.keys, cache.values, cache.documents)
        return self.head(features, tokens, positions, cache=grown, level=k), grown

    def score(self, supervision: Any, weights: Tensor, hidden: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        objective, last_hidden = self.objective, supervision.last_hidden[part]
        log_p = self.teacher.log_p(last_hidden)  # [chunk, draft_vocab], the same for all steps
        log_q = at_least_float32(self.head.unrolled_logits(hidden)).log_softmax(-1)  # [unroll, chunk, draft_vocab]
        losses = objective.weight * OBJECTIVES[objective.name](log_q, log_p)  # [unroll, chunk]
        if objective.regression_weight:
            feature = self.head.project(last_hidden)  # the last hidden state is this head's only tap
            distance = feature_distance(at_least_float32(hidden), at_least_float32(feature))
            losses = losses + objective.regression_weight * distance
        return self.weighted(weights, losses, log_q, log_p, supervision.can_predict(objective.unroll)[:, part])


def positions_at_once(logits: int, device: torch.device) -> int:
    """The number of positions to score at once, given the number of logits of one position."""
    if device.type == "cpu":
        return max(min(CHUNK_LOGITS // logits, max(CACHED_LOGITS // logits, CACHED_POSITIONS)), 1)
    return max(GPU_CHUNK_LOGITS // logits, 1)


def input_noise(
    width: float,
    lengths: list[int],
    keys: list[str],
    size: int,
    device: torch.device | str,
    packing: list[list[int]] | None = None,
) -> Tensor:
    """EAGLE-1's uniform noise around zero for the features of each sample. [batch, longest row, size]

    Its range is `width` for a sample of 512 tokens and inversely proportional to the sample's length. It depends on
    the sample's key and length only, not on the rest of the batch.
    """
    noise = []
    for length, key in zip(lengths, keys, strict=True):
        generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
        drawn = torch.rand(length, size, generator=generator, device=device)
        noise.append((drawn - 0.5) * (width * NOISE_LENGTH / length))
    return in_rows(noise, packing)
