"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target guesses many tokens in parallel and verifies n-grams.

    root - a0 - a1 - a2      level 0: the oldest guesses of the next tokens, one per column
           |    |    |
           b0   b1   b2      level 1: the target's choices after level 0, one step later
           |    |    |
           c0   c1   c2      level 2: the target's choices after level 1, two steps later

This is the lookahead window. In each step (a Jacobi iteration) the target's choices after the last level become the new
last level and all other levels move up by one. When a step adds several tokens to the text, the columns also move left
to follow the root. Each column, read downwards together with the target's choice at its end, is an n-gram that goes
into a pool. The n-grams of the pool that begin with the root token are verified in the same tree. The window is part
of that tree, so its tokens may be accepted too.
"""

from dataclasses import dataclass, field

from headstart.inference.core.cache import KVCache
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.lookup import TrieDrafter
from headstart.inference.drafters.repeats import Trie


@dataclass
class NGramPool:
    """N-grams by their first token; keeps the `capacity` latest for each."""

    capacity: int
    by_first: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)  # insertion order, the latest last

    def add(self, tokens: list[int]) -> None:
        known = self.by_first.setdefault(tokens[0], {})
        known.pop(tuple(tokens[1:]), None)
        known[tuple(tokens[1:])] = None
        if len(known) > self.capacity:
            known.pop(next(iter(known)))

    def following(self, token: int) -> list[tuple[int, ...]]:
        """The rest of each n-gram that begins with this token, the latest first."""
        return list(self.by_first.get(token, ()))[::-1]


class LookaheadRow:
    """The lookahead window and the n-gram pool of one row."""

    def __init__(self, columns: int, levels: int) -> None:
        self.columns, self.levels = columns, levels
        self.pool = NGramPool(columns)
        self.seen = 0  # length of the text at the last draft; the pool holds all n-grams up to there
        self.window: list[list[int | None]] = [[None] * columns for _ in range(levels)]  # [level][column]
        self.nodes: list[list[int | None]] = []  # [level][column] -> node in the last tree, None if it was left out

    def advance(self, text: list[int], choices: list[int]) -> None:
        """Update window and pool from the target's choice at each node of the last tree and the text's new tokens.

        `choices` are empty after a step without drafts.
        """
        num_new = len(text) - self.seen
        if self.nodes and choices:
            last_choices = [None if node is None else choices[node] for node in self.nodes[-1]]
            for column in range(self.columns):
                guessed = [level[column] for level in [*self.window, last_choices]]
                ngram = [token for token in guessed if token is not None]
                if len(ngram) == len(guessed):
                    self.pool.add(ngram)
            # Level k of column j guesses the token j + k + 1 places after the root, and the root has moved.
            levels = [*self.window[1:], last_choices]
            self.window = [(level[num_new - 1 :] + [None] * self.columns)[: self.columns] for level in levels]
        for start in range(max(self.seen - self.levels, 0), len(text) - self.levels):
            self.pool.add(text[start : start + self.levels + 1])
        self.seen = len(text)

    def draft(self, text: list[int], trie: Trie) -> None:
        """Add the window, and the pool's n-grams after the root token."""
        parent = 0
        self.nodes = [[None] * self.columns for _ in range(self.levels)]
        for column in range(self.columns):
            path = trie.add_path(parent, [self.guess(text, level, column) for level in range(self.levels)])
            for level, node in enumerate(path):
                self.nodes[level][column] = node
            if not path:
                break
            parent = path[0]
        for tokens in self.pool.following(text[-1]):
            trie.add_path(0, tokens)

    def guess(self, text: list[int], level: int, column: int) -> int:
        """The window's entry; an empty one is filled with a token of the text (in the paper, with a random token)."""
        known = self.window[level][column]
        if known is None:
            known = text[-1 - (7 * column + level) % len(text)]
            self.window[level][column] = known
        return known


class Lookahead(TrieDrafter):
    """Lookahead decoding; it needs no model but the target.

    The target guesses `columns` tokens in parallel (the paper's W); n-grams have `levels` + 1 tokens (its N).
    """

    def __init__(self, columns: int, levels: int) -> None:
        super().__init__(depth=columns + levels - 1, max_nodes=1 + 2 * columns * levels)
        self.columns, self.levels = columns, levels
        self.rows: dict[int, LookaheadRow] = {}  # by the row's key

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        self.rows = {key: self.rows.get(key) or LookaheadRow(self.columns, self.levels) for key in verified.keys}
        return super().draft(verified, cache)

    def grow(self, trie: Trie, verified: VerifiedOnHost, row: int) -> None:
        known, text = self.rows[verified.keys[row]], verified.texts[row]
        known.advance(text, verified.choices[row] if verified.drafted[row] else [])
        known.draft(text, trie)
