"""Prompt lookup decoding (Saxena, 2023): drafts what followed the same tokens earlier in the text. No model runs."""

from headstart.inference.core.cache import KVCache
from headstart.inference.core.drafter import NoDrafter
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.repeats import Continuations, GumbelRow, Trie, batch_tries, grow_best_first

LONGEST_NGRAM = 3  # tokens at the end of the text that are searched for


class Lookup(NoDrafter):
    """Drafts what followed the longest n-gram that ends the text and occurred before; continuations share one tree.

    The tree of each row is built on the host, without hidden states of the target or slots in the cache.
    """

    static_shapes = False

    def __init__(self, growth: Growth, ngram: int = LONGEST_NGRAM) -> None:
        self.depth, self.max_nodes = growth.depth, growth.nodes + 1
        self.growth, self.ngram = growth, ngram

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        tries = [Trie(row.text[-1], min(row.remaining, self.depth), row.constraint) for row in verified.rows]
        for row, trie in enumerate(tries):
            self.grow(trie, verified, row)
        return batch_tries(tries, self.max_nodes, verified.roots.device)

    def grow(self, trie: Trie, verified: VerifiedOnHost, row: int) -> None:
        """Add the draft tokens of one row to its trie."""
        matches, _ = Continuations.of_longest_match(verified.rows[row].text, self.ngram)
        grow_best_first(trie, matches, self.growth, GumbelRow(verified, row))
