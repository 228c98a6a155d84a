"""The text of one choice as its tokens arrive: cut before a stop string, and split from tool calls."""

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
    """Gives text out once it is certain that no stop string begins in it. The texts joined are the whole text.

    Stop strings are searched in the text that they are given with, which may show special tokens that `text` hides.
    """

    def __init__(
        self,
        text: Detokenize,
        prompt: list[int],
        stop: StopStrings | None = None,
        include_stop: bool = False,
        echo: bool = False,
    ) -> None:
        """`include_stop` keeps the stop string that ends the text. With `echo` the prompt's text comes first."""
        self.stream, self.stop, self.include_stop = TextStream(text, prompt, echo), stop, include_stop
        # A character that the prompt begins comes with the token that completes it.
        self.echo = text(prompt).rstrip(REPLACEMENT_CHARACTER) if echo else ""
        self.count = len(self.echo)  # characters so far, those that are held included
        self.searched = None if stop is None or stop.detokenize is text else TextStream(stop.detokenize, prompt)
        self.held: list[tuple[str, TokenText]] = []  # each with the text in which stop strings are searched
        self.stopped: str | None = None  # the stop string that was found

    def add(self, token: int, depth: int | None) -> list[TokenText]:
        """Take in a token; returns what is certain now. After a stop string nothing is."""
        if self.stopped is not None:
            return []
        shown = self.stream.piece(token)
        self.count += len(shown)
        return self._take(shown if self.searched is None else self.searched.piece(token), TokenText(shown, depth))

    def offset(self, token: int) -> int:
        """Where the text of a token that comes next will begin; of a part of a character, where that one begins."""
        is_part = self.stream.text([token]).startswith(REPLACEMENT_CHARACTER)
        return self.count + (0 if is_part else self.stream.held)

    def end(self) -> list[TokenText]:
        """The text that was held back, after the last token."""
        if self.stopped is not None:
            return []
        shown = self.stream.rest()
        self.count += len(shown)
        found = self._take(shown if self.searched is None else self.searched.rest(), TokenText(shown, None))
        rest, self.held = self.held, []
        return found if self.stopped is not None else found + [shown for _, shown in rest if shown.text]

    def _take(self, searched: str, shown: TokenText) -> list[TokenText]:
        if searched or shown.text:
            self.held.append((searched, shown))
        text = "".join(searched for searched, _ in self.held)
        if self.stop is not None and (found := self.stop.first_in(text)) is not None:
            place, self.stopped = found
            return self._until(place, place + len(self.stopped) * self.include_stop)
        certain = len(text) - num_begun(text, self.stop.strings if self.stop is not None else ())
        given = []
        while self.held and len(self.held[0][0]) <= certain:
            searched, shown = self.held.pop(0)
            certain -= len(searched)
            given.append(shown)
        return [each for each in given if each.text]

    def _until(self, place: int, end: int) -> list[TokenText]:
        """What is held: as it is shown before this place of the searched text, as it is searched from there on."""
        given, first = [], 0
        for searched, shown in self.held:
            before = max(place - first, 0)
            text = shown.text if before >= len(searched) else shown.text[:before]
            given.append(TokenText(text + searched[before : max(end - first, 0)], shown.depth))
            first += len(searched)
        return [each for each in given if each.text]


