"""Laws of the server's answers: each text is what the decode loop writes alone, streamed or not, drafted or not; tool
calls are the same and fit their tools, forced or free."""

import json
import math
import re
import time
from functools import partial
from typing import Any

import pytest
import torch
from matrix import slow
from openai import BadRequestError, NotFoundError, OpenAI
from server_run import NAME, Running, alone, running, tokens_of, with_loop
from tiny_run import CHAT_TEMPLATE, ENDS

from headstart.data_pipelines.prompts.completion_client import CompletionClient, completion
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import generate
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.service import Served

MESSAGES: Any = [{"role": "user", "content": "the head guesses 🌳"}]


def chat_prompt(server: Running) -> list[int]:
    assert "[assistant]" in CHAT_TEMPLATE
    return tokens_of(server, f"[user]{MESSAGES[0]['content']}[assistant]", special=False)


def chat(client: OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=messages, **fields)


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": NAME, "prompt": "a draft is", "max_tokens": 8, **fields})


def parts_of(chunks: Any) -> list[Any]:
    """The choices of a stream with one choice."""
    return [chunk.choices[0] for chunk in chunks if chunk.choices]


def text_and_calls(parts: list[Any]) -> tuple[str, list[tuple[int, str, str]]]:
    """What a streamed chat says, and the places, names and arguments of its calls."""
    calls = [call for part in parts for call in part.delta.tool_calls or []]
    found = [(call.index, call.function.name, call.function.arguments) for call in calls]
    return "".join(part.delta.content or "" for part in parts), found


EXTRA: list[dict[str, Any]] = [
    {},
    {"top_k": 20, "repetition_penalty": 1.2, "logit_bias": ((40, 6.5), (41, -100.0))},
    {"speculative": False, "min_p": 0.02, "frequency_penalty": 0.8},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5},
]


@pytest.mark.parametrize("seed", range(len(EXTRA)))
def test_a_chat_is_what_the_target_writes_alone(server: Running, client: OpenAI, seed: int) -> None:
    extra, temperature = EXTRA[seed], 0.0 if seed == 3 else 0.9
    fields = {**extra, "logit_bias": {str(token): bias for token, bias in extra.get("logit_bias", ())}}
    found = chat(client, seed=seed, temperature=temperature, top_p=0.95, max_tokens=10, extra_body=fields)
    own = {name: value for name, value in extra.items() if name != "speculative"}
    expected = alone(server, chat_prompt(server), 10, Sampling(temperature, top_p=0.95, seed=seed, **own))
    assert found.choices[0].message.content == expected
    assert found.choices[0].finish_reason in ("stop", "length")
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.prompt_tokens == len(chat_prompt(server))


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
@pytest.mark.parametrize("fields", [{"n": 3}, {"stop": ["e", "th", "🌳"]}, {"logit_bias": {"104": 20}}])
def test_streamed_text_is_the_unstreamed_text(client: OpenAI, seed: int, fields: dict[str, Any]) -> None:
    """Most tokens of this target are single bytes, so characters are spelled by several of them."""
    wanted = {"seed": seed, "temperature": 1.5, "max_tokens": 16, **fields}
    full = chat(client, **wanted)
    *chunks, last = chat(client, **wanted, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], full.usage)
    assert last.metrics
    assert not any(chunk.usage for chunk in chunks)
    for choice in full.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]


@pytest.mark.parametrize("include", [False, True])
def test_a_special_token_may_be_a_stop_string_while_it_is_hidden(client: OpenAI, include: bool) -> None:
    extra = {"ignore_eos": True, "include_stop_str_in_output": include}
    found = complete(client, stop=["x", "<end>"], logit_bias={"0": 100}, extra_body=extra).choices[0]
    assert (found.text, found.finish_reason, found.stop_reason) == ("<end>" * include, "stop", "<end>")


