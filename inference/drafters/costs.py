"""What the parts of a decode step cost on this machine, and trees that weigh expected tokens against these costs.

Costs are measured at load, then corrected by the steps that run.
"""

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from statistics import fmean, median
from typing import Annotated

import numpy
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from headstart.heads.calibration import StaticTree
from headstart.inference.core.tree import Tree, size_bucket
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.growth import Fixed, GrowthPolicy, Pool

NODES = (1, 2, 4, 6, 8, 12, 16, 32, 64)  # sizes of a row's tree, root included; costs of others are interpolated
SHORTEST = 128  # positions; shorter contexts are corrected together
CONTEXTS = 64  # positions; costs are computed once for each multiple
WINDOW = 32  # observed steps that a correction rests on
PRIOR = 4  # observed steps that a correction must outweigh
APART = math.log(1.5)  # most that the steps of one size differ from all steps of the batch
RENEWED = 32  # observations after which corrections are applied; a step gives a few
TINY = 1e-300  # replaces a chance of 0, as in a row that is finished while others still draft

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

    def __init__(
        self, surface: CostSurface, width: int, captured: bool = False, synced: bool = True, learns: bool = True
    ) -> None:
        """`width` is the number of nodes that a level expands. `synced`: work is done when a call returns.

        Ranks that draft the same trees for a target that they share must not learn, as each has a clock of its own.
        """
        self.surface, self.width, self.captured, self.synced, self.learns = surface, width, captured, synced, learns
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
        if not self.learns:
            return
        size = size_bucket(nodes) if self.captured else nodes
        measured = float(self.surface.seconds(numpy.array([float(size)]), at)[0])
        nearest = min(NODES, key=lambda known: abs(math.log(known / size)))
        for name in target_groups(at, nearest):
            self.observed.add(name, seconds, measured)
        self._renew()

    def observe_drafting(self, at: Situation, first_level: float, levels: list[float]) -> None:
        """Learn how long drafting the first level took, and each further one."""
        if not self.learns:
            return
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


class Costly(GrowthPolicy):
    """The policies that weigh costs; `now` and `rate` are those of the step that is being drafted."""

    watch: StepWatch
    now: StepCosts
    rate: float  # expected tokens per second

    def is_worth(self, drafted: int, chance: float) -> bool:
        costs = [self.now.target[0], *verify_costs(self.now, drafted + 1)]
        return chance > self.rate * (costs[-1] - costs[-2])

    def joined_by(self, count: int) -> None:
        self.watch.nodes += count


