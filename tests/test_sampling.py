"""Laws of sampling: noise belongs to (seed, position, token) and to nothing else, and what it picks follows p."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inference import sampling as module
from inference.sampling import Sampling, choice_scores, gumbel_noise

# 99.9 % of a chi-square distribution lies below, by its degrees of freedom.
CHI_SQUARE_999 = {4: 18.47, 24: 51.18}
LOGITS = torch.tensor([1.5, 0.2, -0.7, 0.9, -2.0])
ROWS = 20_000


def draws(seed: int = 0, positions: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """The token chosen at each position from the same five-symbol distribution."""
    positions = torch.arange(ROWS) if positions is None else positions
    return choice_scores(LOGITS.expand(len(positions), 5), positions, Sampling(temperature, seed)).argmax(-1)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def splitmix_noise(seed: int, position: int, token: int) -> float:
    """The same noise in Python's own integers, mod 2^64."""
    golden, whole = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & whole
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & whole
        return state ^ (state >> 31)

    key = mix((mix((position * golden + seed) & whole) + golden) & whole)
    uniform = ((mix((key + token * golden) & whole) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(uniform))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1])
def test_noise_is_a_function_of_seed_position_and_token(seed: int) -> None:
    positions, tokens = torch.tensor([0, 1, 7, 4095, 10**6]), torch.tensor([0, 3, 128_255])
    noise = gumbel_noise(seed, positions, tokens)
    for row, position in enumerate(positions.tolist()):
        for column, token in enumerate(tokens.tolist()):
            assert float(noise[row, column]) == pytest.approx(splitmix_noise(seed, position, token), abs=1e-6)


def test_noise_does_not_know_the_shape_of_its_batch() -> None:
    positions, tokens = torch.randint(10_000, (37,)), torch.randperm(211)
    whole = gumbel_noise(5, positions, tokens)
    rows, columns = torch.randperm(37)[:11], torch.randperm(211)[:23]
    assert torch.equal(gumbel_noise(5, positions[rows], tokens[columns]), whole[rows][:, columns])
    one_by_one = [gumbel_noise(5, positions[i : i + 1], tokens[j : j + 1]) for i in range(5) for j in range(5)]
    assert torch.equal(torch.cat(one_by_one).flatten(), whole[:5, :5].flatten())
    assert torch.equal(gumbel_noise(5, positions.int(), tokens.int()), whole)


def test_a_draft_vocabulary_gets_the_noise_of_its_tokens() -> None:
    logits, positions = torch.randn(6, 97), torch.arange(6)
    ids = torch.randperm(97)[:20].sort().values
    noise = gumbel_noise(3, positions, torch.arange(97))
    scores = choice_scores(logits[:, ids], positions, Sampling(0.8, 3), ids)
    wanted = (logits[:, ids] / 0.8).log_softmax(-1) + noise[:, ids]
    assert torch.equal(scores, wanted)


def test_greedy_adds_nothing() -> None:
    logits = torch.randn(6, 97)
    assert torch.equal(choice_scores(logits, torch.arange(6), Sampling()), logits)


def test_a_vanishing_temperature_is_greedy() -> None:
    logits, positions = torch.randn(500, 97), torch.arange(500)
    greedy = logits.argmax(-1)
    differing = [
        int((choice_scores(logits, positions, Sampling(temperature, 1)).argmax(-1) != greedy).sum())
        for temperature in (1.0, 0.1, 1e-5, 1e-8)
    ]
    assert differing[0] > differing[1] > differing[2] == differing[3] == 0


def test_an_overwhelming_temperature_forgets_the_logits() -> None:
    counts = draws(temperature=1e6).bincount(minlength=5)
    assert chi_square(counts, torch.full((5,), 0.2)) < CHI_SQUARE_999[4]


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature: -0.5 given, 0 \(greedy\) or more"):
        Sampling(-0.5)


def test_noise_is_gumbel_in_mean_variance_and_distribution() -> None:
    """Three standard errors for the moments; for the whole distribution Kolmogorov's bound at one in a thousand."""
    noise = gumbel_noise(0, torch.arange(200), torch.arange(500)).double().flatten()
    count = len(noise)
    assert float(noise.mean()) == pytest.approx(0.577216, abs=3 * (math.pi**2 / 6 / count) ** 0.5)
    # The variance of a sample variance is (kurtosis - 1) sigma^4 / n, and Gumbel's kurtosis is 5.4.
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=3 * (4.4 / count) ** 0.5 * math.pi**2 / 6)
    distribution = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(1, count + 1) / count
    assert float((distribution - steps).abs().max()) < 1.95 / count**0.5


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_choices_follow_the_distribution(seed: int, temperature: float) -> None:
    counts = draws(seed, temperature=temperature).bincount(minlength=5)
    assert chi_square(counts, (LOGITS / temperature).softmax(-1)) < CHI_SQUARE_999[4]


def test_choices_over_seeds_follow_the_distribution() -> None:
    """Users count seeds up from zero; at one position these must be as independent as positions are."""
    chosen = torch.cat([draws(seed, torch.tensor([17])) for seed in range(3000)])
    assert chi_square(chosen.bincount(minlength=5), LOGITS.softmax(-1)) < CHI_SQUARE_999[4]


@pytest.mark.parametrize("pair", ["positions", "seeds"])
def test_neighbouring_choices_are_independent(pair: str) -> None:
    """Position t with t + 1, and seed s with s + 1 at one position: 25 cells against the product distribution."""
    first = draws()[::2] if pair == "positions" else draws(seed=6)
    second = draws()[1::2] if pair == "positions" else draws(seed=7)
    p = LOGITS.softmax(-1)
    cells = (first * 5 + second).bincount(minlength=25)
    assert chi_square(cells, (p[:, None] * p).flatten()) < CHI_SQUARE_999[24]


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.zeros_like,
    "too quiet": lambda noise: noise * 0.9,
    "normal": lambda noise: torch.special.ndtri(torch.exp(-torch.exp(-noise.double()))).float() * 1.28,
    "of the next token": lambda noise: (noise + noise.roll(1, dims=-1)) / 2,
    "the same for two tokens": lambda noise: torch.cat([noise[:, :1], noise[:, :1], noise[:, 2:]], dim=-1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_noise_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square test above is worth something: it fails for each of these."""
    monkeypatch.setattr(module, "gumbel_noise", lambda *args: BROKEN[name](gumbel_noise(*args)))
    counts = draws().bincount(minlength=5)
    assert chi_square(counts, LOGITS.softmax(-1)) > CHI_SQUARE_999[4]