def test_choices_count_seeds_on_prompts_are_texts_or_token_ids_and_a_missing_seed_is_drawn(server, client) -> None:
    found = complete(client, prompt=["a draft", "the head"], n=2, seed=11, temperature=1.0, max_tokens=8)
    assert [choice.index for choice in found.choices] == list(range(4))
    for index, choice in enumerate(found.choices):
        prompt = tokens_of(server, ["a draft", "the head"][index // 2])
        assert choice.text == alone(server, prompt, 8, Sampling(temperature=1.0, seed=11 + index % 2))
    ids = tokens_of(server, "a draft is")
    texts = {complete(client, prompt=prompt, temperature=0).choices[0].text for prompt in ("a draft is", ids, [ids])}
    assert len(texts) == 1
    echoed = complete(client, temperature=0, echo=True).choices[0].text
    assert echoed == "a draft is" + texts.pop()
    assert "".join(each.text for each in parts_of(complete(client, temperature=0, echo=True, stream=True))) == echoed
    found = [complete(client, temperature=1.0) for _ in range(2)]
    assert len({each.seed for each in found}) == 2
    again = complete(client, temperature=1.0, seed=found[0].seed)
    assert again.choices[0].text == found[0].choices[0].text


def test_logprobs_are_those_of_the_target(server: Running, client: OpenAI) -> None:
    found = chat(client, temperature=0, max_tokens=9, logprobs=True).choices[0].logprobs.content
    served, prompt = server.service.served, chat_prompt(server)
    tokens = generate(served.target, prompt, 9).tokens
    with torch.no_grad():
        logits = served.target.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-4)
    assert [each.token for each in found] == [served.tokenizer.decode([token]) for token in tokens]
    parts = parts_of(chat(client, temperature=0, max_tokens=9, logprobs=True, stream=True))
    assert [each for part in parts if part.logprobs for each in part.logprobs.content] == found
    several = chat(client, temperature=0, max_tokens=9, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    best = logits.log_softmax(-1).topk(2).values.tolist()
    for each, wanted in zip(several, best, strict=True):
        assert [pair.logprob for pair in each.top_logprobs] == pytest.approx(wanted, abs=1e-4)


def test_end_tokens_stop_ids_and_ignore_eos(server: Running, client: OpenAI) -> None:
    prompt = tokens_of(server, "a draft is")
    free = generate(server.service.served.target, prompt, 20, Sampling(temperature=1.0, seed=5)).tokens
    fields: dict[str, Any] = {"seed": 5, "temperature": 1.0, "max_tokens": 20}
    plain = complete(client, **fields)
    assert plain.usage.completion_tokens == len(free)
    assert plain.choices[0].finish_reason == ("stop" if free[-1] in ENDS else "length")
    assert complete(client, **fields, extra_body={"ignore_eos": True}).usage.completion_tokens == 20
    stopped = complete(client, **fields, extra_body={"stop_token_ids": [free[1]]})
    assert stopped.choices[0].stop_reason == free[1]
    assert stopped.usage.completion_tokens == free.index(free[1]) + 1
    long = complete(client, **fields, extra_body={"min_tokens": 20})
    assert long.usage.completion_tokens == 20
    plain = complete(client, **fields, extra_body={"min_tokens": 20, "speculative": False})
    assert plain.choices[0].text == long.choices[0].text


FIELDS = {"a": {"enum": ["x", "yy"]}, "n": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["a", "n"], "additionalProperties": False}
VALID = r'\{\s*"a"\s*:\s*"(x|yy)"\s*,\s*"n"\s*:\s*(true|false)\s*\}'
WANTED = [({"regex": "a{3}b?"}, r"aaab?"), ({"choice": ["yes", "no."]}, r"yes|no\."), ({"json": SCHEMA}, VALID)]


@pytest.mark.parametrize(("wanted", "allowed"), WANTED)
def test_structured_outputs_bind_the_text(client: OpenAI, wanted: dict[str, Any], allowed: str) -> None:
    fields: dict[str, Any] = {"seed": 0, "temperature": 1.0, "max_tokens": 60}
    extra = {"structured_outputs": wanted}
    assert re.fullmatch(allowed, complete(client, **fields, extra_body=extra).choices[0].text)
    found = chat(client, **fields, extra_body=extra).choices[0]
    assert re.fullmatch(allowed, found.message.content)
    assert found.finish_reason == "stop"
    plain: dict[str, Any] = {"extra_body": {**extra, "speculative": False}}
    if "json" in wanted:  # the same, as OpenAI's clients ask for it
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
        plain = {"extra_body": {"speculative": False}, "response_format": schema}
    assert chat(client, **fields, **plain).choices[0].message.content == found.message.content


def prompt_logprobs(server: Running, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        logits = server.service.served.target.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(logits, tokens[1:], strict=True)]


@pytest.mark.parametrize("count", [0, 8])
def test_an_echo_has_the_logprobs_of_the_prompt(server: Running, client: OpenAI, count: int) -> None:
    """As lm-eval asks for: of the last tokens, those of an answer to choose."""
    prompts = [tokens_of(server, text) for text in ("a draft is a tree", "the head 🌶 guesses")]
    fields: dict[str, Any] = {"prompt": prompts, "max_tokens": count, "temperature": 0, "logprobs": 1, "echo": True}
    whole = complete(client, **fields)
    chunks = parts_of(complete(client, **fields, stream=True))
    for choice, prompt in zip(whole.choices, prompts, strict=True):
        told = choice.logprobs
        tokens = prompt + ([] if count == 0 else tokens_of(server, choice.text)[len(prompt) :])
        assert told.token_logprobs[0] is told.top_logprobs[0] is None
        length = len(prompt) + count
        assert len(told.tokens) == len(told.text_offset) == len(told.token_logprobs) == length or count == 8
        wanted = prompt_logprobs(server, tokens[: len(prompt)])
        assert told.token_logprobs[1 : len(prompt)] == pytest.approx(wanted, abs=1e-4)
        pairs = zip(told.top_logprobs[1:], told.token_logprobs[1:], strict=True)
        assert all(max(top.values()) >= own for top, own in pairs)
        mine = [each for each in chunks if each.index == choice.index]
        assert "".join(each.text for each in mine) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [part for each in mine if each.logprobs for part in getattr(each.logprobs, name)]
            assert parts == getattr(told, name)
    if count == 0:
        assert [choice.text for choice in whole.choices] == ["a draft is a tree", "the head 🌶 guesses"]
        assert {choice.finish_reason for choice in whole.choices} == {"length"}
        assert whole.usage.completion_tokens == 0
        with pytest.raises(BadRequestError, match=r"max_tokens: 0 given, .* with echo"):
            complete(client, max_tokens=0)


def test_a_sampled_token_was_missing_among_its_own_top_logprobs(client: OpenAI) -> None:
    """Also a token of the prompt that is echoed."""
    told = complete(client, temperature=2.0, max_tokens=20, logprobs=1, echo=True).choices[0].logprobs
    for token, logprob, top in zip(told.tokens[1:], told.token_logprobs[1:], told.top_logprobs[1:], strict=True):
        assert top[token] >= logprob
        assert len(top) <= 2
    assert max(map(len, told.top_logprobs[1:])) == 2


def test_bytes_of_tokens_join_to_the_text_and_offsets_count_its_characters(server: Running, client: OpenAI) -> None:
    text = "a 😀é b"
    extra = {"structured_outputs": {"choice": [text]}}
    told = chat(client, temperature=0, max_tokens=40, logprobs=True, extra_body=extra).choices[0].logprobs.content
    assert b"".join(bytes(each.bytes) for each in told[:-1]).decode() == text  # the last one is an end token
    prompt = "x 🌳."
    found = complete(client, prompt=prompt, temperature=0, logprobs=0, echo=True, max_tokens=40, extra_body=extra)
    choice = found.choices[0]
    assert choice.text == prompt + text
    tokens = tokens_of(server, prompt + text)
    decode = server.service.served.tokenizer.decode
    starts = [len(decode(tokens[:count]).rstrip("\ufffd")) for count in range(len(tokens))]
    assert choice.logprobs.text_offset[: len(tokens)] == starts


def test_a_prompt_that_comes_again_is_not_read_again(served: Served) -> None:
    with running(with_loop(served, prefix_memory=2**24), ServerSettings((NAME,), max_batch=4)) as found:
        prompt = list(range(20, 100))
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        first, second = (found.http.post("/v1/completions", json=body, timeout=60).json() for _ in range(2))
        assert first["choices"] == second["choices"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 60
        assert 'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 0.0' not in found.http.get("/metrics").text


def test_figures_of_speculation_come_with_the_answer_and_each_tokens_text_and_depth_if_asked_for(client) -> None:
    found = complete(client, temperature=0, max_tokens=20, extra_body={"ignore_eos": True}).metrics
    figures = found["speculative_decoding"]
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
    accepted = sum(depth * count for depth, count in enumerate(figures["acceptance_histogram"]))
    assert accepted == figures["num_accepted_draft_tokens"] > 0
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / figures["num_spec_steps"])
    assert found["time_to_first_token_seconds"] > 0
    plain = complete(client, temperature=0, max_tokens=2, extra_body={"speculative": False})
    assert plain.metrics["speculative_decoding"] is None
    extra = {"headstart": {"tokens": True, "trees": True}, "ignore_eos": True}
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "extra_body": extra}
    whole = complete(client, **fields)
    parts = parts_of(complete(client, **fields, stream=True))
    shown = [(each.model_extra or {}).get("headstart", {}) for each in parts]
    streamed = [token for each in shown for token in each.get("tokens", [])]
    assert streamed == whole.choices[0].headstart["tokens"]
    assert "".join(token["text"] for token in streamed) == whole.choices[0].text
    trees = [each["tree"] for each in shown if "tree" in each]
    assert trees
    assert all(len(tree["texts"]) == len(tree["parents"]) > max(tree["path"]) for tree in trees)
    assert {token["depth"] for token in streamed} > {None, 0, 1}


def test_models_versions_and_tokens(server: Running, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "alias"]
    assert client.models.retrieve("alias").model_dump()["max_model_len"] == 128
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")
    http = server.http
    for path in ("/health", "/ping", "/ready"):
        assert (http.get(path).status_code, http.get(path).content) == (200, b"")
    assert re.fullmatch(r"[\d.]+\w*", http.get("/version").json()["version"])
    for path, kind in (("/", "text/html"), ("/style.css", "text/css"), ("/page.js", "javascript")):
        page = http.get(path)
        assert page.status_code == 200
        assert kind in page.headers["content-type"]
        assert "default-src 'self'" in page.headers["content-security-policy"]
    found = http.post("/tokenize", json={"prompt": "a draft", "return_token_strs": True}).json()
    assert found["tokens"] == tokens_of(server, "a draft")
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "a draft"}
    assert http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == chat_prompt(server)


