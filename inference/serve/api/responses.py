"""OpenAI's Responses API without stored responses: requests become chats, and answers become items and events."""

import json
import re
from functools import cached_property
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BeforeValidator, FailFast, Field, ValidationError, ValidationInfo, field_validator

from headstart.inference.serve.api.answers import Answer, Json, metrics, usage
from headstart.inference.serve.api.errors import ApiError, wrong
from headstart.inference.serve.api.fields import (
    Allowed,
    ChatRequest,
    CommonFields,
    ContentPart,
    Fields,
    Flag,
    Format,
    JsonSchema,
    Listed,
    Parts,
    Range,
    Text,
    first_refusal,
    refuse_unknown,
)
from headstart.inference.serve.api.output import Choice, Output, RequestProgress
from headstart.inference.show import TokenText
from headstart.inference.targets.chat_template import unread_fields

SHARED = {*CommonFields.model_fields, "chat_template_kwargs"} - {"stream_options"}
# Fields that the answer repeats as they are.
REPEATED = {
    *("instructions", "max_output_tokens", "parallel_tool_calls", "previous_response_id", "reasoning", "tool_choice"),
    "tools",
}
# Names in the error messages of a chat, and this API's names for them.
FIELD_NAMES = {
    r"^messages(\[\d+\])?": "input",
    "max_completion_tokens": "max_output_tokens",
    r"^response_format(\.json_schema)?": "text.format",
    "^reasoning_effort": "reasoning.effort",
    r'"function": \{"name": NAME\}': '"name": NAME',
}


Content = Annotated[Text | Parts, Allowed("a text, or a list of parts with a type, is")]
IGNORED_IN_ITEMS = frozenset({"id", "status", "summary", "encrypted_content", "phase"})
Included = Annotated[Literal["reasoning.encrypted_content"], Allowed("reasoning.encrypted_content is")]
Kind = Literal["message", "function_call", "function_call_output", "reasoning"]
Role = Literal["system", "developer", "user", "assistant"]


class Item(Listed, extra="allow"):
    """An item of the input. Fields of our own items without a counterpart in chats are ignored, others refused."""

    type: Annotated[Kind, Allowed("a complete message, function_call, function_call_output, reasoning is")] = "message"
    role: Annotated[Role, Allowed("system, developer, user, assistant are")] | None = None
    content: Content | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Content | None = None


class TextFormat(JsonSchema):
    type: Annotated[Format, Allowed("text, json_object, json_schema is")] = "text"


class TextOptions(Fields):
    format: TextFormat = TextFormat()
    verbosity: Text | None = None


class Reasoning(Fields):
    effort: Text | None = None
    summary: Any = None  # of reasoning items, which this server does not write
    generate_summary: Any = None


def as_items(text_or_items: Any) -> Any:
    return [{"role": "user", "content": text_or_items}] if isinstance(text_or_items, str) else text_or_items


