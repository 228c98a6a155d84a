"""Laws of /v1/responses: its text is that of the chat that it stands for, and its events add up to its answer."""

import json
from typing import Any

import pytest
from matrix import slow
from openai import APIError, OpenAI
from server_run import NAME, Running
from test_server import SCHEMA
from test_server_client import LOOK
from test_server_limits import gated, until
from test_server_refused import JSON, assert_refused

from headstart.inference.serve.service import Served

CALL = '<tool_call>{"name":"f"}</tool_call>'
FLAT = {"type": "function", **LOOK["function"]}


@pytest.fixture(scope="module")
def server(templated: Running) -> Running:
    return templated


def respond(client: OpenAI, **fields: Any) -> Any:
    extra = {"seed": 3, **fields.pop("extra_body", {})}
    shared = {"model": NAME, "input": "a tree", "max_output_tokens": 4, "extra_body": extra}
    return client.responses.create(**{**shared, **fields})


CALL_ITEM = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": "it"}'}
OUTPUT = {"type": "output_text", "text": "so", "annotations": [], "logprobs": []}
TREE = {"type": "input_text", "text": "a tree"}
CALL_TURN = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
ITEMS = [
    *({"role": "developer", "content": "be brief"}, {"role": "user", "content": "look"}),
    {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "why"}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "content": [OUTPUT], "status": "completed"},
    *(CALL_ITEM, CALL_ITEM, {"type": "function_call_output", "call_id": "c1", "output": "it"}),
    {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "no"}]},
    *(CALL_ITEM, {"type": "function_call_output", "call_id": "c1", "output": [TREE]}),
]
TURNS = [
    *(("system", "be brief"), ("user", "look")),
    ("assistant", "so", {"reasoning_content": "why", "tool_calls": [CALL_TURN, CALL_TURN]}),
    ("tool", "it", {"tool_call_id": "c1"}),
    ("assistant", None, {"tool_calls": [CALL_TURN]}),
    ("tool", "a tree", {"tool_call_id": "c1"}),
]


@pytest.mark.parametrize(
    ("given", "chat"),
    [
        ({}, {}),
        ({"instructions": "be brief"}, {"messages": [("system", "be brief"), ("user", "a tree")]}),
        ({"input": ITEMS}, {"messages": TURNS}),
        ({"input": [{"role": "user", "content": ""}]}, {"messages": [("user", "")]}),
        ({"tools": [FLAT], "tool_choice": "none"}, {"tools": [LOOK], "tool_choice": "none"}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"temperature": 0, "max_output_tokens": 3}, {"temperature": 0, "max_tokens": 3}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        ),
        ({"store": True, "metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"]}, {}),
    ],
)
def test_a_response_is_the_chat_that_it_stands_for(client: OpenAI, given: dict[str, Any], chat: dict[str, Any]) -> None:
    turns = chat.pop("messages", [("user", "a tree")])
    messages: Any = [{"role": role, "content": text, **(more[0] if more else {})} for role, text, *more in turns]
    expected: Any = client.chat.completions.create(model=NAME, messages=messages, seed=3, **{"max_tokens": 4, **chat})
    found = respond(client, **given)
    assert found.output_text == expected.choices[0].message.content
    assert found.usage.input_tokens == expected.usage.prompt_tokens
    assert found.usage.output_tokens == expected.usage.completion_tokens
    is_cut = expected.choices[0].finish_reason == "length"
    assert found.status == ("incomplete" if is_cut else "completed")
    assert (found.incomplete_details is not None) == is_cut