def test_logs_hold_figures_and_no_text(server: Running, client: OpenAI) -> None:
    answer = chat(client, max_tokens=8, temperature=0, extra_headers={"X-Request-Id": "mine-1"})
    while not (mine := [line for line in server.lines if '"mine-1"' in line]):  # it is written after the answer
        time.sleep(0.01)
    found = json.loads(mine[0])
    assert found["status"] == 200
    assert found["completion_tokens"] == answer.usage.completion_tokens
    assert math.isfinite(found["prefill_seconds"] + found["queue_seconds"])
    assert "guesses" not in "".join(server.lines)


def test_our_own_server_writes_the_responses_of_a_harvest(server: Running) -> None:
    servers = CompletionClient([server.url])
    prompts = [[5, 6, 7], [9, 4]]
    bodies = [completion(prompt, Sampling(1.0, seed=3), max_new_tokens=6) for prompt in prompts]
    answers = dict(servers.each(bodies, at_once=2))
    target = server.service.served.target
    alone = [generate(target, prompt, 6, Sampling(1.0, seed=3)).tokens for prompt in prompts]
    assert [answers[number].choice["token_ids"] for number in range(2)] == alone


look = partial(chat, messages=[{"role": "user", "content": "look"}])
CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("before", [slow(""), "so "])
def test_tool_calls_come_whole_and_in_a_stream(client: OpenAI, before: str) -> None:
    extra = {"structured_outputs": {"choice": [before + CALL]}}
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 90, "extra_body": extra}
    whole = look(client, **fields).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"at": "it"}')
    parts = parts_of(look(client, **fields, stream=True))
    assert text_and_calls(parts) == (whole.message.content or "", [(0, "look", '{"at": "it"}')])
    assert whole.finish_reason == parts[-1].finish_reason == "tool_calls"
    assert (whole.message.content or "") == before
    ignored = look(client, **fields, tool_choice="none").choices[0]
    assert ignored.message.content == before + CALL
    assert ignored.finish_reason == "stop"


