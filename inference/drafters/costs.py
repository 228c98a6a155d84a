"""What the parts of a decode step cost on this machine, and trees that weigh expected tokens against these costs.

Costs are measured once, at load. Steps that run correct one ratio: the seconds of plain steps over drafting steps.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, chain
from statistics import median
from typing import Annotated

import numpy
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from torch import Tensor

from headstart.inference.core.tree import Tree, size_bucket
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.growth import ByChance, GrowthPolicy, Pool

CORRECTION_STEPS = 32  # the newest steps of a batch size and kind
PRIOR_STEPS = 4  # steps that the measured ratio weighs as much as
SURVEY_SHARE = 0.02  # of the time of captured steps, that drafting more than pays may take
SURVEY_STEPS_MIN = 8  # between two surveys
SURVEY_DECAY = 0.8  # weight of what earlier surveys found
STAYING_RATE = 0.98  # of the best shape's tokens per second, down to which the last shape stays
LEAST_CHANCE = 1e-300  # replaces a chance of 0, as in a row that is finished while others still draft

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class MeasuredCosts:
    """Seconds that the parts of a step took."""

    tokens: tuple[int, ...]  # sizes of the target's pass, in tokens of all rows together, ascending
    target: tuple[Seconds, ...]  # a step with that many tokens, without drafting
    first_level: Seconds  # drafting for one row: the head's pass over the newly verified positions
    level: Seconds  # and each further level

    def __post_init__(self) -> None:
        ascending = all(before < after for before, after in zip(self.tokens, self.tokens[1:], strict=False))
        growing = all(before <= after for before, after in zip(self.target, self.target[1:], strict=False))
        matching = len(self.tokens) == len(self.target) >= 2 and self.target[0] > 0
        if not (ascending and growing and matching and self.first_level > 0):
            raise ValueError(f"not a valid measurement of costs: {self}")

    def verifying(self, tokens: ArrayLike) -> NDArray[numpy.float64]:
        """A target step with these many tokens of all rows; linear between and beyond the measured sizes."""
        slope = (self.target[-1] - self.target[-2]) / (self.tokens[-1] - self.tokens[-2])
        counts = numpy.asarray(tokens, dtype=float)
        return numpy.interp(counts, self.tokens, self.target) + slope * numpy.maximum(counts - self.tokens[-1], 0)


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds of a step's parts for a number of rows."""

    plain: float  # a step without drafts
    verify: list[float]  # a target step with 1, 2, ... draft tokens in each row
    first_level: float
    level: float

    def drafting(self, levels: float) -> float:
        return self.first_level + max(levels - 1, 0) * self.level


@dataclass(frozen=True)
class Ran:
    """What a step did."""

    rows: int
    nodes: int = 1  # in each row, with accepted tokens that are read again
    levels: int = 0  # that were drafted; 0: a plain step


class CostTable:
    """The measured costs for any number of rows, and how steps without drafts differ from them."""

    def __init__(
        self, measured: MeasuredCosts, width: int, most: int, captured: bool = False, learns: bool = True
    ) -> None:
        """A level expands `width` nodes, and a row has up to `most` draft tokens.

        `captured`: the target's passes have sizes that are powers of two. Ranks that draft the same trees for a target
        that they share must not learn, as their clocks differ.
        """
        self.measured, self.width, self.most, self.captured, self.learns = measured, width, most, captured, learns
        # Observed over measured seconds of the newest steps, by the number of rows and whether they drafted.
        self.ratios: dict[tuple[int, bool], deque[float]] = {}
        self._known: dict[int, StepCosts] = {}

    def of(self, rows: int) -> StepCosts:
        """The costs of steps with this many rows; drafting for more rows costs as much more as in the target."""
        if rows not in self._known:
            nodes = numpy.arange(1, self.most + 2)
            if self.captured:
                nodes = 2 ** numpy.ceil(numpy.log2(nodes))
            plain, *verify = map(float, self.measured.verifying(rows * nodes))
            one, all_rows = map(float, self.measured.verifying([self.width, rows * self.width]))
            drafting = (each * all_rows / one for each in (self.measured.first_level, self.measured.level))
            self._known[rows] = StepCosts(plain, verify, *drafting)
        return self._known[rows]

    def plain(self, rows: int) -> float:
        """Seconds of a step without drafts, if those with drafts take what was measured.

        A moment of the measurement may have been busy, so observed steps of both kinds correct the measured ratio.
        """
        costs, ratios = self.of(rows), [self.ratios.get((rows, drafts), ()) for drafts in (False, True)]
        count = min(map(len, ratios))
        if not count:
            return costs.plain
        plain, drafted = map(median, ratios)
        return min(costs.plain * (plain / drafted) ** (count / (count + PRIOR_STEPS)), costs.verify[0])

    def observe(self, step: Ran, seconds: float) -> None:
        """Learn from a step that took `seconds` in all."""
        if self.learns:
            costs = self.of(step.rows)
            drafting = costs.drafting(step.levels) if step.levels else 0.0
            measured = drafting + [costs.plain, *costs.verify][step.nodes - 1]
            newest = self.ratios.setdefault((step.rows, step.levels > 0), deque(maxlen=CORRECTION_STEPS))
            newest.append(seconds / measured)


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

    def planned(self, rows: int) -> tuple[GrowthPolicy, int | None]:
        """The depth, of few, and the size for which earlier steps let expect the most tokens per second."""
        self._learn()
        self.now = self.costs.of(rows)
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
        return self.now.drafting(depth) + self.now.verify[size - 1]

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
        self.now, self.levels_done = self.costs.of(len(verified.rows)), []
        return verified.levels(self.depth)

    def continues(self, pool: Pool) -> bool:
        """Whether the best tree with another level would beat the best one without it.

        This assumes that the next level keeps the same share of its parents' chances as the last one did.
        """
        self.look_at(pool)
        *before, last = self.levels_done
        above = before[-1] if before else [[1.0]] * len(last)
        sums = [[max(sum(largest(row, self.width)), LEAST_CHANCE) for row in level] for level in (above, last)]
        shares = [own / parents for parents, own in zip(*sums, strict=True)]
        coming = [[chance * share for chance in row] for row, share in zip(last, shares, strict=True)]
        return max(self.rates(self.levels_done)) < max(self.rates([*self.levels_done, coming]))

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        self.look_at(pool)
        rates = self.rates(self.levels_done)
        self.rate = max(rates)
        return pool.best(roots, rates.index(self.rate) + 1)

    def rates(self, levels: list[list[list[float]]]) -> list[float]:
        """Expected tokens per second, the bonus token included, with the best 1, 2, ... nodes of these levels.

        The tokens are the mean over rows.
        """
        by_row = [
            accumulate(largest(chain.from_iterable(row), self.nodes), initial=1.0) for row in zip(*levels, strict=True)
        ]
        tokens = [sum(each) / len(by_row) for each in zip(*by_row, strict=True)][1:]
        drafting = self.now.drafting(len(levels))
        return [each / (drafting + verify) for each, verify in zip(tokens, self.now.verify, strict=False)]

    def is_worth(self, drafted: int, chance: float) -> bool:
        fewer, more = [self.now.plain, *self.now.verify][drafted : drafted + 2]
        return chance > self.rate * (more - fewer)

    def look_at(self, pool: Pool) -> None:
        """Copy the chances of new levels to the host; on a GPU this waits for them."""
        for scores in pool.scores[len(self.levels_done) :]:
            self.levels_done.append(scores.exp().tolist())


def largest(chances: Iterable[float], count: int) -> list[float]:
    """The `count` largest in descending order."""
    return sorted(chances, reverse=True)[:count]
