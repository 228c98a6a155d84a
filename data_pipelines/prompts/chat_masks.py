"""Parsed rows as samples in the target's tokens: prompts to answer, or whole texts with what is trained on.

A turn of the assistant is trained on after the tokens that a server would send for the turns before it, and up to its
end mark. Where these tokens continue those of the turn before, both are one sample. Templates that change earlier turns
once a new one is added (they drop reasoning, or end the last turn differently) thus give one sample per turn.

What the target writes in a turn is what the rendering with the turn adds to the prompt; generation marks of a template
are not used, as templates put them in different places. A row is refused if the rendering hides a part of it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Literal

from headstart.data_pipelines.prompts.conversations import (
    Conversation,
    Parsed,
    PromptAndAnswer,
    TokenRow,
    texts_of,
)
from headstart.data_pipelines.prompts.row_report import TOO_LONG
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.images.kept import KeptPictures
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes.schema import DataSection

Turns = Literal["all", "last"]
Span = tuple[int, int]

STAND_IN = "\u27e6words of the assistant\u27e7"  # rendered in place of a turn's words, to find what surrounds them
LONGEST_HEADER = 256  # most characters that a template writes between a prompt and the reply
OPENED = re.compile(r"\s*<(\w+)>\s*")  # a block that a prompt opens for the answer, as DeepSeek-R1's <think>
BLOCK = re.compile(r"<(/?)(\w+)>\s*\Z")  # opened or closed at the end of a text
MARKS_FROM = 9_170_000_000_000


@dataclass(frozen=True)
class MaskedTokens:
    """A text as tokens, the token ranges that the assistant wrote, in order, and its pictures, if any."""

    tokens: list[int]
    spans: list[Span]
    images: Json | None = None  # as `KeptPictures` reads them


class ChatMasks:
    """Turns conversations into prompts and masked texts; `added` counts what the template adds to answers."""

    def __init__(self, template: ChatTemplate, pictures: KeptPictures | None = None, source: str = "") -> None:
        """`source` is where the conversations are from; without `pictures` none may show any."""
        self.template, self.pictures, self.folder = template, pictures, Path(source).parent
        self.added = Counter[str]()  # text that the template writes before an answer's own words -> answers
        self.without_end = 0  # answers after which the template writes no special token

    def prompt(self, conversation: Conversation) -> list[int]:
        """The tokens after which the target answers the last turn that is not the assistant's."""
        return self.asked(conversation).tokens

    def asked(self, conversation: Conversation) -> MaskedTokens:
        """`prompt` with its pictures."""
        asked = conversation.prompt()
        text = self.render(asked, ask=True)
        self._refuse_hidden(text, asked)
        return self._seen(asked, text)

    def _seen(self, asked: Conversation, text: str) -> MaskedTokens:
        """The tokens of a prompt, which `text` renders; a picture has a placeholder for each of its features."""
        if not asked.shown:
            return MaskedTokens(self.template.encode(text), [])
        if self.pictures is None:
            raise BadRow("unsupported field", "the row has images, which cannot be read here; remove them")
        try:
            self.pictures.prompts.refuse_marks(asked.messages, asked.tools)
            named = enumerate(asked.shown, start=1)
            kept = [self.pictures.keep(f"picture {number}", each, self.folder) for number, each in named]
            images = {"text": text, "pictures": kept}
            return MaskedTokens(self.pictures.prompt_of(images), [], images)
        except ValueError as error:
            raise BadRow("picture", str(error)) from error

    def masked(self, conversation: Conversation, turns: Turns) -> list[MaskedTokens]:
        """A conversation that ends with an answer as one sample, or as several if the template changes earlier turns.

        The ranges cover all assistant turns or the last one, as `turns` says. Raises BadRow if no range can be found.
        """
        answers = [
            place
            for place, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and place not in conversation.context_only
        ]
        if not answers:
            raise BadRow("nothing to train on", "every turn of the assistant has weight 0; leave the row out")
        samples: list[MaskedTokens] = []
        for place in answers if turns == "all" else answers[-1:]:
            before = conversation.first(place)
            asked = self.render(before, ask=True)
            self._refuse_hidden(asked, before)
            answer, encode = self._answer(conversation, place, asked), self.template.encode
            written = written_after(self.template, encode(asked), encode(asked + answer), answer)
            seen = self._seen(before, asked)
            prompt = seen.tokens
            known, spans = (samples[-1].tokens, samples[-1].spans) if samples else ([], [])
            if samples and prompt[: len(known)] == known:
                samples.pop()
            else:
                spans = []
            spans = [*spans, (len(prompt), len(prompt) + len(written))]
            samples.append(MaskedTokens(prompt + written, spans, seen.images))
        return samples

    def _answer(self, conversation: Conversation, place: int, asked: str) -> str:
        """The text that the target writes in turn `place` after the prompt `asked`, up to and with its end mark."""
        before, turn = conversation.first(place), conversation.messages[place]
        full = self.render(conversation.first(place + 1))
        around = self.render(replace(before, messages=[*before.messages, {"role": "assistant", "content": STAND_IN}]))
        opening, words, tail = around.partition(STAND_IN)
        if turn.get("tool_calls"):
            marks = list(self.template.special.finditer(full))
            mark = marks[-1] if marks else None
            end = mark.end() if mark else len(full.rstrip())
        else:
            if not words or not full.endswith(tail):
                raise BadRow("chat template", f"the chat template does not write the words of turn {place + 1}")
            mark = self.template.special.search(tail)  # the first: Phi-3 writes an end-of-text mark after it
            end = len(full) - len(tail) + (mark.end() if mark else 0)
        start, opened = self._start(before, asked, full, opening)
        answer, added = full[start:end], opening[start:] if full.startswith(opening) else ""
        if opened is not None:
            added = "" if reasoning_of(turn, opened)[0] else f"\n</{opened}>\n\n"
            answer = closed(turn, opened, answer, full[len(full) - len(tail) : end])
        if block := BLOCK.search(asked + added):  # stands right before the words
            again, words = f"<{block[2]}>", reasoning_of(turn, block[2])[1]
            is_shown_twice = block[1] == "/" and again in answer.removeprefix(added)
            if words.lstrip().startswith(again) or (is_shown_twice and turn["content"].lstrip().startswith(again)):
                why = f"turn {place + 1} opens {again} once more than the chat template; close it, or remove it"
                raise BadRow("reasoning", why)
        self._refuse_hidden(answer, conversation.first(place + 1), place, opened or "think")
        if mark and answer.count(mark[0]) > 1:
            raise BadRow("end mark", f"turn {place + 1} holds {mark[0]}, at which the target stops; remove it there")
        self.without_end += mark is None
        if added.strip():  # text that no part of the row says
            self.added[added] += 1
        return answer

    def _refuse_hidden(self, shown: str, conversation: Conversation, first: int = 0, tag: str | None = None) -> None:
        """Raise BadRow unless the text `shown` holds each part of the turns from `first` on, in its own place.

        `tag` is the block of the reasoning in an answer; None for a prompt, from which templates drop reasoning.
        """
        shown, (marked, parts) = "".join(shown.split()), with_marks(conversation.messages, first)
        written = self.render(replace(conversation, messages=marked), ask=tag is None)
        hidden = [part for mark, part in parts.items() if mark not in written]
        for number, turn in enumerate(conversation.messages[first:], start=first + 1):
            reasoning, words = reasoning_of(turn, tag or "think")
            texts = [words] if isinstance(turn["content"], str) else texts_of(turn)
            hidden += [f"the words of turn {number}"] if not all(is_shown(text, shown) for text in texts) else []
            hidden += [f"the reasoning of turn {number}"] if tag and not is_shown(reasoning, shown) else []
        if hidden:
            raise BadRow("chat template", f"the chat template does not write {hidden[0]}")

    def _start(self, before: Conversation, asked: str, full: str, opening: str) -> tuple[int, str | None]:
        """Where the answer starts in the rendering `full`, and the name of a block that only the prompt opens.

        Usually `full` starts with the prompt `asked`. Else the prompt ends with text that the turn does not show
        (DeepSeek-R1 opens <think>). Or the template changes earlier turns once there is an answer (Mistral moves the
        system prompt). `opening` is the rendering up to the turn's words.
        """
        if full.startswith(asked):
            return len(asked), None
        rest, start = self.render(before), common_length(asked, opening)
        if asked.startswith(rest) and start >= len(rest) and full.startswith(asked[:start]):
            if (opened := OPENED.fullmatch(asked[start:])) is None:
                why = f"the prompt ends with {asked[start:][:40]!r}, with which no answer begins"
                raise BadRow("chat template", f"{why}; set the variables of the template: target.chat_template_kwargs")
            return start, opened[1]

        def shared(end: int) -> int:
            return common_length(reversed(asked), reversed(opening[:end]))

        end = max(range(max(0, len(opening) - LONGEST_HEADER), len(opening) + 1), key=shared)
        is_shown = texts_of(before.messages[-1])[-1].strip() in opening[end - shared(end) : end]
        if not is_shown or full[:end] != opening[:end]:
            raise BadRow("chat template", "the chat template changes the turns before an answer once it is there")
        return end, None

    def render(self, conversation: Conversation, ask: bool = False) -> str:
        """The conversation as text; with `ask`, up to where the target's answer begins."""
        if not self.template.exists:
            raise BadRow("chat template", "messages need a chat template, which the tokenizer lacks; give prompt")
        if not self.template.is_as_text:
            why = "the tokenizer's apply_chat_template gives other tokens than its chat template as text"
            raise BadRow("chat template", f"{why}; such tokenizers are not supported")
        if taken := self.template.reserved(conversation.variables):
            raise BadRow("unknown form", f"chat_template_kwargs holds {taken}, which is no variable of a template")
        try:
            return self.template.render(
                conversation.messages, conversation.tools, ask, variables=conversation.variables
            )
        except Exception as error:  # a template is a program of its own, and raises whatever it likes
            raise BadRow("chat template", f"the target's chat template refuses these messages ({error})") from error


