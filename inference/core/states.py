"""What a target keeps of a row besides slots: states without an axis of tokens, which cannot be cut back.

They stay at the last position up to which every token was accepted. What was accepted since is the row's window: the
next pass reads it again, before the root and the draft tokens. So a rejection costs no pass of its own. A pass whose
tokens are all accepted moves the states, and so does a step without drafts once the window is full.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Int
from torch import Tensor

WINDOW = 4  # accepted tokens that a row's next pass reads again, at most
Snapshot = Any  # a copy of one row's states


class RowStates(ABC):
    """The states of rows by their places in the batch, or of some of these places."""

    pads = True  # whether rows of a pass have equally many tokens, so that shorter ones are filled up

    def __init__(self, places: int) -> None:
        self.first = 0  # place of the first row
        self.windows: list[list[int]] = [[] for _ in range(places)]  # of all places
        self.counts: list[int] = []  # tokens of each row in the pass that has just run
        self.width = 0  # of that pass, in which rows are filled up
        self.is_sure = False  # whether that pass moved the states themselves, and not a copy

    def row(self, number: int) -> Self:
        """The same states, seen from another first row."""
        found = copy.copy(self)
        found.first = self.first + number
        return found

    def window(self, row: int) -> list[int]:
        return self.windows[self.first + row]

    def longest(self, rows: int) -> int:
        """Length of the longest window."""
        return max((len(self.window(row)) for row in range(rows)), default=0)

    def keep(self, paths: Sequence[list[int]], tokens: Sequence[list[int]]) -> None:
        """Follow a pass over trees of these tokens, of which these chains, which begin at the root, were accepted."""
        whole = []
        for row, path in enumerate(paths):
            count = self.counts[row]
            if len(self.window(row)) + len(path) == count and (count == self.width or not self.pads):
                whole.append(row)
                self.windows[self.first + row] = []
            else:
                assert not self.is_sure
                self.window(row).extend(tokens[row][node] for node in path)
        self.commit(whole)

    @abstractmethod
    def commit(self, rows: list[int]) -> None:
        """Make the states after the last pass those of these rows."""

    @abstractmethod
    def copied(self, place: int) -> Snapshot:
        """A copy of the states of a place."""

    def write(self, place: int, snapshot: Snapshot) -> None:
        """Set the states of a place, whose window becomes empty; None stands for the start of a text."""
        self.windows[self.first + place] = []

    def move(self, source: int, goal: int) -> None:
        """Give a place the states of another, which will not be used again."""
        source, goal = self.first + source, self.first + goal
        self.windows[goal], self.windows[source] = self.windows[source], []


def after_windows(
    windows: Sequence[list[int]], tokens: Int[Tensor, "rows nodes"]
) -> tuple[Int[Tensor, "rows width"], Int[Tensor, "rows nodes"]]:
    """Each row's window with its tokens after it, filled up on the right, and the places of these tokens."""
    nodes, longest = tokens.shape[1], max(map(len, windows))
    places = torch.tensor([[*range(len(window), len(window) + nodes)] for window in windows]).to(tokens.device)
    filled = [[*window, *[0] * (longest + nodes - len(window))] for window in windows]
    return torch.tensor(filled).to(tokens.device).scatter_(1, places, tokens), places


class LayerStates(RowStates):
    """States in layers that transformers knows: of convolutions and recurrences, [rows, ...] each."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.places = places
        self.kept: dict[tuple[int, str, int], Tensor] = {}  # [places, ...] by layer, attribute and number
        self.facts: dict[int, dict[str, Any]] = {}  # the other attributes of each layer, once it has states
        self.layers: Sequence[Any] = ()  # those of the pass that has just run
        self.loaded: dict[tuple[int, str, int], Tensor] = {}  # the views that they were given if it was sure

    def load(self, layers: Sequence[Any], rows: int, is_sure: bool) -> None:
        """Put the states of the first rows into a cache's layers: views if the pass is sure to move them.

        `rows` is 0 for a text that begins: its layers have no states yet.
        """
        self.layers, self.is_sure, self.loaded = layers, is_sure, {}
        if not rows:
            return
        for number, facts in self.facts.items():
            for name, value in facts.items():
                setattr(layers[number], name, copy.copy(value))
        for (number, name, state), kept in self.kept.items():
            own = kept[self.first : self.first + rows]
            getattr(layers[number], name)[state] = own if is_sure else own.clone()
            if is_sure:
                self.loaded[number, name, state] = own

    def commit(self, rows: list[int]) -> None:
        for number, layer in enumerate(self.layers if rows else ()):
            states = states_of(layer)
            if states and number not in self.facts:
                self.facts[number] = facts_of(layer)
            for (name, state), tensor in states.items():
                key = number, name, state
                if tensor is self.loaded.get(key):  # most models update their states in place
                    continue
                if key not in self.kept:
                    self.kept[key] = tensor.new_zeros(self.places, *tensor.shape[1:])
                self.kept[key][[self.first + row for row in rows]] = tensor[rows]

    def copied(self, place: int) -> Snapshot:
        return {key: kept[self.first + place].clone() for key, kept in self.kept.items()}

    def write(self, place: int, snapshot: Snapshot) -> None:
        super().write(place, snapshot)
        for key, state in (snapshot or {}).items():
            self.kept[key][self.first + place] = state

    def move(self, source: int, goal: int) -> None:
        super().move(source, goal)
        for kept in self.kept.values():
            kept[self.first + goal] = kept[self.first + source]


def states_of(layer: Any) -> dict[tuple[str, int], Tensor]:
    """The states of a cache's layer, by attribute and number; keys and values are none."""
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


class OwnCaches(RowStates):
    """Rows that each have a cache of the model's own making, of whatever class; they run one after the other."""

    pads = False

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.kept: list[Any] = [None] * places
        self.after: dict[int, Any] = {}  # by row: after the last pass

    def load(self, row: int, is_sure: bool) -> Any:
        """The row's cache for a pass, None before its first; a copy unless the pass is sure to keep all tokens."""
        kept = self.kept[self.first + row]
        return kept if is_sure else copy.deepcopy(kept)

    def commit(self, rows: list[int]) -> None:
        for row in rows:
            self.kept[self.first + row] = self.after[row]
        self.after = {}

    def copied(self, place: int) -> Snapshot:
        return copy.deepcopy(self.kept[self.first + place])

    def write(self, place: int, snapshot: Snapshot) -> None:
        super().write(place, snapshot)
        self.kept[self.first + place] = copy.deepcopy(snapshot)

    def move(self, source: int, goal: int) -> None:
        super().move(source, goal)
        self.kept[self.first + goal], self.kept[self.first + source] = self.kept[self.first + source], None


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
