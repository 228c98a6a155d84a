"""Laws of streamed text: pieces joined are the whole text, and nothing of a stop string or a tool call slips out."""

import json
import random
from typing import Any

import pytest
from tiny_run import build_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from headstart.inference.core.request import StopStrings
from headstart.inference.serve.api.output import Output
from headstart.inference.serve.api.text import ToolCallParser, WrittenText, joined
from headstart.inference.show import TokenText
from headstart.inference.targets.tokenizer import bytes_of

STOPS = [("ab",), ("aab", "b c"), ("abcabd",), ("🌳", "c")]


def spell(tokens: list[int]) -> str:
    """A token is a byte; bytes of an unfinished character are replacement characters."""
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", STOPS)
def test_text_ends_where_the_first_stop_string_begins(stops: tuple[str, ...], include: bool) -> None:
    for seed in range(10):
        text = "".join(random.Random(seed).choices(["a", "b", "c", " ", "d", "🌳", "é"], k=60))
        written = WrittenText(spell, [], StopStrings(stops, spell), include)
        found = joined([piece for token in text.encode() for piece in written.add(token, None)] + written.end())
        expected = text
        if ends := [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]:
            end, first = min(ends)
            expected = text[:end] if include else text[: end - len(first)]
            assert written.stopped == first
        assert found == expected


def spell_hidden(tokens: list[int]) -> str:
    return spell([token for token in tokens if token < 256])


def spell_shown(tokens: list[int]) -> str:
    return "".join(spell([token]) if token < 256 else f"<|{token}|>" for token in tokens)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stops", "shown"),
    [(("<|300|>",), "abc"), (("c<|300|>d",), "ab"), (("bc", "<|300|>"), "a"), (("<|301|>",), "abcd"), (("d",), "abc")],
)
def test_a_stop_string_that_is_a_hidden_special_token_is_found(stops, shown, include) -> None:
    """The text is a b c <|300|> d, and special tokens are not shown."""
    stop = StopStrings(stops, spell_shown)
    tokens = [*b"abc", 300, *b"d"]
    written = WrittenText(spell_hidden, [], stop, include)
    found = joined([piece for token in tokens for piece in written.add(token, None)] + written.end())
    assert found == shown + (written.stopped or "") * include
    assert (written.stopped is None) == (stops == ("<|301|>",))
    assert stop.kept(tokens, 5) == {"<|300|>": 4, "c<|300|>d": 5, "bc": 3, "<|301|>": None, "d": 5}[stops[0]]


def test_a_text_that_ends_in_half_a_stop_string_or_half_a_character_keeps_it() -> None:
    written = WrittenText(spell, [], StopStrings(("abc",), spell))
    assert not [piece for token in b"ab" for piece in written.add(token, 1)]
    assert written.end() == [TokenText("a", 1), TokenText("b", 1)]
    cut = WrittenText(spell, [*"né".encode()])
    assert [joined(cut.add(byte, None)) for byte in "a€".encode()[:-1]] == ["a", "", ""]
    assert joined(cut.end()) == "\ufffd"


MARKS = ["<tool_call>", "</tool_call>", "<tool_call"]
PARTS = [*MARKS, "</", '"', "\\", "{", "}", ", ", "Köln", "🌳", "\n", "\ud83d", "a", " "]
PROSE = [*MARKS, "use <tool_call> tags: ", "<tool_call>{", '<tool_call>{"', "a < b ", "so\n"]


def some_value(draw: random.Random, depth: int = 0) -> Any:
    if depth == 2 or draw.random() < 0.5:
        return draw.choice([None, True, -7, 0.5, "".join(draw.choices(PARTS, k=draw.randrange(6)))])
    values = [some_value(draw, depth + 1) for _ in range(draw.randrange(3))]
    return values if draw.random() < 0.4 else {"".join(draw.choices(PARTS, k=2)): value for value in values}


