"""Parse data rows in all known forms into conversations, plain texts or tokens."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from headstart.data_pipelines.prompts.rows import BadRow, in_words
from headstart.data_pipelines.stages.stage import Json

Item = TypeVar("Item")

NEEDED = (
    "prompt or text (a string), prompt with response or completion, messages (a list of {role, content}), "
    "conversations (a list of {from, value}), or tokens with loss_mask"
)
IGNORED = -100  # the label of a token that is not trained on
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


# Keys of a row and of a turn that are read, and those that would change what is trained on and are not supported.
ROW_KEYS = {
    *("prompt", "text", "response", "completion", "messages", "conversations", "system", "tools", "functions"),
    *("tokens", "input_ids", "loss_mask", "assistant_masks", "labels", "attention_mask", "chat_template_kwargs"),
}
TURN_KEYS = {
    *("role", "from", "content", "value", "tool_calls", "function_call", "name", "tool_call_id"),
    *("reasoning_content", "reasoning", "thinking", "weight", "train"),
}
TEXT_PARTS = (None, "text", "input_text", "output_text")  # the types of parts whose text is the turn's words
CALL_KEYS = {"id", "type", "index", "function", "name", "arguments", "args", "parameters"}
REFUSED = {
    *("images", "image", "videos", "video", "audios", "audio", "documents", "refusal", "tool_plan", "thoughts"),
    *("loss", "loss_mask", "mask", "masked", "loss_weight", "loss_weights", "trainable", "training"),
}


@dataclass(frozen=True)
class Conversation:
    """Turns in the form that chat templates take, in a valid order."""

    messages: list[Json]
    tools: list[Json] | None = None
    variables: Json = field(default_factory=dict)  # chat template variables for this conversation alone
    context_only: frozenset[int] = frozenset()  # places of turns of the assistant that are not trained on

    @property
    def has_system(self) -> bool:
        """Whether it opens with instructions, which are lost first if its beginning is cut off."""
        return self.messages[0]["role"] in ("system", "developer")

    def first(self, count: int) -> "Conversation":
        return replace(self, messages=self.messages[:count])

    def prompt(self) -> "Conversation":
        """The conversation without the assistant's turns at its end, for the target to answer."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return self.first(end)

    def answered(self) -> "Conversation":
        """The conversation up to the last turn of the assistant."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        return self.first(places[-1] + 1 if places else 0)


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


def parse_row(row: Json, is_turn: Callable[[str], bool] = lambda text: True) -> Parsed:
    """The content of a row in any known form; raises BadRow for other rows. A field that is null is not there.

    {prompt} is a user turn and {prompt, response} a user turn and its answer, if `is_turn` says so of the prompt
    (`ChatTemplate.is_turn`). {text} and, as in TRL, {prompt, completion} are plain text. Lists of messages are joined
    to one conversation under all names.
    """
    given = {name: value for name, value in row.items() if value is not None}
    refuse_keys(given, ROW_KEYS, "the row")
    if "tokens" in given or "input_ids" in given:
        return parse_tokens(given)
    turns = given.get("messages", given.get("conversations"))
    prompt = given.get("prompt")
    is_said = isinstance(prompt, str) and is_turn(prompt)
    answers = [name for name in ANSWERS if name in given]
    if turns is None and prompt is not None and answers:
        return parse_answer(given, answers, is_said)
    answers = [name for name in answers if words_of(given[name])]
    if turns is None:
        if answers:
            raise BadRow("unclear", f"{answers[0]} is given without a prompt; name what it answers prompt")
        return parse_prompt(given, is_said)
    whole = parse_turns(turns, given)
    if whole.messages[-1]["role"] != "assistant":
        return parse_answer({**given, "prompt": turns}, answers, False) if answers else whole
    if other := [name for name in answers if words_of(given[name]) != whole.messages[-1]["content"].strip()]:
        raise BadRow("unclear", f"{other[0]} is given beside messages that end with an answer; remove one")
    return whole


def words_of(answer: object) -> str:
    """The words of an answer, which is text or a list with one turn."""
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        answer = answer[0].get("content", answer[0].get("value"))
    return "" if answer == [] else str(answer).strip()


def parse_prompt(row: Json, is_said: bool) -> Conversation | str:
    """A prompt or a text alone; `is_said`: a prompt of plain text is what a user says."""
    name = "prompt" if "prompt" in row else "text"
    if name not in row:
        nulls = " that are not null" if not row else ""
        raise BadRow("unknown form", f"fields {sorted(row)} given{nulls}; a row needs {NEEDED}")
    if name == "prompt" and isinstance(row[name], list) and all(isinstance(turn, dict) for turn in row[name]):
        return parse_turns(row[name], row)
    text = text_field(row, name)
    if row.get("system") or (is_said and name == "prompt"):
        return parse_turns([{"role": "user", "content": text}], row)
    return text


def parse_answer(row: Json, answers: list[str], is_said: bool) -> Conversation | PromptAndAnswer:
    """A prompt and its answer, as texts or as messages; `is_said` is that of `parse_prompt`."""
    if len(answers) > 1:
        raise BadRow("unclear", f"{' and '.join(answers)} are given, one is allowed; remove the other")
    [name] = answers
    prompt, answer = row["prompt"], row[name]
    if isinstance(prompt, list):
        said = answer if isinstance(answer, list) else [{"role": "assistant", "content": text_field(row, name)}]
        return parse_turns([*prompt, *said], row)
    prompt, answer = text_field(row, "prompt"), text_field(row, name)
    if name == "response" and is_said:
        return parse_turns([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], row)
    if row.get("system"):
        raise BadRow("unclear", f"system is given with a plain {name}, messages are needed; give the turns as messages")
    return PromptAndAnswer(prompt, answer)


def refuse_keys(given: Json, known: set[str], what: str) -> None:
    """Raise BadRow for a field with a value that would change what is trained on and cannot be read."""
    if found := sorted(name for name in (REFUSED - known) & given.keys() if given[name] not in ("", [], {})):
        why = f"{what} has {found[0]}, which is not supported; remove the field if the text is right without it"
        raise BadRow("unsupported field", why)


def unread_keys(row: Json) -> set[str]:
    """The fields of a row and of its turns that have a value and are not read."""
    lists = [row.get(name) for name in ("messages", "conversations", "prompt", *ANSWERS)]
    listed = [turn for turns in lists if isinstance(turns, list) for turn in turns]
    found = {name for name, value in row.items() if value is not None and name not in ROW_KEYS}
    return found | {
        f"{name} of a turn"
        for turn in listed
        if isinstance(turn, dict)
        for name, value in turn.items()
        if value is not None and name not in TURN_KEYS
    }


def text_field(row: Json, name: str) -> str:
    """A field that must be text; raises BadRow saying what it is instead."""
    text = row[name]
    if not isinstance(text, str):
        raise BadRow("unknown form", f"{name} is {in_words(text)}, text is needed; quote it or change the field")
    if not text.strip():
        raise BadRow("empty", f"{name} is empty; a row needs {NEEDED}")
    return text


def parse_tokens(row: Json) -> TokenRow:
    """Tokens, and those to train on by loss_mask, or by labels other than -100; padding (attention_mask 0) goes."""
    tokens = list_of(int, row.get("tokens", row.get("input_ids")), "tokens")
    masks = [name for name in ("loss_mask", "assistant_masks", "labels") if name in row]
    if len(masks) > 1:
        raise BadRow("unclear", f"{' and '.join(masks)} are given, one is allowed; remove the others")
    mask = list_of(int, row[masks[0]], masks[0]) if masks else [0] * len(tokens)
    if masks == ["labels"]:
        other = [(label, token) for label, token in zip(mask, tokens, strict=False) if label not in (IGNORED, token)]
        if other:
            found = f"labels holds {other[0][0]} for token {other[0][1]}"
            raise BadRow("unknown form", f"{found}; each label is its token (not shifted), or {IGNORED} to ignore it")
        mask = [label != IGNORED for label in mask]
    seen = list_of(int, row.get("attention_mask", [1] * len(tokens)), "attention_mask")
    if any(isinstance(token, bool) for token in tokens):
        raise BadRow("unknown form", "tokens holds true or false, token ids are needed; change the field")
    for name, values in (((masks or ["loss_mask"])[0], mask), ("attention_mask", seen)):
        if len(tokens) != len(values):
            found = f"{len(tokens)} tokens and {len(values)} {name} values"
            raise BadRow("unknown form", f"{found}; they must have the same length")
    if not any(seen):
        raise BadRow("empty", f"tokens is an empty list; a row needs {NEEDED}")
    kept = [(token, flag) for token, flag, is_seen in zip(tokens, mask, seen, strict=True) if is_seen]
    if wrong := [flag for _, flag in kept if flag not in (0, 1)]:
        found = f"{masks[0]} holds {wrong[0]}, 0 and 1 are allowed"
        raise BadRow("unknown form", f"{found}; correct it, or name it labels if {IGNORED} is what it ignores")
    return TokenRow([token for token, _ in kept], [bool(flag) for _, flag in kept])


def parse_turns(turns: object, row: Json) -> Conversation:
    listed = list_of(dict, turns, "messages")
    messages = [parse_turn(turn, number) for number, turn in enumerate(listed, start=1)]
    is_first = bool(messages) and messages[0]["role"] == "system"
    if row.get("system") and not is_first:
        messages.insert(0, {"role": "system", "content": text_field(row, "system")})
    elif row.get("system") and str(row["system"]).strip() not in ("", messages[0]["content"].strip()):
        raise BadRow("unclear", "system is given beside another system turn, one is allowed; remove one")
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("empty", "no user turn to answer; give at least one")
    check_order(messages)
    before = len(messages) - len(listed)
    context_only = frozenset(place for place, turn in enumerate(listed, start=before) if not is_trained_on(turn, place))
    variables = row.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise BadRow("unknown form", f"chat_template_kwargs is {in_words(variables)}, an object is needed; correct it")
    return Conversation(messages, parse_tools(row), variables, context_only)


def is_trained_on(turn: Json, place: int) -> bool:
    """Whether a turn's weight and train let it be trained on; raises BadRow for a weight between."""
    weights = [turn[name] for name in ("weight", "train") if turn.get(name) is not None]
    if other := [weight for weight in weights if weight not in (0, 1)]:
        raise BadRow("unsupported field", f"turn {place + 1} has weight {other[0]!r}, 0 or 1 is needed; round it")
    return all(weights)


