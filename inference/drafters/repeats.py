"""Draft tokens from earlier occurrences of the same tokens, and how they join the trees of a head.

A head copies badly: names, quotes, code and texts that loop are often outside its draft vocabulary, or longer than its
trees are deep.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from statistics import fmean

import numpy
import torch

from headstart.inference.core.constraint import GuardedState, Path, follow, only_token
from headstart.inference.core.gumbel import gumbel_noise
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import VerifiedOnHost
from headstart.inference.drafters.growth import Growth, GrowthPolicy

# Probabilities measured on SmolLM2-135M-Instruct's answers to 12 questions of Spec-Bench at temperature 0.
# P(the next token of a repeat is right), by how many tokens (at least) matched before it.
REPEAT_RATES = {1: 0.4, 2: 0.5, 3: 0.6, 4: 0.75, 8: 0.85}
# P(the last successor of a token recurs, given that the other drafts failed), by its run length (at least).
SUCCESSOR_RATES = {1: 0.25, 2: 0.45, 3: 0.5}
PRIOR_TOKENS = 4.0  # tokens of a text that weigh as much as the measured rates
LONGEST_MATCH = max(REPEAT_RATES)  # tokens at the end of the text that are searched for
REPEAT_DEPTH = 12  # draft tokens of a repeat; a longer one continues in the next step
MAX_OCCURRENCES = 64  # the latest occurrences of an n-gram that are followed


class Trie:
    """The draft tree of one row: each path once, none deeper than `max_depth`, and none that breaks the constraint."""

    def __init__(self, root: int, max_depth: int, state: GuardedState | None = None) -> None:
        self.max_depth, self.state = max_depth, state
        self.paths: list[Path] = [()]  # to each node, without the root
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.chances = [1.0]  # P(the target's path includes the node)
        self.children: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float = 1.0) -> int | None:
        """Add a child with this token unless it exists; returns its node, or None if it is refused or too deep."""
        if not self.allows(parent, token):
            return None
        node = self.children.setdefault((parent, token), len(self))
        if node == len(self):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.paths.append((*self.paths[parent], token))
            self.chances.append(chance)
        return node

    def add_tree(self, tokens: list[int], parents: list[int], chances: list[float]) -> None:
        """Add one row of a tree, without nodes that are cut off from the root; the root has no chance in the list."""
        nodes: list[int | None] = [0]
        for token, parent, chance in zip(tokens[1:], parents[1:], chances, strict=True):
            above = nodes[parent] if parent >= 0 else None
            nodes.append(None if above is None else self.add(above, token, chance))

    def cut(self, size: int) -> None:
        """Drop the nodes that were added after the first `size`."""
        for node in range(size, len(self)):
            del self.children[self.parents[node], self.tokens[node]]
        for each in (self.paths, self.tokens, self.parents, self.depths, self.chances):
            del each[size:]

    def allows(self, parent: int, token: int) -> bool:
        if self.depths[parent] == self.max_depth:
            return False
        return self.state is None or follow(self.state, self.paths[parent], token) is not None

    def add_only_tokens(self, max_nodes: int) -> None:
        """Add the tokens that the constraint forces, up to `max_nodes` nodes in all."""
        if self.state is None:
            return
        for node, path in enumerate(self.paths):  # grows in the loop, so that chains of forced tokens are followed
            if len(self) < max_nodes and self.depths[node] < self.max_depth:
                token = only_token(self.state, path)
                if token is not None:
                    self.add(node, token)


def batch_tries(tries: Sequence[Trie], max_nodes: int, device: torch.device) -> Tree:
    """The rows' tries as one tree per row; smaller ones are padded with nodes that have no parent.

    Tokens that a constraint forces are added at the end, so that nodes keep their numbers.
    """
    for trie in tries:
        trie.add_only_tokens(max_nodes)
    return Tree.of_rows([trie.tokens for trie in tries], [trie.parents for trie in tries], device)


def grow_best_first(trie: Trie, matches: "Continuations", growth: Growth, gumbel: "GumbelRow") -> None:
    """Add the most probable nodes below the root, one at a time, up to the depth, width and nodes of the growth.

    A node's probability is split among its children by how many occurrences they follow. In a sampled row, the
    target's Gumbel noise is added to the log counts, as it will be when the target chooses.
    """
    order = count()  # breaks ties in favour of the earlier node
    # Minus log probability, order, parent, token, and where the occurrences continue after the token.
    candidates: list[tuple[float, int, int, int, Continuations]] = []

    def push_children(node: int, cost: float, matches: Continuations) -> None:
        if trie.depths[node] >= min(growth.depth, trie.max_depth):
            return
        following = {token: rest for token, rest in matches.by_token().items() if trie.allows(node, token)}
        if not following:
            return
        noise = gumbel.at(trie.depths[node], [*following])
        scores = [math.log(len(rest.places)) + value for rest, value in zip(following.values(), noise, strict=True)]
        log_sum = math.log(sum(math.exp(score) for score in scores))
        best = sorted(zip(scores, following.items(), strict=True), key=lambda pair: -pair[0])[: growth.width]
        for score, (token, rest) in best:
            heapq.heappush(candidates, (cost + log_sum - score, next(order), node, token, rest))

    push_children(0, 0.0, matches)
    while candidates and len(trie) <= growth.nodes:
        cost, _, parent, token, matches = heapq.heappop(candidates)
        node = trie.add(parent, token)
        assert node is not None
        push_children(node, cost, matches)


@dataclass(frozen=True)
class GumbelRow:
    """The Gumbel noise of the target's next choices in one row of a batch; zero if the row is greedy."""

    verified: VerifiedOnHost
    row: int

    def at(self, depth: int, tokens: list[int]) -> list[float]:
        """The Gumbel noise of each token as a child of a node at this depth; the root is at depth 0."""
        sampling, row = self.verified.sampling, self.row
        if sampling.samplings[row].temperature == 0:
            return [0.0] * len(tokens)
        if sampling.gumbel_table is not None:  # drawn once per step, starting at the position after the root
            return sampling.gumbel_table.values[row, depth, tokens].tolist()
        # Drawing it on the host is faster than waiting for the device.
        position = torch.tensor([[len(self.verified.rows[row].text) + depth]])
        seed = torch.tensor([sampling.samplings[row].seed])
        return gumbel_noise(seed, position, torch.tensor(tokens))[0, 0].tolist()


