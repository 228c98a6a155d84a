"""Laws of streamed text: pieces joined are the whole text, and nothing of a stop string or a tool call slips out."""

import json
import random

import pytest

from headstart.inference.core.request import StopStrings
from headstart.inference.serve.requests.text import ToolCall, ToolCallParser, WrittenText
from headstart.inference.show.text_stream import TokenText

STOPS = [("ab",), ("aab", "b c"), ("abcabd",), ("🌳", "c")]


def spell(tokens: list[int]) -> str:
    """A token is a byte; bytes of an unfinished character are replacement characters."""
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("include", [False, True])
def test_text_ends_where_the_first_stop_string_begins(seed: int, include: bool) -> None:
    draw = random.Random(seed)
    stops = draw.choice(STOPS)
    text = "".join(draw.choice(["a", "b", "c", " ", "d", "🌳", "é"]) for _ in range(30))
    written = WrittenText(spell, [], StopStrings(stops, spell), include)
    found = "".join(piece.text for token in text.encode() for piece in written.add(token, None))
    found += "".join(piece.text for piece in written.end())
    expected = text
    if ends := [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]:
        end, first = min(ends)
        expected = text[:end] if include else text[: end - len(first)]
        assert written.stopped == first
    assert found == expected


def test_a_text_that_ends_in_half_a_stop_string_keeps_it() -> None:
    written = WrittenText(spell, [], StopStrings(("abc",), spell))
    assert not [piece for token in b"ab" for piece in written.add(token, 1)]
    assert written.end() == [TokenText("a", 1), TokenText("b", 1)]


CALL = {"name": "weather", "arguments": {"city": "Köln", "text": "</tool_call"}}
TEXT = f"Let me look.\n<tool_call>\n{json.dumps(CALL, ensure_ascii=False)}\n</tool_call> and <tool_call>no</tool_call>!"


@pytest.mark.parametrize("seed", range(20))
def test_tool_calls_are_found_however_their_marks_are_split(seed: int) -> None:
    draw, parser, rest, seen = random.Random(seed), ToolCallParser(["weather", "f"]), TEXT, ""
    calls: list[ToolCall] = []
    while rest:
        count = draw.randint(1, 40 if seed % 2 else 5)
        pieces, more = parser.add([TokenText(rest[:count], None)])
        rest, seen, calls = rest[count:], seen + "".join(piece.text for piece in pieces), calls + more
    pieces, more = parser.add([], is_end=True)
    seen, calls = seen + "".join(piece.text for piece in pieces), calls + more
    assert seen == "Let me look.\n and <tool_call>no</tool_call>!"
    [function] = [call["function"] for call in calls]
    assert (function["name"], json.loads(function["arguments"])) == ("weather", CALL["arguments"])


def test_a_call_that_the_end_of_the_text_cuts_off_counts_if_its_json_is_whole() -> None:
    whole, cut = ToolCallParser(["weather", "f"]), ToolCallParser(["weather", "f"])
    whole.add([TokenText('<tool_call>{"name": "f", "arguments": {}}', None)])
    assert whole.add([], is_end=True)[1][0]["function"]["arguments"] == "{}"
    cut.add([TokenText('<tool_call>{"name": "f", "argu', None)])
    assert ("".join(piece.text for piece in cut.add([], is_end=True)[0]), cut.calls) == (
        '<tool_call>{"name": "f", "argu',
        [],
    )