def parse_turn(turn: Json, number: int) -> Json:
    """A turn in either spelling (role/content or from/value), with the keys that templates read."""
    turn = {key: value for key, value in turn.items() if value is not None}
    refuse_keys(turn, TURN_KEYS, f"turn {number}")
    name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(name, str) or name not in ROLES:
        raise BadRow("wrong turn", f"turn {number} is by {name!r}; allowed roles are {', '.join(ROLES)}")
    message: Json = {"role": ROLES[name], "content": text_of(content, number)}
    calls = turn.get("tool_calls")
    if name == "function_call":  # ShareGPT's, a call as JSON text
        calls = [{"function": parse_json(content, f"turn {number}: the function_call")}]
    elif not calls and turn.get("function_call"):  # OpenAI's before there were tool_calls
        calls = [{"function": turn["function_call"]}]
    if calls:
        message["tool_calls"] = [parse_call(call, number) for call in list_of(dict, calls, "tool_calls")]
        message["content"] = "" if name == "function_call" else message["content"]
    elif not message["content"].strip():
        raise BadRow("empty", f"turn {number} by {name} is empty; give it text, or remove the turn")
    reasoning = turn.get("reasoning_content") or turn.get("reasoning") or turn.get("thinking")
    if reasoning and not isinstance(reasoning, str):
        raise BadRow("unknown form", f"the reasoning of turn {number} is {in_words(reasoning)}, text is needed")
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}


