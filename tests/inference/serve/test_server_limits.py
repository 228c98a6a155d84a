"""Laws of the server's limits: what is wrong is refused with a status and a reason, and what leaves is let go."""

import asyncio
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from matrix import slow_unless
from server_run import NAME, Running, load_served, running

from headstart.inference.core.drafter import PLAIN
from headstart.inference.core.request import EmittedTokens
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.service import Served

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}


class Gate:
    """Lets the engine's steps through one by one, or all of them."""

    def __init__(self) -> None:
        self.steps = threading.Semaphore(0)
        self.is_open = threading.Event()
        self.fails = False

    def wait(self) -> None:
        while not self.is_open.is_set() and not self.steps.acquire(timeout=0.01):
            pass
        if self.fails:
            self.fails = False
            raise RuntimeError("a step failed")


class GatedLoop(DecodeLoop):
    gate: Gate

    def step(self) -> list[EmittedTokens]:
        self.gate.wait()
        return super().step()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return load_served(tmp_path_factory.mktemp("served") / "target", max_batch=2)


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Running]:
    settings = ServerSettings((NAME,), max_batch=2, max_queue=6, max_body=2**20, body_timeout=1.0)
    with running(served, settings) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as found:
        yield found


@contextmanager
def gated(served: Served, prefill_chunk: int = 512, **settings: Any) -> Iterator[tuple[Running, Gate]]:
    """A server whose steps wait for a gate."""
    gate = Gate()

    def make_loop() -> DecodeLoop:
        loop = GatedLoop(served.target, PLAIN, 2, prefill_chunk=prefill_chunk)
        loop.gate = gate
        return loop

    values: dict[str, Any] = {"names": (NAME,), "max_batch": 2, "max_queue": 1, **settings}
    with running(replace(served, make_loop=make_loop), ServerSettings(**values)) as found:
        try:
            yield found, gate
        finally:
            gate.is_open.set()


def raw_post(fields: dict[str, Any]) -> bytes:
    """A completion request as it goes over the wire."""
    body = json.dumps(fields)
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


