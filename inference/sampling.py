"""Which token a distribution chooses: argmax, with Gumbel noise keyed by (seed, position) when sampling.

argmax(log p + g) with Gumbel g is an exact sample from p. The noise of a position is a pure function of the seed, the
position and the token, so plain decoding and every drafter's tree make the same choice there, and a drafter that looks
at the same noise guesses that choice better (the coupling of Daliri et al., arXiv 2408.07978).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# splitmix64's increment and multipliers (Steele et al., 2014), as the signed integers that torch multiplies mod 2^64.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature: {self.temperature} given, 0 (greedy) or more is allowed")


def mix(state: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64; right shifts are made logical by masking the sign bits away."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * MIX_1
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * MIX_2
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def gumbel_noise(
    seed: int, positions: Int[Tensor, " rows"], tokens: Int[Tensor, " columns"]
) -> Float[Tensor, "rows columns"]:
    """One Gumbel value for each absolute position and target token, float32, the same on every device."""
    key = mix(mix(positions.long() * GOLDEN + seed) + GOLDEN)  # [rows]
    bits = mix(key[:, None] + tokens.long() * GOLDEN)  # [rows, columns]
    # 52 random bits and a half step: strictly inside (0, 1) in float64, where both logarithms stay exact enough.
    uniform = (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform)).float()


def choice_scores(
    logits: Float[Tensor, "rows vocab"],
    positions: Int[Tensor, " rows"],
    sampling: Sampling,
    tokens: Int[Tensor, " vocab"] | None = None,
) -> Float[Tensor, "rows vocab"]:
    """Scores whose argmax is the token chosen for each absolute position.

    `tokens` are the target ids of the columns when these are a draft vocabulary.
    """
    if sampling.temperature == 0:
        return logits
    if tokens is None:
        tokens = torch.arange(logits.shape[-1], device=logits.device)
    noise = gumbel_noise(sampling.seed, positions, tokens)
    return torch.log_softmax(logits.float() / sampling.temperature, dim=-1) + noise
