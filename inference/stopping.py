"""Where a text ends: an end token, or a string that may begin in one token and end in another."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

Detokenize = Callable[[list[int]], str]


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a text; `detokenize` turns tokens into text."""

    strings: tuple[str, ...]
    detokenize: Detokenize

    def __post_init__(self) -> None:
        if not self.strings or not all(self.strings):
            raise ValueError(f"stop strings: {list(self.strings)} given, one or more that are not empty are allowed")

    def kept(self, tokens: list[int], fresh: int) -> int | None:
        """How many of the `fresh` last tokens stand when one of them completes a stop string; None if none does."""
        before = len(tokens) - fresh
        first = self._reach(tokens[:before])
        if not self._contained(tokens[first:]):
            return None
        return next(count for count in range(1, fresh + 1) if self._contained(tokens[first : before + count]))

    def _reach(self, tokens: list[int]) -> int:
        """The first token in which a string may have begun that is not complete yet."""
        # Within the last n bytes, for n bytes of string: n tokens, or more where some have no text of their own.
        num_bytes = max(len(string.encode()) for string in self.strings)
        count = num_bytes
        while count < len(tokens) and len(self.detokenize(tokens[-count:])) < num_bytes:
            count *= 2
        return max(len(tokens) - count, 0)

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        ends = [text.find(string) for string in self.strings if string in text]
        return text[: min(ends)] if ends else text

    def _contained(self, tokens: list[int]) -> bool:
        text = self.detokenize(tokens)
        return any(string in text for string in self.strings)


def cut_at_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Up to and including the first end token."""
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens
