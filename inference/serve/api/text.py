"""The text of one choice as its tokens arrive: cut before a stop string, and separated from tool calls."""

import json
from collections.abc import Collection, Sequence
from typing import Any
from uuid import uuid4

from headstart.inference.core.request import Detokenize, StopStrings
from headstart.inference.show import TextStream, TokenText
from headstart.inference.targets.tokenizer import REPLACEMENT_CHARACTER

ToolCall = dict[str, Any]  # as OpenAI has it
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class WrittenText:
    """Returns text as soon as no stop string can begin in it. The pieces add up to the complete text.

    Stop strings are searched in their own detokenized text, which may show special tokens that `text` hides.
    """

    def __init__(
        self,
        text: Detokenize,
        prompt: list[int],
        stop: StopStrings | None = None,
        include_stop: bool = False,
        echo: str | None = None,
    ) -> None:
        """`include_stop` keeps the stop string that ends the text. `echo`: the prompt's text, if it comes first."""
        self.stream, self.stop, self.include_stop = TextStream(text, prompt, echo is not None), stop, include_stop
        # A character that the prompt leaves incomplete comes with the token that completes it.
        self.echo = (echo or "").rstrip(REPLACEMENT_CHARACTER)
        self.count = len(self.echo)  # characters so far, including held ones
        self.searched = None if stop is None or stop.detokenize is text else TextStream(stop.detokenize, prompt)
        self.held: list[tuple[str, TokenText]] = []  # each with the text in which stop strings are searched
        self.stopped: str | None = None  # the stop string that ended the text

    def add(self, token: int, depth: int | None) -> list[TokenText]:
        """Take in a token; returns the text that is certain now, which is none after a stop string."""
        if self.stopped is not None:
            return []
        return self._take(
            self.stream.piece(token), None if self.searched is None else self.searched.piece(token), depth
        )

    def offset(self, token: int) -> int:
        """Where the text of this next token begins; for a part of a character, where the character begins."""
        is_part = self.stream.text([token]).startswith(REPLACEMENT_CHARACTER)
        return self.count + (0 if is_part else self.stream.held)

    def end(self) -> list[TokenText]:
        """The text that was held back, after the last token."""
        if self.stopped is not None:
            return []
        certain = self._take(self.stream.rest(), None if self.searched is None else self.searched.rest(), None)
        rest, self.held = self.held, []
        return certain if self.stopped is not None else certain + [shown for _, shown in rest if shown.text]

    def _take(self, piece: str, searched: str | None, depth: int | None) -> list[TokenText]:
        """Take in a token's text, and the text in which stop strings are searched if that is another one."""
        self.count += len(piece)
        if piece or searched:
            self.held.append((piece if searched is None else searched, TokenText(piece, depth)))
        text = "".join(searched for searched, _ in self.held)
        if self.stop is not None and (match := self.stop.first_in(text)) is not None:
            start, self.stopped = match
            return self._until(start, start + len(self.stopped) * self.include_stop)
        certain = len(text) - num_begun(text, self.stop.strings if self.stop is not None else ())
        released = []
        while self.held and len(self.held[0][0]) <= certain:
            searched, shown = self.held.pop(0)
            certain -= len(searched)
            released.append(shown)
        return [each for each in released if each.text]

    def _until(self, start: int, end: int) -> list[TokenText]:
        """The held text up to `end` in the searched text: as shown before `start`, as searched after it."""
        released, first = [], 0
        for searched, shown in self.held:
            before = max(start - first, 0)
            text = shown.text if before >= len(searched) else shown.text[:before]
            released.append(TokenText(text + searched[before : max(end - first, 0)], shown.depth))
            first += len(searched)
        return [each for each in released if each.text]


