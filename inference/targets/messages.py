"""The fields of a chat's messages: one reader for training rows and requests, so that a template sees the same of both.

Errors are ValueErrors that begin with the field; the caller puts the message's place in front.
"""

import json
import re
import reprlib
from collections.abc import Set
from json.scanner import py_make_scanner
from typing import Any

from headstart.common.errors import wrong_value

Json = dict[str, Any]

REASONING_NAMES = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "reasoning_details",
)  # names for the text before an answer
FIELDS = frozenset({"role", "content", "tool_calls", "name", "tool_call_id", *REASONING_NAMES})
# Parts of a server's answer that clients send back, and that say nothing that is not in the fields above.
IGNORED = frozenset({"annotations", "parsed"})
CALL_FIELDS = frozenset({"id", "type", "index", "function", "name", "arguments", "parsed_arguments"})
# The escapes of a JSON text; one outside the group is half of a surrogate pair.
ESCAPE = re.compile(r"(?P<complete>\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\[^u]|\\u(?![dD][89a-fA-F]))|\\u\w{4}")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LARGE = 2**16  # characters; reading more takes long enough to delay other requests


def read_json(text: str) -> Any:
    """The value of a JSON text, with the replacement character for each half of a surrogate pair.

    JSON can name such halves by escapes, but tokenizers cannot encode them and answers cannot hold them.
    """
    if SURROGATE.search(text):
        text = ESCAPE.sub(lambda match: match["complete"] or r"\ufffd", text)
    decoder = json.JSONDecoder()
    if len(text) > LARGE:  # the scanner in C holds the interpreter's lock until it has read everything
        decoder.scan_once = py_make_scanner(decoder)
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
            value = "".join(texts) if all(isinstance(text, str) for text in texts) else value
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
