"""Conversations as tokens in the target's chat template, with the ranges that the assistant wrote.

The ranges come from the template's generation marks if it has them, else from comparing renderings: the text after the
generation prompt, including the end mark, is what the target would write. Some templates change earlier turns when a
new one is added: they drop reasoning, or end the last turn differently. Such a conversation becomes one sample per
assistant turn, each with the context that the target would see, instead of one sample for all turns.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Literal

from jinja2 import TemplateError

from headstart.data_pipelines.prompts.conversations import Conversation
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.targets.tokenizer import Tokenizer

Turns = Literal["all", "last"]
Span = tuple[int, int]

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
STAND_IN = "\u27e6words of the assistant\u27e7"  # rendered in place of a turn's words, to find what surrounds them
LONGEST_HEADER = 256  # most characters that a template writes between a prompt and the reply


@dataclass(frozen=True)
class MaskedTokens:
    """A text as tokens, and the token ranges that the assistant wrote, in order."""

    tokens: list[int]
    spans: list[Span]


class ChatTemplate:
    """A tokenizer's chat template; raises BadRow if it has none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise BadRow("chat template", "messages need a chat template, which the tokenizer lacks; give prompt")
        self.tokenizer = tokenizer
        self.is_marked = GENERATION_MARK.search(str(tokenizer.chat_template)) is not None
        added = tokenizer.added_tokens_decoder.values()
        marks = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self.special = re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))

    def prompt(self, conversation: Conversation) -> list[int]:
        """The tokens after which the target answers the last turn that is not the assistant's."""
        asked = conversation.prompt()
        return list(self.tokenizer(self.render(asked, ask=True), add_special_tokens=False)["input_ids"])

    def masked(self, conversation: Conversation, turns: Turns) -> list[MaskedTokens]:
        """The conversation as one sample, or as one per assistant turn if the template changes earlier turns.

        The ranges cover all assistant turns or the last one, as `turns` says. Raises BadRow if no range can be found.
        """
        if conversation.prompt().messages == conversation.messages:
            why = "the last turn is not by the assistant; add the answer, or choose data.responses=target"
            raise BadRow("no response", why)
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
            raise BadRow("chat template", "the chat template marks no text of this conversation as generated")
        return MaskedTokens(rendered["input_ids"][: spans[-1][1]], spans if turns == "all" else spans[-1:])

    def _samples(self, conversation: Conversation) -> Iterator[tuple[str, list[Span]]]:
        """Texts with the character ranges of the assistant; a turn that continues the previous text shares it."""
        text, spans = "", list[Span]()
        for number, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                rendered, start = self._render_turn(conversation, number)
                if spans and not (rendered.startswith(text) and start >= len(text)):
                    yield text, spans
                    spans = []
                text, spans = rendered, [*spans, (start, len(rendered))]
        yield text, spans

    def _render_turn(self, conversation: Conversation, number: int) -> tuple[str, int]:
        """The text up to the end of assistant turn `number`, and where its words start; renders with and without it."""
        before = Conversation(conversation.messages[:number], conversation.tools)
        turn = conversation.messages[number]
        asked, full = self.render(before, ask=True), self.render(append(before, turn))
        plain = {key: value for key, value in turn.items() if key in ("role", "tool_calls")}
        around = self.render(append(before, {**plain, "content": STAND_IN}))
        if turn.get("tool_calls"):
            end = self._end_of_calls(turn, full)
        else:
            _, words, tail = around.partition(STAND_IN)
            if not words or not full.endswith(tail):
                raise BadRow("chat template", f"the chat template does not show the words of turn {number + 1}")
            mark = self.special.search(tail)  # the first: Phi-3 writes an end-of-text mark after it
            end = len(full) - len(tail) + (mark.end() if mark else 0)
        if full.startswith(asked):
            return full[:end], len(asked)
        return self._render_changed_context(before, asked, full[:end], around.partition(STAND_IN)[0])

    def _render_changed_context(self, before: Conversation, asked: str, full: str, opening: str) -> tuple[str, int]:
        """`_render_turn` for a turn whose rendering does not start with its prompt `asked`.

        Either the prompt ends with text that the turn does not show (DeepSeek-R1 opens <think>), which is dropped. Or
        the template changes earlier turns once there is an answer (Mistral moves the system prompt); the answer is then
        appended to the prompt that the target would see. `opening` is the rendering up to the turn's words.
        """
        rest, start = self.render(before), common_length(asked, opening)
        if asked.startswith(rest) and start >= len(rest) and full.startswith(asked[:start]):
            return full, start

        def shared(end: int) -> int:
            return common_length(reversed(asked), reversed(opening[:end]))

        end = max(range(max(0, len(opening) - LONGEST_HEADER), len(opening) + 1), key=shared)
        is_shown = before.messages[-1]["content"].strip() in opening[end - shared(end) : end]
        if not is_shown or full[:end] != opening[:end]:
            raise BadRow("chat template", "the chat template changes the turns before an answer once it is there")
        return asked + full[end:], len(asked)

    def _end_of_calls(self, turn: Json, full: str) -> int:
        names = [call["function"]["name"] for call in turn["tool_calls"]]
        if missing := [name for name in names if name not in full]:
            raise BadRow("chat template", f"the chat template does not write the tool calls {', '.join(missing)}")
        marks = list(self.special.finditer(full))
        return marks[-1].end() if marks else len(full.rstrip())

    def _encode(self, text: str, spans: list[Span]) -> MaskedTokens:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places: list[Span] = encoded["offset_mapping"]
        for border in {border for span in spans for border in span}:
            if any(start < border < end for start, end in places):
                raise BadRow("chat template", "a token spans the boundary of the assistant's words")
        inside = [[number for number, (place, _) in enumerate(places) if start <= place < end] for start, end in spans]
        return MaskedTokens(list(encoded["input_ids"]), [(found[0], found[-1] + 1) for found in inside])

    def render(self, conversation: Conversation, ask: bool = False) -> str:
        """The conversation as text; with `ask`, up to where the target's answer begins."""
        return str(self._apply(conversation, tokenize=False, add_generation_prompt=ask))

    def _apply(self, conversation: Conversation, **how: Any) -> Any:
        tools: Any = conversation.tools  # transformers also accepts functions here
        try:
            return self.tokenizer.apply_chat_template(conversation.messages, tools=tools, **how)
        except (TemplateError, TypeError, ValueError, LookupError) as error:  # a template may raise any of these
            raise BadRow("chat template", f"the target's chat template refuses these messages ({error})") from error


def append(conversation: Conversation, turn: Json) -> Conversation:
    return Conversation([*conversation.messages, turn], conversation.tools)


def runs(mask: Sequence[int]) -> list[Span]:
    """The ranges in which a mask is nonzero."""
    edges = [place for place, (before, here) in enumerate(pairwise([0, *mask, 0])) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))


def common_length(first: Iterable[str], second: Iterable[str]) -> int:
    """The length of the longest common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
