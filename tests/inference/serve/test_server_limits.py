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
from pathlib import Path
from typing import Any

import httpx
import pytest
from matrix import slow_unless
from server_run import NAME, Running, running
from test_server_refused import COMPLETION, assert_refused

from headstart.inference.core.drafter import PLAIN
from headstart.inference.core.request import EmittedTokens, StopStrings
from headstart.inference.engine import loop
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.serve.api.constraints import GrammarState
from headstart.inference.serve.api.text import WrittenText
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.service import Served


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


@contextmanager
def gated(served: Served, prefill_chunk: int = 512, **settings: Any) -> Iterator[tuple[Running, Gate]]:
    gate = Gate()

    def make_loop() -> DecodeLoop:
        made = GatedLoop(served.target, PLAIN, 2, prefill_chunk=prefill_chunk)
        made.gate = gate
        return made

    values: dict[str, Any] = {"names": (NAME,), "max_batch": 2, "max_queue": 1, **settings}
    with running(replace(served, make_loop=make_loop), ServerSettings(**values)) as found:
        try:
            yield found, gate
        finally:
            gate.is_open.set()


def raw_post(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields)
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


def until(holds: Callable[[], bool], seconds: float = 20, gate: Gate | None = None) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        if gate is not None:
            gate.steps.release()
        time.sleep(0.01)


def test_a_body_that_does_not_arrive_is_not_waited_for_and_one_with_two_lengths_hides_no_request(server) -> None:
    with connect(server) as slow:
        slow.sendall(raw_post({"prompt": "a"})[:-3])
        slow.settimeout(20)
        assert b" 408 " in slow.recv(100)
    # The request after the chunks was answered, too, which a proxy that reads Content-Length never saw.
    inner = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    for version, length in (("1.1", f"Content-Length: {5 + len(inner)}\r\n"), ("1.0", "")):
        head = f"POST {COMPLETION} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{length}"
        with connect(server) as client:
            client.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner)
            client.settimeout(20)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b" 400 " in answer
        assert b"Transfer-Encoding" in answer


def test_without_a_key_there_is_no_answer(served: Served) -> None:
    with running(served, ServerSettings((NAME,), api_keys=("one", "two"))) as found:
        for key in ("", "on", "one two", "three"):
            refused = found.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
            assert_refused(refused, 401, "Bearer")
        for key in ("one", "two"):
            allowed = found.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert allowed.status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert found.http.get(path).status_code == 200
        assert "two" not in "".join(found.lines)


def test_a_full_queue_refuses_with_a_time_to_come_back(served: Served) -> None:
    with gated(served) as (server, gate):
        threads = [PostThread(server) for _ in range(3)]
        until(lambda: server.service.waiting == 3)
        refused = server.http.post(COMPLETION, json={"prompt": "a"})
        assert_refused(refused, 503, "3 wait", "at most 3", "--max-queue")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        metrics = server.http.get("/metrics").text
        assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="queue_full"} 1.0' in metrics
        assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0' in metrics
        gate.is_open.set()
        assert [thread.status for thread in threads] == [200] * 3
        assert server.http.post(COMPLETION, json={"prompt": "a", "max_tokens": 2}).status_code == 200


class PostThread(threading.Thread):
    def __init__(self, server: Running, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.server, self.fields = server, fields
        self.found: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        body = {"prompt": "a draft", "max_tokens": 8, **self.fields}
        self.found = self.server.http.post(COMPLETION, json=body)

    def answer(self) -> httpx.Response:
        self.join(60)
        assert self.found is not None
        return self.found

    @property
    def status(self) -> int:
        return self.answer().status_code


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["queue", "prefill", "decoding"])
def test_a_client_that_leaves_the_queue_prefill_or_decoding_takes_no_further_work(served, place, stream) -> None:
    with gated(served, prefill_chunk=4) as (server, gate):
        service = server.service
        others = [PostThread(server, max_tokens=100, ignore_eos=True) for _ in range(2 * (place == "queue"))]
        until(lambda: service.running == len(others), gate=gate if others else None)
        with connect(server) as client:
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
        assert [other.status for other in others] == [200] * len(others)
        assert server.http.post(COMPLETION, json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_client_that_reads_a_byte_at_a_time_holds_no_row_and_delays_nobody(served: Served) -> None:
    with running(served, ServerSettings((NAME,), max_batch=2)) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's least: about 2 kB
        slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        fields = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 2, "logprobs": 5}
        slow.sendall(raw_post(fields))
        came = slow.recv(1)
        other = server.http.post(COMPLETION, json={"prompt": "a", "max_tokens": 2})
        assert other.status_code == 200
        until(lambda: server.service.running == 0)  # though it has read one byte
        slow.settimeout(20)
        while not came.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            came += slow.recv(2**16)
        assert came.count(b'"finish_reason": "length"') == 2


