"""The training-time test: unroll the head on its own features, as drafting will, and score every depth."""

import zlib
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipelines.batches import Batch, in_rows
from data_pipelines.shards import tapped
from heads.base import DraftHead
from heads.frozen import FrozenTarget, at_least_float32
from heads.losses import OBJECTIVES, acceptance, feature_distance
from heads.unroll_attention import UnrollCache
from heads.vocab import DraftVocab
from recipes import Recipe
from trainers.chunked_loss import score_in_chunks

CHUNK_LOGITS = 2**25  # scored at once: 128 MiB in float32, and a few times as much in what is computed from them
CACHED_LOGITS = 2**19  # the same on a CPU, where what stays in its cache takes two thirds of the time
CACHED_POSITIONS = 64  # but never less on a CPU than makes a matrix product worth its while
NOISE_LENGTH = 512  # tokens of the sample on which EAGLE-1's noise has its nominal width
PAPERS = {
    "eagle1": (0.1, 1.0, 0.2),
    "eagle3": (1.0, 0.0, 0.0),
    "medusa": (1.0, 0.0, 0.0),
}  # objective_weight, regression_weight, input_noise


@dataclass(frozen=True)
class Objective:
    """What training minimises: a weighted sum of two losses at each unroll step, and of the steps."""

    name: str
    weight: float
    regression_weight: float
    input_noise: float
    unroll_weights: tuple[float, ...]

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "Objective":
        """What the recipe leaves open is as in the paper of its head."""
        train = recipe.train
        given = train.objective_weight, train.regression_weight, train.input_noise
        paper = zip(given, PAPERS[recipe.head.kind], strict=True)
        weight, regression_weight, noise = (default if own is None else own for own, default in paper)
        decayed = tuple(train.unroll_decay**k for k in range(train.unroll))
        return cls(train.objective, weight, regression_weight, noise, train.unroll_weights or decayed)

    @property
    def unroll(self) -> int:
        return len(self.unroll_weights)


@dataclass(frozen=True)
class Supervision:
    """The positions whose next token the target wrote and the head can draft.

    Position j stands for the target's distribution of token j + 1. Unroll step k predicts it from index j - 1 - k of
    the same sample.
    """

    rows: Tensor  # [positions], row of the batch
    columns: Tensor  # [positions], where in the row
    places: Tensor  # [positions], j: where in its sample
    last_hidden: Tensor  # [positions, hidden]; the target's distribution is read off it when it is needed
    outside: int  # supervised positions left out because the target's choice is not in the draft vocabulary

    def counts(self, unroll: int) -> Tensor:
        """How many positions each step can predict: those with an index k + 1 places before them. [unroll]"""
        return self.reached(unroll).sum(1).float()

    def reached(self, unroll: int) -> Tensor:
        """[unroll, positions]"""
        return self.places > torch.arange(unroll, device=self.places.device).unsqueeze(1)


