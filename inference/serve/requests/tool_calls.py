"""Finds tool calls in a text as Hermes and Qwen models write them: JSON between <tool_call> and </tool_call>."""

import json
from dataclasses import dataclass
from uuid import uuid4

from headstart.inference.serve.requests.written import Piece

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON
    id: str

    def as_json(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallParser:
    """Splits a stream of text into visible text and calls. A mark may be spread over any number of pieces.

    What looks like a call but is none stays text, mark included.
    """

    def __init__(self) -> None:
        self.held: list[Piece] = []
        self.calls: list[ToolCall] = []

    def add(self, pieces: list[Piece]) -> tuple[list[Piece], list[ToolCall]]:
        """The text that is certain to be no call, and the calls that ended in these pieces."""
        visible: list[Piece] = []
        before = len(self.calls)
        for piece in pieces:
            self.held.append(piece)
            visible += self._release()
        return visible, self.calls[before:]

    def end(self) -> tuple[list[Piece], list[ToolCall]]:
        """The rest: a call whose closing mark is missing counts if its JSON is whole."""
        text, before = self._text(), len(self.calls)
        if text.startswith(OPEN) and (call := read_call(text.removeprefix(OPEN))) is not None:
            self.calls.append(call)
            self.held = []
        rest, self.held = self.held, []
        return rest, self.calls[before:]

    def _text(self) -> str:
        return "".join(piece.text for piece in self.held)

    def _release(self) -> list[Piece]:
        text = self._text()
        start = text.find(OPEN)
        if start < 0:
            return self._give(len(text) - beginning_of(OPEN, text))
        visible = self._give(start)
        inside = text[start:]
        end = inside.find(CLOSE)
        if end < 0:
            return visible
        call = read_call(inside[len(OPEN) : end])
        whole = self._give(end + len(CLOSE))
        if call is None:
            return visible + whole
        self.calls.append(call)
        return visible

    def _give(self, count: int) -> list[Piece]:
        """Take this many characters out of what is held."""
        found: list[Piece] = []
        while count > 0:
            piece = self.held.pop(0)
            found.append(Piece(piece.text[:count], piece.depth))
            if len(piece.text) > count:
                self.held.insert(0, Piece(piece.text[count:], piece.depth))
            count -= len(piece.text)
        return found


def beginning_of(mark: str, text: str) -> int:
    """How many of the text's last characters may begin the mark."""
    counts = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((count for count in counts if mark.startswith(text[-count:])), 0)


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
    return ToolCall(found["name"], written, f"call_{uuid4().hex[:24]}")
