"""Laws of generated request bodies: no content is a fault of the server, and none touches another text."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from server_run import NAME, Running, load_served, running

from headstart.inference.serve.api.fields import ChatRequest, CompletionRequest, TokenizeRequest
from headstart.inference.serve.api.responses import ResponsesRequest
from headstart.inference.serve.options import ServerSettings

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
SCHEMAS = st.sampled_from([
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "string", "maxLength": 4},
    {"enum": ["yes", "no"]},
    {"$ref": "#"},
    {"enum": []},
    {"type": "string", "pattern": "(?=a)"},
    {"const": "<end>"},
    {},
])  # fmt: skip
CALLS = st.lists(
    st.fixed_dictionaries({
        "id": TEXT, "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": TEXT, "arguments": st.sampled_from(["{}", '{"a": 1}', "", "{"])}),
    }),
    min_size=1, max_size=2,
)  # fmt: skip
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), min_size=1, max_size=2)
OPTIONAL = {"name": TEXT, "tool_call_id": TEXT, "reasoning_content": TEXT, "tool_calls": CALLS}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]), "content": TEXT | PARTS},
        optional=OPTIONAL,
    ),
    min_size=1,
    max_size=4,
)
NAMES = st.sampled_from(["f", "look_up", "\ud800", "é"])
FUNCTIONS = st.fixed_dictionaries({"name": NAMES}, optional={"parameters": SCHEMAS, "strict": st.booleans()})
TOOLS = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}), min_size=1, max_size=2)
TOKENS = st.lists(st.integers(0, 299), min_size=1, max_size=8)
TEXTS = TEXT.filter(bool)
FORMATS = SCHEMAS.map(lambda each: {"type": "json_schema", "json_schema": {"name": "x", "schema": each}})
# What a client means by a field.
MEANT: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just(NAME),
    "messages": MESSAGES,
    "input": TEXTS,
    "prompt": TEXTS | TOKENS | st.lists(TEXTS | TOKENS, min_size=1, max_size=3),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "stop_token_ids": TOKENS,
    "logit_bias": st.dictionaries(st.integers(0, 299).map(str), st.integers(-100, 100), max_size=4),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | FORMATS,
    "structured_outputs": st.fixed_dictionaries({"regex": st.sampled_from(["a+", "(", "", "[ab]{2,}"])}),
    "chat_template_kwargs": st.dictionaries(TEXT, JUNK, max_size=2),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "headstart": st.fixed_dictionaries({}, optional={"tokens": st.booleans(), "trees": st.booleans()}),
    "reasoning_effort": st.sampled_from(["low", "none"]),
    "verbosity": st.just("low"),
    "instructions": TEXT,
    "logprobs": st.booleans() | st.integers(0, 3),
    **dict.fromkeys(("n", "top_logprobs", "min_tokens", "top_k", "priority"), st.integers(1, 2)),
    **dict.fromkeys(("temperature", "min_p", "top_p", "repetition_penalty"), st.floats(0.1, 1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), st.floats(-2, 2)),
    "seed": st.integers(-5, 5),
}
BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # always given, so that texts are short


def bodies(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with a few fields as a client means them, and in every other one a field that is anything at all."""
    names = {field.alias or name for name, field in kind.model_fields.items()}
    needed = [name for name in ("messages", "prompt", "input") if name in names]
    meant = {name: MEANT.get(name, st.booleans()) for name in sorted(names - {*BOUNDS})}
    bounds = st.fixed_dictionaries({name: st.integers(1, 6) for name in BOUNDS if name in names})
    few = st.lists(st.sampled_from(sorted(meant)), max_size=4).flatmap(
        lambda chosen: st.fixed_dictionaries({name: meant[name] for name in {*chosen, *needed}})
    )
    nothing: st.SearchStrategy[dict[str, Any]] = st.just({})
    wild = nothing | st.dictionaries(st.sampled_from(sorted(meant)) | TEXT, JUNK, min_size=1, max_size=1)
    return st.builds(lambda *parts: {key: value for part in parts for key, value in part.items()}, few, bounds, wild)


REQUESTS = st.one_of(
    st.tuples(st.just("/v1/chat/completions"), bodies(ChatRequest)),
    st.tuples(st.just("/v1/completions"), bodies(CompletionRequest)),
    st.tuples(st.just("/v1/responses"), bodies(ResponsesRequest)),
    st.tuples(st.just("/tokenize"), bodies(TokenizeRequest)),
)

MESSAGE = {"role": "user", "content": "the "}
PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 4, "stream": True}),
    ("/v1/completions", {"prompt": ["the ", [5, 6]], "max_tokens": 4, "temperature": 1, "seed": 3}),
    ("/v1/responses", {"input": "the ", "max_output_tokens": 4}),
    ("/tokenize", {"prompt": "the "}),
]
MANY = 1000  # enough for the share of bodies that are answered to say something


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    served = load_served(tmp_path_factory.mktemp("served") / "target", prefix_memory=2**20)
    with running(served, ServerSettings((NAME,), max_batch=4, max_queue=8)) as found:
        yield found


class Bystander(threading.Thread):
    """Asks for the same seeded text again and again, while others ask for whatever they like."""

    def __init__(self, server: Running) -> None:
        super().__init__(daemon=True)
        self.client, self.ended, self.texts = server.http, threading.Event(), set[str]()

    def run(self) -> None:
        body = {"prompt": "the target", "max_tokens": 24, "temperature": 1, "seed": 7, "ignore_eos": True}
        while not self.ended.is_set():
            answer = self.client.post("/v1/completions", json=body)
            self.texts.add(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)

    def finish(self) -> set[str]:
        self.ended.set()
        self.join(60)
        return self.texts


def ask_for_anything(server: Running, count: int) -> None:
    """Send generated bodies beside a bystander's requests."""
    bystander, answered = Bystander(server), list[bool]()

    # Also without a seed of its own, hypothesis draws differently in each run: from the constants of what is imported.
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=count < MANY)
    @given(REQUESTS)
    @example(PLAIN[0])
    @example(PLAIN[1])
    @example(PLAIN[2])
    @example(PLAIN[3])
    def send(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        answer = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400, 404), answer.text
        answered.append(answer.status_code == 200)
        assert answered[-1] or request not in PLAIN, answer.text
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert path == "/v1/responses" or answer.text.endswith("data: [DONE]\n\n")
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


def test_no_content_is_a_fault_of_the_server(server: Running, capfd: pytest.CaptureFixture[str]) -> None:
    ask_for_anything(server, 12)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_two_thousand_bodies_are_answered(server: Running, capfd: pytest.CaptureFixture[str]) -> None:
    ask_for_anything(server, 2 * MANY)
    assert "Traceback" not in capfd.readouterr().err