def samples_of(chat: ChatMasks, parsed: Parsed, row: Json, data: DataSection) -> Iterator[Json]:
    """The samples of a row: one prompt for the target to answer, or the row's own samples (data.responses given)."""
    if data.responses == "target":
        asked = encode_prompt(chat, parsed)
        tokens, images = asked.tokens, with_images(asked)
        if images and len(tokens) > data.prompt_tokens:
            why = f"{len(tokens)} tokens with its images, which are not cut; data.prompt_tokens is {data.prompt_tokens}"
            raise BadRow(TOO_LONG, why)
        yield {"tokens": tokens[-data.prompt_tokens :], "cut": len(tokens) > data.prompt_tokens, **images}
        return
    for given in given_samples(chat, parsed, row, data):
        if len(given.tokens) > data.longest_sample:
            why = f"{len(given.tokens)} tokens; data.prompt_tokens and data.response_tokens allow {data.longest_sample}"
            raise BadRow(TOO_LONG, why)
        start, spans = given.spans[-1][0], [list(span) for span in given.spans]
        tokens, response = given.tokens[:start], given.tokens[start:]
        yield {"tokens": tokens, "cut": False, "response": response, "spans": spans, **with_images(given)}


def with_images(text: MaskedTokens) -> Json:
    return {} if text.images is None else {"images": text.images}