class ToolCallParser:
    """Separates text from tool calls: JSON between <tool_call> and </tool_call>, as Hermes and Qwen models write it.

    A mark may be spread over any number of tokens, and the strings of a call may contain marks. Anything that does not
    parse as a call stays text, including its mark.
    """

    def __init__(self, names: Collection[str], only_one: bool = False) -> None:
        """`names`: the tools' names. With `only_one`, the text ends after the first call."""
        self.names, self.only_one = names, only_one
        self.held: list[TokenText] = []
        self.calls: list[ToolCall] = []
        self.in_text = False  # since the beginning or the last call
        self.blank: list[TokenText] = []  # white space, which is shown only if text follows

    @property
    def is_done(self) -> bool:
        """Whether the text is over because it has its only call."""
        return self.only_one and bool(self.calls)

    def add(self, fresh: list[TokenText], is_end: bool = False) -> list[TokenText | ToolCall]:
        """The text that cannot be part of a call, and the complete calls, in their order.

        At the end nothing is held back: a call without its closing mark counts if its JSON is complete.
        """
        parts: list[TokenText | ToolCall] = []
        self.held += fresh
        while not self.is_done:
            text = joined(self.held)
            start = text.find(OPEN)
            if start < 0:
                begun = 0 if is_end else num_begun(text, (OPEN,))
                parts += self._shown(take_characters(self.held, len(text) - begun))
                break
            parts += self._shown(take_characters(self.held, start))
            first = first_call(text[start:], self.names, is_end)
            if first is None:
                break
            call, count = first
            taken = take_characters(self.held, count)
            if call is None:
                parts += self._shown(taken)
            else:
                parts.append(call)
                self.calls.append(call)
                self.blank, self.in_text = [], False
        if is_end and not self.calls:
            parts += self.blank
        return parts

    def _shown(self, fresh: list[TokenText]) -> list[TokenText]:
        self.in_text = self.in_text or bool(joined(fresh).strip())
        shown, self.blank = self.blank + fresh, []
        if not self.in_text:
            shown, self.blank = [], shown
        return shown


def joined(held: Sequence[TokenText]) -> str:
    return "".join(each.text for each in held)


def take_characters(held: list[TokenText], count: int) -> list[TokenText]:
    """Remove the first `count` characters from `held`, and return them; a token's text may be split in two."""
    taken: list[TokenText] = []
    while count > 0:
        first = held.pop(0)
        taken.append(TokenText(first.text[:count], first.depth))
        if len(first.text) > count:
            held.insert(0, TokenText(first.text[count:], first.depth))
        count -= len(first.text)
    return taken


def num_begun(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may begin one of the marks."""
    longest = max(map(len, marks), default=1) - 1
    counts = range(min(longest, len(text)), 0, -1)
    return next((count for count in counts if any(mark.startswith(text[-count:]) for mark in marks)), 0)


def first_call(text: str, names: Collection[str], is_end: bool) -> tuple[ToolCall | None, int] | None:
    """The call at the start of a text, and its number of characters; None if that depends on text still to come.

    The call is None if it does not parse; its mark is then text.
    """
    no_call = None, len(OPEN)
    inside = text.removeprefix(OPEN).lstrip()
    if inside and not inside.startswith("{"):
        return no_call
    try:
        value, end = JSON.raw_decode(inside)
    except json.JSONDecodeError as error:
        # An unclosed string may contain the mark; elsewhere the mark shows that the JSON is broken, not incomplete.
        is_incomplete = error.msg.startswith("Unterminated string") or CLOSE not in inside[error.pos :]
        return None if is_incomplete and not is_end else no_call
    except (ValueError, RecursionError):
        return no_call
    after = inside[end:].lstrip()
    if not after.startswith(CLOSE):
        if not CLOSE.startswith(after):
            return no_call
        if not is_end:
            return None
    return read_call(value, names), len(text) - len(after) + min(len(after), len(CLOSE))


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


JSON = json.JSONDecoder(parse_constant=refuse_constant)


def read_call(value: dict[str, Any], names: Collection[str]) -> ToolCall | None:
    """The tool call in this JSON; None if it does not call one of the tools."""
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or name not in names:
        return None
    arguments = {} if arguments in (None, "") else arguments
    try:
        read = JSON.decode(arguments) if isinstance(arguments, str) else arguments
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # not JSON, a number out of floating point's range, or nesting too deep
        return None
    if not isinstance(read, dict):
        return None
    # JSON may name halves of surrogate pairs by escapes; text can hold them only as such.
    function = {"name": name, "arguments": text.encode(errors="backslashreplace").decode()}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