@pytest.mark.parametrize("text", [None, f"so {CALL} {CALL} e", CALL[:-5], slow(f" \n{CALL}\n"), slow("\n ")])
def test_events_add_up_to_the_whole_response(client: OpenAI, text: str | None) -> None:
    own: dict[str, Any] = {} if text is None else {"extra_body": {"structured_outputs": {"choice": [text]}}}
    fields = {"tools": [{"type": "function", "name": "f"}], "max_output_tokens": 100, **own}
    whole, events = respond(client, **fields), list(respond(client, **fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}" == f"response.{whole.status}"
    assert (last.output_text.strip(), last.usage) == (whole.output_text.strip(), whole.usage)
    calls = [(item.name, item.arguments) for item in last.output if item.type == "function_call"]
    assert calls == [(item.name, item.arguments) for item in whole.output if item.type == "function_call"]
    assert len(calls) == (text or "").count("<tool_call>")
    told = [item.content[0].text if item.type == "message" else None for item in last.output]
    assert len(calls) < 2 or told == ["so ", None, None, " e"]
    for place, item in enumerate(last.output):
        own_events = [event for event in events if getattr(event, "output_index", None) == place]
        kinds = [event.type.removeprefix("response.") for event in own_events]
        assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")
        assert own_events[0].item.id == own_events[-1].item.id == item.id
        assert own_events[-1].item == item
        written = "".join(event.delta for event in own_events if event.type.endswith(".delta"))
        is_call = item.type == "function_call"
        assert written == (item.arguments if is_call else item.content[0].text)
        assert kinds[-2] == ("function_call_arguments.done" if is_call else "content_part.done")


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize(
    ("text", "items"),
    [(f"so {CALL} end", ["so ", None, " end"]), (f"a {CALL} {CALL} b {CALL}", ["a ", None, None, " b ", None])],
)
def test_text_after_a_call_was_told_before_it(client, text, items, speculative) -> None:
    extra = {"structured_outputs": {"choice": [text]}, "speculative": speculative}
    fields = {"tools": [{"type": "function", "name": "f"}], "max_output_tokens": 104, "extra_body": extra}
    whole, last = respond(client, **fields), list(respond(client, **fields, stream=True))[-1].response
    for found in (whole, last):
        told = [(item.type, item.content[0].text if item.type == "message" else None) for item in found.output]
        assert told == [("function_call" if each is None else "message", each) for each in items]


def test_an_error_after_the_first_event_is_an_event_that_clients_raise(served: Served) -> None:
    with gated(served) as (server, gate), OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        gate.steps.release(1)
        stream = respond(client, stream=True, extra_body={"structured_outputs": {"choice": ["so it is"]}})
        until(lambda: server.service.running == 1)
        gate.fails = True
        gate.steps.release(1)
        with pytest.raises(APIError, match="decoding failed"):
            list(stream)


IMAGE = [{"type": "input_image", "image_url": "x"}]
# The beginning of the message, which names the field, and what it says is allowed.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id: 'resp_1'", "the full conversation as input"),
    ({"input": [{"role": "user", "content": "x", "thinking": "y"}]}, "input[0].thinking: there is no such", "content"),
    ({"input": [{"content": "x"}]}, "input[0].role: None", "a role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type: 'item_reference'", "a complete message"),
    ({"input": [{**CALL_ITEM, "arguments": "{"}]}, "input.tool_calls[0].function.arguments", "a JSON object"),
    ({"input": [{"role": "user", "content": IMAGE}]}, "input.content[0].type: 'input_image'", "only text"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]: {", "type function"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema: missing", "a JSON schema"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]: 'message", "reasoning.encrypted_content"),
    ({"truncation": "auto"}, "truncation: 'auto'", "disabled"),
    ({"n": 2}, "n: there is no such field", "input"),
]


def test_what_needs_a_store_or_other_tools_is_refused_by_name(server: Running) -> None:
    for fields, beginning, allowed in REFUSED:
        for stream in (False, True):
            answer = server.http.post("/v1/responses", json={"input": "a tree", "stream": stream, **fields})
            assert assert_refused(answer, 400, allowed).startswith(beginning)
            field = beginning.partition(":")[0].removesuffix(".schema")
            assert json.loads(answer.text)["error"]["param"].startswith(field)


REPEATED = {
    "tools": '[{"type": "function", "name": "f", "parameters": {"maximum": NUMBER}}]',
    "tool_choice": "NUMBER",
    "text": '{"format": {"type": "text", "description": [NUMBER]}}',
    "reasoning": '{"summary": NUMBER}',
}


@pytest.mark.parametrize("name", REPEATED)
def test_an_answer_that_repeats_a_number_beyond_json_failed(server: Running, name: str) -> None:
    for number in ("1e999", "-1e999", "NaN"):
        for stream in ("true", "false"):
            value = REPEATED[name].replace("NUMBER", number)
            body = f'{{"input": "a tree", "stream": {stream}, "{name}": {value}}}'
            answer = server.http.post("/v1/responses", content=body, headers=JSON)
            assert_refused(answer, 400, f"{name}: ", "finite numbers")
            assert answer.json()["error"]["param"] == name


def test_what_is_read_can_be_repeated_whatever_its_depth(server: Running) -> None:
    statuses = set()
    for depth in range(900, 1000, 3):
        body = f'{{"input": "a", "max_output_tokens": 1, "reasoning": {{"summary": {"[" * depth}{"]" * depth}}}}}'
        found = server.http.post("/v1/responses", content=body, headers=JSON)
        statuses.add(found.status_code)
    assert statuses <= {200, 400}
