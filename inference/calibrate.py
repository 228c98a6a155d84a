"""Fit a head's calibration on texts that the target writes itself: how sure its scores are, depth by depth, how much
the target's noise says beside them, and which tree of fixed shape suits it best.

    python -m inference.calibrate recipes/tiny_full.yaml report.head=assets/demo_head

Training does this at its end; this command does it for any head, and writes the result into the head's config.json.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import DraftHead
from heads.calibration import Calibration
from heads.checkpoint import load_head, save_head
from heads.static_tree import search_tree
from heads.unroll_attention import UnrollCache
from inference.decode import generate_batch
from inference.drafters.growth import Dynamic
from inference.drafters.head import HeadDrafter
from inference.inputs import head_folder, held_out_prompts, taps_to_read
from inference.request import Request
from inference.sampling import BatchSampling, Sampling
from inference.target.model import TargetModel
from recipes import Recipe, run_command

CANDIDATES = torch.logspace(-0.6, 0.7, 53)  # multipliers tried: 0.25 to 5
WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)  # of the noise, tried with every fourth of these
TEMPERATURES = (0.7, 1.0)  # what `sampled` is fitted on
CHILDREN = 4  # as many as trees usually have of a node: scores count where drafting would get to, easier text than all
RANKS = 16  # of a level's guesses that a tree may hold
NODES = 64  # of the tree that is stored; smaller ones are the first of its nodes


@dataclass
class Tally:
    """What the target's own choices say of a head's scores, level by level."""

    weights: Float[Tensor, "levels weights"]  # of the noise, that were tried; the last one ranks the guesses
    multipliers: Float[Tensor, " multipliers"]  # that were tried
    losses: Float[Tensor, "levels weights multipliers"]  # sums of -log of the chance given to the choice, for each
    hits: Float[Tensor, "levels ranks"]  # how often the choice was the guess of each rank, the ones before it in a tree
    tried: Float[Tensor, " levels"]  # how often the ones before it were in a tree

    @classmethod
    def empty(cls, weights: Float[Tensor, "levels weights"], ranks: int, every: int = 1) -> "Tally":
        """To try every multiplier, or every second, third, ... of them."""
        multipliers, levels = CANDIDATES[::every], len(weights)
        losses = torch.zeros(*weights.shape, len(multipliers), dtype=torch.float64)
        return cls(weights, multipliers, losses, losses.new_zeros(levels, ranks), losses.new_zeros(levels))

    def best(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Multipliers and weights of the noise, level by level, under which the choices are likeliest; a level that was
        never scored keeps 1 and its last weight."""
        flat = self.losses.flatten(1)
        found, scored = flat.argmin(dim=1), flat.sum(dim=1) > 0
        multipliers = self.multipliers[found % len(self.multipliers)]
        weights = self.weights.gather(1, (found // len(self.multipliers)).unsqueeze(1)).squeeze(1)
        return (
            tuple(torch.where(scored, multipliers, 1.0).tolist()),
            tuple(torch.where(scored, weights, self.weights[:, -1]).tolist()),
        )

    def accuracies(self) -> Float[Tensor, "levels ranks"]:
        """Chance of each rank; what was never seen has half a case."""
        return (self.hits + 0.5) / (self.tried.unsqueeze(1) + 0.5 * (self.hits.shape[1] + 1))

    def with_ranks_of(self, other: "Tally") -> "Tally":
        return replace(self, hits=self.hits + other.hits, tried=self.tried + other.tried)


@torch.inference_mode()
def fit_calibration(
    target: TargetModel, head: DraftHead, prompts: Sequence[list[int]], depth: int, new_tokens: int
) -> Calibration:
    """The multipliers and weights of the noise under which the target's own choices are likeliest, given that it chose
    the tokens before; and the tree that holds most of them."""
    ranks, ones = min(RANKS, len(head.vocab.ids)), torch.ones(depth, 1)
    greedy = Tally.empty(ones, ranks)
    tally_texts(greedy, target, head, written(target, head, prompts, depth, new_tokens, [Sampling()]))
    warm = [Sampling(temperature, seed=1) for temperature in TEMPERATURES]
    texts = written(target, head, prompts, depth, new_tokens, warm)
    coarse = Tally.empty(torch.tensor(WEIGHTS).repeat(depth, 1), ranks, every=4)
    tally_texts(coarse, target, head, texts)
    sampled = Tally.empty(torch.tensor(coarse.best()[1]).unsqueeze(1), ranks)
    tally_texts(sampled, target, head, texts)
    tree = search_tree(sampled.with_ranks_of(greedy).accuracies(), NODES)
    return Calibration(greedy.best()[0], *sampled.best(), tree)


def written(
    target: TargetModel,
    head: DraftHead,
    prompts: Sequence[list[int]],
    depth: int,
    new_tokens: int,
    samplings: Sequence[Sampling],
) -> list[tuple[Request, list[int]]]:
    """What the target answers to the prompts."""
    drafter = HeadDrafter(head, Dynamic.chain(depth))  # it only saves time: the text is the target's
    found = []
    for sampling in samplings:
        requests = [Request(prompt, new_tokens, sampling) for prompt in prompts]
        generations = generate_batch(target, requests, drafter)
        found += [(request, each.tokens) for request, each in zip(requests, generations, strict=True)]
    return found


def tally_texts(tally: Tally, target: TargetModel, head: DraftHead, texts: Sequence[tuple[Request, list[int]]]) -> None:
    """Count in what the target wrote, as deep as the tally goes."""
    for request, tokens in texts:
        text = torch.tensor([request.prompt + tokens], device=target.device)
        levels = score_text(target, head, text, len(request.prompt), request.sampling, len(tally.weights))
        add_text(tally, levels, request.sampling.temperature or 1.0)


@dataclass(frozen=True)
class LevelScores:
    """How a level scores each token of a text, and which columns the target chose; the first ones go unread."""

    quiet: Float[Tensor, "choices draft_vocab"]  # scores without noise
    noise: Float[Tensor, "choices draft_vocab"]  # the target's
    columns: Int[Tensor, " choices"]  # -1 where the head cannot draft the choice
    written: Bool[Tensor, " choices"]  # by the target

    def scores(self, weight: float) -> Float[Tensor, "choices draft_vocab"]:
        """With so much of the noise."""
        return torch.add(self.quiet, self.noise, alpha=weight)


def score_text(
    target: TargetModel, head: DraftHead, text: Int[Tensor, "1 seq"], prompt: int, sampling: Sampling, depth: int
) -> Iterator[LevelScores]:
    """Level by level: index t of level k predicts the token of position t + 2 + k from the true ones before it, which
    is the chance of a child whose parents were all accepted."""
    yield from score_taps(head, target.forward(text[:, :-1], last_only=True).taps, text, prompt, sampling, depth)


def score_taps(
    head: DraftHead,
    taps: Float[Tensor, "1 before tapped"],
    text: Int[Tensor, "1 seq"],
    prompt: int,
    sampling: Sampling,
    depth: int,
    shift: int = 0,
) -> Iterator[LevelScores]:
    """The same from hidden states that are there already; `shift` moves the tokens that the head reads beside them."""
    batch = BatchSampling([sampling], text.device)
    ids = head.vocab.ids.to(text.device)
    column = torch.full((head.vocab.target_size,), -1, device=text.device)
    column[ids] = torch.arange(len(ids), device=text.device)
    features = head.project(taps)
    positions, cache = torch.arange(features.shape[1], device=text.device), UnrollCache()
    for level in range(min(depth, features.shape[1] - 1)):
        tokens = text[:, 1:].roll(-level - shift, dims=1)
        hidden = head(features, tokens, positions + level, cache=cache, level=level)
        at = positions[: len(positions) - 1 - level] + level + 2
        quiet = batch.warp(head.logits(hidden[:, : len(at)], level), None, ids)[0].float()
        yield LevelScores(quiet, batch.gumbel(at.unsqueeze(0), ids)[0], column[text[0, at]], at >= prompt)
        features = head.feedback(hidden, features, tokens)


def add_text(tally: Tally, levels: Iterator[LevelScores], unit: float = 1.0) -> None:
    """Count a text in, whose scores are multiplied with `unit` in any case: its temperature, see `Calibration`."""
    inside: Tensor | None = None  # indexes all of whose choices so far were among the ranked guesses
    drafted: Tensor | None = None  # those all of whose choices so far a tree is likely to hold
    for level, found in enumerate(levels):
        known = found.columns >= 0
        drafted = found.written if drafted is None else drafted[: len(known)]
        counted = drafted & known  # what the head cannot draft says nothing about its scores
        columns = found.columns[counted]
        for tried, weight in enumerate(tally.weights[level].tolist()):
            scores = found.scores(weight)
            for number, multiplier in enumerate(tally.multipliers.tolist()):
                given = scores[counted] * unit * multiplier
                loss = torch.nn.functional.cross_entropy(given, columns, reduction="sum")
                tally.losses[level, tried, number] += loss.cpu()
        chosen = scores.gather(1, found.columns.clamp(min=0).unsqueeze(1))
        ranks = torch.where(known, (scores > chosen).sum(1), len(scores[0]))
        inside = found.written if inside is None else inside[: len(ranks)]
        hits = torch.bincount(ranks[inside], minlength=tally.hits.shape[1])[: tally.hits.shape[1]]
        tally.hits[level] += hits.cpu()
        tally.tried[level] += int(inside.sum())
        inside, drafted = inside & (ranks < tally.hits.shape[1]), drafted & (ranks < CHILDREN)


def main() -> None:
    run_command(__doc__, calibrate)


def calibrate(recipe: Recipe) -> None:
    """Fit the calibration of the report's head on the report's prompts, and save it with the head."""
    folder = head_folder(recipe)
    taps = taps_to_read(recipe)
    target = TargetModel.load(recipe.target, taps)
    head = load_head(folder, target.frozen)
    prompts = held_out_prompts(recipe)
    head.calibration = fit_calibration(target, head, prompts, recipe.decode.depth, recipe.decode.max_new_tokens)
    save_head(head, folder)
    print(f"{folder}: {head.calibration}")


if __name__ == "__main__":
    main()