def encode_prompt(chat: ChatMasks, parsed: Parsed) -> MaskedTokens:
    """The text for the target to continue, without a final answer; raises BadRow for a row without a prompt."""
    if isinstance(parsed, Conversation):
        return chat.asked(parsed)
    if isinstance(parsed, TokenRow):
        spans = runs(parsed.loss_mask)
        return MaskedTokens(parsed.tokens[: spans[-1][0]] if spans and spans[-1][0] else parsed.tokens, [])
    tokens = chat.template.encode_text(parsed.prompt if isinstance(parsed, PromptAndAnswer) else parsed)
    if not tokens:
        raise BadRow("empty", "the target's tokenizer makes no token of the text; give other text")
    return MaskedTokens(tokens, [])


def given_samples(chat: ChatMasks, parsed: Parsed, row: Json, data: DataSection) -> list[MaskedTokens]:
    """A row's own text and the ranges to train on; in a plain text, everything after the first token."""
    if isinstance(parsed, Conversation) and (answered := parsed.answered()).messages:
        return chat.masked(answered, data.turns)
    if isinstance(parsed, PromptAndAnswer):
        return [join(chat.template, parsed)]
    if isinstance(parsed, Conversation) or (isinstance(parsed, str) and row.get("prompt") is not None):
        needs = "data.responses=given needs response or completion with prompt, or a turn of the assistant"
        remedy = "add it, rename a whole text to text, or choose data.responses=target"
        raise BadRow("no response", f"fields {sorted(row)} given; {needs}; {remedy}")
    tokens = parsed.tokens if isinstance(parsed, TokenRow) else chat.template.encode_text(parsed)
    mask = parsed.loss_mask if isinstance(parsed, TokenRow) else [True] * len(tokens)
    spans = runs([False, *mask[1:]])  # nothing predicts the first token
    if not spans:
        raise BadRow("nothing to train on", "no token to train on; set loss_mask values to 1, or give a longer text")
    return [MaskedTokens(tokens, spans if data.turns == "all" else spans[-1:])]


