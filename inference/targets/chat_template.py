"""The one way from messages to the target's prompt tokens, for training, serving, chat and reports alike."""

import inspect
import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from datetime import date
from functools import cached_property
from itertools import takewhile
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from string import ascii_letters
from typing import Any, cast

from transformers.utils.chat_template_utils import render_jinja_template

from headstart.common.errors import wrong_value
from headstart.heads.target_config import folder_of
from headstart.inference.targets.tokenizer import Tokenizer, load_tokenizer
from headstart.recipes.schema import TargetSection

Json = dict[str, Any]

DATE = "date"  # the setting that fixes a template's current day
# Takes the place of the function in a template: it knows the day's value of each directive, such as %d or %-m.
STRFTIME = (
    "{%% macro strftime_now(format) %%}{%% set found = namespace(text=format) %%}{%% for key, value in %s.items() %%}"
    "{%% set found.text = found.text | replace(key, value) %%}{%% endfor %%}{{ found.text }}{%% endmacro %%}\n"
)
PROBE = {"probe_key": "probe value"}
# How a template may expect a turn with tool calls: its content if it has no text, and the type of the arguments.
CALL_FORMS: tuple[tuple[str | None, type], ...] = (("", dict), (None, dict), (None, str), ("", str))
# Names for the text before an answer's words.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
FIELDS = frozenset({"role", "content", "tool_calls", "name", "tool_call_id", *REASONING_NAMES})
# Parts of a server's answer that clients send back, and that say nothing that is not in the fields above.
IGNORED = frozenset({"annotations", "parsed"})
CALL_FIELDS = frozenset({"id", "type", "index", "function", "name", "arguments", "parsed_arguments"})
# The escapes of a JSON text; one outside the group is half of a surrogate pair.
ESCAPE = re.compile(r"(?P<complete>\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\[^u]|\\u(?![dD][89a-fA-F]))|\\u\w{4}")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LARGE = 2**16  # characters or bytes; reading more takes long enough to delay other requests


