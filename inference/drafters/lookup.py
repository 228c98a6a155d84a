"""Drafts what followed the same tokens before, in the text itself or in a corpus. No model runs.

Lookup is a drafter: prompt lookup decoding (Saxena, 2023) or, with a corpus, SAM decoding (arXiv 2411.10666). Repeats
adds to a head's trees what the text repeats. A head copies badly: names, quotes, code and texts that loop are often
outside its draft vocabulary, or longer than its trees are deep.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.suffix_automaton import SuffixAutomaton

NGRAM = 3  # tokens: the longest n-gram that is searched for in the text
MAX_OCCURRENCES = 64  # occurrences of an n-gram that count, the latest ones
MAX_MATCH = 64  # tokens at the end of the text that are searched for in a corpus
# How often the next token of a repeat is right, by how many tokens (at least) of the text's end have repeated before
# it: measured on SmolLM2-135M-Instruct's answers to 12 questions of Spec-Bench at temperature 0.
RATES = {1: 0.4, 2: 0.5, 3: 0.6, 4: 0.75, 8: 0.85}
PRIOR = 4.0  # tokens of a text that weigh as much as these rates
LONGEST = max(RATES)  # tokens at the end of the text that are searched for to find a repeat
DEPTH = 12  # draft tokens of a repeat; a longer one continues in the next step
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

    def follow(self, tokens: Sequence[int]) -> int:
        """The length of the longest path from the root that begins these tokens."""
        node, count = 0, 0
        while count < len(tokens) and (node, tokens[count]) in self.children:
            node, count = self.children[node, tokens[count]], count + 1
        return count

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
