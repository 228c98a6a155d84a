"""Seconds of the parts of a decode step on this machine: measured at load, corrected by the steps that run."""

import math
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import numpy
from numpy.typing import NDArray
from pydantic import Field

from headstart.inference.core.drafter import VerifiedOnHost
from headstart.inference.targets.cuda_graph import size_bucket

NODES = (1, 2, 4, 6, 8, 12, 16, 32, 64)  # sizes of a row's tree, root included; costs of others are interpolated
SHORTEST = 128  # positions; shorter contexts are corrected together
CONTEXTS = 64  # positions; costs are computed once for each multiple
WINDOW = 32  # observed steps that a correction rests on
PRIOR = 4  # observed steps that a correction must outweigh
APART = math.log(1.5)  # most that the steps of one size differ from all steps of the batch
RENEWED = 32  # observations after which corrections are applied; a step gives a few

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class StepCosts:
    """Seconds at one context length and batch size."""

    target: tuple[float, ...]  # a step with NODES nodes: all of it except drafting
    first_level: float  # drafting one level: the head's pass over the newly verified positions
    level: float  # each further level
    captured: bool = False  # whether the target's pass is captured, for sizes that are powers of two

    def verify(self, most: int) -> NDArray[numpy.float64]:
        """A target step with 1, 2, ... `most` draft tokens; extrapolated beyond the largest size."""
        nodes = numpy.arange(2, most + 2, dtype=float)
        if self.captured:
            nodes = 2 ** numpy.ceil(numpy.log2(nodes))
        return extrapolated(nodes, NODES, self.target)


@dataclass(frozen=True)
class CostSurface:
    """Measured seconds of a step's parts, as functions of nodes, context and batch.

    A target step costs a pass over the tokens of all rows, however rows share them, plus attention, which grows with
    the context of each row and with its nodes.
    """

    tokens: tuple[int, ...]  # the sizes that were timed, in tokens of all rows together, ascending
    target: tuple[Seconds, ...]  # a greedy step with that many tokens, without context
    most: int  # nodes of a row's largest tree
    position: tuple[Seconds, Seconds]  # further, per row and position of context, with one node and with `most`
    sampled: tuple[Seconds, Seconds]  # further, per row, if rows sample, with one node and with `most`
    first_level: tuple[Seconds, Seconds]  # drafting for one row without context, and further per position
    level: tuple[Seconds, Seconds]
    complete: bool = True  # whether there was time for all sizes

    def __post_init__(self) -> None:
        ascending = all(before < after for before, after in zip(self.tokens, self.tokens[1:], strict=False))
        growing = all(before <= after for before, after in zip(self.target, self.target[1:], strict=False))
        matching = len(self.tokens) == len(self.target) >= 2 and self.most >= 2 and self.target[0] > 0
        rising = self.position[0] <= self.position[1] and self.sampled[0] <= self.sampled[1]
        if not (ascending and growing and matching and rising and self.first_level[0] > 0):
            raise ValueError(f"costs that no measurement gives: {self}")

    def seconds(self, nodes: NDArray[numpy.float64], at: "Situation") -> NDArray[numpy.float64]:
        """A target step with this many nodes in each row."""
        ends = (1, self.most)
        found = extrapolated(nodes * at.batch, self.tokens, self.target)
        found = found + at.batch * at.context * numpy.interp(nodes, ends, self.position)
        return found if at.greedy else found + at.batch * numpy.interp(nodes, ends, self.sampled)

    def drafting(self, at: "Situation", width: int) -> tuple[float, float]:
        """The first level, and each further level of `width` nodes. More rows cost what they cost the target."""
        one, all_rows = extrapolated(numpy.array([width, width * at.batch], dtype=float), self.tokens, self.target)
        first, further = (start + slope * at.context for start, slope in (self.first_level, self.level))
        share = float(all_rows / one)
        return first * share, further * share


def extrapolated(
    at: NDArray[numpy.float64], sizes: tuple[int, ...], values: tuple[float, ...]
) -> NDArray[numpy.float64]:
    """Linear between the sizes, and beyond the largest one as between the last two."""
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    return numpy.interp(at, sizes, values) + slope * numpy.maximum(at - sizes[-1], 0)


@dataclass(frozen=True)
class Situation:
    """All that the cost of a step depends on, except the tree."""

    context: int  # positions of the longest row
    batch: int
    greedy: bool  # all rows are

    @classmethod
    def of(cls, verified: VerifiedOnHost) -> "Situation":
        ends = [start + count for start, count in zip(verified.starts, verified.counts, strict=True)]
        return cls(max(ends), len(ends), verified.sampling.all_greedy)

    @property
    def group(self) -> str:
        """Situations that are corrected together."""
        return f"{'greedy' if self.greedy else 'sampled'}, batch {self.batch}"


