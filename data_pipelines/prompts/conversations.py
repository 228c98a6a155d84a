"""Parse data rows in all known forms into conversations, plain texts or tokens."""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from headstart.data_pipelines.prompts.rows import BadRow, in_words
from headstart.data_pipelines.stages.stage import Json

Item = TypeVar("Item")

NEEDED = (
    "prompt or text (a string), prompt with response or completion, messages (a list of {role, content}), "
    "conversations (a list of {from, value}), or tokens with loss_mask"
)
ANSWERS = ("response", "completion")  # fields that hold what was written after `prompt`
SPELLINGS = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model", "function_call"),
    "tool": ("tool", "function", "observation", "function_response"),
}
ROLES = {name: role for role, names in SPELLINGS.items() for name in names}
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

    @property
    def has_system(self) -> bool:
        """Whether it opens with instructions, which are lost first if its beginning is cut off."""
        return self.messages[0]["role"] in ("system", "developer")

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


@dataclass(frozen=True)
class PromptAndAnswer:
    """A prompt and what was written after it, both as text, with nothing between them."""

    prompt: str
    answer: str


Parsed = Conversation | TokenRow | PromptAndAnswer | str


def parse_row(row: Json, has_template: bool = True) -> Parsed:
    """The content of a row in any known form; raises BadRow for other rows. A field that is null is not there.

    Of texts, {prompt, response} is a user turn and its answer if the tokenizer has a chat template, and {prompt,
    completion} is plain text, as in TRL. Lists of messages are joined to one conversation under both names.
    """
    given = {name: value for name, value in row.items() if value is not None}
    if "tokens" in given or "input_ids" in given:
        return parse_tokens(given)
    turns = given.get("messages", given.get("conversations"))
    if turns is not None:
        return parse_turns(turns, given)
    answers = [name for name in ANSWERS if name in given]
    if "prompt" in given and answers:
        return parse_answer(given, answers, has_template)
    return parse_prompt(given)


def parse_prompt(row: Json) -> Conversation | str:
    """A prompt or a text alone."""
    name = "prompt" if "prompt" in row else "text"
    if name not in row:
        nulls = " that are not null" if not row else ""
        raise BadRow("unknown form", f"fields {sorted(row)} given{nulls}; a row needs {NEEDED}")
    if name == "prompt" and isinstance(row[name], list) and all(isinstance(turn, dict) for turn in row[name]):
        return parse_turns(row[name], row)
    text = text_field(row, name)
    return parse_turns([{"role": "user", "content": text}], row) if row.get("system") else text


def parse_answer(row: Json, answers: list[str], has_template: bool) -> Conversation | PromptAndAnswer:
    """A prompt and its answer, as texts or as messages."""
    if len(answers) > 1:
        raise BadRow("unclear", f"{' and '.join(answers)} are given, one is allowed; remove the other")
    [name] = answers
    prompt, answer = row["prompt"], row[name]
    if isinstance(prompt, list):
        said = answer if isinstance(answer, list) else [{"role": "assistant", "content": text_field(row, name)}]
        return parse_turns([*prompt, *said], row)
    prompt, answer = text_field(row, "prompt"), text_field(row, name)
    if name == "response" and has_template:
        return parse_turns([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], row)
    if row.get("system"):
        raise BadRow("unclear", f"system is given with a plain {name}, messages are needed; give the turns as messages")
    return PromptAndAnswer(prompt, answer)


def text_field(row: Json, name: str) -> str:
    """A field that must be text; raises BadRow saying what it is instead."""
    text = row[name]
    if not isinstance(text, str):
        raise BadRow("unknown form", f"{name} is {in_words(text)}, text is needed; quote it or change the field")
    if not text.strip():
        raise BadRow("empty", f"{name} is empty; a row needs {NEEDED}")
    return text


def parse_tokens(row: Json) -> TokenRow:
    tokens = list_of(int, row.get("tokens", row.get("input_ids")), "tokens")
    mask = list_of(int, row.get("loss_mask", row.get("assistant_masks", [0] * len(tokens))), "loss_mask")
    if any(isinstance(token, bool) for token in tokens):
        raise BadRow("unknown form", "tokens holds true or false, token ids are needed; change the field")
    if len(tokens) != len(mask):
        found = f"{len(tokens)} tokens and {len(mask)} loss_mask values"
        raise BadRow("unknown form", f"{found}; they must have the same length")
    if not tokens:
        raise BadRow("empty", f"tokens is an empty list; a row needs {NEEDED}")
    return TokenRow(tokens, [bool(flag) for flag in mask])


def parse_turns(turns: object, row: Json) -> Conversation:
    listed = list_of(dict, turns, "messages")
    messages = [parse_turn(turn, number) for number, turn in enumerate(listed, start=1)]
    if row.get("system") and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": text_field(row, "system")})
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("empty", "no user turn to answer; give at least one")
    check_order(messages)
    return Conversation(messages, parse_tools(row.get("tools")))


def parse_turn(turn: Json, number: int) -> Json:
    """A turn in either spelling (role/content or from/value), with the keys that templates read."""
    turn = {key: value for key, value in turn.items() if value is not None}
    name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(name, str) or name not in ROLES:
        raise BadRow("wrong turn", f"turn {number} is by {name!r}; allowed roles are {', '.join(ROLES)}")
    message: Json = {"role": ROLES[name], "content": text_of(content, number)}
    calls = turn.get("tool_calls")
    if name == "function_call":  # ShareGPT's, a call as JSON text
        calls = [{"function": parse_json(content, f"turn {number}: the function_call")}]
    if calls:
        message["tool_calls"] = [with_arguments(call, number) for call in list_of(dict, calls, "tool_calls")]
        message["content"] = "" if name == "function_call" else message["content"]
    elif not message["content"]:
        raise BadRow("empty", f"turn {number} by {name} is empty; give it text, or remove the turn")
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
        raise BadRow("unknown form", f"turn {number} is {in_words(content)}, text is needed")
    return content


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
        raise BadRow("unreadable", f"{what}: not JSON ({error})") from error


def check_order(messages: list[Json]) -> None:
    """Raise BadRow for the first turn that cannot follow the one before it."""
    roles = [message["role"] for message in messages]
    for number, (before, role) in enumerate(pairwise([None, *roles]), start=1):
        if before not in FOLLOWS[role]:
            place = "the start" if before is None else f"a turn by {before}"
            raise BadRow("wrong turn", f"turn {number} is by {role} right after {place}; change the order of the turns")


def list_of(kind: type[Item], value: object, name: str) -> list[Item]:
    wanted = {int: "whole numbers", dict: "objects"}[kind]
    if not isinstance(value, list):
        raise BadRow("unknown form", f"{name} is {in_words(value)}, a list of {wanted} is needed; a row needs {NEEDED}")
    for place, item in enumerate(value, start=1):
        if not isinstance(item, kind):
            found = f"{name} holds {in_words(item)} at place {place}"
            raise BadRow("unknown form", f"{found}, a list of {wanted} is needed; a row needs {NEEDED}")
    return value
