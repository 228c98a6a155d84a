"""Texts as terminals and pages show them: the text that each token adds as it arrives."""

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

    The pieces joined, with the rest at the end, are the full text.
    """

    def __init__(self, text: Detokenize, before: list[int], is_shown: bool = False) -> None:
        """`before` are the tokens before the first one, such as the prompt.

        They may end inside a character. If it becomes complete, all of it comes with its last token. `is_shown`: their
        own text, without such an end, is shown before this one.
        """
        self.text = text
        self.tokens = before[-CONTEXT:]
        full = text(self.tokens)
        self.given = len(full.rstrip(REPLACEMENT_CHARACTER))  # characters of these tokens' text that were given out
        self.unsure = "" if is_shown else full[self.given :]  # the characters between them and the first token's
        self.held = len(full) - self.given - len(self.unsure)  # replacement characters that are held back

    def piece(self, token: int) -> str:
        """The text that this token makes certain."""
        self.tokens.append(token)
        full = self.text(self.tokens)
        certain = full.rstrip(REPLACEMENT_CHARACTER)  # the last character's bytes may not be complete
        if self.unsure and len(certain) > self.given:
            rest = full[self.given : self.given + len(self.unsure)]
            self.given += len(rest) - len(rest.lstrip(REPLACEMENT_CHARACTER))  # no token has completed these
            self.unsure = ""
        self.held = max(len(full) - len(certain) - len(self.unsure), 0)
        piece = certain[self.given :]
        self.given = max(self.given, len(certain))
        if len(certain) == len(full) and len(self.tokens) > 4 * CONTEXT:
            self.tokens = self.tokens[-CONTEXT:]
            self.given = len(self.text(self.tokens))
        return piece

    def rest(self) -> str:
        """The text that was held back, after the last token."""
        return self.text(self.tokens)[self.given :].removeprefix(self.unsure)
