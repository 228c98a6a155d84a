"""Drafts what followed the same tokens before, in the text itself or in a corpus. No model runs.

This is prompt lookup decoding (Saxena, 2023) or, with a corpus, SAM decoding (arXiv 2411.10666).
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import numpy
import torch
from torch import Tensor, nn

from headstart.inference.core.cache import KVCache
from headstart.inference.core.cache_memory import Shape
from headstart.inference.core.constraint import ConstraintState, Path, follow, only_token
from headstart.inference.core.gumbel import gumbel_noise
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified, VerifiedOnHost

NGRAM = 3  # tokens: the longest n-gram that is searched for in the text
MAX_OCCURRENCES = 64  # occurrences of an n-gram that count, the latest ones
MAX_MATCH = 64  # tokens at the end of the text that are searched for in a corpus
State = TypeVar("State")


class Trie:
    """The draft tree of one row: adding a path twice adds no node, and no node is deeper than `max_depth`.

    It holds no node that the row's constraint refuses.
    """

    def __init__(self, root: int, max_depth: int, state: ConstraintState | None = None) -> None:
        self.max_depth, self.state = max_depth, state
        self.paths: list[Path] = [()]  # to each node, without the root
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.children: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int | None:
        """Add a child with this token unless it exists; returns its node, or None if it is refused or too deep."""
        if not self.allows(parent, token):
            return None
        node = self.children.setdefault((parent, token), len(self))
        if node == len(self):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.paths.append((*self.paths[parent], token))
        return node

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of the longest path from the root that begins these tokens, the root included."""
        nodes = [0]
        for token in tokens:
            if (nodes[-1], token) not in self.children:
                break
            nodes.append(self.children[nodes[-1], token])
        return nodes

    def cut(self, size: int) -> None:
        """Drop the nodes that were added after the first `size`."""
        for node in range(size, len(self)):
            del self.children[self.parents[node], self.tokens[node]]
        for each in (self.paths, self.tokens, self.parents, self.depths):
            del each[size:]

    def allows(self, parent: int, token: int) -> bool:
        if self.depths[parent] == self.max_depth:
            return False
        return self.state is None or follow(self.state, self.paths[parent], token) is not None

    def add_only_tokens(self, max_nodes: int) -> None:
        """Add the tokens to which the constraint leaves no alternative, up to `max_nodes` nodes in all."""
        if self.state is None:
            return
        for node, path in enumerate(self.paths):  # grows in the loop, so that chains of forced tokens are followed
            if len(self) < max_nodes and self.depths[node] < self.max_depth:
                token = only_token(self.state, path)
                if token is not None:
                    self.add(node, token)

    def add_path(self, parent: int, tokens: Sequence[int]) -> list[int]:
        """Add a path below a node, down to the maximum depth; returns its nodes."""
        path: list[int] = []
        for token in tokens:
            node = self.add(path[-1] if path else parent, token)
            if node is None:
                break
            path.append(node)
        return path


def batch_tries(tries: Sequence[Trie], max_nodes: int, device: torch.device) -> Tree:
    """The rows' tries as one tree per row; smaller ones are padded with nodes that have no parent.

    Tokens that a constraint forces are added at the end, so that nodes keep their numbers.
    """
    for trie in tries:
        trie.add_only_tokens(max_nodes)
    longest = max(map(len, tries))
    tokens = [trie.tokens + [0] * (longest - len(trie)) for trie in tries]
    parents = [trie.parents + [-1] * (longest - len(trie)) for trie in tries]
    both = torch.tensor([tokens, parents]).to(device, non_blocking=True)
    return Tree(both[0], both[1])


