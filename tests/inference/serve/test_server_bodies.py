"""Laws of many requests: no content is a fault of the server, and each text is the one written alone."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import fmean
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from matrix import slow, slow_unless
from server_run import NAME, Running, alone, holds, running, with_loop
from test_server_refused import CHAT, COMPLETION, HELLO, JSON, TEXTS

from headstart.inference.core.sampling import Sampling
from headstart.inference.serve.api.errors import ApiError
from headstart.inference.serve.api.fields import ChatRequest, CompletionRequest, TokenizeRequest, read_fields
from headstart.inference.serve.api.responses import ResponsesRequest
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.service import Served
from headstart.inference.targets.chat_template import LARGE
from headstart.recipes.sampling import SamplingFields

# The server's thread draws random numbers while hypothesis draws a body.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
MARKS = ["<tool_call>", "</tool_call>", "[assistant]", "<end>"]
PIECES = [*MARKS, "a", "the ", "é", "🌳", "\ud800", "\0", "\n", '"', "{", "}"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False, width=16) | st.just(2**70) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
RESPONSES, TOKENIZE = "/v1/responses", "/tokenize"
KINDS: Any = {CHAT: ChatRequest, COMPLETION: CompletionRequest, RESPONSES: ResponsesRequest, TOKENIZE: TokenizeRequest}
# Bodies that are answered, rich enough for each kind of field.
PLAIN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "max_tokens": 4, "stream": True, "logprobs": True, "top_logprobs": 2}),
    (COMPLETION, {"prompt": ["the ", [5, 6]], "max_tokens": 4, "temperature": 1, "seed": 3, "n": 2, "min_p": 0.1}),
    (RESPONSES, {"input": "the ", "max_output_tokens": 4, "instructions": "a", "text": {"format": {"type": "text"}}}),
    (TOKENIZE, {"prompt": "the "}),
    *((path, body if path == TOKENIZE else {**body, "max_tokens": 4}) for path, body in TEXTS),
]
BOUNDS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}  # unchanged, so that texts are short
MANY = 1000  # enough for the share of bodies that are answered to say something


def changed(value: Any) -> st.SearchStrategy[Any]:
    ways: list[st.SearchStrategy[Any]] = [JUNK]
    if isinstance(value, str):
        ways.append(TEXT.map(lambda more: value + more))
    if isinstance(value, dict | list) and value:
        places = st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value)))
        inside = places.flatmap(lambda at: changed(value[at]).map(lambda other: with_item(value, at, other)))
        ways += [inside, inside, inside]
    return st.one_of(*ways)


def with_item(value: Any, at: Any, other: Any) -> Any:
    return {**value, at: other} if isinstance(value, dict) else [*value[:at], other, *value[at + 1 :]]


def bodies(path: str, body: dict[str, Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    names = {field.alias or name for name, field in KINDS[path].model_fields.items()} - BOUNDS
    free = sorted({*body} - BOUNDS)
    one = st.sampled_from(free).flatmap(lambda name: changed(body[name]).map(lambda other: {**body, name: other}))
    more = st.dictionaries(st.sampled_from(sorted(names)) | TEXT, JUNK, min_size=1, max_size=1)
    wild = one | more.map(lambda fields: {**body, **fields})
    return st.tuples(st.just(path), st.just(body) | wild)


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Running]:
    with running(with_loop(served, prefix_memory=2**20), ServerSettings((NAME,), max_batch=4, max_queue=8)) as found:
        yield found


class Bystander(threading.Thread):
    """Asks for the same seeded text again and again, while others ask for whatever they like."""

    def __init__(self, server: Running) -> None:
        super().__init__(daemon=True)
        self.client, self.ended, self.texts = server.http, threading.Event(), set[str]()

    def run(self) -> None:
        body = {"prompt": "the target", "max_tokens": 8, "temperature": 1, "seed": 7, "ignore_eos": True}
        while not self.ended.is_set():
            answer = self.client.post(COMPLETION, json=body)
            self.texts.add(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)

    def finish(self) -> set[str]:
        self.ended.set()
        self.join(60)
        return self.texts


@pytest.mark.parametrize("count", [12, pytest.param(2 * MANY, marks=pytest.mark.slow)])
def test_no_content_is_a_fault_of_the_server(server: Running, capfd: pytest.CaptureFixture[str], count: int) -> None:
    bystander, answered = Bystander(server), list[bool]()

    # Also without a seed of its own, hypothesis draws differently in each run: from the constants of what is imported.
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=count < MANY)
    @given(st.one_of(*(bodies(*each) for each in PLAIN)))
    @example(PLAIN[0])
    @example(PLAIN[1])
    @example(PLAIN[2])
    @example(PLAIN[3])
    def send(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        answer = server.http.post(path, content=json.dumps(body), headers=JSON)
        assert answer.status_code in (200, 400, 404), answer.text
        answered.append(answer.status_code == 200)
        assert answered[-1] or json.dumps(request) not in map(json.dumps, PLAIN), answer.text  # in JSON true is not 1
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert path == RESPONSES or answer.text.endswith("data: [DONE]\n\n")
        elif answer.status_code != 200:
            assert answer.json()["error"]["message"]

    bystander.start()
    try:
        send()
    finally:
        texts = bystander.finish()
    assert len(texts) == 1, texts
    assert count < MANY or sum(answered) > 0.2 * len(answered), "nearly all were refused, so little was checked"
    assert server.service.worker.failures == 0
    assert "Traceback" not in capfd.readouterr().err


SIZE = 2**20  # bytes of the body, an eighth of what is allowed
TOOL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "a"}]
# A body of many equal items, as a function of the items; and the item.
REPEATED: dict[str, tuple[str, Callable[[list[Any]], dict[str, Any]], Any]] = {
    "messages": (CHAT, lambda items: {"messages": items}, {"role": "user", "content": ""}),
    "wrong messages": (CHAT, lambda items: {"messages": items}, {"role": "wizard", "content": ""}),
    "parts": (CHAT, lambda items: {"messages": [{"role": "user", "content": items}]}, PARTS[0]),
    "calls": (CHAT, lambda items: {"messages": [{"role": "assistant", "tool_calls": items}]}, TOOL),
    "ignored lists": (CHAT, lambda items: {"messages": HELLO, "metadata": items}, []),
    "tools": (CHAT, lambda items: {"messages": HELLO, "tools": items}, {"type": "function", "function": {"name": "f"}}),
    "items": (RESPONSES, lambda items: {"input": items}, {"role": "user", "content": "a"}),
    "tokens": (COMPLETION, lambda items: {"prompt": items}, 1),
    "prompts": (COMPLETION, lambda items: {"prompt": items}, [1]),
    "texts": (TOKENIZE, lambda items: {"prompt": "".join(items)}, "a b"),
    "biases": (COMPLETION, lambda of: {"prompt": "a", "logit_bias": {str(n): 1 for n, _ in enumerate(of)}}, "12345678"),
    "choices": (COMPLETION, lambda items: {"prompt": "a", "structured_outputs": {"choice": items}}, "ab"),
}


@pytest.mark.parametrize("case", slow_unless(("messages",), REPEATED))
def test_reading_a_large_body_keeps_no_other_thread_waiting(server: Running, case: str) -> None:
    """Streams and /health paused for seconds: one body was validated in one piece, or a step of some hundred operations
    waited for the lock at each. Half a second is allowed for the largest body, so a sixteenth for this one.
    """
    path, with_items, item = REPEATED[case]
    body = json.dumps(with_items([item] * (SIZE // (len(json.dumps(item)) + 2)))).encode()

    def read() -> None:
        with suppress(ApiError, ValueError):
            server.service.encode(KINDS[path], body) if path != TOKENIZE else read_fields(TokenizeRequest, body)

    def is_short(times: list[float]) -> bool:  # none if the body was read before the first look
        return not times or (max(times) < 0.5 / 8 and fmean(times) < 0.5 / 300)

    assert is_short(holds(read)) or is_short(holds(read))


def test_the_event_loop_reads_no_body_and_shapes_no_long_answer(server: Running) -> None:

    async def clock() -> int:
        return time.pthread_getcpuclockid(threading.get_ident())

    loop = asyncio.run_coroutine_threadsafe(clock(), server.service.worker.asyncio).result(20)
    many = {"messages": [{"role": "user", "content": ""}] * 20_000}
    echo = {"prompt": [5] * 100, "max_tokens": 1, "echo": True, "logprobs": 5, "n": 8, "temperature": 1}
    for path, body, status in ((CHAT, many, 400), (COMPLETION, echo, 200), (TOKENIZE, {"prompt": "ab" * 20}, 200)):
        before = time.clock_gettime(loop)
        assert server.http.post(path, json=body).status_code == status
        assert time.clock_gettime(loop) - before < 0.1


def test_the_waiting_of_a_request_begins_with_its_arrival(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the body, and waiting for others to be read, was in no figure."""
    encode = server.service.requests.encode

    def slowly(fields: Any) -> Any:
        time.sleep(0.3)
        return encode(fields)

    monkeypatch.setattr(server.service.requests, "encode", slowly)
    found = server.http.post(COMPLETION, json={"prompt": "a", "max_tokens": 2}).json()["metrics"]
    assert found["time_to_first_token_seconds"] > found["queue_seconds"] > 0.3