def test_half_of_a_surrogate_pair_in_an_argument_is_an_escape(client: OpenAI) -> None:
    extra = {"structured_outputs": {"choice": [CALL.replace("it", "\\ud83d")]}}
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 90, "extra_body": extra}
    (call,) = look(client, **fields).choices[0].message.tool_calls
    assert call.function.arguments == '{"at": "\\ud83d"}'
    assert text_and_calls(parts_of(look(client, **fields, stream=True)))[1] == [(0, "look", call.function.arguments)]


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
def test_a_forced_call_is_one_of_the_tools_and_its_schema(client, choice, parallel, seed) -> None:
    """A call of a named tool ends in `stop`, as OpenAI's and vLLM's do."""
    fields: dict[str, Any] = {"tools": MANY, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": seed}
    fields |= {"temperature": 1.0, "max_tokens": 98, **ENDING}
    fields |= {"response_format": {"type": "json_object"}} if seed else {}  # which binds only what is no call
    whole = look(client, **fields).choices[0]
    calls = whole.message.tool_calls
    assert all(map(read_look, calls))
    assert whole.message.content is None
    assert whole.finish_reason == ("stop" if choice == NAMED else "tool_calls")
    assert [call.function.name for call in calls] in ([["look"]] if choice == NAMED else [["look"], ["wait"]])
    if choice == NAMED:
        plain = look(client, **fields, extra_body={"speculative": False}).choices[0].message
        assert [call.function for call in plain.tool_calls] == [call.function for call in calls]
    parts = parts_of(look(client, **fields, stream=True))
    text, streamed = text_and_calls(parts)
    assert streamed == [(at, call.function.name, call.function.arguments) for at, call in enumerate(calls)]
    assert not text.strip()
    assert parts[-1].finish_reason == whole.finish_reason


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
            look(client, **fields)


@pytest.mark.parametrize("speculative", [True, slow(False)])
def test_without_parallel_calls_the_text_ends_after_the_first(server, client, speculative) -> None:
    written = '<tool_call>{"name": "wait"}</tool_call>'
    twice = {"structured_outputs": {"choice": [f"so {written}\n{written} and"]}, "speculative": speculative}
    fields: dict[str, Any] = {"tools": MANY, "max_tokens": 98, "temperature": 0, "extra_body": twice}
    parts = parts_of(look(client, **fields, stream=True))
    assert [place for place, *_ in text_and_calls(parts)[1]] == [0, 1]
    whole = look(client, **fields, parallel_tool_calls=False)
    choice = whole.choices[0]
    assert (choice.message.content, len(choice.message.tool_calls), choice.finish_reason) == ("so ", 1, "tool_calls")
    text, calls = text_and_calls(parts_of(look(client, **fields, parallel_tool_calls=False, stream=True)))
    assert (text, len(calls)) == ("so ", 1)
    assert whole.usage.completion_tokens == len(tokens_of(server, f"so {written}"))


@pytest.mark.parametrize("starts", ["<", "{"])
def test_with_tools_a_format_binds_what_is_no_call(server: Running, client: OpenAI, starts: str) -> None:
    (first,) = tokens_of(server, starts)
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    fields: dict[str, Any] = {"tools": MANY, "response_format": wanted, "parallel_tool_calls": False}
    bias = {"logit_bias": {str(first): 100}}
    found = look(client, **fields, **bias, temperature=0, max_tokens=98).choices[0].message
    if starts == "<":
        assert all(map(read_look, found.tool_calls))
    else:
        assert json.loads(found.content)["a"] in ("x", "yy")
