"""Counter-based random numbers keyed by (seed, position, token, stream), the same in every batch, on every device."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

# splitmix64's increment and multipliers (Steele et al., 2014), as the signed integers that torch multiplies mod 2^64.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
# Numbers computed together on a CPU; the temporaries of more leave its caches, which takes three times as long.
AT_ONCE = 2**18


def mix(state: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, in place: temporaries of vocabulary size cost more than the mixing."""
    # torch's right shift keeps the sign; masking off the upper bits makes it a logical shift.
    state.bitwise_xor_((state >> 30).bitwise_and_((1 << 34) - 1)).mul_(MIX_1)
    state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(MIX_2)
    return state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))


def uniform_numbers(
    seeds: Int[Tensor, " batch"], positions: Int[Tensor, "batch nodes"], tokens: Int[Tensor, " columns"], stream: int
) -> Float[Tensor, "batch nodes columns"]:
    """Uniform numbers in (0, 1), float64, keyed by the row's seed, the absolute position, the target's token id and the
    stream; different streams are independent."""
    offset = ((stream + 1) * GOLDEN + 2**63) % 2**64 - 2**63  # wrapped to int64 by hand: torch refuses larger integers
    key = mix(mix(positions.long() * GOLDEN + seeds.unsqueeze(1)) + offset)  # [batch, nodes]
    bits = mix(key.unsqueeze(-1) + tokens.long() * GOLDEN)  # [batch, nodes, columns]
    # 52 random bits plus half a step lie strictly inside (0, 1) in float64, so both logarithms are finite and precise.
    return (bits >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)


def gumbel_noise(
    seeds: Int[Tensor, " batch"],
    positions: Int[Tensor, "batch nodes"],
    tokens: Int[Tensor, " columns"],
    stream: int = 0,
) -> Float[Tensor, "batch nodes columns"]:
    """Gumbel noise, float32, keyed by the row's seed, the absolute position, the target's token id and the stream."""
    rows = max(AT_ONCE // len(tokens), 1)
    if positions.device.type != "cpu" or positions.numel() <= rows:
        return uniform_numbers(seeds, positions, tokens, stream).log_().neg_().log_().neg_().float()
    found = torch.empty(positions.numel(), len(tokens))
    keys = seeds.unsqueeze(1).expand_as(positions).flatten(), positions.flatten()
    for start in range(0, len(found), rows):
        part = slice(start, start + rows)
        found[part] = gumbel_noise(keys[0][part], keys[1][part].unsqueeze(1), tokens, stream).squeeze(1)
    return found.view(*positions.shape, len(tokens))
