"""Drafting without any model: what followed the last tokens before, in the text itself or in a corpus."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from torch import Tensor, nn

from inference.cache import KVCache
from inference.drafter import Verified, VerifiedOnHost
from inference.drafters.suffix_automaton import SuffixAutomaton
from inference.drafters.trie import Child, Noise, Shape, Trie, grow, side_by_side
from inference.tree import Tree

OCCURRENCES = 64  # of an n-gram that are looked at, the latest ones
REACH = 64  # tokens that a match in a corpus may be long


@dataclass(frozen=True)
class Continuations:
    """Places of a text where the same n-gram ended before; one that runs into the end goes on from its own start."""

    text: list[int]
    places: tuple[tuple[int, int], ...]  # the place of the next token, and how far it lies from the end of the text

    @classmethod
    def of_longest(cls, text: list[int], ngram: int) -> tuple["Continuations", int]:
        """Of the longest n-gram at the text's end that occurred before, and its length; 0 is none."""
        tokens, total = numpy.asarray(text), len(text)
        ends = numpy.flatnonzero(tokens[:-1] == tokens[-1])  # of earlier occurrences
        if not len(ends):
            return cls(text, ()), 0
        length = 1
        while length < ngram:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[total - 1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        latest = ends[-OCCURRENCES:][::-1].tolist()
        return cls(text, tuple((end + 1, total - 1 - end) for end in latest)), length

    def children(self) -> list[Child["Continuations"]]:
        """The tokens that follow, the latest first."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for place, period in self.places:
            token = self.text[place]
            onward = place + 1 if place + 1 < len(self.text) else place + 1 - period
            groups.setdefault(token, []).append((onward, period))
        return [
            Child(token, float(len(places)), Continuations(self.text, tuple(places)))
            for token, places in groups.items()
        ]


class Lookup:
    """What the lookups share: no features, no cache, trees of a shape that depends on what is found."""

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    static_shapes = False
    compilable_layers: Sequence[nn.Module] = ()

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @property
    def max_nodes(self) -> int:
        return self.shape.nodes + 1

    @property
    def depth(self) -> int:
        return self.shape.depth

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Nothing to read: the texts come with every draft."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        tries = []
        for row, (text, room) in enumerate(zip(verified.texts, verified.remaining, strict=True)):
            trie = Trie(text[-1], room)
            self.look_up(text, trie, Noise(verified, row))
            tries.append(trie)
        return side_by_side(tries, verified.roots.device)

    def look_up(self, text: list[int], trie: Trie, noise: Noise) -> None:
        raise NotImplementedError


class PromptLookup(Lookup):
    """What followed the longest n-gram, up to `ngram` tokens, at the text's end earlier in prompt and output.

    Prompt lookup decoding (Saxena, 2023), where several continuations may share a tree.
    """

    def __init__(self, shape: Shape, ngram: int) -> None:
        super().__init__(shape)
        self.ngram = ngram

    def look_up(self, text: list[int], trie: Trie, noise: Noise) -> None:
        found, length = Continuations.of_longest(text, self.ngram)
        if length:
            grow(trie, found, Continuations.children, self.shape, noise)


class CorpusLookup(Lookup):
    """What followed the longest match of the text's end in a corpus (SAM decoding, arXiv 2411.10666), by frequency.

    Where an n-gram of the text itself matches as long, the text is followed instead.
    """

    def __init__(self, shape: Shape, ngram: int, automaton: SuffixAutomaton) -> None:
        super().__init__(shape)
        self.ngram, self.automaton = ngram, automaton

    def look_up(self, text: list[int], trie: Trie, noise: Noise) -> None:
        found, length = Continuations.of_longest(text, self.ngram)
        state, in_corpus = self.automaton.match(text[-REACH:])
        if in_corpus > length:
            grow(trie, state, self.automaton.children, self.shape, noise)
        elif length:
            grow(trie, found, Continuations.children, self.shape, noise)
