"""Conversations in the target's own chat template, and which of their tokens the assistant wrote.

The mask comes from the template's generation marks, or else from differences of renderings: what stands behind the
generation prompt is what the target would write there, its words and its end mark. Some templates rewrite the past
(they drop earlier reasoning, or close the last turn otherwise); a conversation then becomes a sample for each turn that
the target would see so, instead of one for all.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Literal

from jinja2 import TemplateError

from data_pipelines.conversations import Conversation
from data_pipelines.rows import BadRow
from data_pipelines.stage import Json
from inference.target.tokenizer import Tokenizer

Turns = Literal["all", "last"]
Span = tuple[int, int]

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
STAND_IN = "\u27e6words of the assistant\u27e7"  # in place of a turn's words, to see what the template writes around
LONGEST_HEADER = 256  # characters that a template may write between a prompt and the words


@dataclass(frozen=True)
class MaskedTokens:
    """A text and the ranges of its tokens that the assistant wrote, in order."""

    tokens: list[int]
    spans: list[Span]


@dataclass(frozen=True)
class Written:
    """A conversation as text up to the end of an assistant's turn, which begins at `start`."""

    text: str
    start: int


class ChatTemplate:
    """A tokenizer's template; raises ValueError where there is none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise BadRow("template", "messages need a chat template and the target's tokenizer has none; give prompt")
        self.tokenizer = tokenizer
        self.is_marked = GENERATION_MARK.search(str(tokenizer.chat_template)) is not None
        added = tokenizer.added_tokens_decoder.values()
        marks = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self.special = re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))

    def prompt(self, conversation: Conversation) -> list[int]:
        """The tokens that the target continues with its answer to the last turn of someone else."""
        asked = conversation.prompt()
        return list(self.tokenizer(self._render(asked, ask=True), add_special_tokens=False)["input_ids"])

    def masked(self, conversation: Conversation, turns: Turns) -> list[MaskedTokens]:
        """The conversation as it is, in one sample if the template keeps the past as it was written, else in several.

        `turns` says whose words count: those of all assistant's turns, or of the last one alone. Raises BadRow.
        """
        if conversation.prompt().messages == conversation.messages:
            raise BadRow("no reply", "the last turn is not the assistant's, so there is no answer to train on")
        if self.is_marked:
            return [self._marked(conversation, turns)]
        samples = list(self._samples(conversation))
        if turns == "last":
            text, spans = samples[-1]
            samples = [(text, spans[-1:])]
        return [self._encode(text, spans) for text, spans in samples]

    def _marked(self, conversation: Conversation, turns: Turns) -> MaskedTokens:
        rendered = self._apply(conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        spans = runs(rendered["assistant_masks"])
        if not spans:
            raise BadRow("mask", "the template marks nothing of this conversation as generated")
        return MaskedTokens(rendered["input_ids"][: spans[-1][1]], spans if turns == "all" else spans[-1:])

    def _samples(self, conversation: Conversation) -> Iterator[tuple[str, list[Span]]]:
        """Texts with the characters that the assistant wrote; turns share a text as long as each continues the last."""
        text, spans = "", list[Span]()
        for number, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                turn = self._written(conversation, number)
                if spans and not (turn.text.startswith(text) and turn.start >= len(text)):
                    yield text, spans
                    spans = []
                text, spans = turn.text, [*spans, (turn.start, len(turn.text))]
        yield text, spans

    def _written(self, conversation: Conversation, number: int) -> Written:
        """The assistant's turn of that number behind all before it, found by rendering it with and without."""
        before = Conversation(conversation.messages[:number], conversation.tools)
        turn = conversation.messages[number]
        asked, full = self._render(before, ask=True), self._render(append(before, turn))
        plain = {key: value for key, value in turn.items() if key in ("role", "tool_calls")}
        around = self._render(append(before, {**plain, "content": STAND_IN}))
        if turn.get("tool_calls"):
            end = self._end_of_calls(turn, full)
        else:
            _, words, tail = around.partition(STAND_IN)
            if not words or not full.endswith(tail):
                raise BadRow("mask", f"the template does not show the words of turn {number + 1}")
            mark = self.special.search(tail)  # the first one: Phi-3 writes an end of the whole text behind it
            end = len(full) - len(tail) + (mark.end() if mark else 0)
        if full.startswith(asked):
            return Written(full[:end], len(asked))
        return self._reasked(before, asked, full[:end], around.partition(STAND_IN)[0])

    def _reasked(self, before: Conversation, asked: str, full: str, head: str) -> Written:
        """A turn whose rendering is no continuation of its prompt.

        Either the prompt ends with more than the turn shows (DeepSeek-R1 opens <think>), then that is left out; or the
        turns before are written otherwise once there is an answer (Mistral moves the system prompt), then the answer is
        put behind the prompt that the target would see.
        """
        rest, start = self._render(before), common_length(asked, head)
        if asked.startswith(rest) and start >= len(rest) and full.startswith(asked[:start]):
            return Written(full, start)

        def shared(end: int) -> int:
            return common_length(reversed(asked), reversed(head[:end]))

        end = max(range(max(0, len(head) - LONGEST_HEADER), len(head) + 1), key=shared)
        if before.messages[-1]["content"].strip() not in head[end - shared(end) : end] or full[:end] != head[:end]:
            raise BadRow("mask", "the template writes the turns before an answer otherwise once it is there")
        return Written(asked + full[end:], len(asked))

    def _end_of_calls(self, turn: Json, full: str) -> int:
        names = [call["function"]["name"] for call in turn["tool_calls"]]
        if missing := [name for name in names if name not in full]:
            raise BadRow("template", f"the target's chat template does not write the tool calls {', '.join(missing)}")
        marks = list(self.special.finditer(full))
        return marks[-1].end() if marks else len(full.rstrip())

    def _encode(self, text: str, spans: list[Span]) -> MaskedTokens:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places: list[Span] = encoded["offset_mapping"]
        for border in {border for span in spans for border in span}:
            if any(start < border < end for start, end in places):
                raise BadRow("mask", "a token reaches across the border of the assistant's words")
        inside = [[number for number, (place, _) in enumerate(places) if start <= place < end] for start, end in spans]
        return MaskedTokens(list(encoded["input_ids"]), [(found[0], found[-1] + 1) for found in inside])

    def _render(self, conversation: Conversation, ask: bool = False) -> str:
        return str(self._apply(conversation, tokenize=False, add_generation_prompt=ask))

    def _apply(self, conversation: Conversation, **how: Any) -> Any:
        tools: Any = conversation.tools  # transformers would take functions too
        try:
            return self.tokenizer.apply_chat_template(conversation.messages, tools=tools, **how)
        except (TemplateError, TypeError, ValueError, LookupError) as error:  # whatever the template does to a turn
            raise BadRow("template", f"the target's chat template refuses these messages ({error})") from error


def append(conversation: Conversation, turn: Json) -> Conversation:
    return Conversation([*conversation.messages, turn], conversation.tools)


def runs(mask: Sequence[int]) -> list[Span]:
    """The ranges in which a mask is true."""
    edges = [place for place, (before, here) in enumerate(pairwise([0, *mask, 0])) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))


def common_length(first: Iterable[str], second: Iterable[str]) -> int:
    """How many characters two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
