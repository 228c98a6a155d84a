"""Laws of a head's calibration: what is fitted, from which scores, and that it changes no text."""

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.heads.calibration import Calibration
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.inference.calibrate import GUMBEL_WEIGHTS, LevelScores, Tally, fit_calibration, tally_text
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import Frontier, HeadDrafter

MakeHead = Callable[..., Eagle3Head]


def test_calibration_counts_only_scores_at_places_that_a_tree_reaches() -> None:
    """Tokens after one that no tree holds are harder than any that are drafted, and would distort the multiplier."""

    def multiplier(reached: list[float], unreached: list[float]) -> float:
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
    count, vocab = 1500, 6
    log_q = torch.randn(count, vocab, generator=generator).log_softmax(-1)
    gumbel = -torch.rand(count, vocab, generator=generator).log().neg().log()
    following = (log_q + gumbel).argmax(-1)
    ignoring = torch.multinomial(log_q.exp(), 1, generator=generator).squeeze(1)
    mixed = torch.where(torch.rand(count, generator=generator) < 0.5, following, ignoring)

    def fitted_weight(choices: Tensor) -> float:
        tally = Tally.empty(torch.tensor([GUMBEL_WEIGHTS]), 4, every=4)
        for text in torch.arange(count).split(100):
            written = torch.ones(len(text), dtype=torch.bool)
            tally_text(tally, iter([LevelScores(log_q[text], gumbel[text], choices[text], written)]))
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


def test_a_fitted_calibration_is_in_range_and_repeatable_and_survives_config_json(target, make_head):
    head, prompts = make_head(), [Request(tokens, 4) for tokens in ([5, 6, 7], [9, 2])]
    fitted = fit_calibration(target, head, prompts, depth=2)
    assert all(0.25 <= value <= 5.02 for value in (*fitted.greedy, *fitted.sampled))
    assert fitted.greedy != (1.0, 1.0)  # random scores do not happen to be calibrated
    assert fit_calibration(target, head, prompts, depth=2) == fitted
    torch.testing.assert_close(Calibration.from_config(fitted.to_config()).greedy, fitted.greedy, atol=1e-4, rtol=1e-4)
    short = fit_calibration(target, head, [Request([5, 6, 7], 2)], depth=3)
    assert short.greedy[-1] == short.sampled[-1] == 1.0  # no text reached that depth