class Teacher:
    """The target's side of training; it is the same for every unroll step."""

    def __init__(self, frozen: FrozenTarget, vocab: DraftVocab) -> None:
        self.frozen, self.vocab = frozen, vocab
        self.drafted = frozen.within(vocab)

    @torch.no_grad()
    def supervise(self, batch: Batch) -> Supervision:
        """Where a batch has something to say."""
        written = torch.zeros_like(batch.loss_mask)
        written[:, :-1] = batch.loss_mask[:, 1:]
        if batch.documents is not None:
            written[:, :-1] &= batch.documents.places[:, 1:] > 0  # no sample foretells the next one's first token
        rows, columns = written.nonzero(as_tuple=True)
        places = columns if batch.documents is None else batch.documents.places[rows, columns]
        last_hidden = batch.last_hidden[rows, columns]  # [positions, hidden]
        if self.vocab.is_full:
            return Supervision(rows, columns, places, last_hidden, outside=0)
        chunks = last_hidden.split(max(CHUNK_LOGITS // self.vocab.target_size, 1))
        choices = torch.cat([self.frozen.logits(chunk).argmax(-1) for chunk in chunks])
        inside = torch.isin(choices, self.vocab.ids.to(choices.device))
        outside = int((~inside).sum())
        return Supervision(rows[inside], columns[inside], places[inside], last_hidden[inside], outside)

    @torch.no_grad()
    def log_p(self, last_hidden: Tensor) -> Tensor:
        """The target's distribution within the draft vocabulary. [positions, draft_vocab]"""
        return self.drafted.logits(last_hidden).log_softmax(-1)


class UnrollScores(NamedTuple):
    """The loss, and sums over the positions that each unroll step could predict, [unroll] each.

    A tuple, so that FSDP2 and DeepSpeed find the loss in it and have the weights there when its gradient is taken.
    """

    loss: Tensor  # scalar; carries the gradient
    counts: Tensor
    losses: Tensor
    hits: Tensor  # the head's first guess is the target's
    accepted: Tensor  # sum of min(p, q) within the draft vocabulary
    divergence: Tensor | None = None  # Medusa-2: KL(original || tuned), summed over the first step's positions; scalar

    def sums(self) -> Tensor:
        """[4, unroll] for reduction over ranks and logging."""
        return torch.stack([self.counts, self.losses, self.hits, self.accepted])


class UnrolledHead(nn.Module):
    """A head under training; one module, so that data-parallel wrappers see a single forward."""

    def __init__(
        self, head: DraftHead, teacher: Teacher, objective: Objective, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.head, self.teacher, self.objective = head, teacher, objective
        saving = partial(checkpoint, self.run_step, use_reentrant=False, preserve_rng_state=False)
        self.step = saving if activation_checkpointing else self.run_step

    def forward(
        self, batch: Batch, supervision: Supervision, counts: Tensor, noise: Tensor | None = None
    ) -> UnrollScores:
        """The loss is a mean over `counts` positions at each step (all ranks' [unroll]); `noise` is the features'."""
        hidden = self.unroll(batch, supervision, noise)
        weights = torch.tensor(self.objective.unroll_weights, device=counts.device) / counts.clamp(min=1)
        # Inside, losses are sums with weights around 1: in half precision the gradients of a mean would vanish.
        score = partial(self.score, supervision, weights / weights.max())
        chunk = positions_at_once(self.objective.unroll * len(self.head.vocab.ids), hidden.device)
        loss, sums = score_in_chunks(score, hidden, self.head.logits_parameters, chunk)
        return UnrollScores(loss * weights.max(), supervision.counts(self.objective.unroll), *sums)

    def unroll(self, batch: Batch, supervision: Supervision, noise: Tensor | None) -> Tensor:
        """The head's hidden states of each step where they are scored. [unroll, positions, feature]"""
        head, target, cache = self.head, self.head.target, UnrollCache(documents=batch.documents)
        features = head.project(tapped(batch.taps, batch.last_hidden, head.taps, target.num_layers))
        features = features if noise is None else features + noise.to(features.dtype)  # [batch, seq, feature]
        scored = []
        for k in range(self.objective.unroll):
            # Ground-truth tokens are fed: index t takes token t + 1 + k. What is rolled in at the end of a sample, from
            # the row's other end or the next sample, is seen only by indices behind it, and none of them is scored.
            tokens = batch.tokens.roll(-1 - k, dims=1)
            hidden, cache = self.step(k, features, tokens, cache)
            # Where step k cannot reach, the sample's index 0 stands in; `score` leaves it out.
            scored.append(hidden[supervision.rows, supervision.columns - supervision.places.clamp(max=1 + k)])
            features = head.feedback(hidden, features, tokens)
        return torch.stack(scored)

    def run_step(self, k: int, features: Tensor, tokens: Tensor, cache: UnrollCache) -> tuple[Tensor, UnrollCache]:
        """The head's hidden state at every index and the keys up to this step; a pure function, so that computing it
        again for a checkpoint's gradient is safe."""
        grown = UnrollCache(cache.keys, cache.values, cache.documents)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        positions = k + (places if cache.documents is None else cache.documents.places)
        return self.head(features, tokens, positions, cache=grown, level=k), grown

    def score(self, supervision: Supervision, weights: Tensor, hidden: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The weighted sum of a chunk's losses, and sums [3, unroll] of losses, hits and accepted chances."""
        objective, last_hidden = self.objective, supervision.last_hidden[part]
        log_p = self.teacher.log_p(last_hidden)  # [chunk, draft_vocab], for all steps
        log_q = at_least_float32(self.head.unrolled_logits(hidden)).log_softmax(-1)  # [unroll, chunk, draft_vocab]
        losses = objective.weight * OBJECTIVES[objective.name](log_q, log_p)  # [unroll, chunk]
        if objective.regression_weight:
            feature = self.head.project(last_hidden)  # the last hidden state is this head's only tap
            distance = feature_distance(at_least_float32(hidden), at_least_float32(feature))
            losses = losses + objective.regression_weight * distance
        with torch.no_grad():
            hits = (log_q.argmax(-1) == log_p.argmax(-1)).float()
            accepted = acceptance(log_q, log_p)
        reached = supervision.reached(objective.unroll)[:, part]
        losses, hits, accepted = (each.where(reached, 0.0).sum(1) for each in (losses, hits, accepted))
        return (weights * losses).sum(), torch.stack([losses.detach(), hits, accepted])


def positions_at_once(logits: int, device: torch.device) -> int:
    """How many positions of so many logits each are scored together."""
    limit = CHUNK_LOGITS // logits
    if device.type == "cpu":
        limit = min(limit, max(CACHED_LOGITS // logits, CACHED_POSITIONS))
    return max(limit, 1)


def input_noise(
    width: float,
    lengths: list[int],
    keys: list[str],
    size: int,
    device: torch.device | str,
    packing: list[list[int]] | None = None,
) -> Tensor:
    """Uniform noise around zero on the features of each sample, `width` wide at 512 tokens and inversely to its length.

    Of (key, place) alone, whatever else is in the batch. [batch, longest row, size] (EAGLE-1)
    """
    noise = []
    for length, key in zip(lengths, keys, strict=True):
        generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
        drawn = torch.rand(length, size, generator=generator, device=device)
        noise.append((drawn - 0.5) * (width * NOISE_LENGTH / length))
    return in_rows(noise, packing)
