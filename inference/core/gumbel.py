"""Counter-based random numbers keyed by (seed, position, token), the same in every batch, on every device."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

# splitmix64's increment and multipliers (Steele et al., 2014), as the signed integers that torch multiplies mod 2^64.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
# Numbers computed together. On a CPU, temporaries of more leave its caches, which takes three times as long; a GPU
# needs 24 bytes for each.
CPU_NUMBERS_AT_ONCE, GPU_NUMBERS_AT_ONCE = 2**18, 2**24
COMPILED_NUMBERS_MIN = 2**22  # on a GPU, by one kernel, which takes seconds to compile


def mix(state: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, in place: temporaries of vocabulary size cost more than the mixing."""
    # torch's right shift keeps the sign; masking off the upper bits makes it a logical shift.
    state.bitwise_xor_((state >> 30).bitwise_and_((1 << 34) - 1)).mul_(MIX_1)
    state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(MIX_2)
    return state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))


def gumbel_noise(
    seeds: Int[Tensor, " batch"], positions: Int[Tensor, "batch nodes"], tokens: Int[Tensor, " columns"]
) -> Float[Tensor, "batch nodes columns"]:
    """Gumbel noise, float32, keyed by the row's seed, the absolute position and the target's token id."""
    if positions.device.type == "cuda" and positions.numel() * len(tokens) >= COMPILED_NUMBERS_MIN:
        return as_one_kernel(positions.device)(seeds, positions, tokens)
    rows = max((CPU_NUMBERS_AT_ONCE if positions.device.type == "cpu" else GPU_NUMBERS_AT_ONCE) // len(tokens), 1)
    if positions.numel() <= rows:
        return noise_at_once(seeds, positions, tokens)
    noise = torch.empty(positions.numel(), len(tokens), device=positions.device)
    keys = seeds.unsqueeze(1).expand_as(positions).flatten(), positions.flatten()
    for start in range(0, len(noise), rows):
        part = slice(start, start + rows)
        noise[part] = noise_at_once(keys[0][part], keys[1][part].unsqueeze(1), tokens).squeeze(1)
    return noise.view(*positions.shape, len(tokens))


def noise_at_once(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """`gumbel_noise` of any size in one piece."""
    key = mix(mix(positions.long() * GOLDEN + seeds.unsqueeze(1)) + GOLDEN)  # [batch, nodes]
    bits = mix(key.unsqueeze(-1) + tokens.long() * GOLDEN)  # [batch, nodes, columns]
    # 52 random bits plus half a step lie strictly inside (0, 1) in float64, so both logarithms are finite and precise.
    uniform = (bits >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()


@cache
def as_one_kernel(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`noise_at_once` compiled, or as it is if it cannot be compiled or gives other numbers.

    512 rows x 49,152 tokens take 0.23 ms on an H100, and 3.6 ms without compiling.
    """
    compiled = torch.compile(noise_at_once, dynamic=True)
    seeds, tokens = torch.arange(3, device=device), torch.arange(64, device=device)
    inputs = seeds, seeds.unsqueeze(1) + 7, tokens
    try:
        same, problem = torch.equal(compiled(*inputs), noise_at_once(*inputs)), "other numbers"
    except Exception as error:  # without a C compiler, say
        same, problem = False, f"{type(error).__name__}: {error}"[:200]
    if not same:
        warnings.warn(f"the noise of sampling could not be compiled ({problem}); it takes longer", stacklevel=2)
    return compiled if same else noise_at_once


@dataclass(frozen=True)
class GumbelTable:
    """The Gumbel noise of a few consecutive positions of each row, drawn once per step.

    All nodes at one depth stand at the same position, so they share an entry.
    """

    first: Int[Tensor, " batch"]  # the absolute position of values[:, 0]
    values: Float[Tensor, "batch count vocab"]

    def moved(self, first: Int[Tensor, " batch"], count: int, seeds: Int[Tensor, " batch"]) -> "GumbelTable":
        """The table of `count` positions from `first` on, with the same rows and seeds; only new positions are drawn.

        A step draws noise for all its drafts and accepts fewer, so most of the next step's noise is known.
        """
        values = self.values.new_empty(len(first), count, self.values.shape[-1])
        new = []
        for row, shift in enumerate((first - self.first).tolist()):
            known = self.values[row, shift : shift + count] if shift >= 0 else self.values[row, :0]
            values[row, : len(known)] = known
            new += [(row, column) for column in range(len(known), count)]
        if new:
            rows, columns = torch.tensor(new, device=first.device).unbind(1)
            positions = (first[rows] + columns).unsqueeze(1)
            tokens = torch.arange(values.shape[-1], device=first.device)
            values[rows, columns] = gumbel_noise(seeds[rows], positions, tokens).squeeze(1)
        return GumbelTable(first, values)

    def at(
        self,
        positions: Int[Tensor, "rows nodes"],
        rows: Int[Tensor, " rows"] | None,
        tokens: Int[Tensor, " columns"] | None,
    ) -> Float[Tensor, "rows nodes columns"]:
        """The Gumbel noise of some rows (None: all) and tokens (None: all) at absolute positions."""
        first, values = (self.first, self.values) if rows is None else (self.first[rows], self.values[rows])
        index = torch.arange(len(first), device=first.device).unsqueeze(1)
        noise = values[index, positions - first.unsqueeze(1)]  # copies whole rows; gather would copy single numbers
        return noise if tokens is None else noise[..., tokens]
