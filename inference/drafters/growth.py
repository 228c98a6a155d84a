"""Growth policies: which nodes each level expands, and which of all draft tokens the target verifies."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified
from headstart.recipes.schema import DecodeSection

LEAST_REPEAT_CHANCE = 0.15  # of a further token that policies without costs verify


@dataclass
class Pool:
    """Every node drafted so far, in drafting order. The root is number 0 and not in the pool."""

    scores: list[Float[Tensor, "batch level"]] = field(default_factory=list)  # log of the chance to be accepted
    tokens: list[Int[Tensor, "batch level"]] = field(default_factory=list)
    expanded: list[Int[Tensor, "batch frontier"]] = field(default_factory=list)  # numbers of each level's parents
    next_number: int = 1  # that the next node gets

    def __len__(self) -> int:
        return self.next_number - 1

    @property
    def parents(self) -> Int[Tensor, "batch nodes"]:
        """The number of each node's parent."""
        counts = [level.shape[1] // above.shape[1] for level, above in zip(self.tokens, self.expanded, strict=True)]
        if len(set(counts)) == 1:  # one repetition for all levels
            return repeated(torch.cat(self.expanded, dim=1), counts[0])
        return torch.cat([repeated(above, count) for above, count in zip(self.expanded, counts, strict=True)], dim=1)

    def add(self, scores: Tensor, tokens: Tensor, expanded: Tensor) -> int:
        """Add a level: the same number of children for each expanded node, parent by parent.

        Returns the number of the level's first node.
        """
        self.scores.append(scores)
        self.tokens.append(tokens)
        self.expanded.append(expanded)
        first, self.next_number = self.next_number, self.next_number + tokens.shape[1]
        return first

    def best(self, roots: Int[Tensor, "batch 1"], count: int) -> Tree:
        """The tree of each root's `count` best nodes. Forbidden nodes (-inf) are cut off from the root."""
        if count >= len(self):
            return self.full(roots)
        scores = torch.cat(self.scores, dim=1)
        # A child never scores above its parent, and a stable sort settles ties in the parent's favour.
        best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
        return self.tree(roots, best.sort(dim=1).values, scores)

    def by_chance(self, roots: Int[Tensor, "batch 1"], count: int) -> Tree:
        """`best`, with its nodes in the order of their scores: the first ones of them are the best of fewer nodes."""
        scores = torch.cat(self.scores, dim=1)
        best, order = torch.sort(scores, dim=1, descending=True, stable=True)
        best, order = best[:, :count], order[:, :count]
        numbers = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
        places = torch.zeros(len(order), len(self) + 1, dtype=torch.long, device=order.device)
        above = places.scatter(1, order + 1, numbers).gather(1, self.parents.gather(1, order))
        tokens = torch.cat(self.tokens, dim=1).gather(1, order)
        return self.below(roots, tokens, above.masked_fill(best == -torch.inf, -1), best)

    def full(self, roots: Int[Tensor, "batch 1"]) -> Tree:
        """The tree of all nodes; they keep their numbers."""
        scores = torch.cat(self.scores, dim=1)
        above = self.parents.masked_fill(scores == -torch.inf, -1)
        return self.below(roots, torch.cat(self.tokens, dim=1), above, scores)

    def tree(
        self, roots: Int[Tensor, "batch 1"], chosen: Int[Tensor, "batch chosen"], scores: Float[Tensor, "batch nodes"]
    ) -> Tree:
        """The tree of the nodes at these places in the pool, ascending; every chosen node's parent is chosen too."""
        tokens, none = torch.cat(self.tokens, dim=1).gather(1, chosen), torch.full_like(roots, -1)
        # Numbers ascend and a parent is always chosen too: its index among the chosen is its new number.
        numbers = torch.cat([none, chosen], dim=1).add_(1)
        above, scores = torch.searchsorted(numbers, self.parents.gather(1, chosen)), scores.gather(1, chosen)
        return self.below(roots, tokens, above.masked_fill_(scores == -torch.inf, -1), scores)

    def below(self, roots: Int[Tensor, "batch 1"], tokens: Tensor, parents: Tensor, scores: Tensor) -> Tree:
        """The tree of these nodes, [batch, nodes] each, below the roots."""
        parents = torch.cat([torch.full_like(roots, -1), parents], dim=1)
        return Tree(torch.cat([roots, tokens], dim=1), parents, deepest=len(self.tokens), log_chances=scores)


def repeated(numbers: Int[Tensor, "batch frontier"], count: int) -> Int[Tensor, "batch children"]:
    """Each number `count` times in a row."""
    return numbers.unsqueeze(-1).expand(-1, -1, count).flatten(1)


@dataclass(frozen=True)
class Growth:
    """How large draft trees may grow, and by which rule: a recipe's `decode.growth` with the fields next to it."""

    depth: int
    width: int  # nodes that a level expands, and children of each
    nodes: int  # draft tokens that are verified; the root does not count
    is_searched: bool = False  # the shape was fitted to the head
    weighs_costs: bool = False  # depth and size follow from measured step times

    @classmethod
    def from_section(cls, section: DecodeSection, max_levels: int | None = None) -> "Growth":
        """What the section asks for; a default depth is limited to the head's levels."""
        depth = section.depth
        if max_levels is not None and "depth" not in section.model_fields_set:
            depth = min(depth, max_levels)
        is_searched, weighs_costs = section.growth == "searched", section.growth == "cost_aware"
        if section.growth == "chain":
            return cls.chain(depth)
        most = depth if section.width == 1 and not is_searched else section.nodes
        return cls(depth, section.width, min(section.nodes, most), is_searched, weighs_costs)

    @classmethod
    def chain(cls, depth: int) -> "Growth":
        return cls(depth, 1, depth)

    @property
    def is_chain(self) -> bool:
        return self.width == 1 and not self.is_searched

    @property
    def max_nodes(self) -> int:
        """The nodes that a step drafts or verifies at most, the root included."""
        return max(self.nodes, self.width * self.depth) + 1

    def as_chain(self) -> "Growth":
        """The chain for a target that cannot verify trees; it weighs costs if this growth does."""
        if self.is_chain:
            return self
        if self.weighs_costs:
            return Growth(self.depth, 1, min(self.nodes, self.depth), weighs_costs=True)
        return Growth.chain(self.depth)

    def __str__(self) -> str:
        if self.is_chain:
            return "cost_aware of width 1" if self.weighs_costs else "chain"
        if self.is_searched:
            return "searched"
        return "cost_aware" if self.weighs_costs else "dynamic"

    def policy(self) -> "GrowthPolicy":
        """The policy that needs neither a fitted tree nor costs."""
        assert not self.is_searched
        assert not self.weighs_costs
        return Dynamic(self.depth, self.width, self.nodes)


class GrowthPolicy:
    """Decides how trees grow. The drafter consults it on each level, with the scores of all children."""

    depth: int  # upper bound on the levels
    width: int  # upper bound on the nodes that one level expands, and on the children of each
    nodes: int  # upper bound on the draft tokens that are verified; the root is not one

    def levels(self, verified: Verified) -> int:
        """The number of levels that this step drafts."""
        return verified.levels(self.depth)

    def shapes(self) -> list["GrowthPolicy"]:
        """For captured steps: policies of one shape each."""
        return [self]

    def planned(self, rows: int) -> tuple["GrowthPolicy", int | None]:
        """For the next captured step: one of these, and how many of its draft tokens are verified; None for all."""
        return self, None

    def observe(self, tree: Tree) -> None:
        """Learn from the draft tokens of a captured step."""

    def children(self, level: int) -> int:
        """Children of each node that a level expands."""
        return self.width

    def continues(self, pool: Pool) -> bool:
        """Whether to draft another level."""
        return True

    def frontier(self, level: int, totals: Float[Tensor, "batch children"]) -> tuple[Tensor, Tensor] | None:
        """The places of the children that the next level expands, and their totals; None for all of them.

        [batch, frontier] each.
        """
        if totals.shape[1] <= self.width:
            return None
        values, places = totals.topk(self.width, dim=1)
        return places, values

    def prune(self, pool: Pool, roots: Int[Tensor, "batch 1"]) -> Tree:
        """The tree that is verified."""
        raise NotImplementedError

    def is_worth(self, drafted: int, chance: float) -> bool:
        """Whether to verify one more token than `drafted`, which the target accepts with this chance."""
        return chance >= LEAST_REPEAT_CHANCE


@dataclass(frozen=True)
class Dynamic(GrowthPolicy):
    """EAGLE-2 (arXiv 2406.16858): each level expands its `width` likeliest nodes, and the best `nodes` overall stay."""

    depth: int
    width: int
    nodes: int

    @classmethod
    def chain(cls, depth: int) -> "Dynamic":
        return cls(depth, 1, depth)

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        return pool.best(roots, self.nodes)


@dataclass(frozen=True)
class ByChance(Dynamic):
    """`Dynamic` whose nodes are in the order of their chances."""

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        return pool.by_chance(roots, self.nodes)


class Fixed(GrowthPolicy):
    """A tree of one shape. Each path names a node by the child to take on every level; 0 is the likeliest child.

    `paths` lists every node, as Medusa's choices do, so (0, 1) comes with (0,) and (0, 0).
    """

    def __init__(self, paths: Iterable[tuple[int, ...]]) -> None:
        self.paths = tuple(paths)
        known = {(), *self.paths}
        for path in self.paths:
            needed = {path[:-1], (*path[:-1], max(path[-1] - 1, 0))} if path else set()
            if not path or min(path) < 0 or not needed <= known:
                raise ValueError(
                    f"the head's searched tree: path {list(path)} given without the path of its parent or of the child "
                    f"before it, both are required; fit the tree again with headstart calibrate RECIPE"
                )
        self.depth, self.nodes = max(map(len, self.paths)), len(known) - 1
        levels = range(self.depth)
        self.by_level = [sorted(path for path in known if len(path) == level + 1) for level in levels]
        # The nodes that have children: the root, then those of level 0, 1, ...
        self.expanded: list[list[tuple[int, ...]]] = [[()]]
        self.expanded += [[path for path in level if (*path, 0) in known] for level in self.by_level[:-1]]
        self.width = max(*map(len, self.expanded), *map(self.children, levels))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)

    def children(self, level: int) -> int:
        return max(path[-1] for path in self.by_level[level]) + 1

    def places(self, level: int, wanted: list[tuple[int, ...]]) -> list[int]:
        """The places of a level's paths among all children of its expanded nodes."""
        above = {path: number for number, path in enumerate(self.expanded[level])}
        return [above[path[:-1]] * self.children(level) + path[-1] for path in wanted]

    @cache  # noqa: B019 - a policy lives as long as its run, and a captured graph needs the tensor to stay where it is
    def _index(self, places: tuple[int, ...], device: torch.device) -> Int[Tensor, " places"]:
        return torch.tensor(places, device=device)

    def frontier(self, level: int, totals: Tensor) -> tuple[Tensor, Tensor]:
        places = self.places(level, self.expanded[level + 1])
        index = self._index(tuple(places), totals.device).expand(len(totals), -1)
        return index, totals.gather(1, index)

    def prune(self, pool: Pool, roots: Tensor) -> Tree:
        """Drop children that the shape does not have, whatever their scores; the others keep the order of the paths."""
        places, offset = [], 0
        for level, tokens in enumerate(pool.tokens):
            places += [offset + place for place in self.places(level, self.by_level[level])]
            offset += tokens.shape[1]
        index = self._index(tuple(places), roots.device)
        return pool.tree(roots, index.expand(len(roots), -1), torch.cat(pool.scores, dim=1))