def test_a_small_body_does_not_wait_for_a_large_one(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, reads, may_end = server.service.encode, threading.Event(), threading.Event()

    def slowly(kind: Any, body: bytes) -> Any:
        if len(body) > LARGE:
            reads.set()
            assert may_end.wait(20)
        return encode(kind, body)

    monkeypatch.setattr(server.service, "encode", slowly)
    fields = {"prompt": "a", "max_tokens": 2}
    large = threading.Thread(target=lambda: server.http.post(COMPLETION, json={**fields, "user": "a" * (2 * LARGE)}))
    large.start()
    assert reads.wait(20)
    assert server.http.post(COMPLETION, json=fields).status_code == 200
    may_end.set()
    large.join(20)


def test_the_first_request_with_a_schema_finds_its_tables_made(served: Served) -> None:
    """Making them held everything for 8 seconds at 262,144 tokens."""
    with running(served, ServerSettings((NAME,))) as server:
        assert "grammars" in vars(server.service.requests)


CLIENTS = 8
ASCII = range(20, 90)  # a prompt must not end within a character
Body = dict[str, Any]


def draw_body(draw: random.Random, shared: list[int]) -> Body:
    prompt = [*(shared if draw.random() < 0.5 else []), *(draw.choice(ASCII) for _ in range(draw.randint(1, 30)))]
    fields: Body = {"max_tokens": draw.randint(1, 40), "temperature": draw.choice([0.0, 0.0, 0.7, 1.2])}
    fields |= draw.choice([{}, {"top_k": 30}, {"repetition_penalty": 1.3}, {"top_p": 0.8, "min_p": 0.02}, {}])
    fields |= draw.choice([{}, {}, {"speculative": False}, {"priority": 1}])
    return {"prompt": prompt, "seed": draw.randrange(1000), "stream": draw.random() < 0.2, **fields}


def ask(server: Running, body: Body) -> str | None:
    """The text of the answer; None of one that is streamed, as its client leaves within or after it."""
    if not body["stream"]:
        found = server.http.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        return str(found.json()["choices"][0]["text"])
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        for _ in zip(range(body["seed"] % 8), answer.iter_lines(), strict=False):
            pass
    return None


@pytest.mark.parametrize(("seed", "count"), [(0, 10), *(slow((seed, 200)) for seed in range(5))])
def test_every_text_of_many_is_the_one_written_alone(server: Running, seed: int, count: int) -> None:
    draw = random.Random(seed)
    shared = [draw.choice(ASCII) for _ in range(40)]
    bodies = [draw_body(draw, shared) for _ in range(count)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        texts = [*clients.map(lambda body: ask(server, body), bodies)]
    for body, text in zip(bodies, texts, strict=True):
        if text is not None:
            sampling = {name: value for name, value in body.items() if name in SamplingFields.model_fields}
            assert text == alone(server, body["prompt"], body["max_tokens"], Sampling(**sampling))
    service = server.service
    while service.open:  # the engine lets go of the last ones after its step
        pass
    assert service.running == service.waiting == 0
    assert service.worker.prefixes[1] > 0
