"""Laws of the step of fixed shapes: it does what the step of changing shapes does, row by row and draft by draft."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from heads.calibration import Calibration
from heads.eagle3 import Eagle3Head
from inference import decode
from inference.calibrate import WEIGHTS, LevelScores, Tally, fit_calibration, tally_text
from inference.cuda_graph import SpareSteps
from inference.decode import DecodeLoop, generate, generate_batch
from inference.drafters.growth import Dynamic, Fixed
from inference.drafters.head import Frontier, HeadDrafter
from inference.request import Generation, Request
from inference.sampling import BatchSampling, Sampling
from inference.target.model import TargetModel
from inference.tree import Tree
from inference.verify import Accepted, accept, verify

MakeHead = Callable[..., Eagle3Head]
MakeModel = Callable[..., LlamaForCausalLM]
PROMPTS = [[5, 6, 7, 11], [3], [*range(30)], [9, 9, 1], [40, 41]]
NEW_TOKENS = [4, 24, 9, 24, 16]  # the short ones end first, so that the last row moves into their place
MIXED = [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, seed=2), Sampling(), Sampling(1.0, seed=3)]
SHAPES = [Dynamic.chain(3), Dynamic(4, 4, 12), Fixed(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))]


def run(target: TargetModel, drafter: HeadDrafter, samplings: list[Sampling], static: bool) -> list[Generation]:
    rows = zip(PROMPTS, NEW_TOKENS, samplings, strict=True)
    requests = [Request(prompt, count, sampling) for prompt, count, sampling in rows]
    return generate_batch(target, requests, drafter, 3, static)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The tokens of every tree that the loop judges, row by row."""
    trees: list[list[list[int]]] = []

    def recorded(function: Callable[..., list[Accepted]]) -> Callable[..., list[Accepted]]:
        def record(tree: Tree, *rest: object) -> list[Accepted]:
            trees.append(tree.tokens.tolist())
            return function(tree, *rest)

        return record

    monkeypatch.setattr(decode, "accept", recorded(accept))
    monkeypatch.setattr(decode, "verify", recorded(verify))
    return trees


@pytest.mark.parametrize("growth", SHAPES, ids=lambda growth: type(growth).__name__ + str(growth.depth))
@pytest.mark.parametrize("samplings", [[Sampling()] * 5, [Sampling(1.0, seed=s) for s in range(5)]], ids=["T=0", "T=1"])
def test_a_row_that_moved_drafts_as_before(
    target: TargetModel,
    make_head: MakeHead,
    judged: list[list[list[int]]],
    growth: Dynamic | Fixed,
    samplings: list[Sampling],
) -> None:
    """What the head read in a captured step must move along; its loss cost acceptance, and no text showed it."""
    drafter = HeadDrafter(make_head(), growth)
    fixed = run(target, drafter, samplings, True)
    trees = [*judged]
    judged.clear()
    changing = run(target, drafter, samplings, False)
    assert [g.tokens for g in fixed] == [g.tokens for g in changing]
    # Near the end of a text the changing shapes are smaller; until then every node is the same.
    pairs = [(mine, its) for mine, its in zip(trees, judged, strict=True) if len(mine[0]) == len(its[0])]
    assert len(pairs) > 12
    assert all(mine == its for mine, its in pairs)


def test_a_calibrated_head_drafts_alike_in_both(target: TargetModel, make_head: MakeHead) -> None:
    head = make_head()
    head.calibration = Calibration((2.0, 1.5), (1.1, 0.8), (0.5, 0.0, 0.3))
    drafter = HeadDrafter(head, Dynamic(4, 4, 12))
    fixed, changing = (run(target, drafter, MIXED, static) for static in (True, False))
    assert [g.tokens for g in fixed] == [g.tokens for g in changing]
    assert [g.stats.accepted_at_depth for g in fixed] == [g.stats.accepted_at_depth for g in changing]


def test_a_calibration_changes_no_text(target: TargetModel, make_head: MakeHead) -> None:
    head = make_head()
    wanted = generate(target, [5, 6, 7], 20, Sampling(1.0, seed=4)).tokens
    for calibration in (
        Calibration(),
        Calibration((3.0,), (0.3,)),
        Calibration((0.4, 2.0), (2.0, 1.0, 0.5), (0.0, 0.7)),
    ):
        head.calibration = calibration
        assert (
            generate(target, [5, 6, 7], 20, Sampling(1.0, seed=4), HeadDrafter(head, Dynamic(4, 3, 9))).tokens == wanted
        )


def test_a_step_is_used_again_by_the_next_run_that_it_fits(make_model: MakeModel) -> None:
    target = TargetModel(make_model(), ())
    prompt = [*range(20)]
    for _ in range(3):
        generate(target, prompt, 10, static=True)
    assert len(target.kept(SpareSteps)) == 1
    (first,) = target.kept(SpareSteps)
    stream = DecodeLoop(target, [Request(prompt, 10)], static=True).run()
    next(stream)
    assert target.kept(SpareSteps) == []  # in use
    generate(target, prompt, 5, static=True)  # at the same time, in a cache of its own
    stream.close()
    assert target.kept(SpareSteps) == [first]
    DecodeLoop(target, [Request(prompt, 10)], static=True)  # one that never runs borrows nothing
    assert target.kept(SpareSteps) == [first]


