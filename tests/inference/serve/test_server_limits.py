"""Laws of the server's limits: what is wrong is refused with a status and a reason, and what leaves is let go."""

import asyncio
import json
import random
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


# The symptom: path, fields beside or in place of the prompt, status, and what the message must say.
REFUSED: dict[str, tuple[str, dict[str, Any], int, tuple[str, ...]]] = {
    "an unknown model": (CHAT, {"model": "gpt-5"}, 404, ("model", "gpt-5", NAME, "/v1/models")),
    "no messages": (CHAT, {"messages": None}, 400, ("messages", "None given", "at least one message")),
    "empty messages": (CHAT, {"messages": []}, 400, ("messages", "[]", "at least one message")),
    "messages as a text": (CHAT, {"messages": "hello"}, 400, ("messages", "hello", "a list")),
    "a role that no template has": (
        CHAT,
        {"messages": [{"role": "wizard", "content": "x"}]},
        400,
        ("messages[0].role", "wizard", "system, developer, user"),
    ),
    "a picture": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        ("messages[0].content", "image_url", "parts of type text"),
    ),
    "a prompt beyond the context": (COMPLETION, {"prompt": [5] * 200}, 400, ("200 tokens", "128 positions")),
    "prompt and answer beyond the context": (
        COMPLETION,
        {"prompt": [5] * 100, "max_tokens": 29},
        400,
        ("max_tokens", "100 tokens", "29", "128 positions", "up to 28"),
    ),
    "a prompt of a million characters": (COMPLETION, {"prompt": "ab" * 250_000}, 400, ("prompt", "500000", "at most")),
    "no prompt": (COMPLETION, {"prompt": None}, 400, ("prompt", "missing")),
    "an empty prompt": (COMPLETION, {"prompt": ""}, 400, ("prompt", "at least one token")),
    "ids beyond the vocabulary": (COMPLETION, {"prompt": [5, 300]}, 400, ("prompt", "300", "0 to 299")),
    "negative ids": (COMPLETION, {"prompt": [-1]}, 400, ("prompt", "-1", "0 to 299")),
    "prompts of two kinds": (COMPLETION, {"prompt": ["a", 5]}, 400, ("prompt", "a list of texts")),
    "a negative temperature": (COMPLETION, {"temperature": -1}, 400, ("temperature", "-1", "0 to 100")),
    "a temperature as a text": (COMPLETION, {"temperature": "hot"}, 400, ("temperature", "'hot'", "a number")),
    "top_p of 0": (COMPLETION, {"top_p": 0}, 400, ("top_p", "above 0")),
    "min_p of 2": (COMPLETION, {"min_p": 2}, 400, ("min_p", "2", "0 to 1")),
    "top_k of -2": (COMPLETION, {"top_k": -2}, 400, ("top_k", "-2", "at least -1")),
    "a penalty of 3": (COMPLETION, {"presence_penalty": 3}, 400, ("presence_penalty", "3", "-2 to 2")),
    "n of 0": (COMPLETION, {"n": 0}, 400, ("n:", "0 given", "1 to 128")),
    "n beyond the queue": (COMPLETION, {"n": 100}, 400, ("n:", "100 choices", "at most 8")),
    "prompts beyond the queue": (COMPLETION, {"prompt": ["a"] * 9}, 400, ("prompt:", "9 choices", "at most 8")),
    "as many prompts as a body holds, many times": (
        COMPLETION,
        {"prompt": ["a"] * 200_000, "n": 128},
        400,
        ("n:", "25600000 choices", "at most 8"),
    ),
    "no tokens": (COMPLETION, {"max_tokens": 0}, 400, ("max_tokens", "0 given", "at least 1")),
    "half a token": (COMPLETION, {"max_tokens": 1.5}, 400, ("max_tokens", "1.5", "a whole number")),
    "seeds that count beyond the last": (
        COMPLETION,
        {"seed": 2**63 - 1, "n": 2},
        400,
        ("seed: 9223372036854775807 given", "at most 2^63 - 2", "n = 2"),
    ),
    "a seed of 65 bits": (COMPLETION, {"seed": 2**64}, 400, ("seed", "a whole number")),
    "a bias beyond the vocabulary": (COMPLETION, {"logit_bias": {"300": 1}}, 400, ("logit_bias", "300", "0 to 299")),
    "a bias of 101": (COMPLETION, {"logit_bias": {"3": 101}}, 400, ("logit_bias", "101", "-100 to 100")),
    "10,000 stop strings": (COMPLETION, {"stop": ["x"] * 10_000}, 400, ("stop", "'x', 'x', ...", "at most 64")),
    "a stop that is no text": (COMPLETION, {"stop": 0}, 400, ("stop", "0 given", "a text")),
    "half a character to stop at": (COMPLETION, {"stop": ["a\ufffd"]}, 400, ("stop", "without U+FFFD")),
    "half a surrogate pair as a stop string": (COMPLETION, {"stop": ["a", "\ud83d"]}, 400, ("stop", "without U+FFFD")),
    "an empty stop string": (COMPLETION, {"stop": [""]}, 400, ("stop", "1 to 1000 characters")),
    "a long stop string": (COMPLETION, {"stop": "x" * 1001}, 400, ("stop", "1 to 1000 characters")),
    "stop ids beyond the vocabulary": (COMPLETION, {"stop_token_ids": [999]}, 400, ("stop_token_ids", "999")),
    "a minimum above the longest answer": (
        COMPLETION,
        {"min_tokens": 9, "max_tokens": 8},
        400,
        ("min_tokens", "9", "at most the 8"),
    ),
    "no schema": (CHAT, {"response_format": {"type": "json_schema"}}, 400, ("response_format", "schema", "missing")),
    "a schema of no use": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}},
        400,
        ("response_format.json_schema.schema", "wizard"),
    ),
    "a format of another kind": (CHAT, {"response_format": {"type": "xml"}}, 400, ("type", "xml", "json_schema")),
    "a schema that is nested deeply": (
        COMPLETION,
        {"structured_outputs": {"json": json.loads('{"items":' * 400 + "{}" + "}" * 400)}},
        400,
        ("structured_outputs.json", "a JSON schema is allowed"),
    ),
    "half a regular expression": (
        COMPLETION,
        {"structured_outputs": {"regex": "(a"}},
        400,
        ("structured_outputs.regex", "regular expression"),
    ),
    "a regular expression that no text fits": (
        COMPLETION,
        {"structured_outputs": {"regex": "ab[^\\s\\S]"}},
        400,
        ("structured_outputs.regex", "no text fits"),
    ),
    "a schema that no text fits": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
        400,
        ("response_format.json_schema.schema", "no text fits"),
    ),
    "more optional properties than the library can follow": (
        COMPLETION,
        {"structured_outputs": {"json": {"properties": {f"p{i}": {} for i in range(600)}, "type": "object"}}},
        400,
        ("structured_outputs.json", "too complex"),
    ),
    "a long choice": (
        COMPLETION,
        {"structured_outputs": {"choice": ["ab" * 70_000]}},
        400,
        ("structured_outputs.choice", "at most 120000"),
    ),
    "no choice": (COMPLETION, {"structured_outputs": {"choice": []}}, 400, ("structured_outputs.choice", "[]")),
    "alternatives without logprobs": (CHAT, {"top_logprobs": 2}, 400, ("top_logprobs", "set logprobs")),
    "stream as a text": (COMPLETION, {"stream": "yes"}, 400, ("stream", "'yes'", "true or false")),
    "a tool that is none": (CHAT, {"tools": [{"type": "function"}]}, 400, ("tools[0]", "a name")),
    "a forced tool": (CHAT, {"tool_choice": "required"}, 400, ("tool_choice", "required", "auto or none")),
    "template arguments of ours": (
        CHAT,
        {"chat_template_kwargs": {"tokenize": True}},
        400,
        ("chat_template_kwargs", "tokenize", "the template's own"),
    ),
    "a template of their own": (CHAT, {"chat_template": "{{ x }}"}, 400, ("chat_template", "no such field")),
    "a field of another server": (COMPLETION, {"guided_json": {}}, 400, ("guided_json", "no such field")),
    "obfuscation": (
        COMPLETION,
        {"stream_options": {"include_obfuscation": True}},
        400,
        ("include_obfuscation", "only false"),
    ),
    "token ids in answers": (CHAT, {"return_token_ids": True}, 400, ("return_token_ids", "not support", "only false")),
    "token ids in a stream": (
        COMPLETION,
        {"return_token_ids": True, "stream": True},
        400,
        ("return_token_ids", "only false", "stream"),
    ),
    "beam search": (COMPLETION, {"use_beam_search": True}, 400, ("use_beam_search", "not support", "only false")),
    "a misspelt field": (
        COMPLETION,
        {"temprature": 1},
        400,
        ("temprature", "no such field", "did you mean temperature"),
    ),
    "a misspelt stream option": (COMPLETION, {"stream_options": {"usage": 1}}, 400, ("usage", "no such field")),
}


