"""Laws of sampling: Gumbel noise depends on (seed, position, token) alone, and the tokens that it chooses follow p."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from headstart.inference.core.gumbel import as_one_kernel, gumbel_noise
from headstart.inference.core.history import History
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import ancestor_mask

# The 99.9 % quantile of the chi-square distribution, by degrees of freedom.
CHI_SQUARE_999 = {4: 18.47, 24: 51.18}
LOGITS = torch.tensor([1.5, 0.2, -0.7, 0.9, -2.0])
ROWS = 20_000


def alone(sampling: Sampling) -> BatchSampling:
    return BatchSampling([sampling], "cpu")


def draws(seed: int = 0, positions: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """The token chosen at each position from the same five-symbol distribution."""
    positions = torch.arange(ROWS) if positions is None else positions
    logits = LOGITS.expand(1, len(positions), 5)
    return alone(Sampling(temperature, seed=seed)).choose(logits, positions.unsqueeze(0))[0]


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def splitmix_noise(seed: int, position: int, token: int) -> float:
    """The same Gumbel noise computed with Python's integers, mod 2^64."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    key = mix((mix((position * golden + seed) & mask) + golden) & mask)
    uniform = ((mix((key + token * golden) & mask) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(uniform))


def test_gumbel_noise_is_a_function_of_seed_position_and_token() -> None:
    seeds = [0, 1, 12345, 2**63 - 1, -7]
    positions, tokens = [0, 1, 7, 4095, 10**6], [0, 3, 128_255]
    noise = gumbel_noise(torch.tensor(seeds), torch.tensor([positions] * len(seeds)), torch.tensor(tokens))
    wanted = [[[splitmix_noise(seed, t, token) for token in tokens] for t in positions] for seed in seeds]
    assert torch.allclose(noise, torch.tensor(wanted), rtol=0, atol=1e-6)


@pytest.mark.parametrize("fault", ["no compiler", "other numbers"])
def test_noise_that_cannot_be_compiled_is_computed_step_by_step(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(function: Callable[..., Tensor], dynamic: bool) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            if fault == "no compiler":
                raise RuntimeError("Failed to find C compiler")
            return function(*inputs) * (1 + 1e-7)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.warns(UserWarning, match="could not be compiled .*(Failed to find C compiler|other numbers)"):
        found = as_one_kernel.__wrapped__(torch.device("cpu"))
    inputs = torch.arange(3), torch.arange(12).view(3, 4), torch.arange(50)
    assert torch.equal(found(*inputs), gumbel_noise(*inputs))


def test_a_gumbel_table_that_moves_on_is_one_drawn_anew() -> None:
    """Rows move by as many positions as they accepted: by some of the table, all of it, none, or back to the start."""
    sampling = BatchSampling([Sampling(temperature=1.0, seed=seed) for seed in (3, 4, 5, 6)], "cpu")
    first = torch.tensor([10, 20, 30, 40])
    before = sampling.with_gumbel(first, 4, 97).gumbel_table
    for count in (1, 4, 6):
        moved = first + torch.tensor([2, 9, 0, -5])
        continued: Any = sampling.with_gumbel(moved, count, 97, before).gumbel_table
        anew: Any = sampling.with_gumbel(moved, count, 97).gumbel_table
        assert torch.equal(continued.first, anew.first)
        assert torch.equal(continued.values, anew.values)


def test_greedy_rows_get_no_noise_nor_do_temperatures_near_zero_and_a_top_k_of_0_keeps_all_tokens() -> None:
    logits = torch.randn(2, 6, 97)
    assert alone(Sampling()).scores(logits[:1], torch.arange(6).unsqueeze(0)).data_ptr() == logits.data_ptr()
    mixed = BatchSampling([Sampling(), Sampling(1.0)], "cpu")
    assert torch.equal(mixed.scores(logits, torch.arange(6).expand(2, 6))[0], logits[0])
    assert Sampling(1.0, top_k=0) == Sampling(1.0, top_k=-1) == Sampling(1.0)
    logits, positions = torch.randn(1, 500, 97), torch.arange(500).unsqueeze(0)
    greedy = logits.argmax(-1)
    samplings = [alone(Sampling(temperature, seed=1)) for temperature in (1.0, 0.1, 1e-5, 1e-8)]
    differing = [int((each.choose(logits, positions) != greedy).sum()) for each in samplings]
    assert differing[0] > differing[1] > differing[2] == differing[3] == 0
    assert Sampling(1e-9) == Sampling()  # dividing by less would overflow


BIAS = (3, 2.0), (5, -1.5)
WARPERS: dict[str, tuple[dict[str, Any], list[theirs.LogitsProcessor]]] = {
    "temperature": ({"temperature": 0.7}, [theirs.TemperatureLogitsWarper(0.7)]),
    "top_k": ({"top_k": 5}, [theirs.TopKLogitsWarper(5)]),
    "top_k of one": ({"top_k": 1}, [theirs.TopKLogitsWarper(1)]),
    "top_k beyond the vocabulary": ({"top_k": 1000}, [theirs.TopKLogitsWarper(1000)]),
    "top_p": ({"top_p": 0.8}, [theirs.TopPLogitsWarper(0.8)]),
    "top_p of almost nothing": ({"top_p": 1e-9}, [theirs.TopPLogitsWarper(1e-9)]),
    "min_p": ({"min_p": 0.1}, [theirs.MinPLogitsWarper(0.1)]),
    "min_p of one": ({"min_p": 1.0}, [theirs.MinPLogitsWarper(1.0)]),
    "bias": ({"logit_bias": BIAS}, [theirs.SequenceBiasLogitsProcessor([[[3], 2.0], [[5], -1.5]])]),
    "repetition": ({"repetition_penalty": 1.3}, [theirs.RepetitionPenaltyLogitsProcessor(1.3)]),
}
EACH = "bias", "repetition", "temperature", "top_k", "top_p", "min_p"  # in transformers' order
MERGED = {name: value for each in EACH for name, value in WARPERS[each][0].items()}
WARPERS["all"] = MERGED, [processor for each in EACH for processor in WARPERS[each][1]]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", WARPERS)
def test_each_warper_matches_that_of_transformers(name: str, ties: bool) -> None:
    options, processors = WARPERS[name]
    logits = torch.randn(200, 97) * 3
    if ties:
        logits = logits.round()
    prompt, output = [1, 5, 8, 1], [2, 5, 96, 2]
    history = History.start([prompt], 97, "cpu").followed_by(torch.tensor([output]), torch.ones(1, 4, 4).bool())
    batch, at = alone(Sampling(**{"temperature": 1.0, **options})), torch.zeros(1, 200).long()
    warped = batch.scores(logits.unsqueeze(0), None, history.at(at))[0].log_softmax(-1)
    texts: Any = torch.tensor([prompt + output] * 200)  # transformers annotates torch.LongTensor, which a Tensor is not
    wanted = theirs.LogitsProcessorList(processors)(texts, logits).log_softmax(-1)
    if ties:  # the sort of transformers is not stable, so which of several equal tokens top-p drops is unspecified
        warped, wanted = warped.sort().values, wanted.sort().values
    assert torch.equal(warped.isinf(), wanted.isinf())
    assert torch.allclose(warped, wanted, rtol=0, atol=1e-5)


def test_penalties_count_the_output_alone_and_top_p_keeps_the_last_of_equally_likely_tokens() -> None:
    history = History.start([[7, 7, 1]], 9, "cpu").followed_by(torch.tensor([[1, 2, 2]]), torch.ones(1, 3, 3).bool())
    logits = torch.randn(1, 3, 9)
    warped = alone(Sampling(presence_penalty=0.5, frequency_penalty=0.25)).scores(logits, None, history)
    assert torch.allclose(logits - warped, torch.tensor([0, 0.75, 1.0, 0, 0, 0, 0, 0, 0]).expand(1, 3, 9))
    warped = alone(Sampling(1.0, top_p=0.5)).scores(torch.zeros(1, 3, 97), None)
    assert torch.equal(warped.isfinite(), (torch.arange(97) >= 48).expand(1, 3, 97))


EVERYTHING = Sampling(0.7, 20, 0.9, 0.01, 1.3, 0.5, 0.25, ((3, 2.0), (5, -1.5), (90, -math.inf)), seed=4)


def a_tree() -> tuple[Tensor, Tensor]:
    """Tokens and parents of two rows, with repeated tokens: 0 -> (1 -> 3, 2 -> (4, 5)), and 0 -> 1 -> 2."""
    tokens = torch.tensor([[5, 5, 7, 5, 7, 1], [3, 1, 3, 0, 0, 0]])
    return tokens, torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, -1, -1, -1]])


