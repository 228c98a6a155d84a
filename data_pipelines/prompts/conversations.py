"""Parse data rows in all known forms into conversations, plain texts or tokens."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from headstart.data_pipelines.prompts.rows import BadRow, in_words
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.images.pictures import PICTURES, TEXTS
from headstart.inference.targets.chat_template import read_message, unread_fields

Item = TypeVar("Item")

NEEDED = (
    "prompt or text (a string), prompt with response or completion, messages (a list of {role, content}), "
    "conversations (a list of {from, value}), or tokens with loss_mask"
)
ANSWERS = ("response", "completion")  # fields that hold the text written after `prompt`
SPELLINGS = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model"),
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


CHAT = ("system", "tools", "chat_template_kwargs")  # fields that are read with messages alone
# The fields of each form of a row. The first form with a value decides, and the fields of the others are not read.
FORMS = (("tokens", "input_ids", "loss_mask"), ("messages", "conversations"), ("prompt", *ANSWERS), ("text",))
MASKS = ("loss_mask", "labels", "assistant_masks")  # fields that say of each token whether it is trained on
TURN_KEYS = ("from", "value", "weight")  # that only rows have
TEXT_PARTS = (None, *TEXTS)  # types of content parts that hold the turn's text
PICTURE_FIELDS = ("images", "image")  # fields of a row with the pictures of parts that have none of their own
PICTURE_MARK = "<image>"  # where a text of a row with pictures shows the next one
# Keys that would change the training text and are not supported, each with the remedy.
REFUSED = dict.fromkeys(
    (
        *("videos", "video", "audios", "audio", "documents", "refusal", "tool_plan", "thoughts"),
        *("loss", "mask", "masked", "loss_weight", "loss_weights", "trainable", "training"),
    ),
    "remove the field if the text is right without it",
)
REFUSED_IN_ROW = REFUSED | {
    "functions": "write tools: [{type: function, function: ...}]",
    "labels": "write loss_mask, with 1 for each token whose label is not -100",
    "assistant_masks": "rename it to loss_mask",
    "attention_mask": "remove it, and every token for which it is 0",
}
REFUSED_IN_TURN = REFUSED | {
    **dict.fromkeys(("images", "image"), "move it into the turn's content: [{type: image, image: FILE}, ...]"),
    "function_call": "write tool_calls: [{function: {name, arguments}}]",
    "loss_mask": "write weight: 0 for a turn that is not trained on",
    "train": "write weight: 0 for a turn that is not trained on",
}


@dataclass(frozen=True)
class Conversation:
    """Turns in the form that chat templates take, in a valid order."""

    messages: list[Json]
    tools: list[Json] | None = None
    variables: Json = field(default_factory=dict)  # chat template variables for this conversation alone
    context_only: frozenset[int] = frozenset()  # places of turns of the assistant that are not trained on
    pictures: tuple[Any, ...] = ()  # where the picture of each image part is, in order

    @property
    def shown(self) -> tuple[Any, ...]:
        """Where the pictures of these messages are, in order."""
        return self.pictures[: len(image_parts(self.messages))]

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
    """A prompt and the text written directly after it."""

    prompt: str
    answer: str


Parsed = Conversation | TokenRow | PromptAndAnswer | str


def parse_row(row: Json, is_turn: Callable[[str], bool] = lambda text: True) -> Parsed:
    """The content of a row in any known form; raises BadRow for other rows. A field that is null counts as absent.

    {prompt} is a user turn and {prompt, response} a user turn and its answer, if `is_turn` is true of the prompt
    (`ChatTemplate.is_turn`). {text} and, as in TRL, {prompt, completion} are plain text.
    """
    fields = {name: value for name, value in row.items() if value is not None}
    tokens, turns = one_of(fields, "tokens", "input_ids"), one_of(fields, "messages", "conversations")
    if tokens is None and (masks := [name for name in MASKS if fields.get(name)]):
        remedy = "give messages with weight: 0 in each turn that is not trained on, or tokens and loss_mask"
        raise BadRow("unsupported field", f"the row has {masks[0]}, a mask of tokens, without tokens; {remedy}")
    refuse_keys(fields, REFUSED_IN_ROW, "the row")
    if tokens is not None:
        refuse_keys(fields, dict.fromkeys(PICTURE_FIELDS, "give messages in place of tokens"), "the row")
        return parse_tokens(tokens, fields)
    if turns is None and "prompt" in fields and (answers := [name for name in ANSWERS if name in fields]):
        return parse_answer(fields, answers, is_turn)
    if answers := [name for name in ANSWERS if has_words(fields.get(name))]:
        if turns is None:
            raise BadRow(
                "unclear", f"{answers[0]} is given without a prompt; rename the text that it answers to prompt"
            )
        remedy = "append it to them as a turn of the assistant, or remove it"
        raise BadRow("unclear", f"{answers[0]} is given in addition to messages; {remedy}")
    parsed = parse_prompt(fields, is_turn) if turns is None else parse_turns(turns, fields)
    if isinstance(parsed, str):
        refuse_keys(
            fields, dict.fromkeys(PICTURE_FIELDS, "give messages, or a prompt that is a user's turn"), "plain text"
        )
    return parsed


def has_words(answer: object) -> bool:
    return bool(answer.strip()) if isinstance(answer, str) else answer not in (None, [])


def parse_prompt(row: Json, is_turn: Callable[[str], bool]) -> Conversation | str:
    """A prompt or a text without an answer."""
    name = "prompt" if "prompt" in row else "text"
    if name not in row:
        nulls = " that are not null" if not row else ""
        raise BadRow("unknown form", f"fields {sorted(row)} given{nulls}; a row needs {NEEDED}")
    if name == "prompt" and isinstance(row[name], list) and all(isinstance(turn, dict) for turn in row[name]):
        return parse_turns(row[name], row)
    text = text_field(row, name)
    if row.get("system") or (name == "prompt" and is_turn(text)):
        return parse_turns([{"role": "user", "content": text}], row)
    return text


def parse_answer(row: Json, answers: list[str], is_turn: Callable[[str], bool]) -> Conversation | PromptAndAnswer:
    """A prompt and its answer, as texts or as messages."""
    if len(answers) > 1:
        raise BadRow("unclear", f"{' and '.join(answers)} are given, one is allowed; remove the other")
    [name] = answers
    if isinstance(row["prompt"], list):
        answer = row[name]
        said = answer if isinstance(answer, list) else [{"role": "assistant", "content": text_field(row, name)}]
        return parse_turns([*row["prompt"], *said], row)
    prompt, answer = text_field(row, "prompt"), text_field(row, name)
    if name == "response" and is_turn(prompt):
        return parse_turns([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], row)
    refuse_keys(row, dict.fromkeys(PICTURE_FIELDS, "give the turns as messages"), "plain text")
    if row.get("system"):
        raise BadRow("unclear", f"system is given with a plain {name}, messages are needed; give the turns as messages")
    return PromptAndAnswer(prompt, answer)


def refuse_keys(fields: Json, refused: dict[str, str], owner: str) -> None:
    """Raise BadRow for a field with a value that would change the training text and is not supported."""
    if names := sorted(name for name in refused.keys() & fields.keys() if fields[name] not in ("", [], {})):
        raise BadRow("unsupported field", f"{owner} has {names[0]}, which is not supported; {refused[names[0]]}")


def one_of(fields: Json, *spellings: str, owner: str = "") -> Any:
    """The value of a field with several spellings, None if it is not there; raises BadRow if two say two things."""
    given = [name for name in spellings if fields.get(name) is not None]
    for other in given[1:]:
        if fields[other] != fields[given[0]]:
            raise BadRow("unclear", f"{owner}{given[0]} and {other} say two things, one is allowed; remove the other")
    return fields[given[0]] if given else None


def unread_keys(row: Json, parsed: Parsed) -> set[str]:
    """The fields of a row and of its turns that have a value and are not read."""
    lists = [row.get(name) for name in ("messages", "conversations", "prompt", *ANSWERS)]
    turns = [turn for turns in lists if isinstance(turns, list) for turn in turns if isinstance(turn, dict)]
    form = next(names for names in FORMS if any(row.get(name) is not None for name in names))
    read = {*form, *((*CHAT, *PICTURE_FIELDS) if isinstance(parsed, Conversation) else ())}
    names = {name for name, value in row.items() if name not in read and value not in (None, "", [], {})}
    return names | {f"{name} of a turn" for turn in turns for name in unread_fields(turn) if name not in TURN_KEYS}


def text_field(row: Json, name: str) -> str:
    """A field that must be text; raises BadRow saying what it is instead."""
    text = row[name]
    if not isinstance(text, str):
        raise BadRow("unknown form", f"{name} is {in_words(text)}, text is needed; quote it or change the field")
    if not text.strip():
        raise BadRow("empty", f"{name} is empty; a row needs {NEEDED}")
    return text


def parse_tokens(given: object, row: Json) -> TokenRow:
    """Tokens, and a mask of the tokens to train on; without a mask, no token is trained on."""
    tokens = list_of(int, given, "tokens")
    mask = list_of(int, row.get("loss_mask", [0] * len(tokens)), "loss_mask")
    if any(isinstance(token, bool) for token in tokens):
        raise BadRow("unknown form", "tokens holds true or false, token ids are needed; change the field")
    if len(tokens) != len(mask):
        lengths = f"{len(tokens)} tokens and {len(mask)} loss_mask values"
        raise BadRow("unknown form", f"{lengths}; they must have the same length")
    if not tokens:
        raise BadRow("empty", f"tokens is an empty list; a row needs {NEEDED}")
    if wrong := [flag for flag in mask if flag not in (0, 1)]:
        raise BadRow("unknown form", f"loss_mask holds {wrong[0]}, 0 and 1 are allowed; correct it")
    return TokenRow(tokens, [bool(flag) for flag in mask])


def parse_turns(turns: object, row: Json) -> Conversation:
    listed = list_of(dict, turns, "messages")
    messages = [parse_turn(turn, number) for number, turn in enumerate(listed, start=1)]
    has_system = bool(messages) and messages[0]["role"] == "system"
    if row.get("system") and not has_system:
        messages.insert(0, {"role": "system", "content": text_field(row, "system")})
    elif row.get("system") and str(row["system"]).strip() not in ("", messages[0]["content"].strip()):
        raise BadRow("unclear", "system is given in addition to another system turn, one is allowed; remove one")
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("empty", "no user turn to answer; give at least one")
    check_order(messages)
    given = one_of(row, *PICTURE_FIELDS)
    pictures = place_pictures(messages, given if isinstance(given, list) else [] if given is None else [given])
    before = len(messages) - len(listed)
    context_only = frozenset(place for place, turn in enumerate(listed, start=before) if not weight_of(turn, place))
    variables, tools = row.get("chat_template_kwargs") or {}, row.get("tools")
    if not isinstance(variables, dict):
        raise BadRow("unknown form", f"chat_template_kwargs is {in_words(variables)}, an object is needed; correct it")
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, "tools")
    return Conversation(messages, list_of(dict, tools, "tools") if tools else None, variables, context_only, pictures)


def weight_of(turn: Json, place: int) -> bool:
    """Whether a turn may be trained on; raises BadRow for a weight between 0 and 1."""
    weight = 1 if turn.get("weight") is None else turn["weight"]
    if weight not in (0, 1):
        raise BadRow("unsupported field", f"turn {place + 1} has weight {weight!r}, 0 or 1 is needed; round it")
    return bool(weight)


def parse_turn(turn: Json, number: int) -> Json:
    """A turn in either spelling (role/content or from/value), with the keys that templates read."""
    turn = {key: value for key, value in turn.items() if value is not None}
    refuse_keys(turn, REFUSED_IN_TURN, f"turn {number}")
    place = f"turn {number}: "
    names = {key: ROLES.get(name, name) if isinstance(name := turn.get(key), str) else name for key in ("role", "from")}
    role, content = one_of(names, "role", "from", owner=place), one_of(turn, "content", "value", owner=place)
    if role == "function_call":
        remedy = f"write a turn by assistant with {REFUSED_IN_TURN[role].removeprefix('write ')}"
        raise BadRow("wrong turn", f"turn {number} is by function_call, which is not supported; {remedy}")
    if not isinstance(role, str) or role not in SPELLINGS:
        raise BadRow("wrong turn", f"turn {number} is by {role!r}; allowed roles are {', '.join(ROLES)}")
    text = content_of(content, number, role)
    if calls := turn.get("tool_calls"):
        list_of(dict, calls, "tool_calls")
    elif isinstance(text, str) and not text.strip():
        raise BadRow("empty", f"turn {number} by {role} is empty; give it text, or remove the turn")
    try:
        return read_message({**turn, "role": role, "content": text})
    except ValueError as error:
        raise BadRow("unknown form", f"{place}{error}") from error


def content_of(content: object, number: int, role: str) -> str | list[Json]:
    """The text of a turn, a list of text parts joined; or the parts of a turn that shows pictures."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part_of(part, number) for part in content]
        if all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        if role != "user":
            raise BadRow("unknown form", f"turn {number} by {role} shows a picture; move it to a turn by user")
        return parts
    if not isinstance(content, str):
        raise BadRow("unknown form", f"turn {number} is {in_words(content)}, text is needed")
    return content