class CostAware(Costly):
    """A dynamic tree that grows as long as the expected tokens per second rise.

    The chances of its nodes say how many tokens to expect, and measured costs say how long a step takes. `depth`,
    `width` and `nodes` are upper bounds. It depends on well calibrated scores.
    """

    def __init__(self, depth: int, width: int, nodes: int, costs: CostTable) -> None:
        self.depth, self.width, self.nodes, self.watch = depth, width, nodes, StepWatch(costs)
        # Plain numbers: there are few, and the policy itself must be fast on every level.
        self.levels_done: list[list[list[float]]] = []  # by level, then row: the chances of the nodes

    def levels(self, verified: Verified) -> int:
        assert isinstance(verified, VerifiedOnHost)
        self.now = self.watch.begin(verified)
        self.verify_costs = verify_costs(self.now, self.nodes)
        self.levels_done = []
        return verified.levels(self.depth)

    def continues(self, pool: Pool) -> bool:
        """Whether the best tree with another level would beat the best one without it."""
        self.look_at(pool)
        expected, verify, spent, gain = self.expected(), self.verify_costs, self.spent(), self.gain()
        now = max(tokens / (spent + cost) for tokens, cost in zip(expected, verify, strict=False))
        # Another level adds `width` nodes to a tree of any size, up to the bound.
        larger, spent = verify[self.width :] + verify[-1:] * self.width, spent + self.now.level
        return now < max((tokens + gain) / (spent + cost) for tokens, cost in zip(expected, larger, strict=False))

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        self.look_at(pool)
        spent = self.spent()
        rates = [tokens / (spent + cost) for tokens, cost in zip(self.expected(), self.verify_costs, strict=False)]
        self.rate = max(rates)
        tree = pool.best(roots, rates.index(self.rate) + 1)
        self.watch.end(tree.shape[1], len(pool.scores))
        return tree

    def look_at(self, pool: Pool) -> None:
        """Copy the chances of new levels to the host; on a GPU this waits for them."""
        for scores in pool.scores[len(self.levels_done) :]:
            self.levels_done.append(scores.exp().tolist())
            self.watch.level_done()

    def expected(self) -> list[float]:
        """Expected tokens of a step with the best 1, 2, ... nodes, the bonus token included; the mean over rows."""
        by_row = [
            accumulate(largest(chain.from_iterable(levels), self.nodes), initial=1.0)
            for levels in zip(*self.levels_done, strict=True)
        ]
        if len(by_row) == 1:
            return list(by_row[0])[1:]
        return [fmean(tokens) for tokens in zip(*by_row, strict=True)][1:]

    def gain(self) -> float:
        """Expected tokens that the best nodes of the next level would add; the mean over rows.

        This assumes that the next level keeps the same share of its parents' chances as the last one did.
        """
        last = self.levels_done[-1]
        above = [1.0] * len(last)
        if len(self.levels_done) > 1:
            above = [sum(largest(row, self.width)) for row in self.levels_done[-2]]
        return fmean(
            sum(largest(row, self.width)) * sum(row) / max(parents, TINY)
            for row, parents in zip(last, above, strict=True)
        )

    def spent(self) -> float:
        """Seconds that drafting took so far."""
        return self.now.first_level + (len(self.levels_done) - 1) * self.now.level


@lru_cache(maxsize=64)  # a run sees few context lengths and asks on every step
def verify_costs(now: StepCosts, nodes: int) -> list[float]:
    """Seconds of a target step with 1, 2, ... `nodes` draft tokens."""
    return now.verify(nodes).tolist()


def largest(chances: Iterable[float], count: int) -> list[float]:
    """The `count` largest in descending order."""
    return sorted(chances, reverse=True)[:count]


class CostAwareShape(Costly):
    """Before drafting, cuts a head's searched tree to the size with the most expected tokens per second."""

    def __init__(self, tree: StaticTree, nodes: int, costs: CostTable) -> None:
        """The sizes are the tree's best 1, 2, ... up to `nodes` nodes."""
        self.sizes = [Fixed(tree.best(count)) for count in range(1, nodes + 1)]
        self.chances = numpy.asarray(tree.chances[:nodes])  # that of the node which each size adds
        self.watch = StepWatch(costs)
        self.depths = numpy.array([size.depth for size in self.sizes])
        self.chosen = self.sizes[-1]
        self.depth, self.width, self.nodes = self.chosen.depth, self.chosen.width, nodes

    def levels(self, verified: Verified) -> int:
        assert isinstance(verified, VerifiedOnHost)
        self.now = self.watch.begin(verified)
        self.chosen = self.fastest(self.now)
        return self.chosen.levels(verified)

    def fastest(self, now: StepCosts) -> Fixed:
        """The shape with the most expected tokens per second."""
        cost = now.verify(self.nodes) + now.first_level + (self.depths - 1) * now.level
        rates = (1 + numpy.cumsum(self.chances)) / cost
        self.rate = float(rates.max())
        return self.sizes[int(rates.argmax())]

    def children(self, level: int) -> int:
        return self.chosen.children(level)

    def frontier(self, level: int, totals: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.chosen.frontier(level, totals)

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        tree = self.chosen.prune(pool, roots)
        self.watch.end(tree.shape[1], len(pool.scores))
        return tree