def a_history() -> History:
    return History.start([[1, 2, 3], [3, 4]], 9, "cpu").extend(torch.zeros(2, 1).long(), torch.tensor([[2], [3]]))


def test_a_history_counts_the_tokens_of_each_path_separately() -> None:
    tokens, parents = a_tree()
    grown = a_history().followed_by(tokens, ancestor_mask(parents))
    for row, before in enumerate([[2], [3]]):
        for node in range(6):
            path, at = list(before), node
            while at >= 0:
                path.append(int(tokens[row, at]))
                at = int(parents[row, at])
            assert grown.counts[row, node].tolist() == [path.count(token) for token in range(9)]


@pytest.mark.parametrize("sampling", [replace(EVERYTHING, temperature=0.0), Sampling(0.7, logit_bias=((3, 2.0),))])
def test_a_draft_vocabulary_scores_like_the_same_columns_of_the_full_one(sampling: Sampling) -> None:
    logits, positions = torch.randn(1, 6, 97), torch.arange(6).unsqueeze(0)
    tokens, parents = (of[:1] for of in a_tree())
    history = History.start([[1, 2, 3]], 97, "cpu").followed_by(tokens, ancestor_mask(parents))
    ids = torch.tensor([1, 3, 5, 7, 50, 90, 96])
    batch = alone(sampling)
    columns = batch.scores(logits[..., ids], positions, history, ids)
    wanted = batch.scores(logits, positions, history)[..., ids]
    assert torch.allclose(columns.log_softmax(-1), wanted.log_softmax(-1), atol=1e-5)


