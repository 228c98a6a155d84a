"""A suffix automaton: an index of every substring of a corpus, and of the tokens that follow it."""

from collections.abc import Iterable


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
