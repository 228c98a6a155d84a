"""Verification: the path of a tree that the target accepts, and the input of the next draft."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from headstart.inference.core.cache import Slots
from headstart.inference.core.constraint import GuardedState, LevelConstraint
from headstart.inference.core.history import History
from headstart.inference.core.sampling import BatchSampling
from headstart.inference.core.tree import Tree, take

BONUS = 0  # the draft depth of the bonus token, which the target adds after the accepted draft tokens


@dataclass(frozen=True)
class Accepted:
    """The path of one row's tree that the target accepts."""

    path: list[int]  # the accepted nodes, root first
    tokens: list[int]  # the path's tokens without the root, then the bonus token
    drafted: int  # draft tokens that were verified
    choices: list[int] = field(default_factory=list, compare=False)  # the target's choice at every node
    nodes: list[int] = field(default_factory=list, compare=False)  # the token of every node, padding included
    parents: list[int] = field(default_factory=list, compare=False)  # one per node; -1 for the root and for padding

    @property
    def depths(self) -> list[int | None]:
        """The draft depth of each token, BONUS for the last one; None for all of them if nothing was drafted."""
        return [*range(1, len(self.tokens)), BONUS] if self.drafted else [None] * len(self.tokens)


def verify(
    tree: Tree,
    logits: Float[Tensor, "batch nodes vocab"],
    roots: Int[Tensor, " batch"],
    sampling: BatchSampling,
    history: History | None,
) -> list[Accepted]:
    """Accept the path of each row's tree that follows the target's choices.

    `logits` are the target's at each node, `roots` the positions of the roots; `history` covers the tokens before them.
    """
    positions = roots.unsqueeze(1) + tree.depths + 1  # of the choices
    if history is not None:
        history = history.followed_by(tree.tokens, tree.ancestors)
    return accept(tree, sampling.choose(logits, positions, history))


def accept(tree: Tree, choices: Int[Tensor, "batch nodes"]) -> list[Accepted]:
    """Follow each row's choices from the root; the first choice that was not drafted is the bonus token."""
    return accepted_of(stacked(tree, choices).tolist())  # one transfer for everything: the only host sync of a step


def stacked(tree: Tree, choices: Int[Tensor, "batch nodes"]) -> Int[Tensor, "batch 3 nodes"]:
    """All that `accepted_of` reads."""
    return torch.stack([tree.tokens, tree.parents, choices], dim=1)


def accepted_of(rows: list[list[list[int]]]) -> list[Accepted]:
    """The accepted path of each row, from its `stacked` tokens, parents and choices."""
    accepted = []
    for tokens, parents, chosen in rows:
        if len(tokens) == 1:  # the root alone: hundreds of rows may decode plainly together
            accepted.append(Accepted([0], chosen, 0, chosen, tokens, parents))
            continue
        child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        path = [0]
        while (node := child.get((path[-1], chosen[path[-1]]))) is not None:
            path.append(node)
        taken = [chosen[node] for node in path]
        accepted.append(Accepted(path, taken, count_drafted(parents), chosen, tokens, parents))
    return accepted


class Followed(NamedTuple):
    """Accepted paths on the device. Beyond a row's own path there is anything."""

    paths: Int[Tensor, "batch longest"]  # the accepted nodes, root first
    tokens: Int[Tensor, "batch longest"]  # the target's choice at each of them; the bonus token is last
    counts: Int[Tensor, " batch"]  # accepted nodes

    @property
    def bonus(self) -> Int[Tensor, "batch 1"]:
        """The last token of each row: the root of its next tree."""
        return self.tokens.gather(1, self.counts.unsqueeze(1) - 1)


def follow(tree: Tree, choices: Int[Tensor, "batch nodes"], longest: int) -> Followed:
    """`accept` for a captured step, whose host reads nothing. No path has more than `longest` nodes."""
    rows, nodes = tree.shape
    paths = torch.arange(longest, device=choices.device).expand(rows, -1)
    if nodes == 1:
        return Followed(paths, choices, torch.ones_like(choices[:, 0]))
    wrong = (choices.gather(1, tree.parents.clamp(min=0)) != tree.tokens) | (tree.parents < 0)
    children = tree.tokens + (tree.parents << 32)
    wrong |= (children.unsqueeze(2) == children.unsqueeze(1)).triu(1).any(-1)  # of equal siblings, the last one counts
    wrong[:, 0] = False
    accepted = ~(tree.ancestors & wrong.unsqueeze(1)).any(-1)
    places = tree.depths.masked_fill(~accepted, longest)
    numbers = torch.arange(nodes, device=choices.device).expand(rows, -1)
    paths = functional.pad(paths, (0, 1)).scatter(1, places, numbers)[:, :-1]
    return Followed(paths, choices.gather(1, paths), accepted.sum(1))


def count_drafted(parents: list[int]) -> int:
    """Draft tokens in a row: neither the root nor padding has a parent."""
    return sum(parent >= 0 for parent in parents)


