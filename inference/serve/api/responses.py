"""OpenAI's Responses API without stored responses: requests become those of a chat, and answers items and events."""

import json
import re
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from headstart.inference.serve.api.answers import Answer, Json, metrics, usage
from headstart.inference.serve.api.errors import ApiError, wrong
from headstart.inference.serve.api.fields import (
    Allowed,
    ChatRequest,
    CommonFields,
    Fields,
    Flag,
    Format,
    JsonSchema,
    Range,
    Text,
    refusal,
)
from headstart.inference.serve.api.output import Choice, Output
from headstart.inference.show import TokenText

SHARED = {*CommonFields.model_fields, "chat_template_kwargs"} - {"stream_options"}
# A chat's names of fields in messages of errors, and those of this API.
OWN_WORDS = {
    r"^messages(\[\d+\])?": "input",
    "max_completion_tokens": "max_output_tokens",
    r"^response_format(\.json_schema)?": "text.format",
    "^reasoning_effort": "reasoning.effort",
    r'"function": \{"name": NAME\}': '"name": NAME',
}


class Part(BaseModel, strict=True):
    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: Text


Content = Annotated[Text | list[Part], Allowed("a text, or a list of parts of type input_text or output_text, is")]
Included = Annotated[Literal["reasoning.encrypted_content"], Allowed("reasoning.encrypted_content is")]
Kind = Literal["message", "function_call", "function_call_output", "reasoning"]
Role = Literal["system", "developer", "user", "assistant"]


class Item(BaseModel, strict=True):
    """An item of the input. What a chat has no place for, such as ids and summaries, is ignored."""

    type: Annotated[Kind, Allowed("message, function_call, function_call_output or reasoning, whole, is")] = "message"
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
    summary: Any = None  # of reasoning items, of which this server writes none
    generate_summary: Any = None


def as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesRequest(CommonFields):
    """A body of /v1/responses."""

    input: Annotated[list[Item], BeforeValidator(as_items)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Range(1)] | None = None
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    tools: list[Any] = Field([])
    tool_choice: Any = "auto"
    parallel_tool_calls: Flag = True
    include: list[Included] = Field([])
    previous_response_id: Annotated[
        None, Allowed("nothing is stored, so only null here, and the whole conversation as input, is")
    ] = None
    chat_template_kwargs: dict[str, Any] = Field({})

    @field_validator("text", "reasoning", "tools", "tool_choice", mode="before")
    @classmethod
    def repeatable(cls, given: Any, info: ValidationInfo) -> Any:
        """A field that the answer repeats; raises ApiError if JSON cannot hold it."""
        name = str(info.field_name)
        try:
            json.dumps({"response": {name: given}}, allow_nan=False)
        except (ValueError, RecursionError):  # reading allows Infinity and 1e999, and is less deep in calls
            raise wrong(name, given, "JSON with finite numbers and of less depth is", "correct it") from None
        return given

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
            first = error.errors()[0]
            raise refusal({**first, "loc": ("body", *first["loc"])}) from None

    def messages(self) -> list[Json]:
        """The messages of the chat. An assistant's message holds the calls that follow it, and the reasoning before."""
        found: list[Json] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        for place, item in enumerate(self.input):
            content, last = joined(item.content), found[-1] if found else {}
            if item.type == "function_call_output":
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
            elif item.type == "message" and item.role is None:
                raise wrong(f"input[{place}].role", None, "a role is", "write it")
            elif item.role == "assistant" and last.keys() == {"role", "content", "reasoning_content"}:
                last["content"] = content
            elif item.type == "message":
                found.append({"role": item.role, "content": content})
            elif item.type == "reasoning" and content:
                found.append({"role": "assistant", "content": "", "reasoning_content": content})
            elif item.type == "function_call":
                if last.get("role") != "assistant":
                    found.append({"role": "assistant"})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                found[-1].setdefault("tool_calls", []).append(call)
        return found


def joined(content: str | list[Part] | None) -> str | None:
    return content if content is None or isinstance(content, str) else "".join(part.text for part in content)


def nested(given: Any) -> Any:
    """A tool, or the choice of one, as a chat has it: with the function in a field of its own."""
    if not isinstance(given, dict) or "function" in given:
        return given
    function = {name: value for name, value in given.items() if name != "type" and value is not None}
    return {"type": given.get("type"), "function": function}


def in_own_words(error: ApiError) -> ApiError:
    """The error of a chat with this API's names of fields."""
    message, param = error.message, error.param
    for chats, own in OWN_WORDS.items():
        message, param = re.sub(chats, own, message), param and re.sub(chats, own, param)
    return ApiError(error.status, message, param, error.headers)


