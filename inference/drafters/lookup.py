"""Drafts what followed the same tokens before, in the text itself or in a corpus. No model runs.

Lookup is a drafter: prompt lookup decoding (Saxena, 2023) or, with a corpus, SAM decoding (arXiv 2411.10666). Repeats
adds to a head's trees what the text repeats. A head copies badly: names, quotes, code and texts that loop are often
outside its draft vocabulary, or longer than its trees are deep.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy

from headstart.inference.core.drafter import VerifiedOnHost
from headstart.inference.core.tree import Tree
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.trie import (
    Child,
    GumbelRow,
    TreeLimits,
    Trie,
    TrieDrafter,
    batch_tries,
    grow_best_first,
)

NGRAM = 3  # tokens: the longest n-gram that is searched for in the text
MAX_OCCURRENCES = 64  # occurrences of an n-gram that count, the latest ones
MAX_MATCH = 64  # tokens at the end of the text that are searched for in a corpus
# How often the next token of a repeat is right, by how many tokens (at least) of the text's end have repeated before
# it: measured on SmolLM2-135M-Instruct's answers to 12 questions of Spec-Bench at temperature 0.
RATES = {1: 0.4, 2: 0.5, 3: 0.6, 4: 0.75, 8: 0.85}
PRIOR = 4.0  # tokens of a text that weigh as much as these rates
LONGEST = max(RATES)  # tokens at the end of the text that are searched for to find a repeat
DEPTH = 12  # draft tokens of a repeat; a longer one continues in the next step


@dataclass(frozen=True)
class Continuations:
    """Earlier occurrences of the n-gram at the text's end, each followed forward in parallel.

    An occurrence that reaches the end of the text continues from the token after its n-gram, as if the text repeated.
    """

    text: list[int]
    places: tuple[tuple[int, int], ...]  # (index of the next token, period: how many tokens to go back from the end)

    @classmethod
    def of_longest_match(cls, text: list[int], ngram: int) -> tuple["Continuations", int]:
        """Find the longest n-gram, of up to `ngram` tokens, that ends the text and occurred before.

        Returns its earlier occurrences, the latest first, and its length, which is 0 if there is none.
        """
        tokens, total = numpy.asarray(text), len(text)
        ends = numpy.flatnonzero(tokens[:-1] == tokens[-1])  # where earlier occurrences end
        if not len(ends):
            return cls(text, ()), 0
        length = 1
        while length < ngram:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[total - 1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        latest = ends[-MAX_OCCURRENCES:][::-1].tolist()
        return cls(text, tuple((end + 1, total - 1 - end) for end in latest)), length

    def children(self) -> list[Child["Continuations"]]:
        """The possible next tokens, the latest first, weighted by how many occurrences they follow."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for place, period in self.places:
            token = self.text[place]
            following = place + 1 if place + 1 < len(self.text) else place + 1 - period
            groups.setdefault(token, []).append((following, period))
        return [
            Child(token, float(len(places)), Continuations(self.text, tuple(places)))
            for token, places in groups.items()
        ]


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

    def children(self, state: int) -> list[Child[int]]:
        """The tokens that follow the state's substrings in the corpus, weighted by frequency."""
        return [Child(token, float(self.count[after]), after) for token, after in self.following[state].items()]

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


class Lookup(TrieDrafter):
    """Drafts what followed the longest n-gram that ends the text and occurred before; continuations share one tree.

    With an automaton, it drafts from the corpus where that holds a longer end of the text.
    """

    def __init__(self, limits: TreeLimits, automaton: SuffixAutomaton | None = None, ngram: int = NGRAM) -> None:
        super().__init__(limits.depth, limits.nodes + 1)
        self.limits, self.automaton, self.ngram = limits, automaton, ngram

    def grow(self, trie: Trie, verified: VerifiedOnHost, row: int) -> None:
        text, gumbel = verified.texts[row], GumbelRow(verified, row)
        matches, length = Continuations.of_longest_match(text, self.ngram)
        if self.automaton is not None:
            state, corpus_length = self.automaton.match(text[-MAX_MATCH:])
            if corpus_length > length:
                grow_best_first(trie, state, self.automaton.children, self.limits, gumbel)
                return
        if length:
            grow_best_first(trie, matches, Continuations.children, self.limits, gumbel)


