"""The training-time test: unroll the head on its own features, as drafting will, and score every depth."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data_pipelines.batches import Batch
from heads.base import DraftHead
from heads.cache import UnrollCache
from heads.frozen import FrozenTarget
from heads.losses import acceptance, soft_cross_entropy


@dataclass(frozen=True)
class Supervision:
    """The positions whose next token the target wrote and the head can draft, with what the target says there.

    Position j carries the target's distribution of token j + 1. Unroll step k predicts it from index j - 1 - k.
    """

    rows: Tensor  # [positions], sample in the batch
    places: Tensor  # [positions], j
    teacher: Tensor  # [positions, draft_vocab], the target's logits
    choices: Tensor  # [positions], draft ids of the target's argmax
    outside: int  # supervised positions left out because that argmax is not in the draft vocabulary


@torch.no_grad()
def supervise(batch: Batch, frozen: FrozenTarget, head: DraftHead) -> Supervision:
    """The teacher's side of a batch; it is the same for every unroll step."""
    written = torch.zeros_like(batch.loss_mask)
    written[:, :-1] = batch.loss_mask[:, 1:]
    rows, places = written.nonzero(as_tuple=True)
    logits = frozen.logits(batch.last_hidden[rows, places])  # [positions, vocab]
    if head.vocab.is_full:
        return Supervision(rows, places, logits, logits.argmax(-1), outside=0)
    ids = head.vocab.ids.to(logits.device)
    choices = logits.argmax(-1)
    inside = torch.isin(choices, ids)
    draft_choices = torch.searchsorted(ids, choices[inside])
    return Supervision(
        rows[inside], places[inside], logits[inside][:, ids], draft_choices, outside=int((~inside).sum())
    )


@dataclass(frozen=True)
class UnrollScores:
    """Sums over the positions that each unroll step could predict; every field is [unroll]."""

    counts: Tensor
    losses: Tensor  # nats; carries the gradient
    hits: Tensor  # the head's first guess is the target's
    accepted: Tensor  # sum of min(p, q) within the draft vocabulary

    def loss(self, counts: Tensor, decay: float) -> Tensor:
        """Mean loss of each depth over `counts` positions (all ranks'), added up with weights decay^k."""
        weights = decay ** torch.arange(len(self.losses), device=self.losses.device)
        return (weights * self.losses / counts.clamp(min=1)).sum()

    def detached(self) -> Tensor:
        """[4, unroll] for reduction over ranks and logging."""
        return torch.stack([self.counts, self.losses.detach(), self.hits, self.accepted])


def unroll_counts(supervision: Supervision, unroll: int) -> Tensor:
    """How many positions each step can predict: those with an index k + 1 places before them. [unroll]"""
    return torch.stack([(supervision.places >= k + 1).sum() for k in range(unroll)]).float()


class UnrolledHead(nn.Module):
    """A head under training; one module, so that data-parallel wrappers see a single forward."""

    def __init__(self, head: DraftHead, unroll: int) -> None:
        super().__init__()
        self.head, self.unroll = head, unroll

    def forward(self, batch: Batch, supervision: Supervision) -> UnrollScores:
        head, cache = self.head, UnrollCache()
        features = head.project(batch.taps)  # [batch, seq, feature]
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        losses, hits, accepted = [], [], []
        for k in range(self.unroll):
            # Ground-truth tokens are fed: index t takes token t + 1 + k. What is rolled in at the end is never scored.
            tokens = batch.tokens.roll(-1 - k, dims=1)
            hidden = head(features, tokens, positions + k, cache=cache)
            reached = supervision.places >= k + 1
            at = supervision.rows[reached], supervision.places[reached] - 1 - k
            logits, teacher = head.logits(hidden[at]), supervision.teacher[reached]  # [positions, draft_vocab]
            losses.append(soft_cross_entropy(logits, teacher).sum())
            with torch.no_grad():
                hits.append((logits.argmax(-1) == supervision.choices[reached]).sum().float())
                accepted.append(acceptance(logits, teacher).sum())
            features = head.feedback(hidden)
        counts = unroll_counts(supervision, self.unroll)
        return UnrollScores(counts, torch.stack(losses), torch.stack(hits), torch.stack(accepted))