class ResponsesRequest(CommonFields):
    """A body of /v1/responses."""

    input: Annotated[list[Item], FailFast(), BeforeValidator(as_items)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Range(1)] | None = None
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    tools: list[Any] = Field([])
    tool_choice: Any = "auto"
    parallel_tool_calls: Flag = True
    include: list[Included] = Field([])
    previous_response_id: Annotated[
        None, Allowed("responses are not stored: only null, with the full conversation as input, is")
    ] = None
    chat_template_kwargs: dict[str, Any] = Field({})

    @field_validator("text", "reasoning", "tools", "tool_choice", mode="before")
    @classmethod
    def repeatable(cls, value: Any, info: ValidationInfo) -> Any:
        """A field that the answer repeats; raises ApiError if it cannot be written as JSON."""
        name = str(info.field_name)
        try:
            json.dumps({"response": {name: value}}, allow_nan=False)
        except (ValueError, RecursionError):  # the parser accepts Infinity, 1e999 and deeper nesting
            raise wrong(name, value, "JSON with finite numbers and less nesting is", "correct it") from None
        return value

    @cached_property
    def repeated(self) -> Json:
        """The fields that the answer repeats."""
        return self.model_dump(include=REPEATED)

    def as_chat(self) -> ChatRequest:
        """The same request as a chat. Raises ApiError."""
        form = self.text.format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        chat = {
            **self.model_dump(include=SHARED, by_alias=True, exclude_unset=True),
            "messages": self.messages(),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": {"type": self.text.format.type, "json_schema": form},
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "tools": [nested(tool) for tool in self.tools],
            "tool_choice": nested(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        try:
            return ChatRequest.model_validate(chat)
        except ValidationError as error:
            raise first_refusal(error) from None

    def messages(self) -> list[Json]:
        """The messages of the chat. An assistant's message includes the reasoning before it and the calls after it."""
        messages: list[Json] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        for index, item in enumerate(self.input):
            content, last = as_chat_content(item.content), messages[-1] if messages else {}
            for name in unread_fields(item.model_extra or {}, IGNORED_IN_ITEMS):
                refuse_unknown(name, getattr(item, name), Item.model_fields, f"input[{index}]")
            if item.type == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": as_chat_content(item.output)})
            elif item.type == "message" and item.role is None:
                raise wrong(f"input[{index}].role", None, "a role is", "write it")
            elif item.role == "assistant" and last.keys() == {"role", "content", "reasoning_content"}:
                last["content"] = content
            elif item.type == "message":
                messages.append({"role": item.role, "content": content})
            elif item.type == "reasoning" and content:
                thoughts = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
                messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
            elif item.type == "function_call":
                if last.get("role") != "assistant":
                    messages.append({"role": "assistant"})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages


def as_chat_content(content: str | list[ContentPart] | None) -> Any:
    """Content as a chat has it."""
    return [part.model_dump() for part in content] if isinstance(content, list) else content


def nested(tool: Any) -> Any:
    """A tool, or the choice of one, in a chat's form: with the function in its own field."""
    if not isinstance(tool, dict) or "function" in tool:
        return tool
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": tool.get("type"), "function": function}


def with_field_names(error: ApiError) -> ApiError:
    """A chat's error with this API's names of fields."""
    message, param = error.message, error.param
    for pattern, name in FIELD_NAMES.items():
        message, param = re.sub(pattern, name, message), param and re.sub(pattern, name, param)
    return ApiError(error.status, message, param, error.headers)


class ResponsesAnswer(Answer):
    """The answer as items, and as events about them; the last event holds the full answer."""

    prefix, full_object, chunk_object, last = "resp", "response", "response", ""

    def __init__(self, progress: RequestProgress, *rest: Any) -> None:
        super().__init__(progress, *rest)
        self.request: ResponsesRequest = progress.encoded.original
        self.number = 0  # of the next event
        self.items: list[Json] = []  # completed ones
        self.message: str | None = None  # the id of the current message
        self.text = ""  # of the current message, or white space that may begin one

    def full(self) -> Json:
        (choice,) = self.progress.choices
        return self.chunks(choice, choice.output)[-1]["response"]

    def opening(self) -> list[Json]:
        return [self.event(kind, response=self.response("in_progress")) for kind in ("created", "in_progress")]

    def chunks(self, choice: Choice, output: Output) -> list[Json]:
        events, text = list[Json](), ""
        for part in output.parts:
            if isinstance(part, TokenText):
                text += part.text
            else:
                events += [*self.write(text), *self.end_message(), *self.call(part)]
                text = ""
        events += self.write(text, choice.finish is not None and not self.items)
        if choice.finish is None:
            return events
        status = "completed" if choice.finish in ("stop", "tool_calls") else "incomplete"
        events += self.end_message(status)
        return [*events, self.event(status, response=self.response(status, choice))]

    def failed(self, error: ApiError) -> Json:
        return {"type": "error", "sequence_number": self.number, **error.body()}

    def event(self, kind: str, **fields: Any) -> Json:
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **fields}

    def write(self, text: str, is_all: bool = False) -> list[Json]:
        """The events of more text. White space alone, as around calls, begins a message only if it is all the text."""
        events: list[Json] = []
        self.text += text
        if self.message is None and (is_all or self.text.strip()):
            text = self.text
            events += self.begin_message()
        if text and self.message is not None:
            events.append(self.event("output_text.delta", **self.position(), delta=text, logprobs=[]))
        return events

    def begin_message(self) -> list[Json]:
        self.message = f"msg_{uuid4().hex}"
        item = self.message_item("in_progress", [])
        return [
            self.event("output_item.added", output_index=len(self.items), item=item),
            self.event("content_part.added", **self.position(), part=output_text("")),
        ]

    def end_message(self, status: str = "completed") -> list[Json]:
        text, self.text = self.text, ""
        if self.message is None:
            return []
        part, position = output_text(text), self.position()
        item = self.message_item(status, [part])
        self.message = None
        return [
            self.event("output_text.done", **position, text=text, logprobs=[]),
            self.event("content_part.done", **position, part=part),
            self.done(item),
        ]

    def call(self, call: Json) -> list[Json]:
        """The events of a call, which is written in one piece."""
        item = {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": call["id"], **call["function"]}
        position = {"item_id": item["id"], "output_index": len(self.items)}
        started, arguments = {**item, "arguments": "", "status": "in_progress"}, item["arguments"]
        return [
            self.event("output_item.added", output_index=len(self.items), item=started),
            self.event("function_call_arguments.delta", **position, delta=arguments),
            self.event("function_call_arguments.done", **position, name=item["name"], arguments=arguments),
            self.done({**item, "status": "completed"}),
        ]

    def done(self, item: Json) -> Json:
        self.items.append(item)
        return self.event("output_item.done", output_index=len(self.items) - 1, item=item)

    def position(self) -> Json:
        return {"item_id": self.message, "output_index": len(self.items), "content_index": 0}

    def message_item(self, status: str, content: list[Json]) -> Json:
        return {"id": self.message, "type": "message", "role": "assistant", "status": status, "content": content}

    def response(self, status: str, ended: Choice | None = None) -> Json:
        """The response so far, with its usage once its choice has ended."""
        request, sampling = self.request, self.progress.choices[0].request.sampling
        response: Json = {
            "id": self.base["id"].replace("-", "_"),
            "object": "response",
            "created_at": self.base["created"],
            "status": status,
            "model": self.base["model"],
            "output": [*self.items],
            "error": None,
            "incomplete_details": None,
            **request.repeated,
            "metadata": {},
            "seed": self.base["seed"],
            "store": False,
            "temperature": sampling.temperature,
            "text": request.text.model_dump(by_alias=True, exclude_none=True),
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if ended is None:
            return response
        if status == "incomplete":
            reason = "max_output_tokens" if ended.finish == "length" else ended.finish
            response["incomplete_details"] = {"reason": reason}
        return {
            **response,
            "usage": response_usage(usage(self.progress)),
            "metrics": metrics(self.progress, self.max_depth),
        }


def output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_usage(chat: Json) -> Json:
    """A chat's usage under this API's names."""
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {**chat["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }
