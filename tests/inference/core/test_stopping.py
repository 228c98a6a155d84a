"""Laws of stop strings: a text ends with the token that completes one, wherever token borders lie."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from matrix import slow
from scripted import DRAFTERS, Oracle, Texts

from headstart.inference.core.request import Request, StopStrings
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import generate, generate_batch, loop_of
from headstart.inference.targets.model import TargetModel

PROMPT, NEW_TOKENS = [5, 6, 7, 11], 24
# 97 tokens of one to three bytes: letters, pairs that span words, and single bytes of multi-byte characters.
BYTES = [bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz .,;"]
BYTES += [first + second for first, second in itertools.product([b"a", b"e", b"th", b"\n"], [b"n", b" s", b"o", b"."])]
BYTES += [bytes([byte]) for byte in sorted(set("éßñ€…日本語🌲".encode()))]
BYTES += [b"w%d" % number for number in range(97 - len(BYTES))]


def detokenize(tokens: list[int]) -> str:
    """Decode as a byte-level tokenizer does: an incomplete character becomes U+FFFD."""
    return b"".join(BYTES[token] for token in tokens).decode(errors="replace")


def tokenize(*parts: str | bytes) -> list[int]:
    return [BYTES.index(part.encode() if isinstance(part, str) else part) for part in parts]


def first_end(tokens: list[int], strings: tuple[str, ...]) -> int | None:
    """By definition: the length of the shortest prefix whose text contains one of the strings, or None."""
    for count in range(1, len(tokens) + 1):
        if any(string in detokenize(tokens[:count]) for string in strings):
            return count
    return None


def stops_of(text: list[int]) -> list[tuple[str, ...]]:
    """Stop strings for a text: some begin or end within a token, some sets hold several, some never occur."""
    clean = [part for part in detokenize(text).split("\ufffd") if len(part) > 3]
    found = [(part[start : start + size],) for part in clean for start in (0, 1) for size in (1, 3)]
    return [*found, ("nowhere",), ("nowhere", clean[-1][-3:], clean[0][:2]), (clean[0], clean[0][:1])]


@pytest.mark.parametrize("seed", range(3))
def test_the_end_of_the_text_does_not_depend_on_the_blocks_in_which_tokens_arrive(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(40):
        tokens = torch.randint(97, (30,), generator=generator).tolist()
        for strings in stops_of(tokenize("t", "o") + tokens + tokenize("t", "o", "e"))[:12]:
            stop, wanted, read, found = StopStrings(strings, detokenize), first_end(tokens, strings), 0, None
            while read < len(tokens) and found is None:
                fresh = min(int(torch.randint(1, 8, (), generator=generator)), len(tokens) - read)
                kept = stop.kept(tokens[: read + fresh], fresh)
                found = None if kept is None else read + kept
                read += fresh
            assert found == wanted, strings


def test_tokens_without_text_do_not_hide_a_stop_string() -> None:
    """Special tokens may decode to nothing; a stop string is found across any number of them."""

    def without_w(tokens: list[int]) -> str:
        return detokenize([token for token in tokens if not BYTES[token].startswith(b"w")])

    silent = len(BYTES) - 1
    tokens = [*tokenize("x", "a"), *[silent] * 9, *tokenize("b")]
    stop = StopStrings(("ab",), without_w)
    assert stop.kept(tokens, 12) == 12
    assert stop.kept(tokens, 1) == 1


@pytest.mark.parametrize("strings", [(), ("",), ("a", "")], ids=str)
def test_empty_stop_strings_are_refused(strings: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"stop strings: \[.*\] given, one or more that are not empty are allowed"):
        StopStrings(strings, detokenize)


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> dict[Sampling, list[int]]:
    samplings = (Sampling(), Sampling(1.0, seed=3))
    return {sampling: generate(target, PROMPT, NEW_TOKENS, sampling).tokens for sampling in samplings}


@pytest.mark.parametrize("name", [slow("oracle"), slow("truth hidden in a tree"), "plain", "half right head, tree"])
def test_a_generation_ends_where_its_text_contains_a_stop_string(target, make_head, texts, name) -> None:
    """Also in the middle of an accepted path; the logprobs end there too."""
    ends = set()
    for sampling, text in texts.items():
        stops = [StopStrings(strings, detokenize) for strings in stops_of(text)]
        requests = [Request(PROMPT, NEW_TOKENS, sampling, stop, logprobs=True) for stop in stops]
        drafter = None if name == "plain" else DRAFTERS[name](Texts(target, [PROMPT + text], make_head))
        results = generate_batch(target, requests, drafter)
        for strings, result in zip(stops_of(text), results, strict=True):
            wanted = first_end(text, strings)
            assert result.tokens == text[:wanted]
            assert result.finish == ("length" if wanted is None else "stop")
            assert result.stats.tokens == len(result.tokens) - 1
            assert len(result.logprobs or []) == len(result.tokens)
            ends.add(wanted)
    assert len(ends) > 4  # among them the first token, one inside an accepted path, and no end at all


def test_end_tokens_drafted_after_the_end_counted_as_accepted(target, texts) -> None:
    """The draft is a chain of the next eight tokens, of which the third ends the text."""
    tried = ((one := Sampling(1.0, seed=seed), generate(target, PROMPT, 12, one).tokens) for seed in range(9))
    sampling, text = next((sampling, text) for sampling, text in tried if text[3] not in text[:3])
    stop = StopStrings((detokenize(text[:4]),), detokenize)
    each: list[dict[str, Any]] = [{"end_tokens": (text[3],)}, {"stop": stop}]
    for ends in each:
        request = replace(Request(PROMPT, 12, sampling, show_trees=True), **ends)
        loop = loop_of(target, [request], Oracle(PROMPT + text, ahead=8))
        _, block = loop.run()
        assert (block.tokens, block.drafted, block.accepted) == (text[1:4], 8, 2)  # the third is the step's own
        assert block.tree is not None
        assert block.tree.path == [0, 1, 2, 3]
        stats = loop.generations[0].stats
        assert (stats.tokens, stats.accepted_at_depth) == (3, [1, 1])


def test_a_stop_string_that_begins_in_the_prompt_is_ignored(target, texts) -> None:
    text = texts[Sampling()]
    across = detokenize(PROMPT[-1:] + text[:1])
    stop = StopStrings((detokenize(PROMPT[:2]), across), detokenize)
    assert first_end(text, stop.strings) is None
    assert generate_batch(target, [Request(PROMPT, NEW_TOKENS, stop=stop)])[0].tokens == text


def test_stop_string_end_token_or_length_ends_a_text_whichever_comes_first(target, texts, monkeypatch) -> None:
    text = texts[Sampling()]
    fresh = (i for i in range(3, 20) if text[i] not in text[:i] and text[i + 1] not in text[: i + 1])
    place = next(i for i in fresh if first_end(text, (detokenize(text[i : i + 1]),)) == i + 1)
    string = detokenize(text[place : place + 1])

    def written(count: int, stop: str) -> tuple[list[int], str]:
        request = Request(PROMPT, count, stop=StopStrings((stop,), detokenize))
        found = generate_batch(target, [request], Oracle(PROMPT + text, ahead=30))[0]
        return found.tokens, found.finish

    monkeypatch.setattr(target, "end_tokens", [text[place + 1]])
    assert written(NEW_TOKENS, string) == (text[: place + 1], "stop")
    assert written(NEW_TOKENS, "nowhere") == (text[: place + 2], "end")
    assert written(place, string) == (text[:place], "length")
    monkeypatch.setattr(target, "end_tokens", [text[place - 1]])
    if text[place - 1] not in text[: place - 1]:
        assert written(NEW_TOKENS, string) == (text[:place], "end")
