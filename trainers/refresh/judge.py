"""Compares two heads on recent traffic, from stored hidden states: the target is not asked again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from headstart.data_pipelines.features.batches import Sample, tapped
from headstart.heads.base import DraftHead

MOST = 256  # requests that are judged, the newest ones
LEAST = 8  # requests without which nothing is judged
RESAMPLED = 2000  # times, for the interval


@dataclass(frozen=True)
class Verdict:
    """Acceptance lengths of the served head and of a candidate on the same requests, and their difference."""

    requests: int
    served: float
    candidate: float
    low: float  # ends of the bootstrap 95 % interval of the candidate's gain
    high: float

    @property
    def is_better(self) -> bool:
        return self.requests >= LEAST and self.low > 0

    def __str__(self) -> str:
        if self.requests < LEAST:
            return f"{self.requests} held-out texts, {LEAST} are needed to judge a head: none was trained"
        return (
            f"acceptance length on {self.requests} held-out requests: {self.served:.3f} of the served head, "
            f"{self.candidate:.3f} of the candidate (difference {self.low:+.3f} to {self.high:+.3f})"
        )


def judge(candidate: DraftHead, served: DraftHead, samples: Sequence[Sample], depth: int, width: int) -> Verdict:
    """Compare the heads request by request, with trees of `width` guesses at each of `depth` levels."""
    newest = samples[-MOST:]
    pairs = [[decoded(head, sample, depth, width) for head in (served, candidate)] for sample in newest]
    counts = torch.tensor(pairs, dtype=torch.float64).reshape(len(newest), 2, 2)  # [requests, heads, tokens and steps]
    lengths = (counts[..., 0].sum(0) / counts[..., 1].sum(0)).tolist()
    drawn = torch.randint(max(len(newest), 1), (RESAMPLED, len(newest)), generator=torch.Generator().manual_seed(0))
    sums = counts[drawn].sum(1)  # [resampled, heads, tokens and steps]
    before, after = (sums[..., 0] / sums[..., 1]).unbind(1)
    ends = (after - before).nan_to_num(0.0).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Verdict(len(newest), *lengths, *ends)


@torch.no_grad()
def decoded(head: DraftHead, sample: Sample, depth: int, width: int) -> tuple[int, int]:
    """Tokens and target steps of the response, if each step drafted the `width` best guesses at every level.

    A draft token is accepted if it is the text's own and so are those before it.
    """
    accepted = accepted_after(head, sample, depth, width).tolist()
    place, tokens, steps = int(sample.loss_mask.int().argmax()) - 1, 0, 0
    place = max(place, 0)  # a long text is cut within its response
    while place < len(accepted):
        if not sample.loss_mask[place + 1]:  # what a tool wrote, between two turns of the target
            place += 1
            continue
        tokens, steps, place = tokens + accepted[place] + 1, steps + 1, place + accepted[place] + 1
    return tokens, steps


def accepted_after(head: DraftHead, sample: Sample, depth: int, width: int) -> Int[Tensor, " choices"]:
    """How many draft tokens are accepted with the token at each position but the first as the root."""
    text = sample.tokens.to(head.embedding.device)
    taps = tapped(sample.taps, sample.last_hidden, head.taps, head.target.num_layers)[:-1].to(head.embedding)
    column = head.vocab.columns().to(text.device)
    choices = len(text) - 2
    hits = torch.zeros(depth, max(choices, 0), dtype=torch.long)
    features = head.project(taps.unsqueeze(0))
    for level, logits in enumerate(head.text_logits(features, text.unsqueeze(0), depth)):
        columns = column[text[level + 2 :]]
        chosen = logits.gather(1, columns.clamp(min=0).unsqueeze(1))
        # An equal guess counts as better, and so does one that is not a number: a broken head accepts nothing.
        better = (~(logits < chosen)).sum(1) - 1
        hits[level, : len(logits)] = ((better < width) & (columns >= 0)).cpu()
    return hits.cumprod(0).sum(0)