class ToolCallParser:
    """Splits text from the tool calls in it, JSON between <tool_call> and </tool_call> as Hermes and Qwen models write.

    A mark may be spread over any number of tokens, and the strings of a call may hold marks. What looks like a call but
    is none stays text, mark included.
    """

    def __init__(self, names: Collection[str], only_one: bool = False) -> None:
        """`names` are those of the tools. With `only_one`, the text ends after the first call."""
        self.names, self.only_one = names, only_one
        self.held: list[TokenText] = []
        self.calls: list[ToolCall] = []
        self.in_text = False  # since the beginning or the last call
        self.blank: list[TokenText] = []  # white space before that; only text after it shows it

    @property
    def is_done(self) -> bool:
        """Whether the text is over, as it has its only call."""
        return self.only_one and bool(self.calls)

    def add(self, fresh: list[TokenText], is_end: bool = False) -> list[TokenText | ToolCall]:
        """The text that is certain to be no call, and the calls that ended, in their order.

        At the end nothing is held back: a call whose closing mark is missing counts if its JSON is whole.
        """
        found: list[TokenText | ToolCall] = []
        self.held += fresh
        while not self.is_done:
            text = joined(self.held)
            start = text.find(OPEN)
            if start < 0:
                begun = 0 if is_end else num_begun(text, (OPEN,))
                found += self._shown(take_characters(self.held, len(text) - begun))
                break
            found += self._shown(take_characters(self.held, start))
            first = first_call(text[start:], self.names, is_end)
            if first is None:
                break
            call, count = first
            taken = take_characters(self.held, count)
            if call is None:
                found += self._shown(taken)
            else:
                found.append(call)
                self.calls.append(call)
                self.blank, self.in_text = [], False
        if is_end and not self.calls:
            found += self.blank
        return found

    def _shown(self, fresh: list[TokenText]) -> list[TokenText]:
        self.in_text = self.in_text or bool(joined(fresh).strip())
        found, self.blank = self.blank + fresh, []
        if not self.in_text:
            found, self.blank = [], found
        return found


def joined(held: Sequence[TokenText]) -> str:
    return "".join(each.text for each in held)


def take_characters(held: list[TokenText], count: int) -> list[TokenText]:
    """Take the first `count` characters out of what is held; a token's text may be cut in two."""
    found: list[TokenText] = []
    while count > 0:
        first = held.pop(0)
        found.append(TokenText(first.text[:count], first.depth))
        if len(first.text) > count:
            held.insert(0, TokenText(first.text[count:], first.depth))
        count -= len(first.text)
    return found


def num_begun(text: str, marks: Sequence[str]) -> int:
    """The number of last characters of a text that may begin one of the marks."""
    longest = max(map(len, marks), default=1) - 1
    counts = range(min(longest, len(text)), 0, -1)
    return next((count for count in counts if any(mark.startswith(text[-count:]) for mark in marks)), 0)


def first_call(text: str, names: Collection[str], is_end: bool) -> tuple[ToolCall | None, int] | None:
    """The call that begins a text, and its number of characters; None if that depends on text that is to come.

    In place of a call that is none stands None, with the characters that are certain to be text.
    """
    no_call = None, len(OPEN)
    inside = text.removeprefix(OPEN).lstrip()
    if inside and not inside.startswith("{"):
        return no_call
    try:
        found, end = JSON.raw_decode(inside)
    except json.JSONDecodeError as error:
        # A string that is not closed may hold any mark; elsewhere a mark means that the JSON does not go on.
        may_go_on = error.msg.startswith("Unterminated string") or CLOSE not in inside[error.pos :]
        return None if may_go_on and not is_end else no_call
    except (ValueError, RecursionError):
        return no_call
    after = inside[end:].lstrip()
    if not after.startswith(CLOSE):
        if not CLOSE.startswith(after):
            return no_call
        if not is_end:
            return None
    return read_call(found, names), len(text) - len(after) + min(len(after), len(CLOSE))


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


JSON = json.JSONDecoder(parse_constant=refuse_constant)


def read_call(found: dict[str, Any], names: Collection[str]) -> ToolCall | None:
    """The call of a tool in this JSON, None if it is none."""
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    if not isinstance(name, str) or name not in names:
        return None
    given = {} if arguments in (None, "") else arguments
    try:
        written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # a number beyond those of floating point, or too deep
        return None
    # JSON may name halves of surrogate pairs by escapes; no text can hold them in another form.
    function = {"name": name, "arguments": written.encode(errors="backslashreplace").decode()}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
