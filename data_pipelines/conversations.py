"""Parse data rows in all known forms into conversations, plain texts or tokens."""

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from headstart.data_pipelines.rows import BadRow
from headstart.data_pipelines.stage import Json

Item = TypeVar("Item")

NEEDED = (
    "prompt or text (a string), messages (a list of {role, content}), conversations (a list of {from, value}), or "
    "tokens with loss_mask"
)
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# The roles that a turn may follow; None is the start of the conversation.
FOLLOWS: dict[str, set[str | None]] = {
    "system": {None, "developer"},
    "developer": {None, "system"},
    "user": {None, "system", "developer", "assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}


@dataclass(frozen=True)
class Conversation:
    """Turns in the form that chat templates take, in a valid order."""

    messages: list[Json]
    tools: list[Json] | None = None

    def prompt(self) -> "Conversation":
        """The conversation without the assistant's turns at its end, for the target to answer."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return Conversation(self.messages[:end], self.tools)


@dataclass(frozen=True)
class TokenRow:
    """A pretokenized row, with a mask of the tokens to train on."""

    tokens: list[int]
    loss_mask: list[bool]


def parse_row(row: Json) -> Conversation | TokenRow | str:
    """The content of a row in any known form; raises BadRow for other rows."""
    if "tokens" in row or "input_ids" in row:
        return parse_tokens(row)
    turns = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    if turns is not None:
        return parse_turns(turns, row)
    text = row.get("prompt", row.get("text"))
    if not isinstance(text, str):
        raise BadRow("unknown form", f"fields {sorted(row)} given; a row needs {NEEDED}")
    if not text:
        raise BadRow("empty", f"the text is empty; a row needs {NEEDED}")
    return text


def parse_tokens(row: Json) -> TokenRow:
    tokens = list_of(int, row.get("tokens", row.get("input_ids")), "tokens")
    mask = list_of(int, row.get("loss_mask", row.get("assistant_masks", [0] * len(tokens))), "loss_mask")
    if len(tokens) != len(mask):
        raise BadRow(
            "unknown form", f"{len(tokens)} tokens and {len(mask)} loss_mask values; they must have the same length"
        )
    if not tokens:
        raise BadRow("empty", "tokens is an empty list")
    return TokenRow(tokens, [bool(flag) for flag in mask])


def parse_turns(turns: object, row: Json) -> Conversation:
    listed = list_of(dict, turns, "messages")
    messages = [parse_turn(turn, number) for number, turn in enumerate(listed, start=1)]
    if isinstance(row.get("system"), str) and row["system"] and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("empty", "no user turn to answer; give at least one")
    check_order(messages)
    return Conversation(messages, parse_tools(row.get("tools")))


def parse_turn(turn: Json, number: int) -> Json:
    """A turn in either spelling (role/content or from/value), with the keys that templates read."""
    name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(name, str) or name not in ROLES:
        raise BadRow("role", f"turn {number} is by {name!r}; allowed roles are {', '.join(ROLES)}")
    message: Json = {"role": ROLES[name], "content": text_of(content, number)}
    calls = parse_call(content, number) if name == "function_call" else turn.get("tool_calls")
    if calls:
        message["tool_calls"] = [with_arguments(call, number) for call in list_of(dict, calls, "tool_calls")]
        message["content"] = "" if name == "function_call" else message["content"]
    elif not message["content"]:
        raise BadRow("empty", f"turn {number} by {name} is empty")
    reasoning = turn.get("reasoning_content") or turn.get("reasoning") or turn.get("thinking")
    if isinstance(reasoning, str) and reasoning:  # some templates read one name, some the other
        message |= {"reasoning_content": reasoning, "thinking": reasoning}
    return message | {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}


def text_of(content: object, number: int) -> str:
    """The text of a turn; a list of text parts is joined."""
    if content is None:
        return ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRow("unknown form", f"turn {number} contains parts that are not text; only text is supported")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow("unknown form", f"turn {number} is {type(content).__name__}; text is needed")
    return content


def parse_call(content: object, number: int) -> list[Json]:
    """Parse ShareGPT's function_call, a call as JSON text."""
    call = parse_json(content, f"turn {number}: the function_call")
    return [{"type": "function", "function": call}]


def with_arguments(call: object, number: int) -> Json:
    """A tool call whose arguments are a mapping, as templates need them, parsed from JSON text if necessary."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("unknown form", f"turn {number} has a tool call without a function name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"turn {number}: the arguments of {function['name']}")
    identity = {"id": call["id"]} if isinstance(call, dict) and call.get("id") else {}
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}, **identity}


def parse_tools(tools: object) -> list[Json] | None:
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, "tools")
    return list_of(dict, tools, "tools") if tools else None


def parse_json(text: object, what: str) -> Any:
    try:
        return json.loads(text if isinstance(text, str) else "")
    except json.JSONDecodeError as error:
        raise BadRow("broken", f"{what}: not JSON ({error})") from error


def check_order(messages: list[Json]) -> None:
    """Raise BadRow for the first turn that cannot follow the one before it."""
    before: str | None = None
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if before not in FOLLOWS[role]:
            place = "the start" if before is None else f"a turn by {before}"
            raise BadRow("role", f"turn {number} is by {role} right after {place}; change the order of the turns")
        before = role


def list_of(kind: type[Item], value: object, name: str) -> list[Item]:
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise BadRow("unknown form", f"{name} is not a list of {kind.__name__}; a row needs {NEEDED}")
    return value