class ChatTemplate:
    """A tokenizer's chat template with the settings of a run (target.chat_template_kwargs)."""

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any] | None = None) -> None:
        """Raise ValueError for settings that cannot be variables of a template."""
        self.tokenizer, self.settings = tokenizer, dict(settings or {})
        if taken := self.reserved(self.settings):
            raise ValueError(
                f"target.chat_template_kwargs: {taken} given, names of the template's own variables are allowed, such "
                "as enable_thinking; leave it out"
            )
        self._call_forms: dict[str, tuple[str | None, type]] = {}  # by the template's source
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self.marks = sorted(special, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")

    @classmethod
    def of(cls, section: TargetSection) -> "ChatTemplate":
        """The chat template of a recipe's target."""
        return cls(load_tokenizer(folder_of(section), section.trust_remote_code), section.chat_template_kwargs)

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a chat template; without one nothing can be rendered."""
        return self.tokenizer.chat_template is not None

    def reserved(self, names: Iterable[str]) -> str | None:
        """The first of these names that is an argument of the call that renders a template, and not a variable."""
        reserved = {"messages", "strftime_now", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        return next((name for name in sorted(names) if name in reserved), None)

    def tokens(self, messages: Sequence[Json], tools: list[Json] | None = None, **more: Any) -> list[int]:
        """The prompt tokens of these messages; `more` are arguments of `render`."""
        return self.encode(self.render(messages, tools, **more))

    def encode(self, text: str) -> list[int]:
        """The tokens of rendered text, whose special tokens the template has written."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_text(self, text: str) -> list[int]:
        """Tokens of text that is not a chat, such as a rendered one, for the target to continue.

        They begin, once, with the tokens that the tokenizer puts before every text, which a rendered text may hold.
        """
        tokens = self.encode(text)
        return tokens if tokens[: len(self._start)] == self._start else self._start + tokens

    @cached_property
    def _start(self) -> list[int]:
        """The tokens that the tokenizer puts before every text."""
        word = self.encode("a")
        tokens = list(self.tokenizer("a")["input_ids"])
        return tokens[: next((at for at in range(len(tokens)) if tokens[at : at + len(word)] == word), 0)]

    def prompt_tokens(self, text: str) -> list[int]:
        """The tokens of a prompt in plain text: a user's turn, or without a chat template text to continue."""
        turn = [{"role": "user", "content": text}]
        return self.tokens(turn) if self.is_turn(text) else self.encode_text(text)

    def is_turn(self, text: str) -> bool:
        """Whether plain text is a user's turn: there is a template, and no special token begins the text, as one begins
        rendered texts."""
        return self.exists and self.special.match(text) is None

    def render(
        self,
        messages: Sequence[Json],
        tools: list[Json] | None = None,
        ask: bool = True,
        continued: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The messages as text; with `ask`, up to the start of the target's answer.

        `continued` leaves the last message open; `variables` of the template replace the run's. Raises any error of the
        template, which is a program of its own.
        """
        options = {"add_generation_prompt": ask, "continue_final_message": continued}
        turns = [self._as_read(message, tools) for message in messages]
        return str(self._apply(turns, tools, variables, tokenize=False, **options))

    @cached_property
    def is_as_text(self) -> bool:
        """Whether the tokenizer's own `apply_chat_template` gives the tokens of the rendered text, as most do."""
        turns = [{"role": "user", "content": "Which colour has the sky?"}]
        options: Json = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        try:
            return list(self._apply(turns, None, None, **options)) == self.tokens(turns)
        except Exception:  # a template may raise anything; this one takes no such turn
            return True

    def end_tokens(self, known: Collection[int] = ()) -> list[int]:
        """The tokenizer's end token; and the last special token that the template writes after an answer, unless one of
        these tokens is already an end token or `known`."""
        end = self.tokenizer.eos_token_id
        ends, marks = [] if end is None else [int(end)], self._marks_after_answer
        return ends if {*marks} & {*ends, *known} else [*ends, *marks[-1:]]

    @cached_property
    def _marks_after_answer(self) -> list[int]:
        """The special tokens that the template writes directly after an assistant's words."""
        words = "The sky is blue."
        turns = [{"role": "user", "content": "Which colour has the sky?"}, {"role": "assistant", "content": words}]
        after = (self._tried(self.render, turns, ask=False) or "").partition(words)[2].lstrip()
        special = {self.tokenizer.convert_tokens_to_ids(mark) for mark in self.marks}
        return list(takewhile(special.__contains__, self.encode(after)))

    def _tried(self, write: Callable[..., Any], *arguments: Any, **options: Any) -> str | None:
        """What a way to render writes; None if there is no template, or if it raises, which may be any error."""
        try:
            return str(write(*arguments, **options)) if self.exists else None
        except Exception:
            return None

    def _apply(
        self, turns: list[Json], tools: list[Json] | None, variables: Mapping[str, Any] | None, **options: Any
    ) -> Any:
        values, functions = {**self.settings, **(variables or {})}, cast(Any, tools)
        source = self.source(tools)
        if values.get(DATE) is not None:
            source = with_date(source, values[DATE])
        if all(turn["content"] is not None for turn in turns):
            return self.tokenizer.apply_chat_template(turns, tools=functions, chat_template=source, **options, **values)
        options.pop("tokenize")
        values = {**self.tokenizer.special_tokens_map, **values}
        rendered: Any = render_jinja_template([turns], tools=functions, chat_template=source, **options, **values)
        return rendered[0][0]  # of the texts and the generation indices

    def _as_read(self, message: Json, tools: list[Json] | None) -> Json:
        """A message in the form that the template reads which renders a conversation with these tools."""
        turn, source = dict(message), self.source(tools)
        if isinstance(turn["content"], str) and self.reads_parts_alone:
            turn["content"] = [{"type": "text", "text": turn["content"]}]
        if turn["role"] == "developer" and "developer" not in source:
            turn["role"] = "system"
        if turn.get("reasoning_content"):
            turn = {"thinking": turn["reasoning_content"], **turn}  # for gpt-oss; transformers 5.17 does not add it
        if not turn.get("tool_calls"):
            return turn
        if source not in self._call_forms:
            self._call_forms[source] = self.call_form(tools)
        return self._with_calls(turn, *self._call_forms[source])

    @cached_property
    def reads_parts_alone(self) -> bool:
        """Whether the template writes words only from a list of parts, as those of some targets that read images."""
        contents: list[Any] = ["probe", [{"type": "text", "text": "probe"}]]
        turns = ([{"role": "user", "content": content}] for content in contents)
        texts = [self._tried(self._apply, each, None, None, tokenize=False) for each in turns]
        return ["probe" in (text or "") for text in texts] == [False, True]

    def source(self, tools: list[Json] | None) -> str:
        """The template for a conversation; a tokenizer may have another one for those with tools."""
        return str(self.tokenizer.get_chat_template(tools=cast(Any, tools)))

    @staticmethod
    def _with_calls(message: Json, empty: str | None, kind: type) -> Json:
        calls = [{**call, "function": dict(call["function"])} for call in message["tool_calls"]]
        for call in calls if kind is str else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**message, "content": message.get("content") or empty, "tool_calls": calls}

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template shows the tools of a conversation to the target."""
        tools = [{"type": "function", "function": {"name": "probe_name", "description": "", "parameters": PROBE}}]
        text = self._tried(self.render, [{"role": "user", "content": "probe"}], tools)
        return text is None or "probe_name" in text

    def call_form(self, tools: list[Json] | None = None) -> tuple[str | None, type]:
        """The first form in which the template writes a call's arguments as an object; the first if it writes none."""
        call = {"type": "function", "id": "probe0000", "function": {"name": "probe_name", "arguments": PROBE}}
        for form in CALL_FORMS:
            turn = self._with_calls({"role": "assistant", "content": "", "tool_calls": [call]}, *form)
            turns = [{"role": "user", "content": "probe"}, turn]
            text = self._tried(self._apply, turns, tools, None, tokenize=False) or ""
            is_python_or_escaped = "'probe_key'" in text or '\\"probe_key' in text
            if all(part in text for part in ("probe_name", "probe_key", "probe value")) and not is_python_or_escaped:
                return form
        return CALL_FORMS[0]


def with_date(source: str, text: Any) -> str:
    """A template whose current day is this one; raises ValueError for a text that names no day."""
    try:
        day = date.fromisoformat(str(text))
    except ValueError:
        raise wrong_value(
            f"chat_template_kwargs.{DATE}", repr(text), "a day such as 2026-11-26 is", "correct it"
        ) from None
    directives = [f"%{flag}{letter}" for flag in ("", "-") for letter in ascii_letters]
    return STRFTIME % json.dumps({directive: day.strftime(directive) for directive in directives}) + source


def read_json(text: str) -> Any:
    """The value of a JSON text, with the replacement character for each half of a surrogate pair.

    JSON can name such halves by escapes, but tokenizers cannot encode them and answers cannot hold them.
    """
    if SURROGATE.search(text):
        text = ESCAPE.sub(lambda match: match["complete"] or r"\ufffd", text)
    decoder = json.JSONDecoder()
    if len(text) > LARGE:  # the scanner in C holds the interpreter's lock until it has read everything
        decoder.scan_once = py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder.decode(text)


def read_message(given: Json) -> Json:
    """A message whose content is text in the one form that templates get: reasoning_content, and calls with objects."""
    message = {"role": given["role"], "content": given["content"]}
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [read_call(f"tool_calls[{index}]", call) for index, call in enumerate(calls)]
    if reasoning := read_reasoning(given):
        message["reasoning_content"] = reasoning
    return message | {name: given[name] for name in ("name", "tool_call_id") if given.get(name)}


def unread_fields(given: Json, known: Set[str] = FIELDS | IGNORED) -> list[str]:
    """The names of a message's fields that have a value and are not read."""
    return [name for name, value in given.items() if name not in known and value not in (None, "", [], {}, False)]


def read_reasoning(given: Json) -> str:
    """The reasoning of an answer under any of its names, "" if there is none."""
    found: dict[str, str] = {}
    for name in REASONING_NAMES:
        value = given.get(name)
        if name == "reasoning_details" and isinstance(value, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in value]
            value = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else value
        if isinstance(value, str):
            found |= {name: value} if value else {}
        elif value is not None:
            parts = " or a list of {type: reasoning.text, text}" if name == "reasoning_details" else ""
            raise wrong_value(name, reprlib.repr(value), f"a text{parts} is", "correct it, or leave it out")
    if len({*found.values()}) > 1:
        first, second = list(found)[:2]
        raise wrong_value(second, reprlib.repr(found[second]), f"the same text as in {first} is", "remove one of them")
    return next(iter(found.values()), "")


def read_call(place: str, call: Any) -> Json:
    """A tool call with its arguments as an object, parsed from JSON text if necessary, in their order of keys."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        remedy = "write {function: {name, arguments}}, as servers give it"
        raise wrong_value(place, reprlib.repr(call), "an object with function.name is", remedy)
    if unknown := sorted(name for name in {*call, *function} - CALL_FIELDS if (function | call)[name] is not None):
        why = f"{place}: the call of {function['name']} has {unknown[0]}, which is not known"
        raise ValueError(f"{why}; name and arguments are needed: rename or remove it")
    arguments, why = function.get("arguments"), "not an object"
    parsed = {} if arguments is None or arguments == "" else arguments
    if isinstance(parsed, str):
        try:
            parsed = read_json(parsed)
        except (ValueError, RecursionError) as error:
            why = f"not valid JSON: {error}"
    if not isinstance(parsed, dict):
        given, allowed = f"{reprlib.repr(arguments)} ({why})", "an object, or a JSON object in a string, is"
        raise wrong_value(f"{place}.function.arguments", given, allowed, "correct it")
    identity = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", "function": {"name": function["name"], "arguments": parsed}, **identity}
