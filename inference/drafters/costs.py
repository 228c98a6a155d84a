"""What the parts of a decode step cost on this machine, and trees that weigh expected tokens against these costs.

Costs are measured at load. The steps that run correct them, by a factor for drafting and one for the rest of a step.
"""

import math
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

from headstart.inference.core.drafter import Situation
from headstart.inference.core.tree import Tree, size_bucket
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.growth import ByChance, GrowthPolicy, Pool

NODES = (1, 2, 4, 6, 8, 12, 16, 32, 64)  # sizes of a row's tree, root included; costs of others are interpolated
CONTEXT_MULTIPLE = 64  # positions; costs are computed once for each multiple
CORRECTION_STEPS = 32  # the newest steps of a batch size, which correct its costs
PRIOR_STEPS = 4  # steps that a correction must outweigh
RENEWAL_STEPS = 8  # steps after which corrections are applied
SURVEY_SHARE = 0.02  # of the time of captured steps, that drafting more than pays may take
SURVEY_STEPS_MIN = 8  # between two surveys
SURVEY_DECAY = 0.8  # weight of what earlier surveys found
STAYING_RATE = 0.98  # of the best shape's tokens per second, down to which the last shape stays
LEAST_CHANCE = 1e-300  # replaces a chance of 0, as in a row that is finished while others still draft

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class StepCosts:
    """Seconds at one context length and batch size."""

    target: tuple[float, ...]  # a step with NODES nodes, without drafting
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

    A target step costs a pass over the tokens of all rows, whatever their distribution over rows, plus attention, which
    grows with the context of each row and with its nodes.
    """

    tokens: tuple[int, ...]  # the sizes that were timed, in tokens of all rows together, ascending
    target: tuple[Seconds, ...]  # a greedy step with that many tokens, without context
    most: int  # nodes of a row's largest tree
    position: tuple[Seconds, Seconds]  # further, per row and position of context, with one node and with `most`
    sampled: tuple[Seconds, Seconds]  # further, per row, if rows sample, with one node and with `most`
    first_level: tuple[Seconds, Seconds]  # drafting for one row without context, and further per position
    level: tuple[Seconds, Seconds]
    complete: bool = True  # whether all sizes were timed, or nothing else ran meanwhile

    def __post_init__(self) -> None:
        ascending = all(before < after for before, after in zip(self.tokens, self.tokens[1:], strict=False))
        growing = all(before <= after for before, after in zip(self.target, self.target[1:], strict=False))
        matching = len(self.tokens) == len(self.target) >= 2 and self.most >= 2 and self.target[0] > 0
        rising = self.position[0] <= self.position[1] and self.sampled[0] <= self.sampled[1]
        if not (ascending and growing and matching and rising and self.first_level[0] > 0):
            raise ValueError(f"not a valid measurement of costs: {self}")

    def seconds(self, nodes: NDArray[numpy.float64], at: "Situation") -> NDArray[numpy.float64]:
        """A target step with this many nodes in each row."""
        ends = (1, self.most)
        seconds = extrapolated(nodes * at.batch, self.tokens, self.target)
        seconds = seconds + at.batch * at.context * numpy.interp(nodes, ends, self.position)
        return seconds if at.greedy else seconds + at.batch * numpy.interp(nodes, ends, self.sampled)

    def drafting(self, at: "Situation", width: int) -> tuple[float, float]:
        """The first level, and each further level of `width` nodes; more rows cost as much more as in the target."""
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
class Drafted:
    """What a step has drafted."""

    at: Situation
    nodes: int  # in each row, with accepted tokens that are read again
    levels: int
    seconds: float | None  # that drafting took; None where the host does not wait for the device


class CostTable:
    """Costs of a step in each situation: the measured ones, times how much longer the batch's newest steps took."""

    def __init__(self, surface: CostSurface, width: int, captured: bool = False, learns: bool = True) -> None:
        """`width` is the number of nodes that a level expands.

        Ranks that draft the same trees for a target that they share must not learn, as their clocks differ.
        """
        self.surface, self.width, self.captured, self.learns = surface, width, captured, learns
        # By batch size: the logarithms of observed over measured seconds, of drafting and of the rest of a step.
        self.ratios: dict[int, deque[tuple[float, float]]] = {}
        self.plain: dict[int, deque[float]] = {}  # the same for steps without drafts
        self.num_observed = 0
        self._now: dict[Situation, StepCosts] = {}

    def now(self, at: Situation) -> StepCosts:
        """The costs in this situation; its context rounds up."""
        rounded = Situation(-(-at.context // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE, at.batch, at.greedy)
        if rounded not in self._now:
            self._now[rounded] = self._corrected(rounded)
        return self._now[rounded]

    def observe(self, drafted: Drafted, seconds: float) -> None:
        """Learn from a step that took `seconds` in all."""
        if not self.learns:
            return
        first, further = self.surface.drafting(drafted.at, self.width)
        of_drafting = first + (drafted.levels - 1) * further
        nodes = size_bucket(drafted.nodes) if self.captured else drafted.nodes
        of_target = float(self.surface.seconds(numpy.array([nodes], dtype=float), drafted.at)[0])
        share = of_drafting / (of_drafting + of_target)
        drafting = seconds * share if drafted.seconds is None else drafted.seconds
        newest = self.ratios.setdefault(drafted.at.batch, deque(maxlen=CORRECTION_STEPS))
        newest.append((math.log(drafting / of_drafting), math.log((seconds - drafting) / of_target)))
        self._renew()

    def observe_plain(self, at: Situation, seconds: float) -> None:
        """Learn from a step without drafts: a busy moment of the measurement made drafts seem to pay for good."""
        if self.learns:
            measured = float(self.surface.seconds(numpy.array([1.0]), at)[0])
            newest = self.plain.setdefault(at.batch, deque(maxlen=CORRECTION_STEPS))
            newest.append(math.log(seconds / measured))
            self._renew()

    def _renew(self) -> None:
        self.num_observed += 1
        if self.num_observed % RENEWAL_STEPS == 0:
            self._now.clear()

    def _corrected(self, at: Situation) -> StepCosts:
        newest = self.ratios.get(at.batch, ())
        weight = len(newest) / (len(newest) + PRIOR_STEPS)
        of_drafting, of_target = (math.exp(weight * median(part)) for part in zip(*newest or [(0.0, 0.0)], strict=True))
        first, further = self.surface.drafting(at, self.width)
        target = self.surface.seconds(numpy.array(NODES, dtype=float), at) * of_target
        if plain := self.plain.get(at.batch):
            weight = len(plain) / (len(plain) + PRIOR_STEPS)
            target[0] = min(target[0] / of_target * math.exp(weight * median(plain)), target[1])
        return StepCosts(tuple(target.tolist()), first * of_drafting, further * of_drafting, self.captured)


class CostAware(GrowthPolicy):
    """A dynamic tree that grows as long as the expected tokens per second rise.

    The chances of its nodes give the expected tokens, and measured costs the duration of a step. `depth`, `width` and
    `nodes` are upper bounds. It depends on well calibrated scores.

    Captured steps do not wait for chances: their depth and size follow from the chances of earlier steps. Some of these
    draft all levels, for at most SURVEY_SHARE of the time.
    """

    def __init__(self, depth: int, width: int, nodes: int, costs: CostTable) -> None:
        self.depth, self.width, self.nodes, self.costs = depth, width, nodes, costs
        self.depths = [level for level in range(1, depth) if level == size_bucket(level)] + [depth]
        # The chances and depths of nodes in order, on their way to the host and there.
        self.coming: tuple[Tensor, Tensor] | None = None
        self.surveyed: tuple[Tensor, Tensor] | None = None
        # Expected tokens of the best tree by depth, and by its number of draft tokens.
        self.known: dict[int, NDArray[numpy.float64]] = {}
        self.shape = depth, nodes  # that the last plan chose
        self.until_survey = 0  # steps
        self.now: StepCosts  # of the current step
        self.rate: float  # the expected tokens per second of its tree
        # Plain numbers: there are few, and the policy itself must be fast on every level.
        self.levels_done: list[list[list[float]]] = []  # by level, then row: the chances of the nodes

    def planned(self, at: Situation) -> tuple[GrowthPolicy, int | None]:
        """The depth, of few, and the size for which earlier steps let expect the most tokens per second."""
        self._learn()
        self._look_up(at)
        self.rate = 0.0
        if self.known:
            sizes = {min((1 << power) - 1, self.nodes) for power in range(1, self.nodes.bit_length() + 1)}
            rates = {(depth, size): self._rate(depth, size) for depth in self.known for size in sizes}
            best = max(rates, key=lambda shape: rates[shape])
            self.shape = self.shape if rates[self.shape] > STAYING_RATE * rates[best] else best
            self.rate = rates[self.shape]
        (depth, size), full = self.shape, (self.depth, self.nodes)
        self.until_survey -= 1
        if self.until_survey < 0:
            longer = self._seconds(*full) / self._seconds(depth, size) - 1
            self.until_survey = max(round(longer / SURVEY_SHARE), SURVEY_STEPS_MIN)
            depth, size = full
        return ByChance(depth, self.width, self.nodes), size

    def shapes(self) -> list[GrowthPolicy]:
        return [ByChance(depth, self.width, self.nodes) for depth in self.depths]

    def _seconds(self, depth: int, size: int) -> float:
        return self.now.first_level + (depth - 1) * self.now.level + self.verify_costs[size - 1]

    def _rate(self, depth: int, size: int) -> float:
        return float(self.known[depth][size - 1]) / self._seconds(depth, size)

    def observe(self, tree: Tree) -> None:
        if tree.deepest == self.depth and tree.log_chances is not None:
            chances, depths = (each.to("cpu", non_blocking=True) for each in (tree.log_chances, tree.depths[:, 1:]))
            self.coming = chances, depths

    def _learn(self) -> None:
        """Count the chances of the survey before the last step, which may not have ended yet."""
        found, self.surveyed, self.coming = self.surveyed, self.coming, None
        if found is None:
            return
        chances, depths = (each.double().numpy() for each in found)
        for depth in self.depths:
            best = -numpy.sort(-numpy.exp(chances) * (depths <= depth), axis=1)
            tokens = 1 + best.cumsum(axis=1).mean(axis=0)
            tokens = numpy.pad(tokens, (0, self.nodes - len(tokens)), "edge")
            self.known[depth] = tokens + SURVEY_DECAY * (self.known.get(depth, tokens) - tokens)

    def levels(self, verified: Verified) -> int:
        assert isinstance(verified, VerifiedOnHost)
        self._look_up(Situation.of(verified))
        self.levels_done = []
        return verified.levels(self.depth)

    def _look_up(self, at: Situation) -> None:
        self.now = self.costs.now(at)
        self.verify_costs = verify_costs(self.now, self.nodes)

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
        return pool.best(roots, rates.index(self.rate) + 1)

    def is_worth(self, drafted: int, chance: float) -> bool:
        costs = [self.now.target[0], *verify_costs(self.now, drafted + 1)]
        return chance > self.rate * (costs[-1] - costs[-2])

    def look_at(self, pool: Pool) -> None:
        """Copy the chances of new levels to the host; on a GPU this waits for them."""
        for scores in pool.scores[len(self.levels_done) :]:
            self.levels_done.append(scores.exp().tolist())

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
            sum(largest(row, self.width)) * sum(row) / max(parents, LEAST_CHANCE)
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
