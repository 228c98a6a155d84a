"""Constrained output: the tokens that may follow each node of a draft tree. A grammar implements the two protocols."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstart.inference.core.tree import Tree

Path = tuple[int, ...]  # tokens after the text so far
Result = TypeVar("Result")


@runtime_checkable  # the shape checks in tests use isinstance
class ConstraintState(Protocol):
    """The grammar state of one request's text."""

    def allowed(self, path: Path) -> Bool[Tensor, " vocab"]:
        """The tokens that may follow the text and `path`, which itself is allowed.

        There is at least one, unless the constraint has become too large to compute; then the text ends in an error.
        """

    def advance(self, token: int) -> bool:
        """Continue the text with an allowed token; returns whether the constraint can still be computed."""


@runtime_checkable
class Constraint(Protocol):
    """The form that a request's output must have. Requests may share one."""

    def start(self) -> ConstraintState:
        """The state of a text without output."""


class NoWayOnError(ValueError):
    """No token may follow a text: its constraint allows none, or a bias forbids all that are allowed."""


class GuardedState:
    """The grammar state of one row. After an error it allows nothing, so that the error ends only this row."""

    def __init__(self, constraint: Constraint, vocab_size: int) -> None:
        self.constraint, self.nothing = constraint, torch.zeros(vocab_size, dtype=torch.bool)
        self.masks: dict[Path, Tensor] = {}  # after the present text; drafts and their target need the same ones
        self.error: Exception | None = None

    @cached_property
    def state(self) -> ConstraintState:
        return self.constraint.start()

    def allowed(self, path: Path) -> Bool[Tensor, " vocab"]:
        if path not in self.masks:
            self.masks[path] = self._unless_failed(lambda: self.state.allowed(path), self.nothing)
        return self.masks[path]

    def advance(self, tokens: list[int]) -> int:
        """Continue the text with these tokens up to the first that is not allowed; returns how many are allowed."""
        for count, token in enumerate(tokens):
            is_allowed = bool(self.allowed(())[token])
            self.masks.clear()
            if not is_allowed or not self._unless_failed(partial(self.state.advance, token), False):
                return count
        return len(tokens)

    def _unless_failed(self, work: Callable[[], Result], otherwise: Result) -> Result:
        if self.error is None:
            try:
                return work()
            except Exception as error:
                self.error = error
        return otherwise


GrammarStates = Sequence[GuardedState | None]  # one per row; None: a row without a constraint


def masked_roots(states: GrammarStates, logits: Float[Tensor, "rows 1 vocab"]) -> Float[Tensor, "rows 1 vocab"]:
    """Logits after the text of each row, -inf for tokens that are not allowed."""
    return LevelConstraint.at_root(states).masked(logits, None)


def masked_tree(states: GrammarStates, tree: Tree, logits: Float[Tensor, "rows nodes vocab"]) -> tuple[Tree, Tensor]:
    """The target's logits at each node, -inf for tokens that are not allowed [rows, nodes, vocab], and the tree.

    A node that is not allowed itself keeps its logits: no choice leads to it. A node that nothing may follow is removed
    from the tree: a constraint may fail on a draft, and still find tokens once the draft is text.
    """
    paths, parents = [], tree.parents.tolist()
    for state, tokens, above in zip(states, tree.tokens.tolist(), parents, strict=True):
        of_row: list[Path | None] = [()]
        for node in range(1, len(tokens)):
            path = None if above[node] < 0 else follow(state, of_row[above[node]], tokens[node])
            if state is not None and path is not None and not bool(state.allowed(path).any()):
                above[node], path = -1, None
            of_row.append(path)
        paths.append(of_row)
    remaining = torch.tensor(parents).to(tree.parents.device, non_blocking=True)
    return replace(tree, parents=remaining), LevelConstraint(states, paths).masked(logits, None)


@dataclass(frozen=True)
class LevelConstraint:
    """The constraints of all rows at some nodes of their trees, such as those of one level."""

    states: GrammarStates
    paths: list[list[Path | None]]  # to each node, without the root; None: the node is not allowed

    @classmethod
    def at_root(cls, states: GrammarStates) -> "LevelConstraint":
        return cls(states, [[()] for _ in states])

    def masked(
        self, logits: Float[Tensor, "rows nodes columns"], tokens: Int[Tensor, " columns"] | None
    ) -> Float[Tensor, "rows nodes columns"]:
        """The logits at these nodes, -inf for tokens that are not allowed; `tokens` are the columns' token ids."""
        size = logits.shape[2] if tokens is None else int(tokens.max()) + 1
        allowed = torch.ones(*logits.shape[:2], size, dtype=torch.bool)
        for row, (state, paths) in enumerate(zip(self.states, self.paths, strict=True)):
            for node, path in enumerate(paths):
                if state is not None and path is not None:
                    allowed[row, node] = state.allowed(path)[:size]
        mask = allowed.to(logits.device)
        return logits.masked_fill(~(mask if tokens is None else mask[..., tokens]), -torch.inf)

    def with_only_tokens(
        self, chances: Float[Tensor, "rows nodes children"], tokens: Int[Tensor, "rows nodes children"]
    ) -> tuple[Tensor, Tensor]:
        """The children of these nodes and the logs of their chances; the only allowed token becomes a certain child."""
        only = [
            [-1 if (token := only_token(state, path)) is None else token for path in paths]
            for state, paths in zip(self.states, self.paths, strict=True)
        ]
        forced = torch.tensor(only).unsqueeze(-1).to(tokens.device)  # [rows, nodes, 1]; -1: there is a choice
        is_first = torch.arange(tokens.shape[2], device=tokens.device) == 0
        replaced = (forced >= 0) & is_first
        return chances.masked_fill(replaced, 0), torch.where(replaced, forced, tokens)

    def extend(self, parents: Int[Tensor, "rows children"], tokens: Int[Tensor, "rows children"]) -> "LevelConstraint":
        """The constraints at new children of these nodes."""
        paths = [
            [follow(state, of_row[parent], token) for parent, token in zip(above, drafted, strict=True)]
            for state, of_row, above, drafted in zip(
                self.states, self.paths, parents.tolist(), tokens.tolist(), strict=True
            )
        ]
        return LevelConstraint(self.states, paths)


def follow(state: GuardedState | None, path: Path | None, token: int) -> Path | None:
    """The path continued with a token; None if the token is not allowed."""
    if path is None or (state is not None and not bool(state.allowed(path)[token])):
        return None
    return (*path, token)


def only_token(state: GuardedState | None, path: Path | None) -> int | None:
    """The only token that may follow the path; None if there is a choice."""
    if state is None or path is None:
        return None
    allowed = state.allowed(path)
    return int(allowed.nonzero()) if int(allowed.count_nonzero()) == 1 else None
