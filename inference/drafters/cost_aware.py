"""Growth that minds the clock: as deep and as large a tree as the expected tokens per second pay for."""

import numpy
from numpy.typing import NDArray
from torch import Tensor

from heads.base import DraftHead
from heads.static_tree import StaticTree
from inference.costs import CostTable, StepCosts
from inference.drafters import Verified
from inference.drafters.growth import Dynamic, Fixed, Growth, Pool, likeliest
from inference.target import TargetModel
from inference.tree import Tree
from recipes.schema import DecodeSection

Floats = NDArray[numpy.float64]
TINY = 1e-300  # in place of no chance at all: that of a row without room for what its neighbours draft


class CostAware:
    """A dynamic tree that grows while the expected tokens per second rise.

    The chances of its nodes say how many tokens are to be expected; measured costs say how long they take. `depth`,
    `width` and `nodes` are the most that it may take. Needs calibrated scores to be worth much.
    """

    static_shapes = False

    def __init__(self, depth: int, width: int, nodes: int, costs: CostTable) -> None:
        self.depth, self.width, self.nodes, self.costs = depth, width, nodes, costs
        self.levels_done: list[Floats] = []  # chances of each level's nodes, [batch, nodes]

    def levels(self, verified: Verified) -> int:
        self.now = self.costs.now(verified, self.nodes)
        self.verify_costs = self.now.verify(self.nodes)
        self.levels_done = []
        return min(self.depth, max(verified.rooms))

    def children(self, level: int) -> int:
        return self.width

    def goes_on(self, pool: Pool) -> bool:
        """Would the best tree with another level beat the best one without?"""
        self.look_at(pool)
        expected, cost = self.expected(), self.cost()
        level = self.levels_done[-1]
        # The share of the chance that a level's children keep of their parents'; the next one is taken to be alike.
        above = 1.0 if len(self.levels_done) == 1 else largest(self.levels_done[-2], self.width).sum(axis=1)
        share = level.sum(axis=1) / numpy.maximum(above, TINY)
        gain = (largest(level, self.width).sum(axis=1) * share).mean()
        sizes = numpy.arange(1, len(expected) + 1)
        added = self.verify_costs[numpy.minimum(sizes + self.width, self.nodes) - 1] - self.verify_costs[sizes - 1]
        deeper = (expected + gain) / (cost + added + self.now.level)
        return bool(deeper.max() > (expected / cost).max())

    def frontier(self, level: int, totals: Tensor) -> Tensor | None:
        return likeliest(totals, self.width)

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        self.look_at(pool)
        return pool.best(roots, int((self.expected() / self.cost()).argmax()) + 1)

    def look_at(self, pool: Pool) -> None:
        """Bring over what the pool has more; on a GPU the host waits for it."""
        for scores in pool.scores[len(self.levels_done) :]:
            self.levels_done.append(numpy.exp(scores.double().cpu().numpy()))

    def expected(self) -> Floats:
        """Tokens that a step yields with the best 1, 2, ... nodes, the bonus included, on the mean of the rows."""
        best: Floats = 1 + largest(numpy.concatenate(self.levels_done, axis=1), self.nodes).cumsum(axis=1).mean(axis=0)
        return best

    def cost(self) -> Floats:
        """Seconds of a step that verifies the best 1, 2, ... nodes of what has been drafted."""
        drafted = sum(level.shape[1] for level in self.levels_done)
        spent = self.now.first_level + (len(self.levels_done) - 1) * self.now.level
        return self.verify_costs[: min(drafted, self.nodes)] + spent


def largest(chances: Floats, count: int) -> Floats:
    """The `count` largest of each row, in descending order."""
    return -numpy.sort(-chances, axis=1)[:, :count]


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
        return min(int((expected / cost).argmax()) + 1, max(verified.rooms))

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

    def frontier(self, level: int, totals: Tensor) -> Tensor | None:
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