@dataclass(frozen=True)
class Continuations:
    """Earlier occurrences of the n-gram at the text's end, followed in parallel.

    An occurrence that reaches the end of the text continues after its own n-gram, as if the text repeated.
    """

    text: list[int]
    places: tuple[tuple[int, int], ...]  # (index of the next token, period: how many tokens to go back from the end)

    @classmethod
    def of_longest_match(cls, text: list[int], ngram: int) -> tuple["Continuations", int]:
        """Find the longest n-gram, of up to `ngram` tokens, that ends the text and occurred before.

        Returns its earlier occurrences, the latest first, and its length; 0 without an occurrence.
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

    def by_token(self) -> dict[int, "Continuations"]:
        """The possible next tokens, the latest first, each with the occurrences that continue with it."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for place, period in self.places:
            following = place + 1 if place + 1 < len(self.text) else place + 1 - period
            groups.setdefault(self.text[place], []).append((following, period))
        return {token: Continuations(self.text, tuple(places)) for token, places in groups.items()}


class Repeated:
    """The repeats of one text so far, and how often they were right."""

    def __init__(self, temperature: float) -> None:
        """The rates are lower at higher temperatures, as sampled texts repeat less."""
        self.right = {length: PRIOR_TOKENS * rate / (1 + temperature) for length, rate in REPEAT_RATES.items()}
        self.tried = dict.fromkeys(REPEAT_RATES, PRIOR_TOKENS)
        self.path: Path = ()  # the last repeat
        self.start = 0  # its position in the text
        self.matched = 1  # its key of REPEAT_RATES

    def next_path(self, text: list[int], trie: Trie, gumbel: GumbelRow) -> Path:
        """The tokens that followed the longest match, down to the trie's maximum depth."""
        self._observe(text)
        matches, length = Continuations.of_longest_match(text, LONGEST_MATCH)
        alone, self.start = Trie(text[-1], min(trie.max_depth, REPEAT_DEPTH), trie.state), len(text)
        if length:
            self.matched = max(least for least in REPEAT_RATES if least <= length)
            grow_best_first(alone, matches, Growth.chain(REPEAT_DEPTH), gumbel)
        self.path = alone.paths[-1]
        return self.path

    @property
    def rate(self) -> float:
        """The chance that a token of the path is right, given that the earlier ones are."""
        return self.right[self.matched] / self.tried[self.matched]

    def _observe(self, text: list[int]) -> None:
        """Count the tokens of the last path that the text has confirmed or refuted since."""
        for token, actual in zip(self.path, text[self.start :], strict=False):
            self.tried[self.matched] += 1
            self.right[self.matched] += token == actual
            if token != actual:
                break