def text_of(content: object, number: int) -> str:
    """The text of a turn; a list of text parts is joined."""
    if content is None:
        return ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and is_text(part) for part in content):
            raise BadRow("unknown form", f"turn {number} contains parts that are not text; only text is supported")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow("unknown form", f"turn {number} is {in_words(content)}, text is needed")
    return content


def is_text(part: Json) -> bool:
    """Whether a part of a turn is plain text: one of another type, such as reasoning, may have a text too."""
    return part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)


def parse_call(call: Json, number: int) -> Json:
    """A tool call whose arguments are an object, parsed from JSON text if necessary."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("unknown form", f"turn {number} has a tool call without a function name")
    if unknown := sorted(name for name in {*call, *function} - CALL_KEYS if (function | call)[name] is not None):
        why = f"turn {number}: the call of {function['name']} has {unknown[0]}, which is not known"
        raise BadRow("unsupported field", f"{why}; name and arguments are needed: rename or remove it")
    given = [function[name] for name in ("arguments", "args", "parameters") if function.get(name) is not None]
    if len(given) > 1:
        raise BadRow("unclear", f"turn {number}: the call of {function['name']} has arguments twice; remove one")
    what = f"turn {number}: the arguments of {function['name']}"
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        arguments = parse_json(arguments, what) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise BadRow("unknown form", f"{what} are {in_words(arguments)}, an object is needed; correct them")
    identity = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}, **identity}


def parse_tools(row: Json) -> list[Json] | None:
    """The tools of a row, also in OpenAI's older form `functions`."""
    name = "tools" if row.get("tools") else "functions"
    tools = row.get(name)
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, name)
    listed = list_of(dict, tools, name) if tools else None
    if listed and name == "functions":
        return [{"type": "function", "function": function} for function in listed]
    return listed


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