def split(text: str, draw: random.Random, only_one: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    parser, output = ToolCallParser(["weather", "f"], only_one), Output()
    while text:
        count = draw.choice([1, 2, 5, 40, len(text)])
        output.parts += parser.add([TokenText(text[:count], None)])
        text = text[count:]
    output.parts += parser.add([], is_end=True)
    functions = [call["function"] for call in output.calls]
    assert all(function["arguments"].encode() for function in functions)
    return output.text, [(each["name"], json.loads(each["arguments"])) for each in functions]


@pytest.mark.parametrize("seed", range(30))
def test_calls_are_found_whatever_their_arguments_hold_and_however_they_arrive(seed: int) -> None:
    draw = random.Random(seed)
    text, prose, wanted = "", "", list[tuple[str, Any]]()
    for _ in range(draw.randint(1, 3)):
        before = "".join(draw.choices(PROSE, k=draw.randrange(4)))
        name, arguments = draw.choice(["weather", "f"]), {"x": some_value(draw), "y": some_value(draw)}
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=draw.random() < 0.5)
        call = call.encode(errors="backslashreplace").decode()
        newline = draw.choice(["", "\n"])
        text += f"{before}<tool_call>{newline}{call}{newline}</tool_call>"
        prose, wanted = prose + before, [*wanted, (name, arguments)]
    after = draw.choice(["", " and <tool_call>no</tool_call>!", '<tool_call>{"name": "f", "argu', "<tool_"])
    assert split(text + after, draw) == (prose + after, wanted)


NO_CALLS = ["{oops", '{"name": "unknown", "arguments": {}}', '{"name": ["f"]}', '{"name": "f"} and more']
NO_CALLS += [f'{{"name": "f", "arguments": {given}' for given in ('{"x": NaN}}', '{"x": 1e999}}', '{"a":' * 5000)]


@pytest.mark.parametrize("inside", NO_CALLS)
def test_what_is_no_call_stays_text_and_hides_no_call(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for seed in range(4):
        assert split(f"{text} so {good}.", random.Random(seed)) == (f"{text} so .", [("f", {})])


def test_white_space_around_calls_is_no_text_and_a_call_that_is_cut_off_counts_if_its_json_is_whole() -> None:
    draw, call = random.Random(0), '<tool_call>{"name": "f"}</tool_call>'
    for _ in range(8):
        assert split(f"\n{call}\n\n{call} ", draw) == ("", [("f", {})] * 2)
        assert split(f"\nso\n{call}\n\nand {call}", draw) == ("\nso\n\n\nand ", [("f", {})] * 2)
        assert split(" \n", draw) == (" \n", [])
        assert split(f"so {call} and {call}", draw, only_one=True) == ("so ", [("f", {})])
    assert split('<tool_call>{"name": "f", "arguments": {}}', random.Random(0)) == ("", [("f", {})])
    cut = '<tool_call>{"name": "f", "argu'
    assert split(cut, random.Random(0)) == (cut, [])


@pytest.mark.parametrize("seed", range(10))
def test_a_character_that_the_prompt_begins_comes_with_its_last_byte(seed: int) -> None:
    """It was in neither part. With an echo, the prompt's part of it is not shown as a broken character before."""
    draw = random.Random(seed)
    before, after = ("".join(draw.choices(["a", "é", "🌳", "\ufffd"], k=5)) for _ in range(2))
    parted = draw.choice(["é", "€", "🌳"])
    text = before + parted + after
    cut = len(before.encode()) + draw.randrange(len(parted.encode()))
    prompt, rest = [*text.encode()[:cut]], text.encode()[cut:]
    parts = {echo: WrittenText(spell, prompt, echo=spell(prompt) if echo else None) for echo in (True, False)}
    for echo, written in parts.items():
        pieces = [piece for byte in rest for piece in written.add(byte, None)] + written.end()
        assert written.echo + joined(pieces) == (text if echo else parted + after)
    broken = WrittenText(spell, prompt)  # what is never completed is the prompt's alone
    assert joined(broken.add(ord("x"), None) + broken.end()) == "x"


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", "a", "b", "\u2581b"]
    model = models.Unigram([(piece, -float(number % 7)) for number, piece in enumerate(pieces)], 0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fuse = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(fuse)
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize("make", [build_tokenizer, byte_fallback_tokenizer])
def test_the_bytes_of_tokens_are_those_of_their_text(make: Any) -> None:
    """Also of tokens that are parts of characters."""
    tokenizer, text = make(), "ab a\n é🌶 \ufffd  b€"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(text)
    assert b"".join(bytes_of(tokenizer, token) for token in tokens).decode().removeprefix(" ") == text
    (special,) = tokenizer.all_special_ids
    assert bytes_of(tokenizer, special).decode() == tokenizer.all_special_tokens[0]