class TrieDrafter:
    """A drafter that builds the tree of each row on the host; it reads no features and keeps nothing in the cache."""

    taps: tuple[int, ...] = ()
    cache_shape: Shape | None = None
    static_shapes = False
    compilable_layers: Sequence[nn.Module] = ()

    def __init__(self, depth: int, max_nodes: int) -> None:
        self.depth, self.max_nodes = depth, max_nodes

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Do nothing: `draft` is given the whole text."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        rows = zip(verified.texts, verified.remaining, verified.states, strict=True)
        tries = [Trie(text[-1], min(remaining, self.depth), state) for text, remaining, state in rows]
        for row, trie in enumerate(tries):
            self.grow(trie, verified, row)
        return batch_tries(tries, self.max_nodes, verified.roots.device)

    def grow(self, trie: Trie, verified: VerifiedOnHost, row: int) -> None:
        """Add the draft tokens of one row to its trie."""
        raise NotImplementedError


@dataclass(frozen=True)
class Child(Generic[State]):
    """A token that may come next."""

    token: int
    weight: float  # its probability relative to its siblings
    state: State  # from which the lookup continues after this token


Expand = Callable[[State], Sequence[Child[State]]]


@dataclass(frozen=True)
class TreeLimits:
    """The largest draft tree that a lookup may build."""

    depth: int
    width: int  # children per node
    nodes: int  # draft tokens, so the root does not count


def grow_best_first(trie: Trie, start: State, expand: Expand[State], limits: TreeLimits, gumbel: "GumbelRow") -> None:
    """Add the most probable nodes below the root, one at a time, until the limits are reached.

    `expand` gives a state's possible next tokens. A node's probability is split among its children by weight. In a
    sampled row, the target's Gumbel noise is added to the log weights, as it will be when the target chooses.
    """
    order = count()  # breaks ties in favour of the node that was found first
    candidates: list[tuple[float, int, int, int, State]] = []  # minus log probability, order, parent, token, state

    def push_children(node: int, cost: float, state: State) -> None:
        if trie.depths[node] >= min(limits.depth, trie.max_depth):
            return
        children = [child for child in expand(state) if trie.allows(node, child.token)]
        if not children:
            return
        gumbel_values = gumbel.at(trie.depths[node], [child.token for child in children])
        scores = [math.log(child.weight) + value for child, value in zip(children, gumbel_values, strict=True)]
        log_sum = math.log(sum(math.exp(score) for score in scores))
        best = sorted(zip(scores, children, strict=True), key=lambda pair: -pair[0])[: limits.width]
        for score, child in best:
            heapq.heappush(candidates, (cost + log_sum - score, next(order), node, child.token, child.state))

    push_children(0, 0.0, start)
    while candidates and len(trie) <= limits.nodes:
        cost, _, parent, token, state = heapq.heappop(candidates)
        node = trie.add(parent, token)
        assert node is not None
        push_children(node, cost, state)


@dataclass(frozen=True)
class GumbelRow:
    """The Gumbel noise with which the target will choose in one row of a batch; zero if the row is greedy."""

    verified: VerifiedOnHost
    row: int

    def at(self, depth: int, tokens: list[int]) -> list[float]:
        """The Gumbel noise of each token as a child of a node at this depth; the root is at depth 0."""
        sampling, row = self.verified.sampling, self.row
        if sampling.samplings[row].temperature == 0:
            return [0.0] * len(tokens)
        if sampling.gumbel_table is not None:  # drawn once per step, from the position after the root on
            prepared: list[float] = sampling.gumbel_table.values[row, depth, tokens].tolist()
            return prepared
        # The host draws it faster than it would wait for a device.
        position = torch.tensor([[len(self.verified.texts[row]) + depth]])
        seed = torch.tensor([sampling.samplings[row].seed])
        drawn: list[float] = gumbel_noise(seed, position, torch.tensor(tokens))[0, 0].tolist()
        return drawn


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
                grow_best_first(trie, state, self._corpus_children, self.limits, gumbel)
                return
        if length:
            grow_best_first(trie, matches, Continuations.children, self.limits, gumbel)

    def _corpus_children(self, state: int) -> list[Child[int]]:
        """The tokens that follow a state's substrings in the corpus, weighted by frequency."""
        assert self.automaton is not None
        return [Child(token, float(count), after) for token, count, after in self.automaton.followed_by(state)]