def join(template: ChatTemplate, pair: PromptAndAnswer) -> MaskedTokens:
    """A prompt and its answer as one text that ends with an end token; the answer is trained on.

    Spaces and line ends after the answer's end mark, which templates write there, do not belong to it.
    """
    answer = pair.answer
    if (marks := [*template.special.finditer(answer)]) and not answer[marks[-1].end() :].strip():
        answer = answer[: marks[-1].end()]
    prompt, whole = template.encode_text(pair.prompt), template.encode_text(pair.prompt + answer)
    whole, tokenizer = prompt + written_after(template, prompt, whole, answer), template.tokenizer
    if early := {*template.end_tokens()} & {*whole[len(prompt) : -1]}:
        mark = tokenizer.decode([min(early)])
        raise BadRow(
            "end mark", f"the answer continues after {mark}, at which the target stops; remove the text after it"
        )
    if tokenizer.eos_token_id is not None and whole[-1] not in tokenizer.all_special_ids:
        whole.append(tokenizer.eos_token_id)
    start = max(len(prompt), 1)  # nothing predicts the first token
    return MaskedTokens(whole, [(start, len(whole))])


def written_after(template: ChatTemplate, prompt: list[int], joined: list[int], answer: str) -> list[int]:
    """The tokens of an answer after a prompt's, which are those that the target is given alone; `joined` is of both.

    If a token of the joined text would hold the end of one and the start of the other, the answer is tokenized apart,
    after a line end: many tokenizers put a space before the first word of a text. Raises BadRow if that changes it.
    """
    if joined[: len(prompt)] == prompt and len(joined) > len(prompt):
        return joined[len(prompt) :]
    before, both = template.encode("\n"), template.encode("\n" + answer)
    written = both[len(before) :] if both[: len(before)] == before else template.encode(answer)
    if template.tokenizer.decode(prompt + written) != template.tokenizer.decode(joined):
        raise BadRow("unclear", "the tokens of prompt and answer decode to another text; give tokens with loss_mask")
    return written


def closed(turn: Json, tag: str, answer: str, tail: str) -> str:
    """The answer after a prompt that has opened the block <tag>: the turn's reasoning if it has any, then its end."""
    reasoning, words = reasoning_of(turn, tag)
    if words != turn["content"] and not turn.get("tool_calls"):
        if reasoning:
            return f"{reasoning.lstrip()}</{tag}>{words}{tail}"  # the row's own spaces
        answer = words.lstrip() + tail
    return f"{reasoning.strip()}\n</{tag}>\n\n{answer}"


def reasoning_of(turn: Json, tag: str = "think") -> tuple[str, str]:
    """The reasoning of a turn, from its own field or from its words in a block <tag>, and the words without it."""
    content = "".join(texts_of(turn))
    match = re.match(rf"\s*(?:<{tag}>)?(.*?)</{tag}>(.*)\Z", content, re.DOTALL)
    reasoning, words = (match[1], match[2]) if match else ("", content)
    return turn.get("reasoning_content") or reasoning, words


def with_marks(turns: Sequence[Json], first: int) -> tuple[list[Json], dict[str, str]]:
    """The turns, in which each text and part of a call from turn `first` on is a mark of its own; and what each marks.

    A mark is text for text, and a number for a number, true, false or null.
    """
    parts: dict[str, str] = {}

    def mark(value: Any, part: str) -> Any:
        if isinstance(value, dict):
            return {mark(name, part): mark(each, part) for name, each in value.items()}
        if isinstance(value, list):
            return [mark(each, part) for each in value]
        if isinstance(value, str) and not value.strip():
            return value
        number = MARKS_FROM + len(parts)
        parts[f"{number}"] = part
        return f"mark{number}" if isinstance(value, str) else number

    marked = [*turns[:first]]
    for number, turn in enumerate(turns[first:], start=first + 1):
        calls = []
        for call in turn.get("tool_calls", ()):
            part = f"the tool call {call['function']['name']} of turn {number}"
            calls.append({**call, "function": {name: mark(each, part) for name, each in call["function"].items()}})
        content, part = turn["content"], f"the words of turn {number}"
        words = (
            mark(content, part)
            if isinstance(content, str)
            else [{**each, "text": mark(each["text"], part)} if "text" in each else each for each in content]
        )
        marked.append({**turn, "content": words, **({"tool_calls": calls} if calls else {})})
    return marked, parts


def is_shown(text: str, shown: str) -> bool:
    """Whether a text is in a rendering, as it is or as JSON writes it; spaces do not count."""
    forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
    return any("".join(form.split()) in shown for form in forms)


def runs(mask: Sequence[int]) -> list[Span]:
    """The ranges in which a mask is nonzero."""
    edges = [place for place, (before, here) in enumerate(pairwise([0, *mask, 0])) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))


def common_length(first: Iterable[str], second: Iterable[str]) -> int:
    """The length of the longest common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
