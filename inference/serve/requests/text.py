"""The text of one choice as its tokens arrive: cut before a stop string, and split from tool calls."""

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from headstart.inference.core.request import Detokenize, StopStrings
from headstart.inference.show.text_stream import TextStream, TokenText

ToolCall = dict[str, Any]  # as OpenAI has it
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class WrittenText:
    """Gives text out once it is certain that no stop string begins in it. The texts joined are the whole text.

    Stop strings are searched in the text that they are given with, which may show special tokens that `text` hides.
    """

    def __init__(
        self, text: Detokenize, prompt: list[int], stop: StopStrings | None = None, include_stop: bool = False
    ) -> None:
        """`include_stop` keeps the stop string that ends the text."""
        self.stream, self.stop, self.include_stop = TextStream(text, prompt), stop, include_stop
        self.searched = None if stop is None or stop.detokenize is text else TextStream(stop.detokenize, prompt)
        self.held: list[tuple[str, TokenText]] = []  # each with the text in which stop strings are searched
        self.stopped: str | None = None  # the stop string that was found

    def add(self, token: int, depth: int | None) -> list[TokenText]:
        """Take in a token; returns what is certain now. After a stop string nothing is."""
        if self.stopped is not None:
            return []
        shown = self.stream.piece(token)
        return self._take(shown if self.searched is None else self.searched.piece(token), TokenText(shown, depth))

    def end(self) -> list[TokenText]:
        """The text that was held back, after the last token."""
        if self.stopped is not None:
            return []
        shown = self.stream.rest()
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

    A mark may be spread over any number of tokens. What looks like a call but is none stays text, mark included.
    """

    def __init__(self) -> None:
        self.held: list[TokenText] = []
        self.calls: list[ToolCall] = []

    def add(self, fresh: list[TokenText]) -> tuple[list[TokenText], list[ToolCall]]:
        """The text that is certain to be no call, and the calls that ended in it."""
        visible: list[TokenText] = []
        before = len(self.calls)
        for each in fresh:
            self.held.append(each)
            visible += self._release()
        return visible, self.calls[before:]

    def end(self) -> tuple[list[TokenText], list[ToolCall]]:
        """The rest: a call whose closing mark is missing counts if its JSON is whole."""
        text = joined(self.held)
        rest, self.held = self.held, []
        if text.startswith(OPEN) and (call := read_call(text.removeprefix(OPEN))) is not None:
            self.calls.append(call)
            return [], [call]
        return rest, []

    def _release(self) -> list[TokenText]:
        text = joined(self.held)
        start = text.find(OPEN)
        if start < 0:
            return take_characters(self.held, len(text) - num_begun(text, (OPEN,)))
        visible = take_characters(self.held, start)
        inside, mark, _ = text[start + len(OPEN) :].partition(CLOSE)
        if not mark:
            return visible
        whole = take_characters(self.held, len(OPEN) + len(inside) + len(CLOSE))
        if (call := read_call(inside)) is None:
            return visible + whole
        self.calls.append(call)
        return visible


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


def read_call(text: str) -> ToolCall | None:
    """The call in this JSON, None if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": found["name"], "arguments": written}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
