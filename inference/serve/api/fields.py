"""The fields of requests as pydantic models. Types are strict, null counts as left out, unknown fields are refused."""

import difflib
import json
import reprlib
from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from headstart.inference.serve.api.errors import ApiError, wrong
from headstart.inference.targets.chat_template import read_json
from headstart.recipes.sampling import Allowed, Range, SamplingFields

# Accepted without effect, because they concern OpenAI's service: the caller, its cache, its tools.
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "request_id", "max_tool_calls",
})  # fmt: skip
# Fields of other servers, with the value that switches each of them off: only that value is accepted.
OFF: dict[str, Any] = {
    **{"suffix": "", "best_of": 1, "prompt_logprobs": 0, "use_beam_search": False, "length_penalty": 1, "typical_p": 1},
    **{"bad_words": [], "modalities": ["text"], "functions": [], "function_call": "none"},
    **{"spaces_between_special_tokens": True, "include_obfuscation": False, "include_reasoning": True},
    **{"return_token_ids": False, "return_tokens_as_token_ids": False, "background": False, "truncation": "disabled"},
}
STOPS_MAX, STOP_LENGTH_MAX = 64, 1000
STOPS = f"a text, or a list of at most {STOPS_MAX} texts of 1 to {STOP_LENGTH_MAX} characters without U+FFFD, is"
TOP_LOGPROBS_MAX = 20
Model = TypeVar("Model", bound=BaseModel)


def read_fields(kind: type[Model], body: bytes) -> Model:
    """The fields of a request's body; raises ApiError. Other threads get their turns, however large the body is."""
    try:
        return kind.model_validate(read_json(body.decode("utf-8-sig")))
    except ValidationError as error:
        raise first_refusal(error) from None
    except RecursionError:
        raise ApiError(
            400, "the body: its JSON is nested too deeply, some hundred levels are allowed; correct it"
        ) from None
    except json.JSONDecodeError as error:
        raise not_json(f"{error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise not_json(error) from None


def check_tools(tools: list[Any]) -> list[Any]:
    """The tools of a chat, unchanged because the template sees their order of keys."""
    names = set[str]()
    for index, tool in enumerate(tools):
        if not has_function(tool) or tool.get("type") != "function":
            raise wrong(f"tools[{index}]", tool, "an object of type function with a name is", "correct it")
        name, parameters = tool["function"]["name"], tool["function"].get("parameters")
        if name in names:
            raise wrong(f"tools[{index}]", name, "one tool of each name is", "rename it or leave it out")
        names.add(name)
        kinds = parameters.get("type", "object") if isinstance(parameters, dict) else parameters
        if parameters is not None and kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            place = f"tools[{index}].function.parameters"
            raise wrong(place, parameters, 'the schema of an object, {"type": "object", ...}, is', "correct it")
    return tools


def has_function(tool: Any) -> bool:
    """Is this an object whose function has a name?"""
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


Flag = Annotated[bool, Allowed("true or false is")]
Text = Annotated[str, Allowed("a text is")]
Tokens = Annotated[list[int], Allowed("a list of token ids is")]
# Incomplete characters show as U+FFFD until their last byte arrives.
Stop = Annotated[Text, Field(min_length=1, max_length=STOP_LENGTH_MAX, pattern="^[^\ufffd]*$")]
Stops = Annotated[list[Stop], Field(max_length=STOPS_MAX)]
Priority = Annotated[int, Range(-(2**31), 2**31)]
Alternatives = Annotated[int, Range(0, TOP_LOGPROBS_MAX)]
NonEmpty = Annotated[Text, Field(min_length=1)]
Format = Literal["text", "json_object", "json_schema"]
CHOICES = 'auto, none, required or {"type": "function", "function": {"name": NAME}}'
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Fields(BaseModel, strict=True, allow_inf_nan=False):
    """Fields of a request, or of an object in one."""

    @model_validator(mode="before")
    @classmethod
    def known(cls, values: Any) -> Any:
        """The fields that have a value; raises an error for the first unknown one that would have an effect."""
        if not isinstance(values, dict):
            return values
        names = {field.alias or name for name, field in cls.model_fields.items()}
        given = {name: value for name, value in values.items() if value is not None}
        for name in given:
            if name not in names and name not in IGNORED:
                refuse_unknown(name, given[name], names)
        return given


class StreamOptions(Fields):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False

    @property
    def with_usage(self) -> bool:
        return self.include_usage or self.continuous_usage_stats


class Extension(Fields):
    """Fields of the chat page."""

    tokens: Flag = False  # each token's text and draft depth
    trees: Flag = False  # each step's draft tree


class JsonSchema(Fields):
    name: Any = None
    description: Any = None
    strict: Any = None
    schema_: Any = Field(None, alias="schema")


class ResponseFormat(Fields):
    """OpenAI's field for the form of the text."""

    type: Annotated[Format, Allowed("text, json_object, json_schema is")] = "text"
    json_schema: JsonSchema = JsonSchema()


class StructuredOutputs(Fields):
    """vLLM's field for the form of the text."""

    json_: Any = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[NonEmpty], Field(min_length=1), Allowed("a list of texts is")] = []


class CommonFields(SamplingFields, Fields):
    """The fields of every request for text."""

    model: Text | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    speculative: Flag = True
    priority: Priority = 0
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()


