"""Growth policies that weigh expected tokens against measured costs: the tree with the most tokens per second."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from statistics import fmean

import numpy
from numpy.typing import NDArray
from torch import Tensor

from headstart.heads.calibration import StaticTree
from headstart.inference.core.drafter import Verified, VerifiedOnHost
from headstart.inference.core.tree import Tree
from headstart.inference.drafters.costs import CostTable, StepCosts, StepWatch
from headstart.inference.drafters.growth import Fixed, Growth, Pool

TINY = 1e-300  # replaces a chance of 0, as in a row that is finished while others still draft
MEMORY = 0.95  # weight of each draft relative to the one after it


class Costly(Growth):
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
    found: list[float] = now.verify(nodes).tolist()
    return found


def largest(chances: Iterable[float], count: int) -> list[float]:
    """The `count` largest in descending order."""
    return sorted(chances, reverse=True)[:count]


class CostAwareShape(Costly):
    """Before drafting, picks the fixed shape with the most expected tokens per second, from shapes of every size."""

    def __init__(self, sizes: Sequence[Fixed], chances: NDArray[numpy.float64], costs: CostTable) -> None:
        """`sizes[i]` has i + 1 nodes, and each holds the one before it; `chances[i]` is that of the node it adds."""
        self.sizes, self.chances, self.watch = sizes, chances, StepWatch(costs)
        self.depths = numpy.array([size.depth for size in sizes])
        self.chosen = sizes[-1]
        self.depth, self.width, self.nodes = self.chosen.depth, self.chosen.width, len(sizes)

    @classmethod
    def searched(cls, tree: StaticTree, nodes: int, costs: CostTable) -> "CostAwareShape":
        """A head's searched tree, cut to its best 1, 2, ... up to `nodes` nodes."""
        sizes = [Fixed(tree.best(count)) for count in range(1, nodes + 1)]
        return cls(sizes, numpy.asarray(tree.chances[:nodes]), costs)

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


class AdaptiveChain(CostAwareShape):
    """A chain whose length follows the recent acceptance rate; a node's chance is a power of it."""

    def __init__(self, depth: int, costs: CostTable) -> None:
        self.accepted, self.verified = 1.0, 2.0  # weighted numbers of draft tokens; the rate starts at 1 of 2
        super().__init__([Fixed.chain(length) for length in range(1, depth + 1)], numpy.ones(depth), costs)

    def levels(self, verified: Verified) -> int:
        assert isinstance(verified, VerifiedOnHost)
        for count, drafted in zip(verified.counts, verified.drafted, strict=True):
            if drafted:
                taken = count - 1
                self.accepted = MEMORY * self.accepted + taken
                # Tokens after a rejected one were not tested.
                self.verified = MEMORY * self.verified + min(taken + 1, drafted)
        self.chances = numpy.power(self.accepted / self.verified, numpy.arange(1, self.depth + 1))
        return super().levels(verified)
