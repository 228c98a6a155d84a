"""Growth that minds the clock: as deep and as large a tree as the expected tokens per second pay for."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, chain
from statistics import fmean

import numpy
from torch import Tensor

from heads.base import DraftHead
from heads.static_tree import StaticTree
from inference.drafter import Verified
from inference.drafters.costs import CostTable, StepCosts
from inference.drafters.growth import Dynamic, Fixed, Growth, Pool, likeliest
from inference.target.model import TargetModel
from inference.tree import Tree
from recipes.schema import DecodeSection

TINY = 1e-300  # in place of no chance at all: that of a row without room for what its neighbours draft


class CostAware:
    """A dynamic tree that grows while the expected tokens per second rise.

    The chances of its nodes say how many tokens are to be expected; measured costs say how long they take. `depth`,
    `width` and `nodes` are the most that it may take. Needs calibrated scores to be worth much.
    """

    static_shapes = False

    def __init__(self, depth: int, width: int, nodes: int, costs: CostTable) -> None:
        self.depth, self.width, self.nodes, self.costs = depth, width, nodes, costs
        # Plain numbers: these are few, and the policy's own time counts on every level.
        self.levels_done: list[list[list[float]]] = []  # of each level, each row's chances of its nodes

    def levels(self, verified: Verified) -> int:
        self.now = self.costs.now(verified, self.nodes)
        self.verify_costs = verify_costs(self.now, self.nodes)
        self.levels_done = []
        return min(self.depth, max(verified.remaining))

    def children(self, level: int) -> int:
        return self.width

    def goes_on(self, pool: Pool) -> bool:
        """Would the best tree with another level beat the best one without?"""
        self.look_at(pool)
        expected, verify, spent, gain = self.expected(), self.verify_costs, self.spent(), self.gain()
        now = max(tokens / (spent + cost) for tokens, cost in zip(expected, verify, strict=False))
        # A tree of any size gets as many more nodes as the next level expands, as far as it may grow.
        larger, spent = verify[self.width :] + verify[-1:] * self.width, spent + self.now.level
        return now < max((tokens + gain) / (spent + cost) for tokens, cost in zip(expected, larger, strict=False))

    def frontier(self, level: int, totals: Tensor) -> tuple[Tensor, Tensor] | None:
        return likeliest(totals, self.width)

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        self.look_at(pool)
        spent = self.spent()
        rates = [tokens / (spent + cost) for tokens, cost in zip(self.expected(), self.verify_costs, strict=False)]
        return pool.best(roots, rates.index(max(rates)) + 1)

    def look_at(self, pool: Pool) -> None:
        """Bring over what the pool has more; on a GPU the host waits for it."""
        for scores in pool.scores[len(self.levels_done) :]:
            self.levels_done.append(scores.exp().tolist())

    def expected(self) -> list[float]:
        """Tokens that a step yields with the best 1, 2, ... nodes, the bonus included, on the mean of the rows."""
        by_row = [
            accumulate(largest(chain.from_iterable(levels), self.nodes), initial=1.0)
            for levels in zip(*self.levels_done, strict=True)
        ]
        if len(by_row) == 1:
            return list(by_row[0])[1:]
        return [fmean(tokens) for tokens in zip(*by_row, strict=True)][1:]

    def gain(self) -> float:
        """What the best nodes of the next level may be expected to add, on the mean of the rows.

        The share of the chance that a level's children keep of their parents' is taken to be alike there.
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
        """Seconds of drafting all the levels so far."""
        return self.now.first_level + (len(self.levels_done) - 1) * self.now.level


@lru_cache(maxsize=64)  # a run meets few context lengths, and each of its steps asks
def verify_costs(now: StepCosts, nodes: int) -> list[float]:
    """Of a target step with 1, 2, ... `nodes` nodes beside the root."""
    found: list[float] = now.verify(nodes).tolist()
    return found


def largest(chances: Iterable[float], count: int) -> list[float]:
    """The `count` largest in descending order."""
    return sorted(chances, reverse=True)[:count]