def until(holds: Callable[[], bool], seconds: float = 20, gate: Gate | None = None) -> None:
    """Wait until this holds; steps go through the gate meanwhile."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        if gate is not None:
            gate.steps.release()
        time.sleep(0.01)


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


DEEP = json.loads('{"items":' * 400 + "{}" + "}" * 400)
WIDE = {"properties": {f"p{number}": {} for number in range(600)}, "type": "object"}
PICTURE = [{"type": "image_url", "image_url": {"url": "x"}}]
# Fields of a chat and of a completion, each with the beginning of the message and what it says is allowed.
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    CHAT: [
        ({"messages": None}, "messages: None given", "at least one message"),
        ({"messages": []}, "messages: [] given", "at least one message"),
        ({"messages": "hello"}, "messages: 'hello' given", "a list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role: 'wizard' given", "system, developer"),
        ({"messages": [{"role": "user", "content": PICTURE}]}, "messages[0].content: [{'image_", "parts of type text"),
        (schema(None), "response_format.json_schema.schema: missing", "a JSON schema"),
        (schema({"type": "wizard"}), "response_format.json_schema.schema: ", "wizard"),
        (schema({"$ref": "#"}), "response_format.json_schema.schema: no text fits", "a JSON schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type: 'xml' given", "json_schema"),
        ({"top_logprobs": 2}, "top_logprobs: 2 given", "only 0"),
        ({"tools": [{"type": "function"}]}, "tools[0]: {'type': 'function'} given", "a name"),
        ({"tool_choice": "required"}, "tool_choice: 'required' given", "auto or none"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs: 'tokenize' given", "the template"),
        ({"chat_template": "{{ x }}"}, "chat_template: there is no such field", "messages"),
        ({"return_token_ids": True}, "return_token_ids: True given", "only false"),
    ],
    COMPLETION: [
        ({"prompt": [5] * 200}, "max_tokens: ", "128 positions"),
        ({"prompt": [5] * 100, "max_tokens": 29}, "max_tokens: ", "up to 28"),
        ({"prompt": "ab" * 250_000}, "prompt: 500000 characters given", "at most"),
        ({"prompt": None}, "prompt: missing", "required"),
        ({"prompt": ""}, "prompt: '' given", "at least one token"),
        ({"prompt": [5, 300]}, "prompt: 300 given", "0 to 299"),
        ({"prompt": [-1]}, "prompt: -1 given", "0 to 299"),
        ({"prompt": ["a", 5]}, "prompt: ['a', 5] given", "a list of texts"),
        ({"temperature": -1}, "temperature: -1 given", "0 to 100"),
        ({"temperature": "hot"}, "temperature: 'hot' given", "a number"),
        ({"top_p": 0}, "top_p: 0 given", "above 0"),
        ({"min_p": 2}, "min_p: 2 given", "0 to 1"),
        ({"top_k": -2}, "top_k: -2 given", "at least -1"),
        ({"presence_penalty": 3}, "presence_penalty: 3 given", "-2 to 2"),
        ({"n": 0}, "n: 0 given", "1 to 128"),
        ({"n": 100}, "n: 100 choices", "at most 8"),
        ({"prompt": ["a"] * 9}, "prompt: 9 choices", "at most 8"),
        ({"prompt": ["a"] * 200_000, "n": 128}, "n: 25600000 choices", "at most 8"),
        ({"max_tokens": 0}, "max_tokens: 0 given", "at least 1"),
        ({"max_tokens": 1.5}, "max_tokens: 1.5 given", "a whole number"),
        ({"seed": 2**63 - 1, "n": 2}, "seed: 9223372036854775807 given", "at most 2^63 - 2"),
        ({"seed": 2**64}, "seed: 18446744073709551616 given", "a whole number"),
        ({"logit_bias": {"300": 1}}, "logit_bias: '300' given", "0 to 299"),
        ({"logit_bias": {"3": 101}}, "logit_bias: 101 given", "-100 to 100"),
        ({"stop": ["x"] * 10_000}, "stop: ['x', 'x', ", "at most 64"),
        ({"stop": 0}, "stop: 0 given", "a text"),
        ({"stop": ["a\ufffd"]}, "stop: ", "without U+FFFD"),
        ({"stop": ["a", "\ud83d"]}, "stop: ", "without U+FFFD"),
        ({"stop": [""]}, "stop: [''] given", "1 to 1000 characters"),
        ({"stop": "x" * 1001}, "stop: 'xxx", "1 to 1000 characters"),
        ({"stop_token_ids": [999]}, "stop_token_ids: 999 given", "0 to 299"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: 9 given", "at most the 8"),
        (outputs(json=DEEP), "structured_outputs.json: ", "a JSON schema"),
        (outputs(json=WIDE), "structured_outputs.json: no text fits, or it is too complex", "a JSON schema"),
        (outputs(regex="(a"), "structured_outputs.regex: ", "a regular expression"),
        (outputs(regex="ab[^\\s\\S]"), "structured_outputs.regex: no text fits", "a regular expression"),
        (outputs(choice=["ab" * 70_000]), "structured_outputs.choice: ", "at most 120000"),
        (outputs(choice=[]), "structured_outputs.choice: [] given", "a list of texts"),
        ({"stream": "yes"}, "stream: 'yes' given", "true or false"),
        ({"guided_json": {}}, "guided_json: there is no such field", "structured_outputs"),
        ({"stream_options": {"include_obfuscation": True}}, "include_obfuscation: True given", "only false"),
        ({"stream_options": {"usage": 1}}, "usage: there is no such field", "include_usage"),
        ({"return_token_ids": True, "stream": True}, "return_token_ids: True given", "only false"),
        ({"use_beam_search": True}, "use_beam_search: True given", "only false"),
        ({"temprature": 1}, "temprature: there is no such field", "did you mean temperature?"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_wrong_field_is_refused_by_name(client: httpx.Client, path: str) -> None:
    """The message has the field, its value, what is allowed and what to do."""
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    for fields, beginning, allowed in REFUSED[path]:
        body = json.dumps({**prompt, **fields})  # in ASCII, as other clients write halves of surrogate pairs
        answer = client.post(path, content=body, headers=JSON)
        message = assert_refused(answer, 400, allowed)
        assert message.startswith(beginning), message
        assert re.search(r"\b(allowed|needed|required)\b.*[;:] \w", message), message


def assert_refused(answer: httpx.Response, status: int, *facts: str) -> str:
    """Returns the message."""
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
    (b"[1]", "[1] given"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature: nan given"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (f'{{"prompt": "a", "seed": {"9" * 5000}}}'.encode(), "4300 digits"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion depth"),
    (b'{"prompt": "\xff"}', "byte 0xff"),
]


def test_bodies_of_other_kinds_sizes_and_paths_are_refused(client: httpx.Client) -> None:
    for body, fact in BODIES:
        assert_refused(client.post(COMPLETION, content=body, headers=JSON), 400, fact, "allowed; correct it")
    assert_refused(client.post(COMPLETION, data={"prompt": "a"}), 415, "application/json")
    assert_refused(client.post(COMPLETION, json={"prompt": "a" * 5 * 2**20}), 413, "1048576 bytes")
    assert_refused(client.post("/v1/other", json={}), 404, "no such path")
    assert_refused(client.get(CHAT), 405, "allowed: POST")
    assert_refused(client.post(CHAT, json={"messages": HELLO, "model": "gpt-5"}), 404, "model: 'gpt-5' given", NAME)


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"at": "it"}'}}
SCHEMA = {"type": "object", "properties": {"at": {"enum": ["it"]}}, "required": ["at"]}
TEXTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"model": NAME, "prompt": ["a"], "stop": ["b"], "logit_bias": {"3": 1}, "user": "u", "echo": True}),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": "b"}}),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"choice": ["b"]}}),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"json": SCHEMA}}),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
                {"role": "assistant", "content": "a", "tool_calls": [CALLED], "reasoning_content": "r"},
                {"role": "tool", "content": "a", "tool_call_id": "c"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
            "chat_template_kwargs": {"mood": "m"},
            "metadata": {"k": "v"},
        },
    ),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/tokenize", {"messages": HELLO, "return_token_strs": True}),
    ("/tokenize", {"prompt": "a"}),
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


@pytest.mark.parametrize("number", slow_unless((0, 6), range(len(TEXTS))))
def test_halves_of_surrogate_pairs_are_answered_wherever_they_stand(client: httpx.Client, number: int) -> None:
    """JSON can name them, but no text can hold them: they failed the request, or the step of all requests."""
    path, body = TEXTS[number]
    for index, fields in enumerate(with_half(body)):
        sent = {**fields, **({} if path == "/tokenize" else {"max_tokens": 2, "stream": index % 2 == 0})}
        answer = client.post(path, content=json.dumps(sent).encode(), headers=JSON)
        assert answer.status_code in (200, 400, 404), answer.text
        assert answer.json() if answer.status_code != 200 or not sent.get("stream") else "[DONE]" in answer.text


def test_halves_of_surrogate_pairs_are_replacement_characters(client: httpx.Client) -> None:
    halves = client.post("/tokenize", content=b'{"prompt": "\\ud83d\\\\ud83d\\ud83d\\ude00\\udE00"}', headers=JSON)
    assert halves.json() == client.post("/tokenize", json={"prompt": "\ufffd\\ud83d😀\ufffd"}).json()


def test_a_body_that_does_not_arrive_is_not_waited_for(server: Running) -> None:
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as slow:
        slow.sendall(raw_post({"prompt": "a"})[:-3])
        slow.settimeout(20)
        assert b" 408 " in slow.recv(100)


def test_without_a_key_there_is_no_answer(served: Served) -> None:
    with running(served, ServerSettings((NAME,), api_keys=("one", "two"))) as found:
        for key in ("", "on", "one two", "three"):
            refused = httpx.get(f"{found.url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
            assert_refused(refused, 401, "Bearer")
        for key in ("one", "two"):
            allowed = httpx.get(f"{found.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert allowed.status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert httpx.get(found.url + path).status_code == 200
        assert "two" not in "".join(found.lines)


def test_a_full_queue_refuses_with_a_time_to_come_back(served: Served) -> None:
    with gated(served) as (server, gate):
        threads = [post_in_thread(server) for _ in range(3)]
        until(lambda: server.service.waiting == 3)
        refused = httpx.post(server.url + COMPLETION, json={"prompt": "a"})
        assert_refused(refused, 503, "3 wait", "at most 3", "--max-queue")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="queue_full"} 1.0' in metrics
        assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0' in metrics
        gate.is_open.set()
        assert [thread.result() for thread in threads] == [200] * 3
        assert httpx.post(server.url + COMPLETION, json={"prompt": "a", "max_tokens": 2}, timeout=60).status_code == 200


def resolve(owner: str, attribute: str) -> Any:
    """The attribute of a module, or of a class in one."""
    module, _, name = owner.rpartition(".")
    found: Any = getattr(import_module(module), name) if name[0].isupper() else import_module(owner)
    return getattr(found, attribute)


class PostThread(threading.Thread):
    def __init__(self, server: Running, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.server, self.fields = server, fields
        self.found: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        body = {"prompt": "a draft", "max_tokens": 8, **self.fields}
        self.found = httpx.post(self.server.url + COMPLETION, json=body, timeout=60)

    def result(self) -> int:
        self.join(60)
        assert self.found is not None
        return int(self.found.status_code)


def post_in_thread(server: Running, **fields: Any) -> PostThread:
    return PostThread(server, **fields)


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["queue", "prefill", "decoding"])
def test_a_client_that_leaves_the_queue_prefill_or_decoding_takes_no_further_work(
    served: Served, place: str, stream: bool
) -> None:
    with gated(served, prefill_chunk=4) as (server, gate):
        service = server.service
        others = [post_in_thread(server, max_tokens=100, ignore_eos=True) for _ in range(2 * (place == "queue"))]
        until(lambda: service.running == len(others), gate=gate if others else None)
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            fields = {"prompt": [20] * 20, "max_tokens": 100, "ignore_eos": True, "stream": stream, "logprobs": 0}
            client.sendall(raw_post(fields))
            until(lambda: service.waiting == 1)
            batch = service.worker.loop.batch
            if place == "prefill":
                gate.steps.release(2)
                until(lambda: batch.partial is not None and batch.partial.cached == 8)
            if place == "decoding":
                until(lambda: service.running == 1, gate=gate)
                assert not stream or client.recv(1)
        until(lambda: service.running + service.waiting == len(others), gate=gate)
        assert batch.partial is None
        assert len(batch.rows) == len(others)
        until(lambda: len(service.open) == len(others) and bool(server.lines))
        line = json.loads(server.lines[-1])
        assert line["finish"] == ["abort"]
        assert line["completion_tokens"] < 100
        assert (line["completion_tokens"] > 0) == (place == "decoding")
        assert line["status"] == (200 if stream and place == "decoding" else 499)
        gate.is_open.set()
        assert [other.result() for other in others] == [200] * len(others)
        assert httpx.post(server.url + COMPLETION, json={"prompt": "a", "max_tokens": 2}, timeout=60).status_code == 200


def test_a_client_that_reads_a_byte_at_a_time_holds_no_row_and_delays_nobody(served: Served) -> None:
    with running(served, ServerSettings((NAME,), max_batch=2)) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's least: about 2 kB
        slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        fields = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 2, "logprobs": 5}
        slow.sendall(raw_post(fields))
        came = slow.recv(1)
        other = httpx.post(server.url + COMPLETION, json={"prompt": "a", "max_tokens": 2}, timeout=20)
        assert other.status_code == 200
        until(lambda: server.service.running == 0)  # though it has read one byte
        slow.settimeout(20)
        while not came.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            came += slow.recv(1)
        assert came.count(b'"finish_reason": "length"') == 2


def test_time_limits_refuse_what_waits_and_cut_what_runs(served: Served) -> None:
    with gated(served, queue_timeout=0.2) as (server, gate):
        threading.Timer(0.6, gate.is_open.set).start()  # a request is let go when the step that is running has ended
        found = httpx.post(server.url + COMPLETION, json={"prompt": "a"})
        assert_refused(found, 503, "no token within 0.2 seconds", "--queue-timeout")
    with gated(served, request_timeout=0.3) as (server, gate):
        gate.steps.release(2)
        thread = post_in_thread(server, ignore_eos=True, max_tokens=50)
        time.sleep(0.5)
        gate.is_open.set()
        assert thread.result() == 200
        assert thread.found is not None
        assert thread.found.json()["choices"][0]["finish_reason"] in ("abort", "length")


@pytest.mark.parametrize(("stream", "steps", "status"), [(False, 0, 500), (True, 0, 500), (True, 1, 200)])
def test_a_step_that_fails_ends_its_requests_alone(
    served: Served, capfd: pytest.CaptureFixture[str], stream: bool, steps: int, status: int
) -> None:
    """After the first token the error of a stream is an event, as its status is told already."""
    with gated(served) as (server, gate):
        thread = post_in_thread(server, stream=stream, ignore_eos=True, logprobs=0)  # these come without a text, too
        until(lambda: server.service.waiting == 1)
        if steps:
            gate.steps.release(steps)
        until(lambda: server.service.running == steps)
        gate.fails = True
        gate.steps.release()
        assert thread.result() == status
        assert thread.found is not None
        assert '"code": 500' in thread.found.text.replace('":5', '": 5')
        assert thread.found.text.endswith("data: [DONE]\n\n") == (status == 200)
        gate.is_open.set()
        assert httpx.post(server.url + COMPLETION, json={"prompt": "a", "max_tokens": 2}, timeout=60).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "headstart:engine_failures{" in httpx.get(f"{server.url}/metrics").text
    assert "a step failed" in capfd.readouterr().err


def test_a_failed_step_cancelled_a_choice_of_another_request(served: Served) -> None:
    """The loop after the failure numbers requests from 0 again, and the failed request cancels its other choice."""
    with gated(served, max_queue=6) as (server, gate):
        failing = post_in_thread(server, n=2, max_tokens=60, ignore_eos=True)
        gate.steps.release(1)
        until(lambda: server.service.running > 0)
        other = post_in_thread(server, n=4, max_tokens=20, ignore_eos=True)
        until(lambda: server.service.waiting == 4)
        gate.fails = True
        gate.is_open.set()
        assert failing.result() == 500
        assert other.result() == 200
        assert other.found is not None
        assert [choice["finish_reason"] for choice in other.found.json()["choices"]] == ["length"] * 4


def fail(*_: Any) -> Any:
    raise RuntimeError("this choice failed")


# What fails for a request with the stop string "fail", or with a grammar: a function, what is in its place, the status.
FAILURES: dict[str, tuple[str, Callable[[Any], Callable[..., Any]], int]] = {
    "when it is submitted": (
        "engine.loop.check_request",
        lambda own: lambda *given: fail() if given[1].stop else own(*given),
        500,
    ),
    "in its stop strings": ("core.request.StopStrings.kept", lambda own: fail, 500),
    "in the text that is shown": (
        "serve.api.text.WrittenText.add",
        lambda own: lambda *given: fail() if given[0].stop else own(*given),
        500,
    ),
    "in its grammar": ("serve.api.constraints.GrammarState.advance", lambda own: fail, 500),
    "in its grammar, later": (
        "serve.api.constraints.GrammarState.allowed",
        lambda own: lambda state, path: fail() if len(state.taken) > 2 else own(state, path),
        500,
    ),
    "as its grammar gives up": (
        "serve.api.constraints.GrammarState.allowed",
        lambda own: lambda state, path: own(state, path) & (len(state.taken) < 3),
        400,
    ),
}


SOME_FAILURES = ("when it is submitted", "as its grammar gives up")


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", slow_unless(SOME_FAILURES, FAILURES))
def test_what_fails_in_one_choice_is_told_to_its_client_alone(
    server: Running, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], place: str, stream: bool
) -> None:
    """No text is told as a proper end, and neither the others' texts nor what comes next change."""
    name, replacement, status = FAILURES[place]
    fields = {"prompt": "a draft", "max_tokens": 30, "ignore_eos": True, "temperature": 0}
    alone = httpx.post(server.url + COMPLETION, json=fields).json()["choices"][0]["text"]
    failures = server.service.worker.failures
    own: Any = {"structured_outputs": {"regex": "[a-z ]{12}"}, "ignore_eos": False, "logprobs": 0}
    httpx.post(server.url + COMPLETION, json={**fields, **own})  # reads the tokens' texts, which takes a while
    owner, _, attribute = f"headstart.inference.{name}".rpartition(".")
    monkeypatch.setattr(f"{owner}.{attribute}", replacement(resolve(owner, attribute)))
    other = post_in_thread(server, **{key: value for key, value in fields.items() if key != "prompt"})
    if "grammar" not in place:
        own = {"stop": "fail"}
    found = httpx.post(server.url + COMPLETION, json={**fields, **own, "stream": stream}, timeout=60)
    is_begun = stream and place in ("in its grammar, later", "as its grammar gives up")
    assert found.status_code == (200 if is_begun else status)
    assert f'"code": {status}' in found.text.replace('":', '": ').replace(":  ", ": ")
    assert '"stop"' not in found.text.replace("stop_reason", "")
    assert found.text.endswith("data: [DONE]\n\n") == is_begun
    assert other.result() == 200
    assert other.found is not None
    assert other.found.json()["choices"][0]["text"] == alone
    assert ("this choice failed" in capfd.readouterr().err) == (status == 500)
    assert server.service.worker.failures == failures
    until(lambda: server.service.running + server.service.waiting == 0 and not server.service.open)


