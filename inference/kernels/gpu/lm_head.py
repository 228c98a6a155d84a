"""The lm_head and the choice of a token in two Triton kernels, which write no logits.

A program of the first computes the logits of one block of the vocabulary, rounds them as they would be stored, and
keeps the best token of each node: by the largest logit, or by the largest logit over the row's temperature plus the
noise in the step's table (core/gumbel.py). The second kernel compares the blocks. Of equal scores the first wins, as in
torch's argmax.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import TypeVar

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor, nn
from triton import language as tl

from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.kernels.fast_layers import FusedForward
from headstart.inference.kernels.gpu.few_rows import FOR_ONE, Tile, Trials, Work, counts, sums_of

NODES = (1, 16, 64)  # of one product, as padded; more are left to torch
TILES = (Tile(64, 128, 4, 4), Tile(128, 64, 4, 4))  # few, as Triton takes a second for each
Output = TypeVar("Output")


@triton.jit(do_not_specialize=["nodes", "of_row", "count"])
def best_of_block(
    hidden, weight, bias, noise, positions, first, settings, scores, tokens,
    nodes, of_row, count, vocab, size, blocks, setting,
    HAS_BIAS: tl.constexpr, SAMPLED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The best score in one block of the vocabulary, and its token, for each node; grid: blocks."""
    block, node = tl.program_id(0), tl.arange(0, ROWS)
    column, is_node = block * COLUMNS + tl.arange(0, COLUMNS), node < nodes
    found = sums_of(hidden, weight, nodes, vocab, size, column, 0, size, ROWS, COLUMNS, STEP)
    if HAS_BIAS:
        found += tl.load(bias + column, mask=column < vocab, other=0.0).to(tl.float32)[:, None]
    found = found.to(hidden.dtype.element_ty).to(tl.float32)
    if SAMPLED:
        row = node // of_row
        temperature = tl.load(settings + row * setting, mask=is_node, other=0.0)[None, :]
        place = tl.load(positions + node, mask=is_node, other=0) - tl.load(first + row, mask=is_node, other=0)
        at = noise + ((row * count + place).to(tl.int64) * vocab)[None, :] + column[:, None]
        drawn = tl.load(at, mask=is_node[None, :] & (column[:, None] < vocab), other=0.0)
        divisor = tl.broadcast_to(tl.where(temperature == 0.0, 1.0, temperature), (COLUMNS, ROWS))
        found = tl.where(temperature == 0.0, found, tl.div_rn(found, divisor) + drawn)
    found = tl.where(column[:, None] < vocab, found, float("-inf"))
    best = tl.max(found, 0)
    token = tl.min(tl.where(found == best[None, :], column[:, None], vocab - 1), 0)
    tl.store(scores + node * blocks + block, best, mask=is_node)
    tl.store(tokens + node * blocks + block, token, mask=is_node)


@triton.jit
def best_of_all(scores, tokens, chosen, blocks, vocab, WIDTH: tl.constexpr):
    """The best of all blocks; grid: nodes."""
    node, block = tl.program_id(0), tl.arange(0, WIDTH)
    score = tl.load(scores + node * blocks + block, mask=block < blocks, other=float("-inf"))
    token = tl.load(tokens + node * blocks + block, mask=block < blocks, other=vocab - 1)
    tl.store(chosen + node, tl.min(tl.where(score == tl.max(score, 0), token, vocab - 1), 0).to(tl.int64))


