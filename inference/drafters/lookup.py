"""Drafts what followed the same tokens before, in the text itself or in a corpus. No model runs.

This is prompt lookup decoding (Saxena, 2023) or, with a corpus, SAM decoding (arXiv 2411.10666).
"""

from collections.abc import Iterable

from headstart.inference.core.cache import KVCache
from headstart.inference.core.drafter import NoDrafter
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.repeats import (
    Child,
    Continuations,
    GumbelRow,
    TreeLimits,
    Trie,
    batch_tries,
    grow_best_first,
)

NGRAM = 3  # tokens: the longest n-gram that is searched for in the text
MAX_MATCH = 64  # tokens at the end of the text that are searched for in a corpus


class SuffixAutomaton:
    """An index of every substring of a corpus, the tokens that follow it, and how often (Blumer et al., 1985).

    A state is a set of substrings that end at the same places; state 0 is the empty one. Built once, in time and memory
    linear in the corpus: about half a kilobyte per token.
    """

    def __init__(self, texts: Iterable[list[int]]) -> None:
        # Indexed by state:
        self.following: list[dict[int, int]] = [{}]  # next token -> state
        self.link = [-1]  # the state of the longest suffix that ends in more places
        self.length = [0]  # length of the state's longest substring
        self.count = [0]  # number of places in the corpus where its substrings end
        for text in texts:
            last = 0
            for token in text:
                last = self._extend(last, token)
                self.count[last] += 1
        for state in sorted(range(1, len(self.link)), key=self.length.__getitem__, reverse=True):
            self.count[self.link[state]] += self.count[state]

    def __len__(self) -> int:
        return len(self.link)

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """The state of the longest suffix of `tokens` that occurs in the corpus, and that suffix's length."""
        state, length = 0, 0
        for token in tokens:
            while state != 0 and token not in self.following[state]:
                state = self.link[state]
                length = self.length[state]
            if token in self.following[state]:
                state, length = self.following[state][token], length + 1
        return state, length

    def followed_by(self, state: int) -> list[tuple[int, int, int]]:
        """Each token that follows the state's substrings, how often it does, and the state after it."""
        return [(token, self.count[after], after) for token, after in self.following[state].items()]

    def _new(self, length: int, following: dict[int, int], link: int) -> int:
        self.following.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(0)
        return len(self.link) - 1

    def _extend(self, last: int, token: int) -> int:
        """Append a token to the text that ends in state `last`; returns the state of the longer text."""
        if token in self.following[last]:  # an earlier text contains the same substring
            return self._exact(last, token)
        current = self._new(self.length[last] + 1, {}, 0)
        state = last
        while state != -1 and token not in self.following[state]:
            self.following[state][token] = current
            state = self.link[state]
        if state != -1:
            self.link[current] = self._exact(state, token)
        return current

    def _exact(self, state: int, token: int) -> int:
        """The state whose longest substring is that of `state` plus the token; split off if longer ones share it."""
        after = self.following[state][token]
        if self.length[after] == self.length[state] + 1:
            return after
        split = self._new(self.length[state] + 1, dict(self.following[after]), self.link[after])
        self.link[after] = split
        while state != -1 and self.following[state].get(token) == after:
            self.following[state][token] = split
            state = self.link[state]
        return split


class Lookup(NoDrafter):
    """Drafts what followed the longest n-gram that ends the text and occurred before; continuations share one tree.

    With an automaton, it drafts from the corpus where that holds a longer end of the text. The tree of each row is
    built on the host, without features of the target or a place in the cache.
    """

    static_shapes = False

    def __init__(self, limits: TreeLimits, automaton: SuffixAutomaton | None = None, ngram: int = NGRAM) -> None:
        self.depth, self.max_nodes = limits.depth, limits.nodes + 1
        self.limits, self.automaton, self.ngram = limits, automaton, ngram

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        rows = zip(verified.texts, verified.remaining, verified.grammar_states, strict=True)
        tries = [Trie(text[-1], min(remaining, self.depth), state) for text, remaining, state in rows]
        for row, trie in enumerate(tries):
            self.grow(trie, verified, row)
        return batch_tries(tries, self.max_nodes, verified.roots.device)

    def grow(self, trie: Trie, verified: VerifiedOnHost, row: int) -> None:
        """Add the draft tokens of one row to its trie."""
        text, gumbel = verified.texts[row], GumbelRow(verified, row)
        matches, length = Continuations.of_longest_match(text, self.ngram)
        if self.automaton is not None:
            state, corpus_length = self.automaton.match(text[-MAX_MATCH:])
            if corpus_length > length:
                grow_best_first(trie, state, self._corpus_children, self.limits, gumbel)
                return
        if length:
            grow_best_first(trie, matches, Continuations.children, self.limits, gumbel)

    def _corpus_children(self, state: int) -> list[Child[int]]:
        """The tokens that follow a state's substrings in the corpus, weighted by frequency."""
        assert self.automaton is not None
        return [Child(token, float(count), after) for token, count, after in self.automaton.followed_by(state)]