class Repeated:
    """The repeats of one text so far, and how often they were right."""

    def __init__(self, temperature: float) -> None:
        """Sampled texts repeat less."""
        self.right = {length: PRIOR * rate / (1 + temperature) for length, rate in RATES.items()}
        self.tried = dict.fromkeys(RATES, PRIOR)
        self.path: list[int] = []  # the last repeat
        self.start = 0  # where it would have begun in the text
        self.matched = 1  # the key of RATES that it had

    def next_path(self, text: list[int], trie: Trie, gumbel: GumbelRow) -> list[int]:
        """The tokens that followed the longest match, down to the trie's maximum depth."""
        self._observe(text)
        matches, length = Continuations.of_longest_match(text, LONGEST)
        self.path, self.start = [], len(text)
        if length:
            self.matched = max(least for least in RATES if least <= length)
            alone = Trie(text[-1], min(trie.max_depth, DEPTH), trie.state)
            grow_best_first(alone, matches, Continuations.children, TreeLimits(DEPTH, 1, DEPTH), gumbel)
            self.path = alone.tokens[1:]
        return self.path

    @property
    def rate(self) -> float:
        """The chance that a token of the path is right, given that those before it are."""
        return self.right[self.matched] / self.tried[self.matched]

    def _observe(self, text: list[int]) -> None:
        """Count the tokens of the last path that the text has confirmed or refuted since."""
        for token, actual in zip(self.path, text[self.start :], strict=False):
            self.tried[self.matched] += 1
            self.right[self.matched] += token == actual
            if token != actual:
                break


class Repeats:
    """Adds to the trees of a head what the texts repeat."""

    def __init__(self, most: int) -> None:
        """`most` bounds the draft tokens that are added per row."""
        self.most, self.depth = most, DEPTH
        self.rows: dict[int, Repeated] = {}  # by the row's key

    def extend(self, tree: Tree, verified: VerifiedOnHost, growth: Growth) -> Tree:
        """The tree with repeats, as far as the growth policy finds them worth their verification."""
        samplings = verified.sampling.samplings
        self.rows = {
            key: self.rows.get(key) or Repeated(sampling.temperature)
            for key, sampling in zip(verified.keys, samplings, strict=True)
        }
        # Of sampled rows, noise is drawn for the head's levels only.
        depth = max(self.depth, growth.depth) if verified.sampling.all_greedy else growth.depth
        all_tokens, all_parents = tree.tokens.tolist(), tree.parents.tolist()
        tries, paths, chances = [], [], []
        for row, (text, repeated) in enumerate(zip(verified.texts, self.rows.values(), strict=True)):
            trie = Trie(text[-1], min(verified.remaining[row], depth), verified.states[row])
            add_tree(trie, all_tokens[row], all_parents[row])
            path = repeated.next_path(text, trie, GumbelRow(verified, row))
            tries.append(trie)
            paths.append(path)
            known = trie.follow(path)
            chances.append([repeated.rate ** (place + 1) for place in range(known, len(path))])
        count = self._worth(chances, max(map(len, tries)) - 1, growth)
        if not count:
            return tree
        for trie, path, new in zip(tries, paths, chances, strict=True):
            trie.add_path(0, path[: len(path) - len(new) + count])
        found = batch_tries(tries, max(map(len, tries)), tree.tokens.device)
        growth.joined_by(found.shape[1] - tree.shape[1])
        deepest = max(max(trie.depths) for trie in tries)
        return replace(found, deepest=deepest, levels=tree.deepest)

    def _worth(self, chances: list[list[float]], drafted: int, growth: Growth) -> int:
        """The number of further tokens of each path that are worth their verification, which all rows share."""
        count = 0
        while count < self.most:
            mean = sum(own[count] for own in chances if len(own) > count) / len(chances)
            if not mean or not growth.is_worth(drafted + count, mean):
                break
            count += 1
        return count


def add_tree(trie: Trie, tokens: list[int], parents: list[int]) -> None:
    """Add one row of a tree to an empty trie; nodes that are cut off from the root are left out."""
    nodes: list[int | None] = [0]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        above = nodes[parent] if parent >= 0 else None
        nodes.append(None if above is None else trie.add(above, token))
