"""Repeats of earlier text beside a head's trees: what followed the same words before is likely to follow them again.

A head knows what a text means, but copies badly: names, quotes, code and texts that loop are often outside its draft
vocabulary, or longer than its trees are deep. Looking them up is free (prompt lookup, Saxena 2023). The path that the
text's longest match suggests shares the nodes that the head has drafted, too, so only what the head did not think of
is verified besides.
"""

from dataclasses import replace

from headstart.inference.core.drafter import VerifiedOnHost
from headstart.inference.core.tree import Tree
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.lookup import Continuations
from headstart.inference.drafters.trie import GumbelRow, TreeLimits, Trie, batch_tries, grow_best_first

# How often the next token of a repeat is right, by how many tokens (at least) of the text's end have repeated before
# it: measured on SmolLM2-135M-Instruct's answers to 12 questions of Spec-Bench at temperature 0.
RATES = {1: 0.4, 2: 0.5, 3: 0.6, 4: 0.75, 8: 0.85}
PRIOR = 4.0  # tokens of a text that outweigh these
LONGEST = max(RATES)  # tokens that are searched for
DEPTH = 12  # of a repeat; a longer one goes on in the next step


class Repeated:
    """What one text has repeated so far."""

    def __init__(self, temperature: float) -> None:
        """Sampled texts repeat less."""
        self.right = {length: PRIOR * rate / (1 + temperature) for length, rate in RATES.items()}
        self.tried = dict.fromkeys(RATES, PRIOR)
        self.path: list[int] = []  # the last repeat
        self.start = 0  # where it would have begun in the text
        self.matched = 1  # the key of RATES that it had

    def next_path(self, text: list[int], trie: Trie, gumbel: GumbelRow) -> list[int]:
        """The tokens that may come next, as deep as the trie may become."""
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
        """How likely a token of the path is, if those before it are right."""
        return self.right[self.matched] / self.tried[self.matched]

    def _observe(self, text: list[int]) -> None:
        """Compare the last path to what the text became, as far as that is known."""
        for token, actual in zip(self.path, text[self.start :], strict=False):
            self.tried[self.matched] += 1
            self.right[self.matched] += token == actual
            if token != actual:
                break


class Repeats:
    """Adds to the trees of a head what the texts repeat."""

    def __init__(self, most: int) -> None:
        """`most` draft tokens per row are added at most."""
        self.most, self.depth = most, DEPTH
        self.rows: dict[int, Repeated] = {}  # by the row's key

    def beside(self, tree: Tree, verified: VerifiedOnHost, growth: Growth) -> Tree:
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
        """How many further tokens of the paths are worth their verification: those of all rows cost it together."""
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