def test_time_limits_refuse_what_waits_and_cut_what_runs(served: Served) -> None:
    with gated(served, queue_timeout=0.2) as (server, gate):
        threading.Timer(0.6, gate.is_open.set).start()  # a request is let go when the step that is running has ended
        found = server.http.post(COMPLETION, json={"prompt": "a"})
        assert_refused(found, 503, "no token within 0.2 seconds", "--queue-timeout")
    with gated(served, request_timeout=0.3) as (server, gate):
        gate.steps.release(2)
        thread = PostThread(server, ignore_eos=True, max_tokens=50)
        time.sleep(0.5)
        gate.is_open.set()
        assert thread.status == 200
        assert thread.answer().json()["choices"][0]["finish_reason"] in ("abort", "length")


@pytest.mark.parametrize(("stream", "steps", "status"), [(False, 0, 500), (True, 0, 500), (True, 1, 200)])
def test_a_step_that_fails_ends_its_requests_alone(served, capfd, stream, steps, status) -> None:
    """After the first token the error of a stream is an event, as its status is told already."""
    with gated(served) as (server, gate):
        thread = PostThread(server, stream=stream, ignore_eos=True, logprobs=0)  # these come without a text, too
        until(lambda: server.service.waiting == 1)
        if steps:
            gate.steps.release(steps)
        until(lambda: server.service.running == steps)
        gate.fails = True
        gate.steps.release()
        assert thread.status == status
        assert '"code": 500' in thread.answer().text.replace('":5', '": 5')
        assert thread.answer().text.endswith("data: [DONE]\n\n") == (status == 200)
        gate.is_open.set()
        assert server.http.post(COMPLETION, json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert server.http.get("/health").status_code == 200
        assert "headstart:engine_failures{" in server.http.get("/metrics").text
    assert "a step failed" in capfd.readouterr().err


def test_a_failed_step_failed_or_cancelled_choices_of_another_request(served: Served) -> None:
    with gated(served, max_queue=6) as (server, gate):
        failing = PostThread(server, n=2, max_tokens=60, ignore_eos=True)
        until(lambda: server.service.running == 2, gate=gate)
        other = PostThread(server, n=4, max_tokens=20, ignore_eos=True)
        until(lambda: len(server.service.worker.loop.waiting) == 4, gate=gate)
        gate.fails = True
        gate.is_open.set()
        assert failing.status == 500
        assert other.status == 200
        assert [choice["finish_reason"] for choice in other.answer().json()["choices"]] == ["length"] * 4


def failing_if(holds: Callable[..., object]) -> Callable[[Any], Callable[..., Any]]:
    def fail_or_call(own: Any, *arguments: Any) -> Any:
        if holds(*arguments):
            raise RuntimeError("this choice failed")
        return own(*arguments)

    return lambda own: lambda *arguments: fail_or_call(own, *arguments)


def giving_up(own: Any) -> Callable[..., Any]:
    return lambda state, path: own(state, path) & (len(state.taken) < 3)


# What fails for a request with the stop string "fail", or with a grammar: a function, its replacement, the status.
FAILURES: dict[str, tuple[Any, str, Callable[[Any], Callable[..., Any]], int]] = {
    "when it is submitted": (loop, "check_request", failing_if(lambda _, request, *more: request.stop), 500),
    "in its stop strings": (StopStrings, "kept", failing_if(lambda *_: True), 500),
    "in the text that is shown": (WrittenText, "add", failing_if(lambda written, *_: written.stop), 500),
    "in its grammar": (GrammarState, "advance", failing_if(lambda *_: True), 500),
    "in its grammar, later": (GrammarState, "allowed", failing_if(lambda state, path: len(state.taken) > 2), 500),
    "as its grammar gives up": (GrammarState, "allowed", giving_up, 400),
}
SOME_FAILURES = ("when it is submitted", "as its grammar gives up")


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", slow_unless(SOME_FAILURES, FAILURES))
def test_what_fails_in_one_choice_is_told_to_its_client_alone(server, monkeypatch, capfd, place, stream) -> None:
    """No text is told as a proper end, and neither the others' texts nor what comes next change."""
    owner, name, replacement, status = FAILURES[place]
    fields = {"prompt": "a draft", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    alone = server.http.post(COMPLETION, json=fields).json()["choices"][0]["text"]
    failures = server.service.worker.failures
    own: Any = {"structured_outputs": {"regex": "[a-z ]{12}"}, "ignore_eos": False, "logprobs": 0}
    server.http.post(COMPLETION, json={**fields, **own})  # reads the tokens' texts, which takes a while
    monkeypatch.setattr(owner, name, replacement(getattr(owner, name)))
    other = PostThread(server, **{key: value for key, value in fields.items() if key != "prompt"})
    if "grammar" not in place:
        own = {"stop": "fail"}
    found = server.http.post(COMPLETION, json={**fields, **own, "stream": stream})
    is_begun = stream and place in ("in its grammar, later", "as its grammar gives up")
    assert found.status_code == (200 if is_begun else status)
    assert f'"code": {status}' in found.text.replace('":', '": ').replace(":  ", ": ")
    assert '"stop"' not in found.text.replace("stop_reason", "")
    assert found.text.endswith("data: [DONE]\n\n") == is_begun
    assert other.status == 200
    assert other.answer().json()["choices"][0]["text"] == alone
    assert ("this choice failed" in capfd.readouterr().err) == (status == 500)
    assert server.service.worker.failures == failures
    until(lambda: server.service.running + server.service.waiting == 0 and not server.service.open)


@pytest.mark.parametrize("stream", [False, True])
def test_what_never_fits_in_the_memory_is_refused_with_status_400(served: Served, stream: bool) -> None:
    make_loop = partial(DecodeLoop, served.target, PLAIN, 2, memory=128 * 192)  # one page
    with running(replace(served, make_loop=make_loop), ServerSettings((NAME,), max_batch=2)) as server:
        body = {"prompt": "a", "max_tokens": 100, "stream": stream}
        assert_refused(server.http.post(COMPLETION, json=body), 400, "memory:", "max_new_tokens 100 needs")


def test_draining_lets_requests_end_and_takes_no_more(served: Served) -> None:
    with gated(served) as (server, gate):
        threads = [PostThread(server), PostThread(server)]
        until(lambda: server.service.waiting == 2)
        draining = asyncio.run_coroutine_threadsafe(server.service.drain(30), server.service.worker.asyncio)
        until(lambda: server.service.draining)
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200
        assert_refused(server.http.post(COMPLETION, json={"prompt": "a"}), 503, "stopping")
        gate.is_open.set()
        assert [thread.status for thread in threads] == [200, 200]
        draining.result(20)


def test_after_the_drain_time_requests_end_with_what_they_have(served: Served) -> None:
    with gated(served, max_queue=4) as (server, gate):
        thread = PostThread(server, max_tokens=100, ignore_eos=True, n=2)
        until(lambda: server.service.waiting == 2)
        gate.steps.release(4)
        until(lambda: server.service.running == 2)
        waiting = [PostThread(server, n=2, stream=stream) for stream in (False, True)]
        until(lambda: server.service.waiting == 4)
        draining = asyncio.run_coroutine_threadsafe(server.service.drain(0.1), server.service.worker.asyncio)
        draining.result(20)
        gate.steps.release(1)
        assert thread.status == 200
        assert thread.answer().json()["choices"][0]["finish_reason"] == "abort"
        for each in waiting:  # they got an empty answer with status 200, which no client sends elsewhere
            assert each.status == 503
            assert each.answer().headers["retry-after"]


def test_connections_that_open_and_drop_leave_nothing_behind(server, capfd) -> None:
    draw = random.Random(0)
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir()))
    for _ in range(60):
        with connect(server) as client:
            whole = raw_post({"prompt": "a", "max_tokens": 40, "stream": draw.random() < 0.5})
            client.sendall(whole[: draw.choice([1, 30, len(whole) - 3, len(whole), len(whole)])])
            time.sleep(draw.random() * 0.02)
    until(lambda: server.service.running + server.service.waiting == 0 and not server.service.open)
    until(lambda: len(list(files.iterdir())) <= before)
    assert "Traceback" not in capfd.readouterr().err
    assert server.http.post(COMPLETION, json={"prompt": "a", "max_tokens": 2}).status_code == 200