def test_rows_of_a_mixed_batch_score_as_if_alone_bit_for_bit() -> None:
    samplings = [Sampling(), EVERYTHING, Sampling(0.7, seed=1), replace(EVERYTHING, seed=9), Sampling(0.7, seed=2)]
    samplings += [Sampling(logit_bias=((3, 2.0),)), Sampling(top_k=3, repetition_penalty=1.2), Sampling(0.7, top_k=3)]
    logits, positions = torch.randn(len(samplings), 6, 97), torch.randint(50, (len(samplings), 6))
    prompts = [torch.randint(97, (5,)).tolist() for _ in samplings]
    tokens, parents = (of[:1].expand(len(samplings), 6) for of in a_tree())
    history = History.start(prompts, 97, "cpu").followed_by(tokens, ancestor_mask(parents))
    batch = BatchSampling(samplings, "cpu")
    together = [batch.scores(logits, positions, history), batch.scores(logits, None, history)]
    for row, sampling in enumerate(samplings):
        rows, one = slice(row, row + 1), alone(sampling)
        own = history.select(torch.tensor([row]))
        assert torch.equal(one.scores(logits[rows], positions[rows], own), together[0][rows])
        assert torch.equal(one.scores(logits[rows], None, own), together[1][rows])
        assert torch.equal(one.choose(logits[rows], positions[rows], own), together[0][rows].argmax(-1))


def test_choices_follow_the_distribution_and_neighbouring_ones_are_independent() -> None:
    """Users count seeds up from zero, so neighbouring seeds must be as independent as neighbouring positions."""
    for temperature in (0.7, 1.5):
        counts = draws(1, temperature=temperature).bincount(minlength=5)
        assert chi_square(counts, (LOGITS / temperature).softmax(-1)) < CHI_SQUARE_999[4]
    batch, p = BatchSampling([Sampling(1.0, seed=seed) for seed in range(3000)], "cpu"), LOGITS.softmax(-1)
    chosen = batch.choose(LOGITS.expand(3000, 1, 5), torch.full((3000, 1), 17))
    assert chi_square(chosen.flatten().bincount(minlength=5), p) < CHI_SQUARE_999[4]
    # Position t and t + 1, and seed s and s + 1 at one position: 25 cells against the product distribution.
    for first, second in ((draws()[::2], draws()[1::2]), (draws(seed=6), draws(seed=7))):
        cells = (first * 5 + second).bincount(minlength=25)
        assert chi_square(cells, (p[:, None] * p).flatten()) < CHI_SQUARE_999[24]