def part_of(given: object, number: int) -> Json:
    """A content part as templates read it; a picture's `source` is None if the row's field of pictures has it."""
    part = given if isinstance(given, dict) else {"type": "?"}
    kind = part.get("type")
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in PICTURES:
        raise BadRow("unknown form", f"turn {number} contains parts that are neither text nor images; remove them")
    source = one_of(part, "image", "image_url", "url", "path", owner=f"turn {number}: ")
    return {"type": "image", "source": source.get("url", source) if isinstance(source, dict) else source}


def place_pictures(messages: list[Json], given: list[Any]) -> tuple[Any, ...]:
    """Where the picture of each image part of the messages is, in order; they lose their sources.

    `given` are the pictures of parts without a source. If there is no such part, they belong where a text of the user
    has PICTURE_MARK, or else before the first of these texts.
    """
    users, places = [turn for turn in messages if turn["role"] == "user"], image_parts(messages)
    if given and not places:
        is_marked = any(PICTURE_MARK in text for turn in users for text in texts_of(turn))
        for turn in users if is_marked else users[:1]:
            parts = (
                turn["content"] if isinstance(turn["content"], list) else [{"type": "text", "text": turn["content"]}]
            )
            turn["content"] = marked_parts(parts) if is_marked else [*open_parts(len(given)), *parts]
        places = image_parts(messages)
    rest, sources = iter(given), [part.pop("source") for part in places]
    if (found := sum(source is None for source in sources)) != len(given):
        raise BadRow("unclear", f"the row has {len(given)} images for {found} places in its turns; give one for each")
    return tuple(next(rest) if source is None else source for source in sources)


