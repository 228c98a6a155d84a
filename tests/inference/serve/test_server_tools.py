"""Laws of tool calls: forced or free, whole or streamed, drafted or not, they are the same and fit their tools."""

import json
from typing import Any

import pytest
from matrix import slow
from openai import BadRequestError, OpenAI
from server_run import NAME
from test_server import SCHEMA
from tiny_run import ENDS, build_tokenizer

MESSAGES: Any = [{"role": "user", "content": "look"}]


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=MESSAGES, **fields)


CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("before", [slow(""), "so "])
def test_tool_calls_come_whole_and_in_a_stream(client: OpenAI, before: str) -> None:
    extra = {"structured_outputs": {"choice": [before + CALL]}}
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 90, "extra_body": extra}
    whole = chat(client, **fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert (whole.message.content or "") == before
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [
        ("look", '{"at": "it"}')
    ]
    chunks = [chunk.choices[0] for chunk in chat(client, **fields, stream=True) if chunk.choices]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == before
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "look", '{"at": "it"}')
    ]
    assert chunks[-1].finish_reason == "tool_calls"
    ignored = chat(client, **fields, tool_choice="none").choices[0]
    assert ignored.message.content == before + CALL
    assert ignored.finish_reason == "stop"


def test_half_of_a_surrogate_pair_in_an_argument_is_an_escape(client: OpenAI) -> None:
    extra = {"structured_outputs": {"choice": [CALL.replace("it", "\\ud83d")]}}
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 90, "extra_body": extra}
    (call,) = chat(client, **fields).choices[0].message.tool_calls
    assert call.function.arguments == '{"at": "\\ud83d"}'
    chunks = chat(client, **fields, stream=True)
    assert call.function.arguments in [
        each.function.arguments for chunk in chunks if chunk.choices for each in chunk.choices[0].delta.tool_calls or []
    ]


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    """A tool with these parameters, as clients write it: nothing is said about others."""
    schema = {"type": "object", "properties": parameters, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "parameters": schema} if parameters else {"name": name}}


MANY = [tool("look", at={"enum": ["it", "</tool_call>"]}, far={"type": "boolean"}), tool("wait")]
NAMED = {"type": "function", "function": {"name": "look"}}
ENDING = {"logit_bias": {str(token): 100 for token in ENDS}}  # this target would go on with calls


def read_look(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "wait":
        return arguments == {}
    found = call.function.name == "look" and arguments.keys() == {"at", "far"}
    return found and arguments["at"] in ("it", "</tool_call>") and arguments["far"] in (True, False)


@pytest.mark.parametrize(
    ("choice", "parallel", "seed"), [("required", True, 0), slow(("required", False, 1)), (NAMED, True, 2)]
)
def test_a_forced_call_is_one_of_the_tools_and_its_schema(
    client: OpenAI, choice: Any, parallel: bool, seed: int
) -> None:
    """A call of a named tool ends in `stop`, as OpenAI's and vLLM's do."""
    fields: dict[str, Any] = {"tools": MANY, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": seed}
    fields |= {"temperature": 1.0, "max_tokens": 98, **ENDING}
    fields |= {"response_format": {"type": "json_object"}} if seed else {}  # which binds only what is no call
    whole = chat(client, **fields).choices[0]
    calls = whole.message.tool_calls
    assert all(map(read_look, calls))
    assert whole.message.content is None
    assert whole.finish_reason == ("stop" if choice == NAMED else "tool_calls")
    assert [call.function.name for call in calls] in ([["look"]] if choice == NAMED else [["look"], ["wait"]])
    plain = chat(client, **fields, extra_body={"speculative": False}).choices[0].message
    chunks = [chunk.choices[0] for chunk in chat(client, **fields, stream=True) if chunk.choices]
    streamed = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    texts = [call.function.arguments for call in calls]
    assert [call.function.arguments for call in plain.tool_calls] == texts
    assert [call.function.arguments for call in streamed] == texts
    assert [call.index for call in streamed] == [*range(len(calls))]
    assert not "".join(chunk.delta.content or "" for chunk in chunks).strip()
    assert chunks[-1].finish_reason == whole.finish_reason


def test_a_choice_without_such_a_tool_is_refused(client: OpenAI) -> None:
    own: dict[str, Any] = {"structured_outputs": {"regex": "a"}}
    for fields, words in (
        ({"tool_choice": "required"}, "tool_choice: 'required' given, .*without tools"),
        ({"tools": MANY, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "'no' given, look, wait is"),
        ({"tools": MANY, "tool_choice": "any"}, "auto, none, required or"),
        ({"tools": [tool("look", at={"type": "wizard"})], "tool_choice": "required"}, "parameters of look: .*wizard"),
        ({"tools": MANY, "tool_choice": "required", "extra_body": own}, "structured_outputs: .*forces a call"),
    ):
        with pytest.raises(BadRequestError, match=words):
            chat(client, **fields)


@pytest.mark.parametrize("speculative", [True, slow(False)])
def test_without_parallel_calls_the_text_ends_after_the_first(client: OpenAI, speculative: bool) -> None:
    call = '<tool_call>{"name": "wait"}</tool_call>'
    twice = {"structured_outputs": {"choice": [f"so {call}\n{call} and"]}, "speculative": speculative}
    fields: dict[str, Any] = {"tools": MANY, "max_tokens": 98, "temperature": 0, "extra_body": twice}
    assert len(chat(client, **fields).choices[0].message.tool_calls) > 1
    whole = chat(client, **fields, parallel_tool_calls=False)
    choice = whole.choices[0]
    assert (choice.message.content, len(choice.message.tool_calls), choice.finish_reason) == ("so ", 1, "tool_calls")
    chunks = [each.choices[0] for each in chat(client, **fields, parallel_tool_calls=False, stream=True)]
    assert "".join(each.delta.content or "" for each in chunks) == "so "
    assert len([call for each in chunks for call in each.delta.tool_calls or []]) == 1
    assert whole.usage.completion_tokens == len(client_tokens(f"so {call}"))


def client_tokens(text: str) -> list[int]:
    return list(build_tokenizer()(text)["input_ids"])


@pytest.mark.parametrize("starts", ["<", "{"])
def test_with_tools_a_format_binds_what_is_no_call(client: OpenAI, starts: str) -> None:
    (first,) = client_tokens(starts)
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    fields: dict[str, Any] = {"tools": MANY, "response_format": wanted, "parallel_tool_calls": False}
    bias = {"logit_bias": {str(first): 100}}
    found = chat(client, **fields, **bias, temperature=0, max_tokens=98).choices[0].message
    if starts == "<":
        assert all(map(read_look, found.tool_calls))
    else:
        assert json.loads(found.content)["a"] in ("x", "yy")
