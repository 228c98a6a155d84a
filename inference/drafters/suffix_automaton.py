"""A suffix automaton: every substring of a corpus, what follows it and how often, in one pass over its tokens."""

from collections.abc import Iterable

from inference.drafters.trie import Child

START = 0


class SuffixAutomaton:
    """States stand for sets of substrings that end at the same places (Blumer et al., 1985).

    Built once, in time and memory linear in the corpus: about half a kilobyte for each token of it.
    """

    def __init__(self, texts: Iterable[list[int]]) -> None:
        self.following: list[dict[int, int]] = [{}]  # token -> state, by state
        self.link = [-1]  # the state of the longest suffix that ends in more places
        self.length = [0]  # of a state's longest substring
        self.count = [0]  # places where it ends
        for text in texts:
            last = START
            for token in text:
                last = self._extend(last, token)
                self.count[last] += 1
        for state in sorted(range(1, len(self.link)), key=self.length.__getitem__, reverse=True):
            self.count[self.link[state]] += self.count[state]

    def __len__(self) -> int:
        return len(self.link)

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """The state of the longest suffix of `tokens` that the corpus holds, and its length."""
        state, length = START, 0
        for token in tokens:
            while state != START and token not in self.following[state]:
                state = self.link[state]
                length = self.length[state]
            if token in self.following[state]:
                state, length = self.following[state][token], length + 1
        return state, length

    def children(self, state: int) -> list[Child[int]]:
        """What follows a state's substrings, weighted by how often."""
        return [Child(token, float(self.count[after]), after) for token, after in self.following[state].items()]

    def _new(self, length: int, following: dict[int, int], link: int) -> int:
        self.following.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(0)
        return len(self.link) - 1

    def _extend(self, last: int, token: int) -> int:
        """The state of the text so far, with another token behind it."""
        if token in self.following[last]:  # another text went the same way
            return self._exact(last, token)
        current = self._new(self.length[last] + 1, {}, START)
        state = last
        while state != -1 and token not in self.following[state]:
            self.following[state][token] = current
            state = self.link[state]
        if state != -1:
            self.link[current] = self._exact(state, token)
        return current

    def _exact(self, state: int, token: int) -> int:
        """The state of `state`'s longest substring and the token; split off where longer ones share it."""
        after = self.following[state][token]
        if self.length[after] == self.length[state] + 1:
            return after
        split = self._new(self.length[state] + 1, dict(self.following[after]), self.link[after])
        self.link[after] = split
        while state != -1 and self.following[state].get(token) == after:
            self.following[state][token] = split
            state = self.link[state]
        return split