def choose(
    hidden: Float[Tensor, "rows nodes size"],
    lm_head: nn.Linear,
    sampling: BatchSampling,
    positions: Int[Tensor, "rows nodes"],
    tile: Tile,
) -> Int[Tensor, "rows nodes"]:
    """The token that each row's sampling, with its table of noise, chooses at each position."""
    hidden, positions = hidden.contiguous(), positions.contiguous()
    (rows, nodes, size), vocab = hidden.shape, lm_head.out_features
    blocks, bias, table = triton.cdiv(vocab, tile.COLUMNS), lm_head.bias, sampling.gumbel_table
    scores = hidden.new_empty(rows * nodes, blocks, dtype=torch.float32)
    tokens, chosen = torch.empty_like(scores, dtype=torch.int32), torch.empty_like(positions)
    noise, first = (scores, positions) if table is None else (table.values, table.first)
    best_of_block[blocks,](
        hidden, lm_head.weight, hidden if bias is None else bias, noise, positions, first,
        sampling.settings, scores, tokens, rows * nodes, nodes, noise.shape[1], vocab, size, blocks,
        sampling.settings.stride(0), HAS_BIAS=bias is not None, SAMPLED=table is not None,
        ROWS=padded(rows * nodes), **tile._asdict(),
    )  # fmt: skip
    width = triton.next_power_of_2(blocks)
    best_of_all[rows * nodes,](scores, tokens, chosen, blocks, vocab, WIDTH=width, num_warps=8)
    return chosen


def padded(nodes: int) -> int:
    """0 for more than a product has."""
    return min((each for each in NODES if nodes <= each), default=0)


class ChoosingHead(FusedForward):
    """Replaces the forward of an lm_head, which only keeps its inputs in passes of `choose`."""

    def __init__(self, module: nn.Linear) -> None:
        self.own = vars(module).get("forward") or partial(type(module).forward, module)
        super().__init__(module, self.own)
        self.tiles = dict[tuple[int, bool], Tile]()  # by padded number of nodes, and whether a row is sampled
        self.given: Tensor | None = None
        self.kept = Tensor()

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.given is None:
            return self.own(inputs)
        self.kept = inputs
        return self.given

    def passing(self, run: Callable[[], Output], given: Tensor) -> tuple[Output, Tensor]:
        """The output of a pass in which the lm_head returns what is `given`, and its inputs."""
        self.given = given
        try:
            return run(), self.kept
        finally:
            self.given, self.kept = None, Tensor()

    def choose_tiles(self, trials: Trials) -> dict[tuple[int, bool], Tile]:
        """Take our kernels where they choose in less time than torch."""
        for nodes, temperature in product(counts(NODES, self.module.weight.dtype), (0.0, 0.7)):
            if (tile := fastest_choice(self.module, nodes, temperature, trials)) is not None:
                self.tiles[nodes, temperature > 0] = tile
        return self.tiles

    def serves(self, sampling: BatchSampling, nodes: int) -> bool:
        return sampling.is_only_tempered and (padded(nodes), not sampling.all_greedy) in self.tiles

    def choose(
        self, run: Callable[[], Output], sampling: BatchSampling, positions: Int[Tensor, "rows nodes"]
    ) -> tuple[Output, Int[Tensor, "rows nodes"]]:
        """The output of a pass, without logits, and the token that the target chooses at each node."""
        tile = self.tiles[padded(positions.numel()), not sampling.all_greedy]
        output, hidden = self.passing(run, self.module.weight.new_empty(*positions.shape, 0))
        return output, choose(hidden, self.module, sampling, positions, tile)


@torch.inference_mode()
def fastest_choice(lm_head: nn.Linear, nodes: int, temperature: float, trials: Trials) -> Tile | None:
    """The tile with which our choice of so many tokens takes less time than torch's; None if none does."""
    weight, (vocab, size) = lm_head.weight, lm_head.weight.shape
    hidden = torch.arange(nodes * size, device=weight.device).sin().to(weight.dtype).view(1, nodes, size)
    positions = torch.zeros(1, nodes, dtype=torch.long, device=weight.device)
    sampling = BatchSampling([Sampling(temperature)], weight.device).with_gumbel(positions[:, 0], 1, vocab)
    scores = sampling.scores(lm_head(hidden), positions)

    def best_score(tile: Tile | None) -> Tensor:
        if tile is None:
            return sampling.scores(lm_head(hidden), positions).max(-1).values
        return scores.gather(-1, choose(hidden, lm_head, sampling, positions, tile).unsqueeze(-1)).squeeze(-1)

    tiles = FOR_ONE[-1:] if nodes == 1 else TILES
    works: dict[Tile | None, Work] = {tile: partial(best_score, tile) for tile in (None, *tiles)}
    return trials.fastest(f"{vocab} x {size}, {nodes} choices at temperature {temperature}", works)
