"""Laws of the API as OpenAI's own client sees it: every documented path and field can be used from it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from server_run import NAME, Running, alone, tokens_of
from test_server import complete

from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import generate_batch

ROOT = Path(__file__).resolve().parents[3]
USER: Any = {"role": "user", "content": "a tree"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(templated: Running) -> Running:
    return templated


@pytest.fixture(scope="module")
def outside(server: Running, client: OpenAI) -> OpenAI:
    return client.with_options(base_url=server.url)


def chat(client: OpenAI, messages: Any = (USER,), **fields: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=list(messages), **{"max_tokens": 8, **fields})


def test_the_tests_use_every_documented_field() -> None:
    table = (ROOT / "docs/serving.md").read_text().partition("## Fields of a request")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    files = "test_server.py", "test_server_client.py"
    used = "".join((ROOT / "tests/inference/serve" / file).read_text() for file in files)
    assert len(names) > 30
    assert not [name for name in names if not re.search(rf"\b{name}\b", used)]


def test_the_longest_answer_has_two_names_and_any_object_of_json_may_be_asked_for(client, server) -> None:
    extra = {"ignore_eos": True}
    assert chat(client, max_tokens=5, extra_body=extra).usage.completion_tokens == 5
    found = client.chat.completions.create(model=NAME, messages=[USER], max_completion_tokens=6, extra_body=extra)
    assert found.usage.completion_tokens == 6
    (brace,) = tokens_of(server, "}", special=False)  # this target hardly ever ends an object by itself
    bias = {"logit_bias": {str(brace): 100}, "max_tokens": 60}
    ended = chat(client, **bias, seed=0, temperature=1.0, response_format={"type": "json_object"})
    assert json.loads(ended.choices[0].message.content) == {}


CONVERSATION: list[Any] = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "look "}, {"type": "text", "text": "there"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
]
BEGUN = [USER, {"role": "assistant", "content": "it"}]
UNUSED = {"return_token_ids": False, "include_reasoning": True, "prompt_cache_options": {"mode": "implicit"}}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "[user]a tree[assistant]"),
        ({"messages": CONVERSATION}, "[system]be brief[user]look there[assistant]<look it>[tool]a tree[assistant]"),
        ({"tools": [LOOK], "tool_choice": "auto"}, "<look>[user]a tree[assistant]"),
        ({"tools": [LOOK], "tool_choice": "none"}, "[user]a tree[assistant]"),
        ({"extra_body": {"add_generation_prompt": False}}, "[user]a tree"),
        ({"extra_body": {"chat_template_kwargs": {"mood": "gay"}}}, "[user]a treegay[assistant]"),
        ({"messages": BEGUN, "extra_body": {"continue_final_message": True}}, "[user]a tree[assistant]it"),
        ({"user": "u1", "metadata": {"a": "b"}, "store": False}, "[user]a tree[assistant]"),
        ({"reasoning_effort": "low", "verbosity": "high"}, "[user]a treelow[assistant]"),
        ({"stream_options": {"include_obfuscation": False}, "extra_body": UNUSED}, "[user]a tree[assistant]"),
    ],
)
def test_a_chat_is_what_its_template_makes_of_it(server, client, outside, fields, prompt) -> None:
    found = chat(client, temperature=0, max_tokens=4, **fields)
    tokens = tokens_of(server, prompt, special=False)
    assert found.usage.prompt_tokens == len(tokens)
    assert (found.choices[0].message.content or "") == alone(server, tokens, 4, Sampling())
    shared = {name: value for name, value in fields.items() if name in ("messages", "tools", "reasoning_effort")}
    if fields.get("tool_choice") != "none":
        body = {"messages": [USER], **shared, **fields.get("extra_body", {})}
        told: Any = outside.post("/tokenize", body=body, cast_to=object)
        assert told["tokens"] == tokens


def test_roles_that_the_template_refuses_are_a_clear_error(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"template refuses them .a system message must come first") as refused:
        chat(client, [USER, {"role": "system", "content": "be brief"}])
    assert refused.value.param == "messages"


def test_special_tokens_are_shown_and_added_only_if_asked_for(server: Running, client: OpenAI, outside: OpenAI) -> None:
    for shows, text in ((True, ""), (False, "<end>" * 3)):
        extra = {"ignore_eos": True, "skip_special_tokens": shows}
        found = complete(client, max_tokens=3, temperature=0, logit_bias={"0": 100}, extra_body=extra)
        assert found.choices[0].text == text
    plain = tokens_of(server, "a draft is", special=False)
    for special, tokens in ((None, [0, *plain]), (True, [0, *plain]), (False, plain)):
        extra = {} if special is None else {"add_special_tokens": special}
        assert complete(client, extra_body=extra).usage.prompt_tokens == len(tokens)
        told: Any = outside.post("/tokenize", body={"prompt": "a draft is", **extra}, cast_to=object)
        assert told["tokens"] == tokens
    added = chat(client, extra_body={"add_special_tokens": True}).usage.prompt_tokens
    assert added == chat(client).usage.prompt_tokens + 1


def test_without_usage_every_chunk_has_a_choice_and_usage_may_come_with_each(client: OpenAI) -> None:
    """Most programs read chunk.choices[0] of each chunk without a look."""
    for make in (chat, complete):
        chunks = list(make(client, stream=True, n=2))
        assert all(len(chunk.choices) == 1 for chunk in chunks)
        assert [hasattr(chunk, "metrics") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert all(chunk.usage is None for chunk in chunks)
    options: Any = {"continuous_usage_stats": True}
    *chunks, last = chat(client, max_tokens=20, n=2, stream=True, stream_options=options)
    written = [chunk.usage.completion_tokens for chunk in chunks]
    assert written == sorted(written)
    assert (last.choices, last.usage.completion_tokens) == ([], written[-1])


@pytest.mark.each_value
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculative", [True, False])
def test_logprobs_of_completions_are_those_of_transformers(server, client, temperature, speculative) -> None:
    """Text that may begin a stop string is held back, while its tokens are told at once."""
    prompt = tokens_of(server, "a draft is", special=False)
    extra = {"speculative": speculative, "ignore_eos": True, "priority": 1}
    fields: dict[str, Any] = {"prompt": prompt, "seed": 3, "temperature": temperature, "logprobs": 3}
    fields["extra_body"] = extra
    stops = [text * 40 for text in "abcdefghijklmnopqrstuvwxyz "]
    whole = complete(client, **fields, stop=stops).choices[0].logprobs
    target = server.service.served.target
    (written,) = generate_batch(target, [Request(prompt, 8, Sampling(temperature, seed=3), end_tokens=())])
    with torch.no_grad():
        logits = target.model(torch.tensor([prompt + written.tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(written.tokens).unsqueeze(1)).squeeze(1).tolist()
    assert whole.token_logprobs == pytest.approx(expected, abs=1e-4)
    for told, best in zip(whole.top_logprobs, logprobs.max(-1).values.tolist(), strict=True):
        assert max(told.values()) == pytest.approx(best, abs=1e-4)
    streamed = [chunk.choices[0].logprobs for chunk in complete(client, **fields, stop=stops, stream=True)]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [each for told in streamed if told for each in getattr(told, name)] == getattr(whole, name)
    text = complete(client, **fields, stop=stops).choices[0].text
    for offset, token in zip(whole.text_offset, whole.tokens, strict=True):
        assert text.startswith(token.strip("\ufffd"), offset + len(token) - len(token.lstrip("\ufffd")))
