"""Lookup drafters: they draft what followed the same n-gram earlier in the text, or in a corpus. No model runs.

PromptLookup is prompt lookup decoding (Saxena, 2023); CorpusLookup is SAM decoding (arXiv 2411.10666).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from torch import Tensor, nn

from headstart.inference.core.cache import KVCache
from headstart.inference.core.drafter import Verified, VerifiedOnHost
from headstart.inference.core.tree import Tree
from headstart.inference.drafters.suffix_automaton import SuffixAutomaton
from headstart.inference.drafters.trie import Child, GumbelRow, TreeLimits, Trie, batch_tries, grow_best_first

NGRAM = 3  # tokens: the longest n-gram that is searched for in the text
MAX_OCCURRENCES = 64  # of an n-gram, the latest ones
MAX_MATCH = 64  # tokens at the end of the text that are searched for in a corpus


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


class Lookup:
    """Base of the lookup drafters: no features of the target, no KV cache, trees whose shape depends on the matches."""

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    static_shapes = False
    compilable_layers: Sequence[nn.Module] = ()

    def __init__(self, limits: TreeLimits) -> None:
        self.limits = limits

    @property
    def max_nodes(self) -> int:
        return self.limits.nodes + 1

    @property
    def depth(self) -> int:
        return self.limits.depth

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Do nothing: `draft` is given the whole text."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        tries = []
        rows = zip(verified.texts, verified.remaining, verified.states, strict=True)
        for row, (text, remaining, state) in enumerate(rows):
            trie = Trie(text[-1], min(remaining, self.depth), state)
            self.look_up(text, trie, GumbelRow(verified, row))
            tries.append(trie)
        return batch_tries(tries, self.max_nodes, verified.roots.device)

    def look_up(self, text: list[int], trie: Trie, gumbel: GumbelRow) -> None:
        """Add draft tokens for this text to the trie."""
        raise NotImplementedError


class PromptLookup(Lookup):
    """Prompt lookup decoding (Saxena, 2023): drafts what followed the text's last n-gram earlier in prompt or output.

    It uses the longest n-gram of up to `ngram` tokens that occurred before. Different continuations share one tree.
    """

    def __init__(self, limits: TreeLimits, ngram: int = NGRAM) -> None:
        super().__init__(limits)
        self.ngram = ngram

    def look_up(self, text: list[int], trie: Trie, gumbel: GumbelRow) -> None:
        matches, length = Continuations.of_longest_match(text, self.ngram)
        if length:
            grow_best_first(trie, matches, Continuations.children, self.limits, gumbel)


class CorpusLookup(Lookup):
    """SAM decoding (arXiv 2411.10666): drafts what most often followed the end of the text in a corpus.

    It finds the longest end of the text that occurs in the corpus. If the text itself holds an earlier match of at
    least that length, it drafts from the text, as prompt lookup does.
    """

    def __init__(self, limits: TreeLimits, automaton: SuffixAutomaton, ngram: int = NGRAM) -> None:
        super().__init__(limits)
        self.ngram, self.automaton = ngram, automaton

    def look_up(self, text: list[int], trie: Trie, gumbel: GumbelRow) -> None:
        matches, length = Continuations.of_longest_match(text, self.ngram)
        state, corpus_length = self.automaton.match(text[-MAX_MATCH:])
        if corpus_length > length:
            grow_best_first(trie, state, self.automaton.children, self.limits, gumbel)
        elif length:
            grow_best_first(trie, matches, Continuations.children, self.limits, gumbel)
