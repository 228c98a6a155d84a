"""The recurrent states of a target's rows. They have no axis of tokens, so they cannot be cut back after a rejection.

They stay at the last position up to which every token was accepted. The tokens accepted since are the row's window: the
next pass reads them again, before the root and the draft tokens, so a rejection needs no extra pass. A pass whose
tokens are all accepted advances the states, and so does a step without drafts once the window is full.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Int
from torch import Tensor

WINDOW = 4  # most accepted tokens that a row's next pass reads again
Snapshot = Any  # a copy of one row's states


class RecurrentStates(ABC):
    """The recurrent states of a cache's rows, in use or not, or of those from `first` on."""

    pads = True  # whether all rows of a pass have the same number of tokens, the shorter ones with padding

    def __init__(self, rows: int) -> None:
        self.first = 0
        self.windows: list[list[int]] = [[] for _ in range(rows)]
        self.counts: list[int] = []  # tokens of each row in the last pass
        self.width = 0  # tokens of each row in the last pass, padding included
        self.is_sure = False  # whether the last pass advanced the states themselves, and not a copy

    def row(self, number: int) -> Self:
        """The same states, seen from another first row."""
        view = copy.copy(self)
        view.first = self.first + number
        return view

    def window(self, row: int) -> list[int]:
        return self.windows[self.first + row]

    def keep(self, paths: Sequence[list[int]], tokens: Sequence[list[int]]) -> None:
        """Update the states after a pass over trees of these tokens whose paths from the root were accepted."""
        accepted = []
        for row, path in enumerate(paths):
            count = self.counts[row]
            if len(self.window(row)) + len(path) == count and (count == self.width or not self.pads):
                accepted.append(row)
                self.windows[self.first + row] = []
            else:
                assert not self.is_sure
                self.window(row).extend(tokens[row][node] for node in path)
        self.commit(accepted)

    @abstractmethod
    def commit(self, rows: list[int]) -> None:
        """Give these rows the states after the last pass."""

    @abstractmethod
    def snapshot(self, row: int) -> Snapshot:
        """A copy of a row's states."""

    def write(self, row: int, snapshot: Snapshot) -> None:
        """Set the states of a row, whose window becomes empty; None stands for the start of a text."""
        self.windows[self.first + row] = []

    def move(self, source: int, goal: int) -> None:
        """Move the states of one row to another."""
        source, goal = self.first + source, self.first + goal
        self.windows[goal], self.windows[source] = self.windows[source], []


def after_windows(
    windows: Sequence[list[int]], tokens: Int[Tensor, "rows nodes"]
) -> tuple[Int[Tensor, "rows width"], Int[Tensor, "rows nodes"]]:
    """Each row's window followed by its tokens, right-padded, and the indices of these tokens."""
    nodes, longest = tokens.shape[1], max(map(len, windows))
    index = torch.tensor([[*range(len(window), len(window) + nodes)] for window in windows]).to(tokens.device)
    padded = [[*window, *[0] * (longest + nodes - len(window))] for window in windows]
    return torch.tensor(padded).to(tokens.device).scatter_(1, index, tokens), index


class LayerStates(RecurrentStates):
    """States of convolutions and recurrences in the cache layers of transformers, [rows, ...] each."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows
        self.states: dict[tuple[int, str, int], Tensor] = {}  # [rows, ...] by layer, attribute and number
        self.facts: dict[int, dict[str, Any]] = {}  # the other attributes of each layer, once it has states
        self.layers: Sequence[Any] = ()  # of the last pass
        self.loaded: dict[tuple[int, str, int], Tensor] = {}  # the views that these layers got, if the pass was sure

    def load(self, layers: Sequence[Any], rows: int, is_sure: bool) -> None:
        """Put the states of the first rows into a cache's layers: views if the pass is sure to advance them.

        `rows` is 0 at the start of a text, when its layers have no states yet.
        """
        self.layers, self.is_sure, self.loaded = layers, is_sure, {}
        if not rows:
            return
        for number, facts in self.facts.items():
            for name, value in facts.items():
                setattr(layers[number], name, copy.copy(value))
        for (number, name, state), stored in self.states.items():
            view = stored[self.first : self.first + rows]
            getattr(layers[number], name)[state] = view if is_sure else view.clone()
            if is_sure:
                self.loaded[number, name, state] = view

    def commit(self, rows: list[int]) -> None:
        for number, layer in enumerate(self.layers if rows else ()):
            states = states_of(layer)
            if states and number not in self.facts:
                self.facts[number] = facts_of(layer)
            for (name, state), tensor in states.items():
                key = number, name, state
                if tensor is self.loaded.get(key):  # most models update their states in place
                    continue
                if key not in self.states:
                    self.states[key] = tensor.new_zeros(self.rows, *tensor.shape[1:])
                self.states[key][[self.first + row for row in rows]] = tensor[rows]

    def snapshot(self, row: int) -> Snapshot:
        return {key: stored[self.first + row].clone() for key, stored in self.states.items()}

    def write(self, row: int, snapshot: Snapshot) -> None:
        super().write(row, snapshot)
        for key, state in (snapshot or {}).items():
            self.states[key][self.first + row] = state

    def move(self, source: int, goal: int) -> None:
        super().move(source, goal)
        for stored in self.states.values():
            stored[self.first + goal] = stored[self.first + source]


def states_of(layer: Any) -> dict[tuple[str, int], Tensor]:
    """The recurrent states of a cache's layer, by attribute and number."""
    return {
        (name, number): state
        for name, value in vars(layer).items()
        if isinstance(value, dict)
        for number, state in value.items()
        if isinstance(state, Tensor)
    }


def facts_of(layer: Any) -> dict[str, Any]:
    """The attributes of a layer that say which states it has."""
    return {
        name: {number: None if isinstance(part, Tensor) else part for number, part in value.items()}
        for name, value in vars(layer).items()
        if isinstance(value, dict)
    }


class OwnCaches(RecurrentStates):
    """Rows that each have a cache of the model's own making, of any class; they run one after the other."""

    pads = False

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.caches: list[Any] = [None] * rows
        self.after: dict[int, Any] = {}  # the cache of each row after the last pass

    def load(self, row: int, is_sure: bool) -> Any:
        """The row's cache for a pass, None before its first; a copy unless the pass is sure to keep all tokens."""
        cache = self.caches[self.first + row]
        return cache if is_sure else copy.deepcopy(cache)

    def commit(self, rows: list[int]) -> None:
        for row in rows:
            self.caches[self.first + row] = self.after[row]
        self.after = {}

    def snapshot(self, row: int) -> Snapshot:
        return copy.deepcopy(self.caches[self.first + row])

    def write(self, row: int, snapshot: Snapshot) -> None:
        super().write(row, snapshot)
        self.caches[self.first + row] = copy.deepcopy(snapshot)

    def move(self, source: int, goal: int) -> None:
        super().move(source, goal)
        self.caches[self.first + goal], self.caches[self.first + source] = self.caches[self.first + source], None


def snapshot_bytes(snapshot: Snapshot) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(snapshot))


def tensors_of(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors that an object holds, at any depth."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (str, int, float, type(None))):
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    parts = [*parts, *vars(value).values()] if hasattr(value, "__dict__") else parts
    return [tensor for part in parts for tensor in tensors_of(part, seen)]
