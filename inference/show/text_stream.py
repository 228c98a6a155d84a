"""Turns tokens into text as they arrive."""

from dataclasses import dataclass

from headstart.inference.core.request import Detokenize
from headstart.inference.targets.tokenizer import REPLACEMENT_CHARACTER

CONTEXT = 8  # tokens decoded with the next one, whose text may depend on them


@dataclass(frozen=True)
class TokenText:
    """The text of one token and its draft depth: BONUS for a bonus token, None if nothing was drafted."""

    text: str
    depth: int | None


class TextStream:
    """The text that each further token adds. A character spelled by several tokens comes with the last of them.

    The pieces joined, with the rest at the end, are the whole text.
    """

    def __init__(self, text: Detokenize, before: list[int]) -> None:
        """`before` are the tokens in front of the first one, such as the prompt."""
        self.text = text
        self.tokens = before[-CONTEXT:]
        self.given = len(text(self.tokens))  # characters of these tokens' text that were given out

    def piece(self, token: int) -> str:
        """The text that this token makes certain."""
        self.tokens.append(token)
        whole = self.text(self.tokens)
        certain = whole.rstrip(REPLACEMENT_CHARACTER)  # the last character's bytes may not be complete
        piece = certain[self.given :]
        self.given = max(self.given, len(certain))
        if len(certain) == len(whole) and len(self.tokens) > 4 * CONTEXT:
            self.tokens = self.tokens[-CONTEXT:]
            self.given = len(self.text(self.tokens))
        return piece

    def rest(self) -> str:
        """The text that was held back, after the last token."""
        return self.text(self.tokens)[self.given :]