class Observed(dict[str, deque[float]]):
    """Logarithms of observed over measured seconds: the newest of each group of steps."""

    def __init__(self, known: dict[str, list[float]] | None = None) -> None:
        super().__init__({name: deque(values, WINDOW) for name, values in (known or {}).items()})
        self.count = 0  # since it was made

    def add(self, name: str, observed: float, measured: float) -> None:
        self.setdefault(name, deque(maxlen=WINDOW)).append(math.log(observed / measured))
        self.count += 1

    def correction(self, *names: str) -> float:
        """The median logarithm of the last group; where it has few steps, of the groups before it, then 0.

        The steps of a group may come from a time when the machine was busy. So a group counts only up to `APART` from
        the one before it, which has more and newer steps.
        """
        found, nearest = 0.0, math.inf
        for name in names:
            if window := self.get(name):
                middle = min(max(median(window), found - nearest), found + nearest)
                found = (len(window) * middle + PRIOR * found) / (len(window) + PRIOR)
                nearest = APART
        return found


class CostTable:
    """Costs of a step in each situation: the measured ones, times what observed steps took more or less."""

    def __init__(self, surface: CostSurface, width: int, captured: bool = False, synced: bool = True) -> None:
        """`width` is the number of nodes that a level expands. `synced`: work is done when a call returns."""
        self.surface, self.width, self.captured, self.synced = surface, width, captured, synced
        self.observed = Observed()
        self._now: dict[Situation, StepCosts] = {}
        self._renew_at = RENEWED

    def now(self, at: Situation) -> StepCosts:
        """The costs in this situation; its context rounds up."""
        rounded = Situation(-(-at.context // CONTEXTS) * CONTEXTS, at.batch, at.greedy)
        if rounded not in self._now:
            self._now[rounded] = self._corrected(rounded)
        return self._now[rounded]

    def observe_target(self, at: Situation, nodes: int, seconds: float) -> None:
        """Learn how long a step with this many nodes in each row took, except drafting."""
        size = size_bucket(nodes) if self.captured else nodes
        measured = float(self.surface.seconds(numpy.array([float(size)]), at)[0])
        for name in target_groups(at, nearest_size(size)):
            self.observed.add(name, seconds, measured)
        self._renew()

    def observe_drafting(self, at: Situation, first_level: float, levels: list[float]) -> None:
        """Learn how long drafting the first level took, and each further one."""
        first, further = self.surface.drafting(at, self.width)
        self.observed.add(f"first level, {at.group}", first_level, first)
        for seconds in levels:
            if further:
                self.observed.add(f"level, {at.group}", seconds, further)
        self._renew()

    def _renew(self) -> None:
        if self.observed.count >= self._renew_at:
            self._renew_at = self.observed.count + RENEWED
            self._now.clear()

    def _corrected(self, at: Situation) -> StepCosts:
        corrections = [self.observed.correction(*target_groups(at, size)) for size in NODES]
        target = self.surface.seconds(numpy.array(NODES, dtype=float), at) * numpy.exp(corrections)
        first, further = self.surface.drafting(at, self.width)
        return StepCosts(
            tuple(numpy.maximum.accumulate(target).tolist()),  # a correction never makes a larger tree cheaper
            first * math.exp(self.observed.correction(f"first level, {at.group}")),
            further * math.exp(self.observed.correction(f"level, {at.group}")),
            self.captured,
        )


def target_groups(at: Situation, size: int) -> tuple[str, str]:
    """The names under which a target step is observed: all steps of the batch, and those of like context and size."""
    context = max(SHORTEST, size_bucket(at.context))
    return f"target, {at.group}", f"target, {at.group}, context {context}, nodes {size}"


def nearest_size(nodes: int) -> int:
    """The size of NODES that is nearest by factor."""
    return min(NODES, key=lambda size: abs(math.log(size / nodes)))


class StepWatch:
    """Times the steps of one growth policy and reports them to the table; the text does not depend on it."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self.at: Situation | None = None
        self.started = self.ended = 0.0
        self.nodes, self.drafting = 0, 0.0
        self.levels: list[float] = []  # when each was done

    def begin(self, verified: VerifiedOnHost) -> StepCosts:
        """The costs for these rows. Call it when drafting begins."""
        self._observe_last_step(verified.last_step)
        self.at, self.levels, self.nodes = Situation.of(verified), [], 0
        found = self.costs.now(self.at)
        self.started = time.perf_counter()
        return found

    def level_done(self) -> None:
        """Call it when the host has read what a level drafted, which on a GPU waits for that level."""
        self.levels.append(time.perf_counter())

    def end(self, nodes: int, levels: int) -> None:
        """Call it when a tree with this many nodes in each row, root included, is drafted."""
        assert self.at is not None
        self.ended, self.nodes = time.perf_counter(), nodes
        first, further = self.costs.surface.drafting(self.at, self.costs.width)
        self.drafting = first + (levels - 1) * further
        if self.levels:
            times = [later - earlier for earlier, later in zip(self.levels, self.levels[1:], strict=False)]
            self.costs.observe_drafting(self.at, self.levels[0] - self.started, times)
            self.drafting = self.ended - self.started
        elif self.costs.synced:  # only the sum is known
            share, self.drafting = (self.ended - self.started) / self.drafting, self.ended - self.started
            self.costs.observe_drafting(self.at, first * share, [further * share] * (levels - 1))

    def _observe_last_step(self, step: tuple[float, float] | None) -> None:
        """Learn from the last step, if the last draft was part of it: loops may take turns with one drafter."""
        if step is not None and self.at is not None and self.nodes and step[0] <= self.started <= self.ended <= step[1]:
            rest = step[1] - step[0] - self.drafting
            if rest > 0:
                self.costs.observe_target(self.at, self.nodes, rest)