def test_growing_prompts_do_not_pile_up_caches(make_model: MakeModel) -> None:
    target = TargetModel(make_model(max_position_embeddings=4096), ())
    for length in (10, 300, 600, 900):
        generate(target, [1] * length, 2, static=True)
    assert [spare.cache.target.capacity for spare in target.kept(SpareSteps)] == [1024]


def test_greedy_rejection_in_half_precision_does_not_crash(make_model: MakeModel, make_head: MakeHead) -> None:
    target = TargetModel(make_model().bfloat16(), (2, 3, 4))
    drafter = HeadDrafter(make_head().bfloat16(), Fixed.chain(3))
    requests = [Request([5, 6, 7], 12, Sampling(0.0, rule="rejection"))]
    assert len(generate_batch(target, requests, drafter, static=False)[0].tokens) == 12


def test_a_depth_that_was_never_scored_keeps_its_multiplier(target: TargetModel, make_head: MakeHead) -> None:
    fitted = fit_calibration(target, make_head(), [[5, 6, 7]], depth=4, new_tokens=2)
    assert fitted.greedy[-1] == fitted.sampled[-1] == 1.0


def test_scores_count_only_where_a_tree_would_get_to() -> None:
    """Text whose first token no tree holds is harder than what is ever drafted; scores there would make the head look
    surer of itself, or less sure, than it is."""

    def fitted(seen: list[float], unseen: list[float]) -> float:
        """The second level's multiplier, from scores of the choice 0 where a tree gets to and where it does not."""
        count, vocab = len(seen) + len(unseen), 10
        first, second = torch.zeros(count, vocab), torch.zeros(count, vocab)
        first[:, 1:] = -1.0  # the choice comes first ...
        first[len(seen) :, 1:] = 1.0  # ... or last
        second[:, 0] = torch.tensor([*seen, *unseen])
        columns, written = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.bool)
        tally, none = Tally.empty(torch.ones(2, 1), 10), torch.zeros(count, vocab)
        levels = [LevelScores(quiet, none, columns, written) for quiet in (first, second)]
        tally_text(tally, iter(levels))
        return tally.best()[0][1]

    sure, unsure = [2.0] * 9 + [-2.0], [-2.0] * 9 + [2.0]
    assert fitted(sure, sure) == fitted(sure, unsure) == fitted(sure, []) > fitted(unsure, sure)


def test_noise_counts_as_much_as_the_target_follows_it() -> None:
    """A target that the head knows chooses by the noise; one that is sure where the head is not does so in spite of it,
    and with its full noise sampled text was drafted worse than by the head's first guesses."""
    generator = torch.Generator().manual_seed(0)
    count, vocab = 4000, 6
    log_q = torch.randn(count, vocab, generator=generator).log_softmax(-1)
    noise = -torch.rand(count, vocab, generator=generator).log().neg().log()
    followed = (log_q + noise).argmax(-1)
    unmoved = torch.multinomial(log_q.exp(), 1, generator=generator).squeeze(1)
    mixed = torch.where(torch.rand(count, generator=generator) < 0.5, followed, unmoved)

    def fitted(choices: Tensor) -> float:
        tally = Tally.empty(torch.tensor([WEIGHTS]), 4, every=4)
        tally_text(tally, iter([LevelScores(log_q, noise, choices, torch.ones(count, dtype=torch.bool))]))
        return tally.best()[1][0]

    assert (fitted(unmoved), fitted(followed)) == (0.0, 1.0)
    assert 0.0 < fitted(mixed) < 1.0


def test_estimates_near_temperature_zero_are_those_of_greedy_decoding(make_head: MakeHead) -> None:
    """A temperature divides the head's error as well; scores that were not multiplied by it claimed to be sure."""
    head = make_head()
    head.calibration = Calibration((1.7,), (1.7,))
    drafter, root = HeadDrafter(head, Dynamic(3, 3, 8)), torch.tensor([[7]])
    frontier = Frontier(root, root, torch.zeros(1, 1), None, None)
    logits = torch.randn(1, 1, len(head.vocab.ids), generator=torch.Generator().manual_seed(0))
    greedy, cold = (
        drafter.chances(0, logits, root[0], BatchSampling([sampling], root.device), frontier)
        for sampling in (Sampling(), Sampling(1e-4, seed=5))
    )
    torch.testing.assert_close(cold, greedy, atol=5e-3, rtol=0)


def test_calibrated_scores_estimate_the_chance_of_acceptance(target: TargetModel, make_head: MakeHead) -> None:
    """On the texts that it was fitted on, a calibrated head is never surer of what happened to be wrong: its mean
    log chance of the target's choices is at least that of the head as it was."""
    head = make_head()
    prompts = [[5, 6, 7], [9, 2], [33, 34, 35]]
    fitted = fit_calibration(target, head, prompts, depth=3, new_tokens=15)
    assert all(0.25 <= value <= 5.02 for value in (*fitted.greedy, *fitted.sampled))
    assert fitted.greedy != (1.0, 1.0, 1.0)  # random scores are not calibrated by chance
    assert fit_calibration(target, head, prompts, depth=3, new_tokens=15) == fitted
    torch.testing.assert_close(Calibration.from_config(fitted.to_config()).greedy, fitted.greedy, atol=1e-4, rtol=1e-4)
