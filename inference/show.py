"""Texts as terminals and pages show them: what each token adds as it arrives, and one colour per draft depth."""

from dataclasses import dataclass

from headstart.inference.core.request import Detokenize
from headstart.inference.core.verify import BONUS
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

    def __init__(self, text: Detokenize, before: list[int], is_shown: bool = False) -> None:
        """`before` are the tokens in front of the first one, such as the prompt.

        They may end inside a character. If it becomes complete, all of it comes with its last token. `is_shown`: their
        own text, without such an end, is shown in front of this one.
        """
        self.text = text
        self.tokens = before[-CONTEXT:]
        whole = text(self.tokens)
        self.given = len(whole.rstrip(REPLACEMENT_CHARACTER))  # characters of these tokens' text that were given out
        self.unsure = "" if is_shown else whole[self.given :]  # what follows them before the first token
        self.held = len(whole) - self.given - len(self.unsure)  # replacement characters that are held back

    def piece(self, token: int) -> str:
        """The text that this token makes certain."""
        self.tokens.append(token)
        whole = self.text(self.tokens)
        certain = whole.rstrip(REPLACEMENT_CHARACTER)  # the last character's bytes may not be complete
        if self.unsure and len(certain) > self.given:
            rest = whole[self.given : self.given + len(self.unsure)]
            self.given += len(rest) - len(rest.lstrip(REPLACEMENT_CHARACTER))  # these no token has completed
            self.unsure = ""
        self.held = max(len(whole) - len(certain) - len(self.unsure), 0)
        piece = certain[self.given :]
        self.given = max(self.given, len(certain))
        if len(certain) == len(whole) and len(self.tokens) > 4 * CONTEXT:
            self.tokens = self.tokens[-CONTEXT:]
            self.given = len(self.text(self.tokens))
        return piece

    def rest(self) -> str:
        """The text that was held back, after the last token."""
        return self.text(self.tokens)[self.given :].removeprefix(self.unsure)


# Stronger with depth; bonus tokens have none.
SHADES = ("#d9f0d3", "#b8e2b0", "#93d08c", "#6abb6b", "#43a24f", "#1f7d34", "#0f6126")
LIGHT_INK = 6  # from this depth on, letters are white
LEGEND = "draft tokens on green, darker with depth; bonus tokens underlined"


def shade(depth: int) -> int:
    """The number of the shade for a depth, from 1; deeper levels share the last one."""
    return min(depth, len(SHADES))


def token_style(depth: int | None) -> str:
    """How rich writes a token on a terminal; None stands for a token of a step without draft tokens."""
    if depth is None:
        return ""
    if depth == BONUS:
        return "underline"
    return f"{'white' if depth >= LIGHT_INK else 'black'} on {SHADES[shade(depth) - 1]}"
