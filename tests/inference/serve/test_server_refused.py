"""Laws of refusals: the answer names the field, its value, what is allowed and what to do, whatever the body holds."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from matrix import slow_unless
from server_run import NAME, Running

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


TOOL = {"type": "function", "function": {"name": "look"}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "look", **fields}}]}


DEEP = json.loads('{"items":' * 400 + "{}" + "}" * 400)
WIDE = {"properties": {f"p{number}": {} for number in range(600)}, "type": "object"}
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
# Fields of a chat and of a completion, each with the beginning of the message and what it says is allowed.
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    CHAT: [
        ({"messages": None}, "messages: None given", "at least one message"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role: 'wizard' given", "system, developer"),
        ({"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages[0].y: there is no such field", "content"),
        ({"messages": [{"role": "user", "content": "x", "thinking": 1}]}, "messages[0].thinking: 1 given", "a text"),
        ({"messages": PICTURE}, "messages[0].content[0].type: 'image_url'", "only text (the target reads text alone)"),
        (schema(None), "response_format.json_schema.schema: missing", "a JSON schema"),
        (schema({"type": "wizard"}), "response_format.json_schema.schema: ", "wizard"),
        (schema({"$ref": "#"}), "response_format.json_schema.schema: no text fits", "a JSON schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type: 'xml' given", "json_schema"),
        ({"tools": [{"type": "function"}]}, "tools[0]: {'type': 'function'} given", "a name"),
        ({"tools": [TOOL, TOOL]}, "tools[1]: 'look' given", "one tool of each name"),
        (tool(parameters={"type": "string"}), "tools[0].function.parameters: {'type': 'string'}", "an object"),
        (tool(parameters="text"), "tools[0].function.parameters: 'text' given", "the schema of an object"),
        ({"chat_template_kwargs": {"date": "today"}}, "chat_template_kwargs.date: 'today' given", "2026-11-26"),
        ({"tool_choice": "required"}, "tool_choice: 'required' given", "auto or none"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs: 'tokenize' given", "the template"),
        ({"chat_template": "{{ x }}"}, "chat_template: there is no such field", "messages"),
    ],
    COMPLETION: [
        ({"prompt": [5] * 200}, "max_tokens: ", "128 positions"),
        ({"prompt": [5] * 100, "max_tokens": 29}, "max_tokens: ", "up to 28"),
        ({"prompt": [5] * 200, "max_tokens": 200}, "max_tokens: ", "shorten the prompt, and lower max_tokens"),
        ({"prompt": "ab" * 250_000}, "prompt: 500000 characters given", "at most"),
        ({"prompt": None}, "prompt: missing", "required"),
        ({"prompt": ""}, "prompt: '' given", "at least one token"),
        ({"prompt": [5, 300]}, "prompt: 300 given", "0 to 299"),
        ({"temperature": -1}, "temperature: -1 given", "0 to 100"),
        ({"n": 100}, "n: 100 choices", "at most 8"),
        ({"prompt": ["a"] * 9}, "prompt: 9 choices", "at most 8"),
        ({"max_tokens": 0}, "max_tokens: 0 given", "at least 1"),
        ({"seed": 2**63 - 1, "n": 2}, "seed: 9223372036854775807 given", "at most 2^63 - 2"),
        ({"logit_bias": {"300": 1}}, "logit_bias: '300' given", "0 to 299"),
        ({"stop": ["x"] * 10_000}, "stop: ['x', 'x', ", "at most 64"),
        ({"stop": 0}, "stop: 0 given", "a text"),
        ({"stop": ["a\ufffd"]}, "stop: ", "without U+FFFD"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: 9 given", "at most the 8"),
        (outputs(json=DEEP), "structured_outputs.json: ", "a JSON schema"),
        (outputs(json=WIDE), "structured_outputs.json: no text fits, or it is too complex", "a JSON schema"),
        (outputs(regex="(a"), "structured_outputs.regex: ", "a regular expression"),
        (outputs(regex="ab[^\\s\\S]"), "structured_outputs.regex: no text fits", "a regular expression"),
        (outputs(choice=["ab" * 70_000]), "structured_outputs.choice: ", "at most 120000"),
        ({"suffix": "x"}, "suffix: 'x' given", 'only ""'),
        ({"guided_json": {}}, "guided_json: there is no such field", "structured_outputs"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation: True", "only false"),
        ({"stream_options": {"usage": 1}}, "stream_options.usage: there is no such field", "include_usage"),
        ({"response_format": {"schema": {}}}, "response_format.schema: there is no such field", "json_schema"),
        ({"headstart": {"tree": True}}, "headstart.tree: there is no such field", "did you mean trees?"),
        (outputs(json={}, regex="a"), "structured_outputs: ['json', 'regex'] given", "one format"),
        ({"return_token_ids": True, "stream": True}, "return_token_ids: True given", "only false"),
        ({"temprature": 1}, "temprature: there is no such field", "did you mean temperature?"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_wrong_field_is_refused_by_name(server: Running, path: str) -> None:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    for fields, beginning, allowed in REFUSED[path]:
        body = json.dumps({**prompt, **fields})  # in ASCII, as other clients write halves of surrogate pairs
        answer = server.http.post(path, content=body, headers=JSON)
        message = assert_refused(answer, 400, allowed)
        assert message.startswith(beginning), message
        assert re.search(r"\b(allowed|needed|required)\b.*[;:] \w", message), message


def assert_refused(answer: httpx.Response, status: int, *facts: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    assert error["type"].endswith("Error")
    assert not [fact for fact in facts if fact not in error["message"]], error["message"]
    assert "Traceback" not in answer.text
    assert len(answer.text) < 1000
    assert answer.headers["x-request-id"]
    return str(error["message"])


BODIES = [
    (b'{"prompt": "a"', "character 14"),
    (b"", "not a JSON object"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature: nan given"),
    (f'{{"prompt": "a", "seed": {"9" * 5000}}}'.encode(), "4300 digits"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"prompt": "\xff"}', "byte 0xff"),
]


def test_bodies_of_other_kinds_sizes_and_paths_are_refused_and_halves_of_surrogate_pairs_replaced(server) -> None:
    client = server.http
    for body, fact in BODIES:
        assert_refused(client.post(COMPLETION, content=body, headers=JSON), 400, fact, "allowed; correct it")
    assert_refused(client.post(COMPLETION, data={"prompt": "a"}), 415, "application/json")
    assert_refused(client.post(COMPLETION, json={"prompt": "a" * 5 * 2**20}), 413, "1048576 bytes")
    assert_refused(client.post("/v1/other", json={}), 404, "no such path")
    assert_refused(client.get(CHAT), 405, "allowed: POST")
    assert_refused(client.post(CHAT, json={"messages": HELLO, "model": "gpt-5"}), 404, "model: 'gpt-5' given", NAME)
    halves = client.post("/tokenize", content=b'{"prompt": "\\ud83d\\\\ud83d\\ud83d\\ude00\\udE00"}', headers=JSON)
    assert halves.json() == client.post("/tokenize", json={"prompt": "\ufffd\\ud83d😀\ufffd"}).json()


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"at": "it"}'}}
SCHEMA = {"type": "object", "properties": {"at": {"enum": ["it"]}}, "required": ["at"]}
EVERYTHING = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {"role": "assistant", "content": "a", "tool_calls": [CALLED], "reasoning_content": "r"},
        {"role": "tool", "content": "a", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
    "chat_template_kwargs": {"mood": "m"},
    "metadata": {"k": "v"},
}
TEXTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"model": NAME, "prompt": ["a"], "stop": ["b"], "logit_bias": {"3": 1}, "user": "u", "echo": True}),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"json": SCHEMA}}),
    (CHAT, EVERYTHING),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/tokenize", {"messages": HELLO, "return_token_strs": True}),
]


def with_half(value: Any) -> Iterator[Any]:
    """The same with half of a surrogate pair in one of its texts and keys: each of them in turn."""
    match value:
        case str():
            yield f"{value}\ud83d"
            yield value.replace("it", "\\ud83d")  # as an escape within JSON in a text
        case list():
            for place, each in enumerate(value):
                yield from ([*value[:place], other, *value[place + 1 :]] for other in with_half(each))
        case dict():
            for name, each in value.items():
                yield from ({**value, name: other} for other in with_half(each))
                yield {f"{own}\ud83d" if own == name else own: other for own, other in value.items()}


@pytest.mark.parametrize("number", slow_unless((0, 3), range(len(TEXTS))))
def test_halves_of_surrogate_pairs_are_answered_wherever_they_stand(server: Running, number: int) -> None:
    """JSON can name them, but no text can hold them: they failed the request, or the step of all requests."""
    path, body = TEXTS[number]
    for index, fields in enumerate(with_half(body)):
        sent = {**fields, **({} if path == "/tokenize" else {"max_tokens": 2, "stream": index % 2 == 0})}
        answer = server.http.post(path, content=json.dumps(sent).encode(), headers=JSON)
        assert answer.status_code in (200, 400, 404), answer.text
        assert answer.json() if answer.status_code != 200 or not sent.get("stream") else "[DONE]" in answer.text


def test_tools_that_are_too_long_are_not_blamed_on_the_messages(server, monkeypatch) -> None:
    """The templates of most chat models write the tools into the prompt."""
    template = server.service.prompts.template
    monkeypatch.setattr(template, "render", lambda turns, tools, *_: "a" * 10**6 if tools else "")
    found = server.http.post(CHAT, json={"messages": HELLO, "tools": [TOOL]})
    assert assert_refused(found, 400, "context length").startswith("tools: ")