@dataclass(frozen=True)
class Verified(ABC):
    """The tokens and hidden states that the last target step verified in each row: the input of a draft.

    Rows differ in the number of newly verified positions, so their tensors are right-padded. One subclass has its
    counts on the host; the other serves a captured step, which cannot read counts from the device.
    """

    taps: Float[Tensor, "batch count tapped"]  # at the newly verified positions
    next_tokens: Int[Tensor, "batch count"]  # the token after each of them
    roots: Int[Tensor, "batch 1"]  # the last of these in each row: the root of its next tree
    sampling: BatchSampling
    history: History | None  # counts the tokens before the root, where penalties need it

    @abstractmethod
    def levels(self, most: int) -> int:
        """The number of levels to draft: `most`, or fewer if no row can use that many draft tokens."""

    @abstractmethod
    def rewind(self, slots: Slots, read: int = 0) -> None:
        """Drop the last tree from a drafter's slots, but keep the first `read` of the newly verified positions."""

    @abstractmethod
    def advance(self, slots: Slots, already: int = 0) -> None:
        """Commit the newly verified positions just written to the slots, except the `already` committed ones."""

    @abstractmethod
    def num_verified(self) -> Int[Tensor, " batch"]:
        """How many positions are newly verified in each row."""

    def last(self, hidden: Float[Tensor, "batch count size"]) -> Float[Tensor, "batch 1 size"]:
        """The hidden states at each row's last newly verified position."""
        return take(hidden, self.num_verified().unsqueeze(1) - 1)

    def constraint(self) -> LevelConstraint | None:
        """The tokens that may follow each row's root; None if no row has a constraint."""
        return None

    @abstractmethod
    def finished(self, level: int) -> Bool[Tensor, " batch"] | None:
        """The rows that cannot use draft tokens of this level; None if every row can."""


@dataclass(frozen=True)
class VerifiedRow:
    """One row on the host, with what the last target step verified in it."""

    text: list[int]  # prompt and output, the root included
    start: int  # the first newly verified position
    count: int  # newly verified positions
    remaining: int  # draft tokens that the row can still use
    key: int = 0  # unique in this process: a drafter may store data of a row by its key
    accepted: Accepted | None = None  # the path of the last tree; None after prefill
    constraint: GuardedState | None = None

    @property
    def end(self) -> int:
        """The position after the newly verified ones."""
        return self.start + self.count


@dataclass(frozen=True)
class VerifiedOnHost(Verified):
    """All counts are known on the host. Drafters without static shapes only get this class."""

    rows: list[VerifiedRow]

    def levels(self, most: int) -> int:
        return min(most, max(row.remaining for row in self.rows))

    def constraint(self) -> LevelConstraint | None:
        states = [row.constraint for row in self.rows]
        return LevelConstraint.at_root(states) if any(state is not None for state in states) else None

    def rewind(self, slots: Slots, read: int = 0) -> None:
        slots.set_lengths([row.start + read for row in self.rows])

    def advance(self, slots: Slots, already: int = 0) -> None:
        slots.advance([row.count - already for row in self.rows])

    def num_verified(self) -> Int[Tensor, " batch"]:
        return torch.tensor([row.count for row in self.rows], device=self.roots.device)

    def last(self, hidden: Float[Tensor, "batch count size"]) -> Float[Tensor, "batch 1 size"]:
        if len(hidden) > 1:
            return super().last(hidden)
        return hidden[:, self.rows[0].count - 1 : self.rows[0].count]

    def finished(self, level: int) -> Bool[Tensor, " batch"] | None:
        finished = [row.remaining <= level for row in self.rows]
        return torch.tensor(finished, device=self.roots.device) if any(finished) else None


@dataclass(frozen=True)
class VerifiedOnDevice(Verified):
    """For a captured step, whose shapes never change. The host rewinds the head's slots before the step begins."""

    counts: Int[Tensor, " batch"]  # these two as in `VerifiedRow`
    remaining: Int[Tensor, " batch"]

    @classmethod
    def of(cls, verified: VerifiedOnHost) -> "VerifiedOnDevice":
        numbers = torch.tensor([[row.count, row.remaining] for row in verified.rows])
        counts, remaining = numbers.to(verified.roots.device, non_blocking=True).unbind(1)
        return cls(verified.taps, verified.next_tokens, verified.roots, verified.sampling, None, counts, remaining)

    def levels(self, most: int) -> int:
        return most

    def rewind(self, slots: Slots, read: int = 0) -> None:
        if read:
            slots.shift(torch.full_like(self.counts, read))

    def advance(self, slots: Slots, already: int = 0) -> None:
        slots.shift(self.counts - already if already else self.counts)  # saves a kernel

    def num_verified(self) -> Int[Tensor, " batch"]:
        return self.counts

    def finished(self, level: int) -> Bool[Tensor, " batch"]:
        return self.remaining <= level