@pytest.mark.parametrize("stream", [False, True])
def test_what_never_fits_in_the_memory_is_refused_with_status_400(served: Served, stream: bool) -> None:
    make_loop = partial(DecodeLoop, served.target, PLAIN, 2, memory=128 * 384)  # one page
    with running(replace(served, make_loop=make_loop), ServerSettings((NAME,), max_batch=2)) as server:
        body = {"prompt": "a", "max_tokens": 100, "stream": stream}
        assert_refused(httpx.post(server.url + COMPLETION, json=body), 400, "memory:", "max_new_tokens 100 needs")


def test_draining_lets_requests_end_and_takes_no_more(served: Served) -> None:
    with gated(served) as (server, gate):
        threads = [post_in_thread(server), post_in_thread(server)]
        until(lambda: server.service.waiting == 2)
        loop = server.service.worker.asyncio
        draining = asyncio.run_coroutine_threadsafe(server.service.drain(30), loop)
        until(lambda: server.service.draining)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert_refused(httpx.post(server.url + COMPLETION, json={"prompt": "a"}), 503, "stopping")
        gate.is_open.set()
        assert [thread.result() for thread in threads] == [200, 200]
        draining.result(20)


def test_after_the_drain_time_requests_end_with_what_they_have(served: Served) -> None:
    with gated(served, max_queue=4) as (server, gate):
        thread = post_in_thread(server, max_tokens=100, ignore_eos=True, n=2)
        until(lambda: server.service.waiting == 2)
        gate.steps.release(4)
        until(lambda: server.service.running == 2)
        waiting = [post_in_thread(server, n=2, stream=stream) for stream in (False, True)]
        until(lambda: server.service.waiting == 4)
        draining = asyncio.run_coroutine_threadsafe(server.service.drain(0.1), server.service.worker.asyncio)
        draining.result(20)
        gate.steps.release(1)
        assert thread.result() == 200
        assert thread.found is not None
        assert thread.found.json()["choices"][0]["finish_reason"] == "abort"
        for each in waiting:  # they got an empty answer with status 200, which no client sends elsewhere
            assert each.result() == 503
            assert each.found is not None
            assert each.found.headers["retry-after"]


def test_connections_that_open_and_drop_leave_nothing_behind(
    server: Running, capfd: pytest.CaptureFixture[str]
) -> None:
    """No row, no open file, and no traceback for a body that was cut off."""
    draw = random.Random(0)
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir()))
    port = int(server.url.rpartition(":")[2])
    for _ in range(60):
        with socket.create_connection(("127.0.0.1", port)) as client:
            whole = raw_post({"prompt": "a", "max_tokens": 40, "stream": draw.random() < 0.5})
            client.sendall(whole[: draw.choice([1, 30, len(whole) - 3, len(whole), len(whole)])])
            time.sleep(draw.random() * 0.02)
    until(lambda: server.service.running + server.service.waiting == 0 and not server.service.open)
    until(lambda: len(list(files.iterdir())) <= before)
    assert "Traceback" not in capfd.readouterr().err
    assert httpx.post(server.url + COMPLETION, json={"prompt": "a", "max_tokens": 2}, timeout=60).status_code == 200
