"""Laws of static steps, which draft and accept exactly what dynamic steps do, and of the calibration of a head."""

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
NEW_TOKENS = [4, 24, 9, 24, 16]  # short texts end first, and then the last row moves into their place
MIXED = [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, seed=2), Sampling(), Sampling(1.0, seed=3)]
SHAPES = [Dynamic.chain(3), Dynamic(4, 4, 12), Fixed(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))]


def run(target: TargetModel, drafter: HeadDrafter, samplings: list[Sampling], static: bool) -> list[Generation]:
    rows = zip(PROMPTS, NEW_TOKENS, samplings, strict=True)
    requests = [Request(prompt, count, sampling) for prompt, count, sampling in rows]
    return generate_batch(target, requests, drafter, 3, static)


@pytest.fixture
def verified_trees(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The tokens of every tree that the decode loop verifies so far, row by row."""
    trees: list[list[list[int]]] = []

    def recording(function: Callable[..., list[Accepted]]) -> Callable[..., list[Accepted]]:
        def record(tree: Tree, *rest: object) -> list[Accepted]:
            trees.append(tree.tokens.tolist())
            return function(tree, *rest)

        return record

    monkeypatch.setattr(decode, "accept", recording(accept))
    monkeypatch.setattr(decode, "verify", recording(verify))
    return trees


@pytest.mark.parametrize("growth", SHAPES, ids=lambda growth: type(growth).__name__ + str(growth.depth))
@pytest.mark.parametrize("samplings", [[Sampling()] * 5, [Sampling(1.0, seed=s) for s in range(5)]], ids=["T=0", "T=1"])
def test_a_row_that_moved_drafts_as_before(
    target: TargetModel,
    make_head: MakeHead,
    verified_trees: list[list[list[int]]],
    growth: Dynamic | Fixed,
    samplings: list[Sampling],
) -> None:
    """The head's slots from a captured step must move with the row. When they did not, only acceptance suffered."""
    drafter = HeadDrafter(make_head(), growth)
    static = run(target, drafter, samplings, True)
    static_trees = [*verified_trees]
    verified_trees.clear()
    dynamic = run(target, drafter, samplings, False)
    assert [g.tokens for g in static] == [g.tokens for g in dynamic]
    # Near the end of a text the dynamic trees are smaller; until then every node is the same.
    trees = zip(static_trees, verified_trees, strict=True)
    pairs = [(one, other) for one, other in trees if len(one[0]) == len(other[0])]
    assert len(pairs) > 12
    assert all(one == other for one, other in pairs)


def test_a_calibrated_head_drafts_alike_in_static_and_dynamic_steps(target: TargetModel, make_head: MakeHead) -> None:
    head = make_head()
    head.calibration = Calibration((2.0, 1.5), (1.1, 0.8), (0.5, 0.0, 0.3))
    drafter = HeadDrafter(head, Dynamic(4, 4, 12))
    static, dynamic = (run(target, drafter, MIXED, is_static) for is_static in (True, False))
    assert [g.tokens for g in static] == [g.tokens for g in dynamic]
    assert [g.stats.accepted_at_depth for g in static] == [g.stats.accepted_at_depth for g in dynamic]


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


def test_a_static_step_is_reused_by_the_next_run_that_it_fits(make_model: MakeModel) -> None:
    target = TargetModel(make_model(), ())
    prompt = [*range(20)]
    for _ in range(3):
        generate(target, prompt, 10, static=True)
    assert len(target.kept(SpareSteps)) == 1
    (first,) = target.kept(SpareSteps)
    stream = DecodeLoop(target, [Request(prompt, 10)], static=True).run()
    next(stream)
    assert target.kept(SpareSteps) == []  # in use
    generate(target, prompt, 5, static=True)  # meanwhile, in a cache of its own
    stream.close()
    assert target.kept(SpareSteps) == [first]
    DecodeLoop(target, [Request(prompt, 10)], static=True)  # a loop that never runs borrows no step
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


def test_a_depth_that_was_never_scored_keeps_multiplier_1(target: TargetModel, make_head: MakeHead) -> None:
    fitted = fit_calibration(target, make_head(), [[5, 6, 7]], depth=4, new_tokens=2)
    assert fitted.greedy[-1] == fitted.sampled[-1] == 1.0


def test_calibration_counts_only_scores_at_places_that_a_tree_reaches() -> None:
    """Tokens after one that no tree holds are harder than any that are drafted, and would distort the multiplier."""

    def multiplier(reached: list[float], unreached: list[float]) -> float:
        """The one fitted for level 2 if the target's choice has these scores where trees reach and elsewhere."""
        count, vocab = len(reached) + len(unreached), 10
        first, second = torch.zeros(count, vocab), torch.zeros(count, vocab)
        first[:, 1:] = -1.0  # the choice is the best guess ...
        first[len(reached) :, 1:] = 1.0  # ... or the worst, which no tree holds
        second[:, 0] = torch.tensor([*reached, *unreached])
        columns, written = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.bool)
        tally, no_gumbel = Tally.empty(torch.ones(2, 1), 10), torch.zeros(count, vocab)
        levels = [LevelScores(scores, no_gumbel, columns, written) for scores in (first, second)]
        tally_text(tally, iter(levels))
        return tally.best()[0][1]

    sure, unsure = [2.0] * 9 + [-2.0], [-2.0] * 9 + [2.0]
    assert multiplier(sure, sure) == multiplier(sure, unsure) == multiplier(sure, []) > multiplier(unsure, sure)


def test_the_fitted_gumbel_weight_reflects_how_often_the_target_follows_the_gumbel_noise() -> None:
    """A confident target often ignores the Gumbel noise, and then full weight drafts worse than no Gumbel noise."""
    generator = torch.Generator().manual_seed(0)
    count, vocab = 4000, 6
    log_q = torch.randn(count, vocab, generator=generator).log_softmax(-1)
    gumbel = -torch.rand(count, vocab, generator=generator).log().neg().log()
    following = (log_q + gumbel).argmax(-1)
    ignoring = torch.multinomial(log_q.exp(), 1, generator=generator).squeeze(1)
    mixed = torch.where(torch.rand(count, generator=generator) < 0.5, following, ignoring)

    def fitted_weight(choices: Tensor) -> float:
        tally = Tally.empty(torch.tensor([WEIGHTS]), 4, every=4)
        tally_text(tally, iter([LevelScores(log_q, gumbel, choices, torch.ones(count, dtype=torch.bool))]))
        return tally.best()[1][0]

    assert (fitted_weight(ignoring), fitted_weight(following)) == (0.0, 1.0)
    assert 0.0 < fitted_weight(mixed) < 1.0


def test_estimated_chances_near_temperature_zero_equal_those_of_greedy_decoding(make_head: MakeHead) -> None:
    """Dividing by a low temperature enlarges the head's error too. Uncorrected, every estimate looked certain."""
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


def test_a_fitted_calibration_is_in_range_and_repeatable_and_survives_config_json(
    target: TargetModel, make_head: MakeHead
) -> None:
    head = make_head()
    prompts = [[5, 6, 7], [9, 2], [33, 34, 35]]
    fitted = fit_calibration(target, head, prompts, depth=3, new_tokens=15)
    assert all(0.25 <= value <= 5.02 for value in (*fitted.greedy, *fitted.sampled))
    assert fitted.greedy != (1.0, 1.0, 1.0)  # random scores do not happen to be calibrated
    assert fit_calibration(target, head, prompts, depth=3, new_tokens=15) == fitted
    torch.testing.assert_close(Calibration.from_config(fitted.to_config()).greedy, fitted.greedy, atol=1e-4, rtol=1e-4)
