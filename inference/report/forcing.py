"""Token forcing: plain passes of the target read written texts and judge every token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.core.request import Images, Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.engine.loop import generate_batch
from headstart.inference.engine.step import start_history
from headstart.inference.report.questions import Prompt
from headstart.inference.targets.model import TargetModel

SCORED_POSITIONS = 64  # in one call
ROUNDING_PROMPTS = 8  # that rounding is measured on
ROUNDING_TOKENS = 10  # the best ones, at each position


@dataclass(frozen=True)
class Forced:
    """The number of written tokens that the target itself would have chosen after the tokens before them."""

    positions: int = 0
    near_ties: int = 0  # not its choice, but within rounding of it
    outside: int = 0  # neither
    widest: float = 0.0  # the largest gap between the best score and a written token's

    @classmethod
    def sum_of(cls, parts: Iterable["Forced"]) -> "Forced":
        columns = zip(*((each.positions, each.near_ties, each.outside, each.widest) for each in parts), strict=True)
        positions, near_ties, outside, widest = columns
        return cls(sum(positions), sum(near_ties), sum(outside), max(widest))


@dataclass(frozen=True)
class Forcing:
    """Judges texts that were written with `sampling`; equal texts of several methods are read once."""

    target: TargetModel
    sampling: Sampling
    rounding: float  # gaps up to it are near-ties
    judged: dict[tuple[int, ...], Forced] = field(default_factory=dict)  # by prompt and text

    @classmethod
    def measured(
        cls, target: TargetModel, prompts: Sequence[Prompt], max_new_tokens: int, sampling: Sampling
    ) -> "Forcing":
        """With the rounding of this target on the first of these prompts."""
        return cls(target, sampling, rounding(target, prompts[:ROUNDING_PROMPTS], max_new_tokens, sampling))

    def judge(self, prompt: Prompt, text: list[int]) -> Forced:
        shown = 0 if prompt.images is None else prompt.images.digest
        key = (len(prompt.tokens), *prompt.tokens, *text, shown)
        if key not in self.judged:
            widths, limit = gaps(self.target, prompt.tokens, text, self.sampling, prompt.images), self.rounding
            if (widths > limit).any():  # the rounding of this text may be larger than the first prompts'
                limit = max(limit, rounding(self.target, [prompt], len(text), self.sampling))
            outside = int((widths > limit).sum())
            near_ties = int((widths > 0).sum()) - outside
            self.judged[key] = Forced(len(text), near_ties, outside, float(widths.max()) if text else 0.0)
        return self.judged[key]


def gaps(
    target: TargetModel, prompt: list[int], text: list[int], sampling: Sampling, images: Images | None = None
) -> Float[Tensor, " text"]:
    """How far each written token's score is below the best one: 0 where the target itself would choose the token.

    Scores are logits when greedy, and logits over the temperature plus the position's Gumbel noise when sampling.
    """
    logits, parts = plain_logits(target, prompt, text, images), []
    batch, request = BatchSampling([sampling], target.device), Request(prompt, len(text), sampling)
    written = torch.tensor(text, device=target.device)
    positions = len(prompt) + torch.arange(len(text), device=target.device).unsqueeze(0)
    step = 1 if sampling.needs_history else SCORED_POSITIONS
    for first in range(0, len(text), step):
        part, history = slice(first, first + step), start_history([request], [text[:first]], target)
        scores = batch.scores(logits[:, part], positions[:, part], history)[0].float()
        parts.append(scores.amax(-1) - scores.gather(-1, written[part].unsqueeze(-1)).squeeze(-1))
    return torch.cat(parts) if parts else logits.new_zeros(0)


def plain_logits(
    target: TargetModel, prompt: list[int], text: list[int], images: Images | None
) -> Float[Tensor, "1 text vocab"]:
    """The logits that choose each token of the text, from one pass over all of it."""
    tokens, wanted = torch.tensor([prompt + text], device=target.device), range(len(prompt) - 1, len(prompt + text) - 1)
    whole = None if images is None else images.over_text(prompt + text)
    return target.passes.forward(tokens, logits_at=[*wanted], images=whole).logits


def rounding(target: TargetModel, prompts: Sequence[Prompt], max_new_tokens: int, sampling: Sampling) -> float:
    """How far a score moves between two correct computations: steps of one token, and one pass over the same tokens.

    It is the largest change, at any position, of the gap between the best token and another of the ten best.
    """
    changes = [0.0]
    for prompt in prompts:
        shown = prompt.images
        request = Request(prompt.tokens, max_new_tokens, sampling, logprobs=True, keep_logits=True, images=shown)
        written = generate_batch(target, [request])[0]
        by_step = torch.cat(written.logits)
        at_once = plain_logits(target, prompt.tokens, written.tokens, shown)[0].float()
        best = by_step.topk(min(ROUNDING_TOKENS, by_step.shape[-1]), dim=-1).indices
        below = [logits.gather(-1, best[:, :1]) - logits.gather(-1, best) for logits in (by_step, at_once)]
        changes.append(float((below[0] - below[1]).abs().max()))
    return max(changes) / (sampling.temperature or 1.0)