def image_parts(messages: list[Json]) -> list[Json]:
    contents = (turn["content"] for turn in messages if isinstance(turn["content"], list))
    return [part for content in contents for part in content if part["type"] == "image"]


def open_parts(count: int) -> list[Json]:
    return [{"type": "image", "source": None} for _ in range(count)]


def marked_parts(parts: list[Json]) -> list[Json]:
    """The parts, with a picture in place of each PICTURE_MARK."""
    made: list[Json] = []
    for part in parts:
        for number, text in enumerate(part["text"].split(PICTURE_MARK) if part["type"] == "text" else [None]):
            made += open_parts(number > 0)
            made += [part] if text is None else [{"type": "text", "text": text}] if text.strip() else []
    return made


def texts_of(turn: Json) -> list[str]:
    """The texts of a turn, between its pictures."""
    content = turn["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def parse_json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow("unreadable", f"{field}: not valid JSON ({error})") from error


def check_order(messages: list[Json]) -> None:
    """Raise BadRow for the first turn that cannot follow the one before it."""
    roles = [message["role"] for message in messages]
    for number, (before, role) in enumerate(pairwise([None, *roles]), start=1):
        if before not in FOLLOWS[role]:
            predecessor = "the start" if before is None else f"a turn by {before}"
            raise BadRow(
                "wrong turn", f"turn {number} is by {role} right after {predecessor}; change the order of the turns"
            )


def list_of(kind: type[Item], value: object, name: str) -> list[Item]:
    wanted = {int: "whole numbers", dict: "objects"}[kind]
    if not isinstance(value, list):
        raise BadRow("unknown form", f"{name} is {in_words(value)}, a list of {wanted} is needed; a row needs {NEEDED}")
    for position, item in enumerate(value, start=1):
        if not isinstance(item, kind):
            problem = f"{name} holds {in_words(item)} at place {position}"
            raise BadRow("unknown form", f"{problem}, a list of {wanted} is needed; a row needs {NEEDED}")
    return value