@pytest.mark.parametrize("symptom", REFUSED)
def test_a_wrong_field_is_refused_by_name(server: Running, symptom: str) -> None:
    path, fields, status, parts = REFUSED[symptom]
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    body = json.dumps({**prompt, **fields})  # in ASCII, as other clients write halves of surrogate pairs
    found = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"})
    assert_refused(found, status, *parts)


def assert_refused(found: httpx.Response, status: int, *parts: str) -> None:
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert error["code"] == status
    assert error["type"].endswith("Error")
    assert not [part for part in parts if part not in error["message"]], error["message"]
    assert "Traceback" not in found.text
    assert len(found.text) < 1000
    assert found.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (b'{"prompt": "a"', ("no JSON", "character 14")),
        (b"", ("no JSON",)),
        (b"[1]", ("no JSON object", "[1]", "one object")),
        (b'{"prompt": "a", "temperature": NaN}', ("temperature", "nan given", "0 to 100")),
        (b'{"prompt": "a", "temperature": 1e999}', ("temperature",)),
        (f'{{"prompt": "a", "seed": {"9" * 5000}}}'.encode(), ("4300 digits",)),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ("recursion depth",)),
        (b'{"prompt": "\xff"}', ("utf-8", "byte 0xff")),
    ],
)
def test_a_body_that_is_no_json_is_refused(server: Running, body: bytes, parts: tuple[str, ...]) -> None:
    found = httpx.post(server.url + COMPLETION, content=body, headers={"Content-Type": "application/json"})
    assert_refused(found, 400, *parts)


