"""Fit a head's calibration: how sure its scores are, depth by depth, on texts that the target writes itself.

    python -m inference.calibrate recipes/tiny_full.yaml report.head=assets/demo_head

Training does this at its end; this command does it for any head, and writes the result into the head's config.json.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.base import DraftHead
from heads.build import load_head, save_head
from heads.cache import UnrollCache
from heads.calibration import Calibration
from heads.target_config import locate_target
from inference.decode import Request, generate_batch
from inference.drafters.growth import Dynamic
from inference.drafters.head import HeadDrafter
from inference.report import head_folder, held_out_prompts, saved_taps
from inference.sampling import BatchSampling, Sampling
from inference.target import TargetModel
from recipes import Recipe, run_command

CANDIDATES = torch.logspace(-0.6, 0.7, 53)  # multipliers tried: 0.25 to 5
TEMPERATURES = (0.7, 1.0)  # what `sampled` is fitted on


@torch.inference_mode()
def fit_calibration(
    target: TargetModel, head: DraftHead, prompts: Sequence[list[int]], depth: int, new_tokens: int
) -> Calibration:
    """The multipliers under which the target's own choices are likeliest, given that it chose the tokens before."""
    greedy = fit_multipliers(target, head, prompts, depth, new_tokens, [Sampling()])
    sampled = [Sampling(temperature, seed=1) for temperature in TEMPERATURES]
    return Calibration(greedy, fit_multipliers(target, head, prompts, depth, new_tokens, sampled))


def fit_multipliers(
    target: TargetModel,
    head: DraftHead,
    prompts: Sequence[list[int]],
    depth: int,
    new_tokens: int,
    samplings: Sequence[Sampling],
) -> tuple[float, ...]:
    losses = torch.zeros(depth, len(CANDIDATES), dtype=torch.float64)
    drafter = HeadDrafter(head, Dynamic.chain(depth))  # it only saves time: the text is the target's
    for sampling in samplings:
        requests = [Request(prompt, new_tokens, sampling) for prompt in prompts]
        for request, generation in zip(requests, generate_batch(target, requests, drafter), strict=True):
            text = torch.tensor([request.prompt + generation.tokens], device=target.device)
            losses += score_losses(target, head, text, len(request.prompt), sampling, depth)
    best = CANDIDATES[losses.argmin(dim=1)]
    return tuple(torch.where(losses.sum(dim=1) > 0, best, 1.0).tolist())  # a depth that was never scored stays as it is


def score_losses(
    target: TargetModel, head: DraftHead, text: Int[Tensor, "1 seq"], prompt: int, sampling: Sampling, depth: int
) -> Float[Tensor, "depth candidates"]:
    """Sum over the written tokens of -log of the chance given to what the target chose, for each multiplier.

    Index t of the unroll's step k predicts the token of position t + 2 + k from the true ones before it: the chance of
    a child whose parents were all accepted.
    """
    batch = BatchSampling([sampling], target.device)
    ids = head.vocab.ids.to(target.device)
    column = torch.full((head.vocab.target_size,), -1, device=target.device)
    column[ids] = torch.arange(len(ids), device=target.device)
    features = head.project(target.forward(text[:, :-1], last_only=True).taps)
    positions = torch.arange(features.shape[1], device=target.device)
    cache, losses = UnrollCache(), torch.zeros(depth, len(CANDIDATES), dtype=torch.float64)
    for step in range(min(depth, features.shape[1] - 1)):
        tokens = text[:, 1:].roll(-step, dims=1)
        hidden = head(features, tokens, positions + step, cache=cache, level=step)
        choices = text[:, step + 2 :]  # [1, seq - 2 - step]
        at = positions[: choices.shape[1]] + step + 2
        scores = batch.scores(head.logits(hidden[:, : len(at)], step), at.unsqueeze(0), None, ids)[0].float()
        columns = column[choices[0]]
        counted = (at >= prompt) & (columns >= 0)  # what the head cannot draft says nothing about its scores
        scores, columns = scores[counted], columns[counted]
        for number, multiplier in enumerate(CANDIDATES.tolist()):
            losses[step, number] = torch.nn.functional.cross_entropy(scores * multiplier, columns, reduction="sum")
        features = head.feedback(hidden, features, tokens)
    return losses


def main() -> None:
    run_command(__doc__, calibrate)


def calibrate(recipe: Recipe) -> None:
    """Fit the multipliers of the report's head on the report's prompts, and save them with it."""
    folder = head_folder(recipe)
    taps = saved_taps(recipe, locate_target(recipe.target.path, recipe.target.revision))
    target = TargetModel.load(recipe.target, taps)
    head = load_head(folder, target.frozen)
    prompts = held_out_prompts(recipe)
    head.calibration = fit_calibration(target, head, prompts, recipe.decode.depth, recipe.decode.max_new_tokens)
    save_head(head, folder)
    print(f"{folder}: {head.calibration}")


if __name__ == "__main__":
    main()