class ResponsesAnswer(Answer):
    """The answer as items, and the events that tell of them; a whole answer is what the last event holds."""

    prefix, whole_object, chunk_object, last = "resp", "response", "response", ""

    def __init__(self, given: ResponsesRequest, *rest: Any) -> None:
        super().__init__(*rest)
        self.given = given
        self.number = 0  # of the next event
        self.items: list[Json] = []  # those that are done
        self.message: str | None = None  # the id of the message that is being written
        self.text = ""  # of that message, or white space of which it is not yet known whether one begins with it

    def whole(self) -> Json:
        (choice,) = self.completion.choices
        return self.chunks(choice, choice.output)[-1]["response"]

    def opening(self) -> list[Json]:
        return [self.event(kind, response=self.response("in_progress")) for kind in ("created", "in_progress")]

    def chunks(self, choice: Choice, output: Output) -> list[Json]:
        found, text = list[Json](), ""
        for part in output.parts:
            if isinstance(part, TokenText):
                text += part.text
            else:
                found += [*self.write(text), *self.end_message(), *self.call(part)]
                text = ""
        found += self.write(text, choice.finish is not None and not self.items)
        if choice.finish is None:
            return found
        status = "completed" if choice.finish in ("stop", "tool_calls") else "incomplete"
        found += self.end_message(status)
        return [*found, self.event(status, response=self.response(status, choice))]

    def failed(self, error: ApiError) -> Json:
        return {"type": "error", "sequence_number": self.number, **error.body()}

    def event(self, kind: str, **fields: Any) -> Json:
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **fields}

    def write(self, text: str, is_all: bool = False) -> list[Json]:
        """The events of more text. White space begins no message, as it stands around calls, unless it is all."""
        found: list[Json] = []
        self.text += text
        if self.message is None and (is_all or self.text.strip()):
            text = self.text
            found += self.begin_message()
        if text and self.message is not None:
            found.append(self.event("output_text.delta", **self.place(), delta=text, logprobs=[]))
        return found

    def begin_message(self) -> list[Json]:
        self.message = f"msg_{uuid4().hex}"
        item = self.message_item("in_progress", [])
        return [
            self.event("output_item.added", output_index=len(self.items), item=item),
            self.event("content_part.added", **self.place(), part=output_text("")),
        ]

    def end_message(self, status: str = "completed") -> list[Json]:
        text, self.text = self.text, ""
        if self.message is None:
            return []
        part, place = output_text(text), self.place()
        item = self.message_item(status, [part])
        self.message = None
        return [
            self.event("output_text.done", **place, text=text, logprobs=[]),
            self.event("content_part.done", **place, part=part),
            self.done(item),
        ]

    def call(self, call: Json) -> list[Json]:
        """The events of a call, which comes in one piece."""
        item = {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": call["id"], **call["function"]}
        place = {"item_id": item["id"], "output_index": len(self.items)}
        begun, arguments = {**item, "arguments": "", "status": "in_progress"}, item["arguments"]
        return [
            self.event("output_item.added", output_index=len(self.items), item=begun),
            self.event("function_call_arguments.delta", **place, delta=arguments),
            self.event("function_call_arguments.done", **place, name=item["name"], arguments=arguments),
            self.done({**item, "status": "completed"}),
        ]

    def done(self, item: Json) -> Json:
        self.items.append(item)
        return self.event("output_item.done", output_index=len(self.items) - 1, item=item)

    def place(self) -> Json:
        return {"item_id": self.message, "output_index": len(self.items), "content_index": 0}

    def message_item(self, status: str, content: list[Json]) -> Json:
        return {"id": self.message, "type": "message", "role": "assistant", "status": status, "content": content}

    def response(self, status: str, ended: Choice | None = None) -> Json:
        """The response so far, with its usage once its choice has ended."""
        given, sampling = self.given, self.completion.choices[0].request.sampling
        found: Json = {
            "id": self.base["id"].replace("-", "_"),
            "object": "response",
            "created_at": self.base["created"],
            "status": status,
            "model": self.base["model"],
            "output": [*self.items],
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": given.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": given.reasoning.model_dump(),
            "seed": self.base["seed"],
            "store": False,
            "temperature": sampling.temperature,
            "text": given.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": given.tool_choice,
            "tools": given.tools,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if ended is None:
            return found
        if status == "incomplete":
            reason = "max_output_tokens" if ended.finish == "length" else ended.finish
            found["incomplete_details"] = {"reason": reason}
        return {
            **found,
            "usage": response_usage(usage(self.completion)),
            "metrics": metrics(self.completion, self.max_depth),
        }


def output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_usage(chats: Json) -> Json:
    """The usage of a chat in this API's words."""
    return {
        "input_tokens": chats["prompt_tokens"],
        "input_tokens_details": {**chats["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": chats["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chats["total_tokens"],
    }
