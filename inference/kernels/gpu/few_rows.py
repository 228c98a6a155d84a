"""Products of linear layers with one to eight tokens, by Triton kernels where a measurement at load finds them faster.

Reading the weights takes longest, so each program reads the weights of a few outputs, once. For one token it multiplies
and adds, for more it multiplies matrices. Where outputs are few, several programs share the inputs of each, and torch
adds their sums. Products and sums are float32, rounded once, and have one order for each number of tokens.

TRITON_INTERPRET=1, set before the import, runs the kernels on a CPU.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
import triton
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from triton import language as tl

from headstart.inference.kernels.fast_layers import FusedForward, linear_layers, whole_of

MEASURED = (1, 2, 4, 8)  # numbers of tokens; others take the choice of the next larger one
FASTER = 0.97  # of torch's time, up to which our kernel is chosen
SECONDS_MAX = 1.5  # of a measurement, without the seconds in which Triton compiles
CYCLED_BYTES = 2**28  # of weights that are read in turn: no cache holds them
MATRIX_DTYPES = (torch.float16, torch.bfloat16)  # products of float32 matrices take Triton long, and compiling, too
DTYPES = (torch.float32, *MATRIX_DTYPES)
PARTS_MAX = 8
Work = Callable[[], Tensor]
Way = TypeVar("Way")


class Tile(NamedTuple):
    """What one program of a product computes, and how."""

    COLUMNS: int  # outputs
    STEP: int  # inputs at once
    num_warps: int
    num_stages: int = 1  # steps whose weights are on their way at once


FOR_ONE = (Tile(2, 1024, 2), Tile(4, 1024, 4), Tile(16, 256, 4))
FOR_SEVERAL = (Tile(16, 256, 4, 4), Tile(32, 128, 4, 5), Tile(64, 128, 4, 4))


@triton.jit
def sums_of(
    inputs, weight, tokens, outputs, size, column, first, end,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The products of some outputs' weights with each token's inputs from `first` to `end`. [COLUMNS, ROWS]"""
    weights, token = weight + column[:, None].to(tl.int64) * size, tl.arange(0, ROWS)
    total = tl.zeros((COLUMNS, STEP if ROWS == 1 else ROWS), tl.float32)
    for start in range(first, end, STEP):
        place = start + tl.arange(0, STEP)[None, :]
        numbers = tl.load(
            inputs + token[:, None] * size + place, mask=(token[:, None] < tokens) & (place < size), other=0.0
        )
        part = tl.load(weights + place, mask=(column[:, None] < outputs) & (place < size), other=0.0)
        if ROWS == 1:
            total += part.to(tl.float32) * numbers.to(tl.float32)
        else:
            total = tl.dot(part, tl.trans(numbers), total, input_precision="ieee")
    return tl.sum(total, 1)[:, None] if ROWS == 1 else total


