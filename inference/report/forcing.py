"""Token forcing: written texts are read by plain passes of the target, which judge every token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.engine.loop import generate_batch
from headstart.inference.engine.step import start_history
from headstart.inference.targets.model import TargetModel

SCORED = 64  # positions that are scored at once
PROMPTS, BEST = 8, 10  # prompts that the rounding is measured on, and tokens at each position


@dataclass(frozen=True)
class Forced:
    """How many written tokens the target itself would have chosen after the tokens before them."""

    positions: int = 0
    near_ties: int = 0  # not its choice, but within rounding of it
    outside: int = 0  # neither
    widest: float = 0.0  # the largest gap between the best score and a written token's

    @classmethod
    def sum_of(cls, parts: Iterable["Forced"]) -> "Forced":
        found = list(parts)
        return cls(
            sum(part.positions for part in found),
            sum(part.near_ties for part in found),
            sum(part.outside for part in found),
            max((part.widest for part in found), default=0.0),
        )


@dataclass(frozen=True)
class Forcing:
    """Judges texts that were written with `sampling`; each text is read once, whichever methods wrote it."""

    target: TargetModel
    sampling: Sampling
    rounding: float  # gaps up to it are near-ties
    read: dict[tuple[int, ...], Forced] = field(default_factory=dict)  # by prompt and text

    @classmethod
    def measured(cls, target: TargetModel, prompts: Sequence[list[int]], most: int, sampling: Sampling) -> "Forcing":
        """With the rounding of this target on the first of these prompts and up to `most` tokens after each."""
        return cls(target, sampling, rounding(target, prompts[:PROMPTS], most, sampling))

    def judge(self, prompt: list[int], text: list[int]) -> Forced:
        key = (len(prompt), *prompt, *text)
        if key not in self.read:
            found, limit = gaps(self.target, prompt, text, self.sampling), self.rounding
            if (found > limit).any():  # the rounding of this text may be larger than that of the first prompts'
                limit = max(limit, rounding(self.target, [prompt], len(text), self.sampling))
            outside = int((found > limit).sum())
            near = int((found > 0).sum()) - outside
            self.read[key] = Forced(len(text), near, outside, float(found.max()) if text else 0.0)
        return self.read[key]


def gaps(target: TargetModel, prompt: list[int], text: list[int], sampling: Sampling) -> Float[Tensor, " text"]:
    """How far the score of each written token is below the best one: 0 where the target itself would choose it.

    Scores are logits when greedy, and logits over the temperature plus the position's Gumbel noise when sampling.
    """
    logits, found = plain_logits(target, prompt, text), []
    batch, request = BatchSampling([sampling], target.device), Request(prompt, len(text), sampling)
    written = torch.tensor(text, device=target.device)
    positions = len(prompt) + torch.arange(len(text), device=target.device).unsqueeze(0)
    step = 1 if sampling.needs_history else SCORED
    for first in range(0, len(text), step):
        part, history = slice(first, first + step), start_history([request], [text[:first]], target)
        scores = batch.scores(logits[:, part], positions[:, part], history)[0].float()
        found.append(scores.amax(-1) - scores.gather(-1, written[part].unsqueeze(-1)).squeeze(-1))
    return torch.cat(found) if found else logits.new_zeros(0)


def plain_logits(target: TargetModel, prompt: list[int], text: list[int]) -> Float[Tensor, "1 text vocab"]:
    """The logits that choose each token of the text, from one pass over it all."""
    tokens = torch.tensor([prompt + text], device=target.device)
    return target.passes.forward(tokens, logits_at=[len(prompt) - 1 + place for place in range(len(text))]).logits


def rounding(target: TargetModel, prompts: Sequence[list[int]], most: int, sampling: Sampling) -> float:
    """How far two correct ways of reading a text move a score: steps of one token, and one pass over the same tokens.

    It is the largest change, at any position, of the gap between the best token and another of the ten best.
    """
    changes = [0.0]
    for prompt in prompts:
        request = Request(prompt, most, sampling, logprobs=True, keep_logits=True)
        written = generate_batch(target, [request])[0]
        steps, whole = torch.cat(written.logits), plain_logits(target, prompt, written.tokens)[0].float()
        best = steps.topk(min(BEST, steps.shape[-1]), dim=-1).indices
        below = [logits.gather(-1, best[:, :1]) - logits.gather(-1, best) for logits in (steps, whole)]
        changes.append(float((below[0] - below[1]).abs().max()))
    return max(changes) / (sampling.temperature or 1.0)