class TextRequest(CommonFields):
    """The common fields of chats and completions."""

    n: Annotated[int, Range(1, 128)] = 1
    max_tokens: Annotated[int, Range(1)] | None = None
    min_tokens: Annotated[int, Range(0)] = 0
    logit_bias: dict[str, Any] = {}  # checked when it is encoded
    stop: Annotated[Stop | Stops, Allowed(STOPS)] = []
    include_stop_str_in_output: Flag = False
    stop_token_ids: Annotated[list[int], Field(max_length=1000), Allowed("a list of at most 1000 token ids is")] = []
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    response_format: ResponseFormat = ResponseFormat()
    headstart: Extension = Extension()


def in_turn(value: Any) -> Any:
    """The value as it is. When this is called, other threads may take the interpreter's lock, which pydantic holds."""
    return value


class Listed(BaseModel, strict=True):
    """An item of a list that may be long."""

    @model_validator(mode="before")
    @classmethod
    def in_turn(cls, values: Any) -> Any:
        return in_turn(values)


class ContentPart(Listed, extra="allow"):
    """A part of a message's content; `read_pictures` reads it."""

    type: Text


Parts = Annotated[list[ContentPart], Allowed("")]


class Message(Listed, extra="allow"):
    """A message of a chat. `encode.turn` reads the other fields, and refuses those that nothing reads."""

    role: Annotated[Role, Allowed("system, developer, user, assistant, tool are")]
    content: Annotated[Text | Parts, Allowed("a text, or a list of parts with a type, is")] | None = None
    tool_calls: list[Any] | None = None
    name: Text | None = None
    tool_call_id: Text | None = None


class NamedFunction(Fields):
    name: Text


class NamedTool(Fields):
    """OpenAI's form of the choice of one tool."""

    type: Annotated[Literal["function"], Allowed("function is")]
    function: NamedFunction


class Templated(Fields):
    """The fields that make a prompt of a chat."""

    messages: Annotated[list[Message], FailFast()] = []
    tools: Annotated[list[Any], AfterValidator(check_tools)] = []
    tool_choice: Annotated[Literal["auto", "none", "required"] | NamedTool, Allowed(f"{CHOICES} is")] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Text | None = None
    verbosity: Text | None = None
    continue_final_message: Flag = False
    add_generation_prompt: Flag | None = None  # None: true unless the final message is continued
    add_special_tokens: Flag | None = None  # None: true for a text, false for messages

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the chat template, including hints that some templates use."""
        hints = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {**{name: value for name, value in hints.items() if value is not None}, **self.chat_template_kwargs}


class ChatRequest(TextRequest, Templated):
    """A body of /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Range(1)] | None = None
    parallel_tool_calls: Flag = True  # False: at most one call
    logprobs: Flag = False
    top_logprobs: Alternatives = 0


class CompletionRequest(TextRequest):
    """A body of /v1/completions."""

    prompt: Annotated[
        Text | Tokens | Annotated[list[Annotated[Text | Tokens, BeforeValidator(in_turn)]], Allowed("")],
        Allowed("a text, a list of texts, a list of token ids or a list of such lists is"),
    ]
    max_tokens: Annotated[int, Range(0)] | None = None
    add_special_tokens: Flag = True
    logprobs: Alternatives | None = None
    echo: Flag = False
    return_token_ids: Flag = False


class TokenizeRequest(Templated):
    model: Text | None = None
    prompt: Text | None = None
    return_token_strs: Flag = False


class DetokenizeRequest(Fields):
    model: Text | None = None
    tokens: Tokens


class HeadRequest(Fields):
    """A body of /adapt/head."""

    folder: Text  # on the server's machine


def first_refusal(error: ValidationError) -> ApiError:
    """pydantic's first error for a wrong body, in OpenAI's shape."""
    first = error.errors()[0]
    kind, value, told = first["type"], first["input"], first.get("ctx", {})
    steps = (*first["loc"], told["field"]) if kind == "unknown" else first["loc"]
    if not steps:
        return not_json(f"{reprlib.repr(value)} given")
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
    if kind == "unknown":
        return ApiError(400, f"{path}: {first['msg']}", path)
    if kind == "missing":
        return ApiError(400, f"{path}: missing, but it is required; write it", path)
    other = "a list is" if kind == "list_type" else "an object is"
    return wrong(path, value, first["msg"] if kind == "not_allowed" else other, "correct it")


def not_json(reason: object) -> ApiError:
    return ApiError(400, f"the body is not a JSON object ({reason}); one object is allowed; correct it")


def refuse_unknown(name: str, value: Any, known: Collection[str], place: str | None = None) -> None:
    """Raise an error for a field outside the model, unless its value switches it off.

    Outside the validation of a body, `place` is the path of the object that has the field.
    """
    if name in OFF:
        if value == OFF[name] and isinstance(value, bool) == isinstance(OFF[name], bool):
            return
        allowed = f"this server does not support it, only {json.dumps(OFF[name])} is allowed"
        message = f"{reprlib.repr(value)} given, {allowed}; leave it out"
    else:
        near = difflib.get_close_matches(name, known, 1, 0.75)
        meant = f"did you mean {near[0]}?" if near else "leave it out"
        message = f"there is no such field; {', '.join(sorted(known))} are allowed; {meant}"
    if place is not None:
        raise ApiError(400, f"{place}.{name[:60]}: {message}", f"{place}.{name[:60]}")
    raise PydanticCustomError("unknown", "{message}", {"message": message, "field": name[:60]})