@triton.jit(do_not_specialize=["tokens"])
def multiply(
    inputs, weight, bias, found, tokens, outputs, size, part,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """inputs [tokens, size] times weight [outputs, size]; grid: blocks of outputs, parts of the inputs."""
    column, first = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * part
    total = sums_of(
        inputs, weight, tokens, outputs, size, column, first, tl.minimum(first + part, size), ROWS, COLUMNS, STEP
    )
    if HAS_BIAS:  # in the first part
        is_output = column < tl.where(first == 0, outputs, 0)
        total += tl.load(bias + column, mask=is_output, other=0.0).to(tl.float32)[:, None]
    token = tl.arange(0, ROWS)[None, :]
    to = found + (tl.program_id(1) * tokens + token) * outputs + column[:, None]
    tl.store(to, total.to(found.dtype.element_ty), mask=(token < tokens) & (column[:, None] < outputs))


def product(
    inputs: Float[Tensor, "*axes size"],
    weight: Float[Tensor, "outputs size"],
    bias: Float[Tensor, " outputs"] | None,
    tile: Tile,
) -> Float[Tensor, "*axes outputs"]:
    """`functional.linear` for at most 16 tokens."""
    inputs, (outputs, size) = inputs.contiguous(), weight.shape
    programs, steps = triton.cdiv(outputs, tile.COLUMNS), triton.cdiv(size, tile.STEP)
    part = triton.cdiv(steps, min(max(2 * processors_of(weight.device) // programs, 1), PARTS_MAX)) * tile.STEP
    tokens, parts = inputs.numel() // size, triton.cdiv(size, part)
    kind = weight.dtype if parts == 1 else torch.float32
    found = inputs.new_empty(parts, *inputs.shape[:-1], outputs, dtype=kind)
    multiply[programs, parts](
        inputs, weight, weight if bias is None else bias, found, tokens, outputs, size, part,
        HAS_BIAS=bias is not None, ROWS=1 if tokens == 1 else 16, **tile._asdict(),
    )  # fmt: skip
    return found[0] if parts == 1 else found.sum(0).to(weight.dtype)


@cache
def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def few_rows(layer: nn.Linear, chosen: dict[int, Tile], inputs: Tensor) -> Tensor:
    """The forward of a linear layer, by our kernel for the numbers of tokens that `chosen` has a tile for."""
    tile = chosen.get(inputs.numel() // layer.in_features)
    if tile is None:
        return type(layer).forward(layer, inputs)
    return product(inputs, layer.weight, layer.bias, tile)


def graph_seconds(work: Work) -> float:
    """The seconds of a function on the GPU as a captured graph, the least of a few replays."""
    graph, events = torch.cuda.CUDAGraph(), [torch.cuda.Event(enable_timing=True) for _ in range(5)]
    with torch.cuda.graph(graph):
        work()
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in pairwise(events)) / 1000


@dataclass
class Trials:
    """Which of our kernels are right and faster than torch's."""

    seconds: Callable[[Work], float] = graph_seconds
    spent: float = 0.0
    times: dict[str, tuple[float, float]] = field(default_factory=dict)  # microseconds of torch's and of the chosen
    failures: set[str] = field(default_factory=set)  # why others are left out

    def line(self, count: int, of: str) -> str:
        return "; ".join([f"{count} of {of}", *sorted(self.failures)])

    def fastest(self, name: str, works: dict[Way | None, Work]) -> Way | None:
        """The way whose work takes least time; None if torch's, which comes first, does, or if the time is up."""
        times, wanted = dict[Way | None, float](), None
        for way, work in works.items() if self.spent <= SECONDS_MAX else ():
            try:
                found = work()  # Triton compiles it
                wanted, rounding = found if wanted is None else wanted, max(torch.finfo(found.dtype).eps, 1e-5)
                if not (found.float() - wanted.float()).norm() <= rounding * wanted.float().norm():
                    self.failures.add("other numbers")
                    continue
                started = time.perf_counter()
                times[way] = self.seconds(work)
                self.spent += time.perf_counter() - started
            except Exception as error:  # Triton has kinds of its own, as for too much shared memory
                self.failures.add(f"{type(error).__name__}: {' '.join(str(error).split())[:100]}")
        if None not in times:
            return None
        least = min(times, key=lambda way: times[way])
        chosen = least if times[least] <= FASTER * times[None] else None
        self.times[name] = (round(1e6 * times[None], 1), round(1e6 * times[chosen], 1))
        return chosen


def in_turn(multiply: Callable[..., Tensor], inputs: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """The products of all layers; returns the last."""
    for layer in layers:
        found = multiply(inputs, layer.weight, layer.bias)
    return found


def counts(measured: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The numbers of tokens that are measured, of which the first is 1."""
    return measured if dtype in MATRIX_DTYPES else measured[:1]


def choose_tiles(layers: Sequence[nn.Linear], trials: Trials) -> dict[int, Tile]:
    """The tiles for each number of tokens, for layers of one shape, where they beat torch's product."""
    weight, found, fewer = layers[0].weight, dict[int, Tile](), 0
    for tokens in counts(MEASURED, weight.dtype):
        inputs = torch.arange(tokens * weight.shape[1], device=weight.device).sin().to(weight.dtype).view(tokens, -1)
        run = partial(in_turn, inputs=inputs, layers=layers[: max(CYCLED_BYTES // weight.nbytes, 1)])
        works: dict[Tile | None, Work] = {None: partial(run, functional.linear)}
        works |= {each: partial(run, partial(product, tile=each)) for each in (FOR_ONE if tokens == 1 else FOR_SEVERAL)}
        tile = trials.fastest(f"{len(weight)} x {weight.shape[1]}, {tokens} tokens", works)
        found |= dict.fromkeys(range(fewer + 1, tokens + 1), tile) if tile else {}
        fewer = tokens
    return found


@torch.inference_mode()
def choose_products(model: nn.Module, trials: Trials) -> str:
    """Let our kernel compute products of few tokens where it is faster; returns for how many shapes of layers."""
    shapes: dict[object, dict[nn.Linear, None]] = {}
    for *_, linear in linear_layers(model):
        layer = whole_of(linear) or linear  # as it is joined
        if layer.weight.dtype in DTYPES and layer.weight.is_contiguous():
            shapes.setdefault((layer.weight.shape, layer.weight.dtype, layer.bias is None), {})[layer] = None
    count = 0
    for group in sorted(shapes.values(), key=lambda each: -sum(layer.weight.nbytes for layer in each)):
        chosen = choose_tiles([*group], trials)
        for layer in group if chosen else ():
            vars(layer)["forward"] = FusedForward(layer, partial(few_rows, layer, chosen))
        count += bool(chosen)
    return trials.line(count, f"{len(shapes)} shapes")
