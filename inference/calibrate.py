"""Fit a head's calibration: scale its scores, weight the Gumbel noise, and search the best draft tree of fixed shape.

    headstart calibrate recipes/tiny_full.yaml decode.head=assets/demo_head

The target writes texts from held-out prompts, greedily and sampled, and the head scores every token of them, at each
depth given the true tokens before it. Three things are then chosen so that the target's tokens become likeliest:

  multipliers      by depth, for greedy and for sampled text: an inverse temperature of the head's scores, so that
                   their softmax estimates how likely the target accepts a draft token
  Gumbel weights   by depth: how much of the target's Gumbel noise is added to the head's scores when sampling
  searched tree    the draft tree of fixed shape that is expected to hold most of the target's tokens

Training does this at its end. This command does it for any head and writes the result into the head's config.json.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstart.common.run_lock import only_run_in
from headstart.heads.base import DraftHead
from headstart.heads.calibration import Calibration, search_tree
from headstart.heads.kinds.checkpoint import load_head_for, save_head
from headstart.inference.core.gumbel import gumbel_noise
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic, Growth
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.loading import held_out_prompts, taps_to_read
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

MULTIPLIERS = torch.logspace(-0.6, 0.7, 53)  # to try: 0.25 to 5
GUMBEL_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)  # tried with every fourth multiplier
SAMPLED_AT = (0.7, 1.0)  # temperatures of the sampled texts
USUAL_CHILDREN = 4  # of a node: scores are fitted only where drafting usually gets to, which is easier text
FITTED_POSITIONS = 128  # of each text and depth, evenly spaced; each takes up to 130 softmaxes over the vocabulary
MAX_RANKS = 16  # guesses per depth that the searched tree may hold
TREE_NODES = 64  # of the searched tree; a smaller tree is made of its first nodes


@dataclass
class Tally:
    """Sums over texts of the target: the fit of each multiplier and weight, and how often each guess was right."""

    weights: Float[Tensor, "depth weights"]  # Gumbel weights to try; guesses are ranked with the last one
    multipliers: Float[Tensor, " multipliers"]  # multipliers to try
    losses: Float[Tensor, "depth weights multipliers"]  # sums of -log of the probability given to the target's token
    hits: Float[Tensor, "depth ranks"]  # how often the guess of each rank was the target's token
    tried: Float[Tensor, " depth"]  # how often all tokens before were among the guesses, so that a tree could hold them

    @classmethod
    def empty(cls, weights: Float[Tensor, "depth weights"], ranks: int, every: int = 1) -> "Tally":
        """A tally that tries every multiplier, or with `every` = 2, 3, ... every second, third, ... one."""
        multipliers, depth = MULTIPLIERS[::every], len(weights)
        losses = torch.zeros(*weights.shape, len(multipliers), dtype=torch.float64)
        return cls(weights, multipliers, losses, losses.new_zeros(depth, ranks), losses.new_zeros(depth))

    def best(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Multipliers and Gumbel weights of least loss by depth; a depth never scored gets 1 and its last weight."""
        flat = self.losses.flatten(1)
        least, scored = flat.argmin(dim=1), flat.sum(dim=1) > 0
        multipliers = self.multipliers[least % len(self.multipliers)]
        weights = self.weights.gather(1, (least // len(self.multipliers)).unsqueeze(1)).squeeze(1)
        multipliers, weights = multipliers.where(scored, 1.0), weights.where(scored, self.weights[:, -1])
        return tuple(multipliers.tolist()), tuple(weights.tolist())

    def accuracies(self) -> Float[Tensor, "depth ranks"]:
        """How often the guess of each rank is correct given a correct prefix; each outcome starts with half a count."""
        return (self.hits + 0.5) / (self.tried.unsqueeze(1) + 0.5 * (self.hits.shape[1] + 1))


@torch.inference_mode()
def fit_calibration(target: TargetModel, head: DraftHead, prompts: Sequence[Request], depth: int) -> Calibration:
    """Fit multipliers and Gumbel weights down to `depth`, and the tree, on texts that the target writes."""

    def texts_at(sampling: Sampling) -> list[tuple[Request, list[int]]]:
        return write_texts(target, head, [replace(prompt, sampling=sampling) for prompt in prompts], depth)

    ranks = min(MAX_RANKS, len(head.vocab.ids))
    greedy = Tally.empty(torch.ones(depth, 1), ranks)
    tally_texts(greedy, target, head, texts_at(Sampling()))
    texts = [text for temperature in SAMPLED_AT for text in texts_at(Sampling(temperature, seed=1))]
    coarse = Tally.empty(torch.tensor(GUMBEL_WEIGHTS).repeat(depth, 1), ranks, every=4)
    tally_texts(coarse, target, head, texts)
    sampled = Tally.empty(torch.tensor(coarse.best()[1]).unsqueeze(1), ranks)
    tally_texts(sampled, target, head, texts)
    sampled.hits += greedy.hits
    sampled.tried += greedy.tried
    return Calibration(greedy.best()[0], *sampled.best(), search_tree(sampled.accuracies(), TREE_NODES))


def write_texts(
    target: TargetModel, head: DraftHead, requests: Sequence[Request], depth: int
) -> list[tuple[Request, list[int]]]:
    """Each request with the target's response."""
    drafter = head_drafter(head, Dynamic.chain(depth))  # to save time; the text is the target's
    generations = generate_batch(target, requests, drafter)
    return [(request, each.tokens) for request, each in zip(requests, generations, strict=True)]


def tally_texts(tally: Tally, target: TargetModel, head: DraftHead, texts: Sequence[tuple[Request, list[int]]]) -> None:
    """Add the target's texts to the tally, at all of its depths."""
    for request, tokens in texts:
        text = torch.tensor([request.prompt + tokens], device=target.device)
        levels = score_text(target, head, text, request, len(tally.weights))
        tally_text(tally, levels, request.sampling.temperature or 1.0)


@dataclass(frozen=True)
class LevelScores:
    """How a head scores the tokens of a text at one depth, and which token the target chose.

    Row t of depth k (from 0) is about the token at position t + 2 + k.
    """

    without_noise: Float[Tensor, "choices draft_vocab"]  # warped logits
    gumbel: Float[Tensor, "choices draft_vocab"]  # the target's Gumbel noise at that position
    columns: Int[Tensor, " choices"]  # the column of the target's choice; -1 if the draft vocabulary lacks it
    written: Bool[Tensor, " choices"]  # did the target write the token? False within the prompt

    def scores(self, weight: float) -> Float[Tensor, "choices draft_vocab"]:
        """Scores with this weight of the Gumbel noise."""
        return torch.add(self.without_noise, self.gumbel, alpha=weight)


def score_text(
    target: TargetModel, head: DraftHead, text: Int[Tensor, "1 seq"], request: Request, depth: int
) -> Iterator[LevelScores]:
    """Yield the scores depth by depth, each from the true tokens before it, as for a child of accepted ancestors."""
    images = None if request.images is None else request.images.over_text(text[0, :-1].tolist())
    columns = target.tap_columns(head.taps)
    taps = target.passes.forward(text[:, :-1], last_only=True, images=images).taps
    taps = taps if columns is None else taps[..., columns]
    yield from score_taps(head, taps, text, len(request.prompt), request.sampling, depth)


def score_taps(
    head: DraftHead,
    taps: Float[Tensor, "1 before tapped"],
    text: Int[Tensor, "1 seq"],
    prompt: int,
    sampling: Sampling,
    depth: int,
) -> Iterator[LevelScores]:
    """`score_text` from known taps."""
    batch = BatchSampling([sampling], text.device)
    ids, column = head.vocab.ids.to(text.device), head.vocab.columns().to(text.device)
    for level, logits in enumerate(head.text_logits(head.project(taps), text, depth)):
        at = torch.arange(level + 2, level + 2 + len(logits), device=text.device)
        warped = batch.scores(logits.unsqueeze(0), None, None, ids)[0].float()
        noise = torch.zeros_like(warped)
        if not batch.all_greedy:
            warped, noise = warped.log_softmax(-1), gumbel_noise(batch.seeds, at.unsqueeze(0), ids)[0]
        yield LevelScores(warped, noise, column[text[0, at]], at >= prompt)


def tally_text(tally: Tally, levels: Iterator[LevelScores], unit: float = 1.0) -> None:
    """Add one text to the tally; all scores are multiplied by `unit`, the text's temperature (see `Calibration`)."""
    max_ranks = tally.hits.shape[1]
    rankable: Tensor | None = None  # rows whose tokens at every depth so far are among the ranked guesses
    drafted: Tensor | None = None  # rows whose tokens at every depth so far would most likely be drafted
    for level, scored in enumerate(levels):
        in_vocab = scored.columns >= 0
        drafted = scored.written if drafted is None else drafted[: len(in_vocab)]
        counted = (drafted & in_vocab).nonzero().flatten()  # one outside the draft vocabulary says nothing about scores
        counted = counted[:: -(-len(counted) // FITTED_POSITIONS) or 1]
        columns = scored.columns[counted]
        for number, weight in enumerate(tally.weights[level].tolist()):
            scores = scored.scores(weight)
            logits = scores[counted] * unit
            for column, multiplier in enumerate(tally.multipliers.tolist()):
                loss = torch.nn.functional.cross_entropy(logits * multiplier, columns, reduction="sum")
                tally.losses[level, number, column] += loss.cpu()
        chosen = scores.gather(1, scored.columns.clamp(min=0).unsqueeze(1))
        ranks = torch.where(in_vocab, (scores > chosen).sum(1), len(scores[0]))
        rankable = scored.written if rankable is None else rankable[: len(ranks)]
        tally.hits[level] += torch.bincount(ranks[rankable], minlength=max_ranks)[:max_ranks].cpu()
        tally.tried[level] += int(rankable.sum())
        rankable, drafted = rankable & (ranks < max_ranks), drafted & (ranks < USUAL_CHILDREN)


def calibrate(recipe: Recipe) -> None:
    """Fit the calibration of decode.head on the report's prompts and save it with the head."""
    with only_run_in(recipe.run_dir, "a calibration"):
        taps, prompts = taps_to_read(recipe), held_out_prompts(recipe)
        target = TargetModel.load_to_answer(recipe.target, taps)
        head = load_head_for(recipe.head_in_use, target.frozen)
        growth = Growth.from_section(recipe.decode, head.max_levels)
        head.calibration = fit_calibration(target, head, prompts, growth.depth)
        save_head(head, recipe.head_in_use)
    print(f"calibration written to {recipe.head_in_use}/config.json; by depth:")
    for name, values in head.calibration.to_config().items():
        if name != "tree":
            print(f"  {name:8}", *(f"{value:.2f}" for value in values))