class Adaptive:
    """A chain as long as recent acceptance pays for; `depth` is the most."""

    static_shapes = False
    width = 1
    memory = 0.95  # of what was seen one draft ago

    def __init__(self, depth: int, costs: CostTable) -> None:
        self.depth, self.nodes, self.costs = depth, depth, costs
        self.accepted, self.judged = 1.0, 2.0  # drafts, recent ones counting most; an even chance to begin with

    def levels(self, verified: Verified) -> int:
        for count, drafted in zip(verified.counts, verified.drafted, strict=True):
            if drafted:
                taken = count - 1
                self.accepted = self.memory * self.accepted + taken
                self.judged = self.memory * self.judged + min(taken + 1, drafted)  # behind a refused one none is judged
        now, chance = self.costs.now(verified, self.depth), self.accepted / self.judged
        sizes = numpy.arange(1, self.depth + 1)
        expected = 1 + (chance**sizes).cumsum()
        cost = now.verify(self.depth) + now.first_level + (sizes - 1) * now.level
        return min(int((expected / cost).argmax()) + 1, max(verified.remaining))

    def children(self, level: int) -> int:
        return 1

    def goes_on(self, pool: Pool) -> bool:
        return True

    def frontier(self, level: int, totals: Tensor) -> None:
        """A chain goes on at its only child."""

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        return pool.best(roots, len(pool))


class CostAwareFixed:
    """A searched tree of fixed shape, cut to the size that yields the most expected tokens per second."""

    static_shapes = False

    def __init__(self, tree: StaticTree, nodes: int, costs: CostTable) -> None:
        """`nodes` are the most that it may take."""
        self.sizes = [Fixed(tree.best(count)) for count in range(1, nodes + 1)]
        self.expected = 1 + numpy.cumsum(tree.chances[:nodes])
        self.depths = numpy.array([size.depth for size in self.sizes])
        self.costs, self.chosen = costs, self.sizes[-1]
        self.depth, self.width, self.nodes = self.chosen.depth, self.chosen.width, nodes

    def levels(self, verified: Verified) -> int:
        self.chosen = self.fastest(self.costs.now(verified, self.nodes))
        return self.chosen.levels(verified)

    def fastest(self, now: StepCosts) -> Fixed:
        """The tree of the most expected tokens per second."""
        cost = now.verify(self.nodes) + now.first_level + (self.depths - 1) * now.level
        return self.sizes[int((self.expected / cost).argmax())]

    def children(self, level: int) -> int:
        return self.chosen.children(level)

    def goes_on(self, pool: Pool) -> bool:
        return True

    def frontier(self, level: int, totals: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.chosen.frontier(level, totals)

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        return self.chosen.prune(pool, roots)


def searched_tree(head: DraftHead) -> StaticTree:
    if head.calibration.tree is None:
        raise ValueError(
            "decode.growth: a searched tree is asked for, and the head has none; fit one with python -m "
            "inference.calibrate RECIPE, or choose another growth"
        )
    return head.calibration.tree


def growth_from_recipe(section: DecodeSection, target: TargetModel, head: DraftHead) -> Growth:
    """The recipe's policy; those that mind the clock measure this target and head when they are first used."""
    if section.growth == "chain":
        return Fixed.chain(section.depth) if section.acceptance == "rejection" else Dynamic.chain(section.depth)
    if section.growth == "fixed":
        assert section.paths is not None
        return Fixed(section.paths)
    if section.growth == "searched":
        return Fixed(searched_tree(head).best(section.nodes))
    if section.growth == "searched_cost_aware":
        return CostAwareFixed(searched_tree(head), section.nodes, CostTable(target, head, section.width))
    if section.growth == "adaptive":
        return Adaptive(section.depth, CostTable(target, head, 1))
    if section.growth == "cost_aware":
        return CostAware(section.depth, section.width, section.nodes, CostTable(target, head, section.width))
    return Dynamic(section.depth, section.width, section.nodes)