def test_bodies_of_other_kinds_sizes_and_paths_are_refused(server: Running) -> None:
    assert_refused(httpx.post(server.url + COMPLETION, data={"prompt": "a"}), 415, "application/json")
    large = httpx.post(server.url + COMPLETION, json={"prompt": "a" * 5 * 2**20})
    assert_refused(large, 413, "1048576 bytes")
    assert_refused(httpx.post(server.url + "/v1/other", json={}), 404, "no such path")
    assert_refused(httpx.get(server.url + CHAT), 405, "another method (POST)")


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


@pytest.mark.parametrize("number", slow_unless((0, 3, 6, 8), range(len(TEXTS))))
def test_halves_of_surrogate_pairs_are_answered_wherever_they_stand(server: Running, number: int) -> None:
    """JSON can name them, but no text can hold them: they failed the request, or the step of everybody."""
    path, body = TEXTS[number]
    with httpx.Client(base_url=server.url) as http:
        for place, fields in enumerate(with_half(body)):
            sent = {**fields, **({} if path == "/tokenize" else {"max_tokens": 2, "stream": place % 2 == 0})}
            content, kind = json.dumps(sent).encode(), {"Content-Type": "application/json"}
            found = http.post(path, content=content, headers=kind)
            assert found.status_code in (200, 400, 404), found.text
            assert found.json() if found.status_code != 200 or not sent.get("stream") else "[DONE]" in found.text
    read = httpx.post(
        f"{server.url}/tokenize", content=b'{"prompt": "\\ud83d\\\\ud83d\\ud83d\\ude00\\udE00"}', headers=kind
    )
    wanted = httpx.post(f"{server.url}/tokenize", json={"prompt": "\ufffd\\ud83d😀\ufffd"})
    assert read.json() == wanted.json()


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
                until(lambda: batch.reading is not None and batch.reading.count == 8)
            if place == "decoding":
                until(lambda: service.running == 1, gate=gate)
                assert not stream or client.recv(1)
        until(lambda: service.running + service.waiting == len(others), gate=gate)
        assert batch.reading is None
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
