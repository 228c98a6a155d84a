"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target's own parallel guesses, kept and verified in its steps.

    root - a0 - a1 - a2      trunk: the oldest guesses at the tokens to come, one a column
           |    |    |
           b0   b1   b2      branches: what the target said there a step ago, and a step after that
           |    |    |
           c0   c1   c2  ->  what it says below c becomes the next c; b becomes the trunk (Jacobi iteration)

Each column read downwards, with what the target says at its end, is an n-gram that goes into a pool; those that begin
with the root are verified in the same tree. The window is a tree like any other, so it may be accepted as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from inference.cache import KVCache
from inference.drafter import Verified, VerifiedOnHost
from inference.drafters.trie import Trie, side_by_side
from inference.tree import Tree


@dataclass
class NGrams:
    """What followed a token, by that token: the `most` latest continuations of each."""

    most: int
    by_first: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)  # in order, the latest last

    def add(self, tokens: list[int]) -> None:
        known = self.by_first.setdefault(tokens[0], {})
        known.pop(tuple(tokens[1:]), None)
        known[tuple(tokens[1:])] = None
        if len(known) > self.most:
            known.pop(next(iter(known)))

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """The latest first."""
        return list(self.by_first.get(token, ()))[::-1]


class Trajectories:
    """The window of one row and its pool; `text` is the row's own list, which the decode loop goes on writing."""

    def __init__(self, text: list[int], columns: int, levels: int) -> None:
        self.text, self.columns, self.levels = text, columns, levels
        self.pool = NGrams(columns)
        self.seen = 0  # tokens of the text that the pool knows, and at the last draft
        self.window: list[list[int | None]] = [[None] * columns for _ in range(levels)]  # by level, then column
        self.nodes: list[list[int | None]] = []  # of the window in the last tree

    def advance(self, choices: list[int]) -> None:
        """Take in what the target said at the nodes of the last tree, and the tokens that became certain since."""
        fresh = len(self.text) - self.seen
        if self.nodes:
            said = [None if node is None else choices[node] for node in self.nodes[-1]]
            for column in range(self.columns):
                guessed = [row[column] for row in [*self.window, said]]
                ngram = [token for token in guessed if token is not None]
                if len(ngram) == len(guessed):
                    self.pool.add(ngram)
            # Row k of column j guesses the token j + k + 1 behind the root, and the root has moved on.
            rows = [*self.window[1:], said]
            self.window = [(row[fresh - 1 :] + [None] * self.columns)[: self.columns] for row in rows]
        for start in range(max(self.seen - self.levels, 0), len(self.text) - self.levels):
            self.pool.add(self.text[start : start + self.levels + 1])
        self.seen = len(self.text)

    def tree(self, room: int) -> Trie:
        trie, trunk = Trie(self.text[-1], room), 0
        self.nodes = [[None] * self.columns for _ in range(self.levels)]
        for column in range(self.columns):
            # Guesses that nobody made are tokens of the text, any of them (the paper takes random ones).
            whole = [self.guess(level, column) for level in range(self.levels)]
            path = trie.add_path(trunk, whole)
            for level, node in enumerate(path):
                self.nodes[level][column] = node
            if not path:
                break
            trunk = path[0]
        for ngram in self.pool.behind(self.text[-1]):
            trie.add_path(0, ngram)
        return trie

    def guess(self, level: int, column: int) -> int:
        known = self.window[level][column]
        if known is None:
            known = self.text[-1 - (7 * column + level) % len(self.text)]
            self.window[level][column] = known
        return known


class Lookahead:
    """Needs nothing but the target: `columns` tokens are guessed at in parallel, in n-grams of `levels` + 1 tokens."""

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    static_shapes = False
    compilable_layers: Sequence[nn.Module] = ()

    def __init__(self, columns: int, levels: int) -> None:
        self.columns, self.levels = columns, levels
        self.rows: dict[int, Trajectories] = {}  # by the identity of the row's text, which they hold

    @property
    def max_nodes(self) -> int:
        return 1 + 2 * self.columns * self.levels

    @property
    def depth(self) -> int:
        return self.columns + self.levels - 1

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Nothing to read: the texts come with every draft."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        texts, choices = verified.texts, verified.choices
        self.rows = {id(text): self.rows.get(id(text)) or self.start(text) for text in texts}
        tries = []
        for text, said, room in zip(texts, choices, verified.remaining, strict=True):
            row = self.rows[id(text)]
            row.advance(said)
            tries.append(row.tree(room))
        return side_by_side(tries, verified.roots.device)

    def start(self, text: list[int]) -> Trajectories:
        return Trajectories(text, self.columns, self.levels)
