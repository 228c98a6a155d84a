"""Rows of data in the forms that they come in, as conversations, plain texts or tokens."""

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from data_pipelines.rows import BadRow
from data_pipelines.stage import Json

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
# Which roles may stand before one; None is the start.
FOLLOWS: dict[str, set[str | None]] = {
    "system": {None, "developer"},
    "developer": {None, "system"},
    "user": {None, "system", "developer", "assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}


@dataclass(frozen=True)
class Conversation:
    """Turns as chat templates take them, in an order that a chat can have."""

    messages: list[Json]
    tools: list[Json] | None = None

    def prompt(self) -> "Conversation":
        """Up to the last turn that someone else wrote, for the target to answer."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return Conversation(self.messages[:end], self.tools)


@dataclass(frozen=True)
class TokenRow:
    """Tokens that someone else made, with a mask of those to train on."""

    tokens: list[int]
    loss_mask: list[bool]


def parse_row(row: Json) -> Conversation | TokenRow | str:
    """What a row holds, whichever of the known forms it has; raises BadRow."""
    if "tokens" in row or "input_ids" in row:
        return parse_tokens(row)
    turns = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    if turns is not None:
        return parse_turns(turns, row)
    text = row.get("prompt", row.get("text"))
    if not isinstance(text, str):
        raise BadRow("unknown form", f"fields {sorted(row)} given, a row needs {NEEDED}")
    if not text:
        raise BadRow("empty", f"an empty text; a row needs {NEEDED}")
    return text


def parse_tokens(row: Json) -> TokenRow:
    tokens = list_of(int, row.get("tokens", row.get("input_ids")), "tokens")
    mask = list_of(int, row.get("loss_mask", row.get("assistant_masks", [0] * len(tokens))), "loss_mask")
    if len(tokens) != len(mask):
        raise BadRow("unknown form", f"{len(tokens)} tokens and {len(mask)} of loss_mask; they must be of one length")
    if not tokens:
        raise BadRow("empty", "no tokens")
    return TokenRow(tokens, [bool(flag) for flag in mask])


def parse_turns(turns: object, row: Json) -> Conversation:
    listed = list_of(dict, turns, "messages")
    messages = [parse_turn(turn, number) for number, turn in enumerate(listed, start=1)]
    if isinstance(row.get("system"), str) and row["system"] and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("empty", "no turn to answer; give at least one user turn")
    check_order(messages)
    return Conversation(messages, parse_tools(row.get("tools")))


def parse_turn(turn: Json, number: int) -> Json:
    """A turn of either spelling with the keys that templates look at."""
    name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(name, str) or name not in ROLES:
        raise BadRow("role", f"turn {number} is by {name!r}; known are {', '.join(ROLES)}")
    message: Json = {"role": ROLES[name], "content": text_of(content, number)}
    calls = parse_call(content, number) if name == "function_call" else turn.get("tool_calls")
    if calls:
        message["tool_calls"] = [with_arguments(call, number) for call in list_of(dict, calls, "tool_calls")]
        message["content"] = "" if name == "function_call" else message["content"]
    elif not message["content"]:
        raise BadRow("empty", f"turn {number} by {name} is empty")
    reasoning = turn.get("reasoning_content") or turn.get("reasoning") or turn.get("thinking")
    if isinstance(reasoning, str) and reasoning:  # templates read it under either name
        message |= {"reasoning_content": reasoning, "thinking": reasoning}
    return message | {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}


def text_of(content: object, number: int) -> str:
    """The text of a turn, also where it is a list of parts."""
    if content is None:
        return ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRow("unknown form", f"turn {number} holds something else than text")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow("unknown form", f"turn {number} holds {type(content).__name__}, text is needed")
    return content


def parse_call(content: object, number: int) -> list[Json]:
    """ShareGPT's function_call: the call as JSON text."""
    call = parse_json(content, f"turn {number}: the function_call")
    return [{"type": "function", "function": call}]


def with_arguments(call: object, number: int) -> Json:
    """A tool call whose arguments are a mapping, as templates want them, and not its JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("unknown form", f"turn {number} has a tool call without a function's name")
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
        raise BadRow("broken", f"{what} are not JSON ({error})") from error


def check_order(messages: list[Json]) -> None:
    """Raises BadRow for the first turn that cannot stand where it does."""
    before: str | None = None
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if before not in FOLLOWS[role]:
            place = "the start" if before is None else before
            raise BadRow("role", f"turn {number} is by {role} right after {place}")
        before = role


def list_of(kind: type[Item], value: object, name: str) -> list[Item]:
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise BadRow("unknown form", f"{name} is no list of {kind.__name__}; a row needs {NEEDED}")
    return value