class Followers:
    """The target's latest choice after each token, in any text.

    Every verification adds to it, rejected draft tokens included (Graft, arXiv 2605.20104).
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, int]] = {}  # (choice, how often in a row)

    def learn(self, tokens: Sequence[int], choices: Sequence[int]) -> None:
        """Record the target's choice after each of these tokens."""
        for token, choice in zip(tokens, choices, strict=True):
            latest, count = self.known.get(token, (None, 0))
            self.known[token] = choice, count + 1 if choice == latest else 1

    def after(self, token: int) -> tuple[int, float] | None:
        """The token that may follow, and its chance if no other draft token is right."""
        if token not in self.known:
            return None
        choice, count = self.known[token]
        return choice, SUCCESSOR_RATES[min(count, max(SUCCESSOR_RATES))]


class Repeats:
    """Extends a head's trees by repeats of the text and by earlier successors of the tree's tokens."""

    def __init__(self, most: int) -> None:
        """At most `most` draft tokens are added per row."""
        self.most, self.depth = most, REPEAT_DEPTH
        self.rows: dict[int, Repeated] = {}  # by the row's key
        self.followers = Followers()

    def extend(self, tree: Tree, verified: VerifiedOnHost, growth: GrowthPolicy) -> Tree:
        """The tree with as many further nodes as the growth policy finds worth verifying."""
        samplings = verified.sampling.samplings
        self.rows = {
            row.key: self.rows.get(row.key) or Repeated(sampling.temperature)
            for row, sampling in zip(verified.rows, samplings, strict=True)
        }
        for row in verified.rows:
            if row.accepted is not None and row.accepted.drafted:
                self.followers.learn(row.accepted.nodes, row.accepted.choices)
        # In batches with sampled rows, noise is drawn for the head's levels only.
        depth = max(self.depth, growth.depth) if verified.sampling.all_greedy else growth.depth
        known = torch.zeros(tree.shape)[:, 1:] if tree.log_chances is None else tree.log_chances
        drawn = zip(tree.tokens.tolist(), tree.parents.tolist(), known.exp().tolist(), strict=True)
        tries, sizes = list[Trie](), list[int]()
        for number, (row, nodes_of_row) in enumerate(zip(verified.rows, drawn, strict=True)):
            trie, repeated = Trie(row.text[-1], min(row.remaining, depth), row.constraint), self.rows[row.key]
            trie.add_tree(*nodes_of_row)
            tries.append(trie)
            sizes.append(len(trie))
            path = repeated.next_path(row.text, trie, GumbelRow(verified, number))
            self._grow(trie, path, repeated.rate, samplings[number].temperature)
        added = zip_longest(*(trie.chances[size:] for trie, size in zip(tries, sizes, strict=True)), fillvalue=0.0)
        further = 0  # tokens per row that are worth verifying, the same for all rows
        for chances in added:
            if not growth.is_worth(max(sizes) - 1 + further, fmean(chances)):
                break
            further += 1
        if not further:
            return tree
        for trie, size in zip(tries, sizes, strict=True):
            trie.cut(size + further)
        extended = batch_tries(tries, max(map(len, tries)), tree.tokens.device)
        return replace(extended, deepest=max(max(trie.depths) for trie in tries), levels=tree.deepest)

    def _grow(self, trie: Trie, path: Path, rate: float, temperature: float) -> None:
        """Add the likeliest nodes, up to `most`. `rate` is the chance of each token of the repeat, `path`, given the
        earlier ones.
        """
        most, order = len(trie) + self.most, count()
        left = list(trie.chances)  # P(the target's path includes a node and none of its children)
        for parent, chance in zip(trie.parents[1:], trie.chances[1:], strict=True):
            left[parent] -= chance
        candidates: list[tuple[float, int, int, int]] = []  # minus chance, order, parent, token

        def push(node: int) -> None:
            """The candidates below a node."""
            depth = trie.depths[node]
            if follower := self.followers.after(trie.tokens[node]):
                token, share = follower
                heapq.heappush(candidates, (-left[node] * share / (1 + temperature), next(order), node, token))
            if depth < len(path) and trie.paths[node] == path[:depth]:
                heapq.heappush(candidates, (-(rate ** (depth + 1)), next(order), node, path[depth]))

        for node in range(len(trie)):
            push(node)
        while candidates and len(trie) < most:
            cost, _, parent, token = heapq.heappop(candidates)
            if trie.add(parent, token, -cost) == len(left):  # a token of the repeat may be a follower too
                left.append(-cost)
                left[parent] += cost
                push(len(left) - 1)
