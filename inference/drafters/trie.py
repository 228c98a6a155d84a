"""Trees built node by node on the host, for drafters that look their tokens up instead of computing them."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import torch

from inference.drafter import Verified
from inference.tree import Tree

State = TypeVar("State")


class Trie:
    """The tree of one row; the same path twice is one node, and nothing lies deeper than there is room."""

    def __init__(self, root: int, room: int) -> None:
        self.room = room
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int | None:
        """The child of a node that holds a token; None where there is no room."""
        if self.depths[parent] >= self.room:
            return None
        node = self.children.setdefault((parent, token), len(self))
        if node == len(self):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
        return node

    def add_path(self, parent: int, tokens: Sequence[int]) -> list[int]:
        """The nodes of a path below a node, as far as there is room."""
        path: list[int] = []
        for token in tokens:
            node = self.add(path[-1] if path else parent, token)
            if node is None:
                break
            path.append(node)
        return path


def side_by_side(tries: Sequence[Trie], device: torch.device) -> Tree:
    """The trees of a batch; smaller ones are filled up with nodes that hang nowhere."""
    longest = max(map(len, tries))
    tokens = [trie.tokens + [0] * (longest - len(trie)) for trie in tries]
    parents = [trie.parents + [-1] * (longest - len(trie)) for trie in tries]
    both = torch.tensor([tokens, parents]).to(device, non_blocking=True)
    return Tree(both[0], both[1])


@dataclass(frozen=True)
class Child(Generic[State]):
    """What may follow: a token, its weight among its siblings, and the state in which the lookup goes on."""

    token: int
    weight: float
    state: State


Expand = Callable[[State], Sequence[Child[State]]]


@dataclass(frozen=True)
class Shape:
    """How large the tree of a lookup may be."""

    depth: int
    width: int  # children of each node
    nodes: int  # drafted ones


def grow(trie: Trie, start: State, expand: Expand[State], shape: Shape, noise: "Noise") -> None:
    """Add the likeliest nodes below the root, one by one, children sharing their parent's chance by weight.

    Where the row is sampled the target's noise decides about siblings, as it will decide about the choice.
    """
    order = count()  # among equals the one that was found first
    waiting: list[tuple[float, int, int, int, State]] = []  # minus log chance, order, parent, token, state

    def look_below(node: int, total: float, state: State) -> None:
        children = expand(state)
        if not children or trie.depths[node] >= min(shape.depth, trie.room):
            return
        gains = noise.at(trie.depths[node], [child.token for child in children])
        scores = [math.log(child.weight) + gain for child, gain in zip(children, gains, strict=True)]
        whole = math.log(sum(math.exp(score) for score in scores))
        best = sorted(zip(scores, children, strict=True), key=lambda pair: -pair[0])[: shape.width]
        for score, child in best:
            heapq.heappush(waiting, (total + whole - score, next(order), node, child.token, child.state))

    look_below(0, 0.0, start)
    while waiting and len(trie) <= shape.nodes:
        total, _, parent, token, state = heapq.heappop(waiting)
        node = trie.add(parent, token)
        assert node is not None
        look_below(node, total, state)


@dataclass(frozen=True)
class Noise:
    """The target's Gumbel noise of one row of a batch, behind its root; zero for a greedy one."""

    verified: Verified
    row: int

    def at(self, depth: int, tokens: list[int]) -> list[float]:
        """Of each token as a child of a node of that depth."""
        sampling, row = self.verified.sampling, self.row
        if sampling.samplings[row].temperature == 0:
            return [0.0] * len(tokens)
        if sampling.gumbel_table is not None:  # drawn once for the whole step; its first position is the root's choice
            kept: list[float] = sampling.gumbel_table.values[row, depth, tokens].tolist()
            return kept
        position = len(self.verified.texts[row]) + depth
        positions = torch.full((len(sampling.samplings), 1), position, device=sampling.seeds.device)
        noise = sampling.gumbel(positions, torch.tensor(tokens, device=positions.device))
        found: list[float] = noise[row, 0].tolist()
        return found
