"""Laws of training rows: what is trained on follows the tokens that a server sends, and ends as the target does."""

import json
from datetime import date
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrix import slow_unless
from test_chat_masks import FAMILIES, template_of
from tiny_run import build_run, build_tokenizer, tiny_recipe
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from headstart.common.files import read_jsonl, write_jsonl
from headstart.data_pipelines.prompts import prompts as prompts_stage
from headstart.data_pipelines.prompts.chat_masks import ChatMasks, MaskedTokens, encode_prompt, given_samples
from headstart.data_pipelines.prompts.conversations import parse_row, unread_keys
from headstart.data_pipelines.prompts.prompts import make_prompts, read_prompts
from headstart.data_pipelines.prompts.row_report import RowReport
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.inference.serve.api.encode import PromptEncoder
from headstart.inference.serve.api.errors import ApiError
from headstart.inference.serve.api.fields import ChatRequest
from headstart.inference.targets.chat_template import REASONING_NAMES, ChatTemplate
from headstart.recipes.schema import DataSection

SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|calls|>")
HEADER = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = HEADER + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + ASK
# As DeepSeek-R1's: the prompt opens the reasoning, which earlier turns hide; a call has no content, and text arguments.
REASONING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<|user|>' + m.content }}{% elif m['content'] is none %}{% for c in m.tool_calls %}"
    "{{ '<|assistant|><|calls|>' + c.function.name + '\n' + c.function.arguments + '<|eos|>' }}{% endfor %}{% else %}"
    "{{ '<|assistant|>' + m.content.split('</think>')[-1] + '<|eos|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# As Qwen3's: an answer is rendered with an empty block of reasoning, unless the prompt has closed one already.
HYBRID = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    + ASK
    + "{% if add_generation_prompt and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
DATED = "{{ bos_token + 'Today is ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML


def template(source: str | None, **variables: Any) -> ChatTemplate:
    tokenizer = build_tokenizer()
    special = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "additional_special_tokens": list(SPECIAL[2:])}
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, variables)


def section(**fields: Any) -> DataSection:
    sizes: dict[str, Any] = {"num_prompts": 99, "prompt_tokens": 2000, "response_tokens": 2000, **fields}
    return DataSection(prompts="prompts.jsonl", heldout_prompts=Path("heldout.jsonl"), **sizes)


def samples(found: ChatTemplate, row: dict[str, Any], **fields: Any) -> list[MaskedTokens]:
    return given_samples(ChatMasks(found), parse_row(row, found.is_turn), row, section(responses="given", **fields))


def trained_on(found: ChatTemplate, row: dict[str, Any], **fields: Any) -> list[tuple[str, str]]:
    """(text before it, text) of each range that is trained on."""
    decode = found.tokenizer.decode
    return [
        (str(decode(sample.tokens[:start])), str(decode(sample.tokens[start:end])))
        for sample in samples(found, row, **fields)
        for start, end in sample.spans
    ]


def prompt_of(found: ChatTemplate, row: dict[str, Any]) -> str:
    return str(found.tokenizer.decode(encode_prompt(ChatMasks(found), parse_row(row, found.is_turn)).tokens))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def report_of(found: ChatTemplate, path: Path, *rows: dict[str, Any], **fields: Any) -> tuple[list[Any], str]:
    write_jsonl(path, rows)
    data, report = section(**fields), RowReport(str(path))
    return read_prompts(found, data, None, report), report.summary("prompts", data)


def test_reasoning_is_trained_on_after_the_block_that_the_prompt_opens() -> None:
    found, thought = template(REASONING), "<think>\nTwo and two.\n</think>\n\nFour."
    prompt = "<|bos|><|user|>2+2?<|assistant|><think>\n"
    in_words, in_field = says(thought), says("Four.", reasoning_content="Two and two.")
    for answer in (in_words, in_field):
        expected = [(prompt, "Two and two.\n</think>\n\nFour.<|eos|>")]
        assert trained_on(found, {"messages": [user("2+2?"), answer]}) == expected
    # without reasoning, the block is closed as such models do when they do not think
    assert trained_on(found, {"messages": [user("2+2?"), says("Four.")]}) == [(prompt, "\n</think>\n\nFour.<|eos|>")]


def test_variables_of_the_template_change_prompts_and_training_alike() -> None:
    found, row = template(HYBRID, enable_thinking=False), {"messages": [user("2+2?"), says("Four.")]}
    [(before, words)] = trained_on(found, row)
    assert (before.endswith("<think>\n\n</think>\n\n"), words) == (True, "Four.<|im_end|>")
    assert prompt_of(found, row) == before == served(found, row["messages"][:1])
    own = row | {"chat_template_kwargs": {"enable_thinking": False}}  # of one row
    assert trained_on(template(HYBRID), own) == [(before, words)]


def test_a_days_prompts_continue_on_another_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_run(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = DATED.replace("bos_token + ", "")
    tokenizer.save_pretrained(tmp_path / "target")
    texts = []
    for day, count in ((2, 4), (3, 6)):
        monkeypatch.setattr(prompts_stage, "date", SimpleNamespace(today=lambda day=day: date(2026, 1, day)))
        make_prompts(tiny_recipe(tmp_path, f"data.num_prompts={count}", "data.prompt_tokens=100"))
        rows = list(read_jsonl(tmp_path / "run/prompts/train.jsonl"))
        texts.append([tokenizer.decode(row["tokens"]) for row in rows])
    assert texts[1][:4] == texts[0]
    dated = [text for text in texts[1] if "Today is" in text]
    assert dated
    assert all("Today is 02 Jan 2026" in text for text in dated)
    with pytest.raises(ValueError, match=r"target\.chat_template_kwargs: made with .*2026-01-02.*2026-05-05"):
        make_prompts(tiny_recipe(tmp_path, "target.chat_template_kwargs={date: 2026-05-05}", "data.prompt_tokens=100"))


def test_a_date_format_in_a_variable_refused_every_row_for_a_key_that_nobody_gave() -> None:
    source = "\n{% set form = '%-d %b %Y' %}{% macro day() %}{{ strftime_now(form) }}{% endmacro %}{{ day() }}" + CHATML
    today, row = date.today(), {"messages": [user("Hi")]}
    asked = prompt_of(template(source, date=today.isoformat()), row)
    assert asked == prompt_of(template(source), row)
    assert asked.startswith(f"\n{today.strftime('%-d %b %Y')}<")
    assert prompt_of(template(source, date="2026-01-02"), row).startswith("\n2 Jan 2026<")


CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
RESULT = {"role": "tool", "content": "snow"}
ASKS_SNOW, CALLS_WEATHER = user("Snow?"), says(None, tool_calls=[{"function": CALL}])
TEXTS_ALONE = HYBRID.replace(
    "(c.function | tojson)",
    "c.function.name + '(' + (c.function.arguments.values() | select('string') | join(', ')) + ')'",
)


def calls_with(value: Any) -> dict[str, Any]:
    return says("", tool_calls=[{"function": {"name": "add", "arguments": {"a": value}}}])


@pytest.mark.parametrize(
    ("source", "messages", "hidden"),
    [
        ("{{ 'weather city Oslo' }}" + CHATML, [ASKS_SNOW, CALLS_WEATHER, RESULT], "the tool call weather of turn 2"),
        (TEXTS_ALONE, [user("add a 7"), calls_with(7), RESULT], "the tool call add of turn 2"),
        (TEXTS_ALONE, [user("add a true"), calls_with({"b": [True]}), RESULT], "the tool call add of turn 2"),
        (
            HYBRID.replace("{{ m.content", "{{ '' if m.role == 'tool' else m.content"),
            [user("snow?"), CALLS_WEATHER, RESULT],
            "the words of turn 3",
        ),
        (
            CHATML.replace("{{ m.content", "{{ ('' if m.role == 'system' else m.content)"),
            [{"role": "system", "content": "Be brief."}, user("Be brief. Snow?")],
            "the words of turn 1",
        ),
    ],
)
def test_a_part_of_a_turn_vanished_if_its_text_stood_elsewhere_in_the_prompt(source, messages, hidden):
    answered, found = {"messages": [*messages, says("Yes.")]}, template(source)
    for read in (
        lambda: prompt_of(found, {"messages": messages}),
        lambda: samples(found, answered, turns="all"),
        lambda: samples(found, answered, turns="last"),
        # as the answer that is trained on, if it is a call
        lambda: samples(found, {"messages": messages[:2]} if hidden.startswith("the tool call") else answered),
    ):
        with pytest.raises(BadRow, match=f"does not write {hidden}"):
            read()


def test_tools_that_the_template_does_not_write_are_said_once_in_serving() -> None:
    said: list[str] = []
    for source in (CHATML, "{{ tools }}" + CHATML):
        encoder = PromptEncoder(template(source), 999, 100_000, said.append)
        for tools in ([], TOOLS, TOOLS):
            encoder.chat(ChatRequest.model_validate({"messages": [user("Hi")], "tools": tools}))[0]
    [line] = said
    assert "which the target's chat template does not write" in json.loads(line)["warning"]


def test_a_template_that_wants_calls_without_content_and_arguments_as_text_gets_them_so() -> None:
    found = template(REASONING)
    messages = [user("Snow?"), says(None, tool_calls=[{"function": CALL}]), RESULT, says("It snows.")]
    calls = '<|assistant|><|calls|>weather\n{"city": "Oslo"}<|eos|>'
    assert calls in prompt_of(found, {"messages": messages[:3]}) == served(found, messages[:3])
    words = [words for _, words in trained_on(found, {"messages": messages})]
    half = {"function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}  # of a surrogate pair: it stopped no harvest
    broken = [user("Hi"), says(None, tool_calls=[half]), RESULT]
    assert "\ufffd" in prompt_of(template(HYBRID), {"messages": broken}) == served(template(HYBRID), broken)
    assert words == ["\n</think>\n\n" + calls.removeprefix("<|assistant|>"), "\n</think>\n\nIt snows.<|eos|>"]


def test_reasoning_under_every_name_reaches_the_template_in_rows_and_in_serving() -> None:
    """The server dropped what rows read, and both dropped reasoning_details, in silence."""
    found = template(CHATML.replace("{{ m.content", "{{ (m.reasoning_content or '') + m.content"))
    for name in (*REASONING_NAMES, "no_such_field"):
        value = [{"type": "reasoning.text", "text": "hidden"}] if name == "reasoning_details" else "hidden"
        messages = [user("Hi"), says("Hello.", **{name: value}), user("Again")]
        if name in REASONING_NAMES:
            assert "hidden" in prompt_of(found, {"messages": messages}) == served(found, messages)
            continue
        row = {"messages": messages}
        assert {f"{name} of a turn"} == unread_keys(row, parse_row(row, found.is_turn))
        with pytest.raises(ApiError, match=r"^messages\[1\]\.no_such_field: there is no such field; content, name"):
            served(found, messages)
        assert served(found, [*messages[:1], says("Hello.", annotations=[{}], parsed=[], **{name: []}), messages[2]])


TOOLS = [{"type": "function", "function": CALL | {"description": "of a day", "parameters": {"type": "object"}}}]
HELLO = {"messages": [user("Hi"), says("Hello.")]}
SNOWS = {"messages": [ASKS_SNOW, CALLS_WEATHER, RESULT, says("It snows.")]}  # its call is an answer, too
NO_MARKS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
NO_MARKS += "{% if add_generation_prompt %}assistant: {% endif %}"
ODD_FIELDS = [
    {"messages": [user("Hi") | {"lang": "en"}, says("Hello.")], "source": "web", "score": None},
    {"prompt": [user("Hi")], "completion": [says("Hello.", lang="en")]},
]


@pytest.mark.parametrize(
    ("source", "rows", "part"),
    [
        (HYBRID, [HELLO, SNOWS], r"the chat template adds '<think>\n\n</think>\n\n' before 3 answers"),
        (REASONING, [HELLO, SNOWS], r"the chat template adds '\n</think>\n\n' before 3 answers"),
        (NO_MARKS, [HELLO], "the chat template writes no end mark after 1 answers"),  # so it never learns to end
        (CHATML, [*ODD_FIELDS, ODD_FIELDS[0]], "not read: lang of a turn (3), source (2)"),
        (CHATML, [HELLO | {"tools": TOOLS}], "not read: tools that the chat template does not write (1)"),
        (CHATML, [HELLO | {"prompt": "Hello.", "text": "Hello.", "response": ""}], "not read: prompt (1), text (1)"),
        (CHATML, [{"messages": [*HELLO["messages"], user("Bye")]}], "dropped the turns after the last answer of 1"),
    ],
)
def test_what_is_added_not_read_or_dropped_is_said(tmp_path, source, rows, part):
    kept, summary = report_of(template(source), tmp_path / "rows.jsonl", *rows, responses="given")
    assert part in summary
    assert "Hello." in str(template(source).tokenizer.decode(kept[0]["tokens"] + kept[0]["response"]))
    assert "Bye" not in str(template(source).tokenizer.decode(kept[0]["tokens"] + kept[0]["response"]))


ONCE_MORE = "turn 2 opens <think> once more than the chat template; close it, or remove it"


@pytest.mark.parametrize(
    ("source", "answer", "why"),
    [
        (CHATML, says("Four.", reasoning_content="Two and two."), "does not write the reasoning of turn 2"),
        (CHATML, says("It ends <|im_end|> here."), r"turn 2 holds <\|im_end\|>, at which the target stops"),
        # A block of reasoning without its end was trained on after another.
        (REASONING, says("<think>\nTwo and two."), ONCE_MORE),  # of a prompt that opens the block
        (HYBRID, says("<think>Two and two."), ONCE_MORE),  # after an empty block that the template writes
        (HYBRID, says("<think>Two and two.</think>Four."), ONCE_MORE),
        (CHATML.replace("assistant\n", "assistant\n<think>\n"), says("<think>Two and two."), ONCE_MORE),
    ],
)
def test_an_answer_that_cannot_be_trained_on_as_it_is_refuses_the_row(source, answer, why):
    with pytest.raises(BadRow, match=why):
        samples(template(source), {"messages": [user("2+2?"), answer]})


def test_an_empty_block_of_reasoning_was_written_twice() -> None:
    opens = template(CHATML.replace("assistant\n", "assistant\n<reason>\n"))  # and writes answers as they are
    for content, words in (
        ("<reason></reason>Four.", "\n</reason>\n\nFour.<|im_end|>"),
        ("<reason>Two.</reason>Four.", "Two.</reason>Four.<|im_end|>"),
    ):
        [(before, found)] = trained_on(opens, {"messages": [user("2+2?"), says(content)]})
        assert (before[-9:], found) == ("<reason>\n", words)


def test_a_bare_prompt_is_a_turn_of_the_user_for_a_chat_model() -> None:
    asked = prompt_of(template(CHATML), {"messages": [user("What is it?")]})
    assert prompt_of(template(CHATML), {"prompt": "What is it?"}) == asked
    assert prompt_of(template(CHATML), {"text": "What is it?"}) == "What is it?"  # raw text where it is asked for
    assert prompt_of(template(None), {"prompt": "What is it?"}) == "What is it?"


def test_an_answer_with_its_prompt_is_trained_on_with_the_newlines_that_it_begins_with() -> None:
    response, completion = {"prompt": "what?", "response": "that"}, {"prompt": "go ", "completion": "on"}
    chat = [("<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n", "that<|im_end|>")]
    assert trained_on(template(CHATML), response) == chat
    assert trained_on(template(None), response) == [("what?", "that<|eos|>")]
    for source in (CHATML, None):
        assert trained_on(template(source), completion) == [("go ", "on<|eos|>")]
    # A token of the joined text holds the newline of the prompt and those of the answer.
    row, asked = {"messages": [user("Hi"), says("\n\nSure.")]}, served(template(CHATML), [user("Hi")])
    assert trained_on(template(CHATML), row) == [(asked, "\n\nSure.<|im_end|>")]


def test_a_rendered_prompt_begins_with_the_start_token_once_in_rows_and_in_serving() -> None:
    """With the token it was served with two, without it it was trained on with none and served with one."""
    found = template("{{ bos_token }}" + CHATML)
    backend = found.tokenizer.backend_tokenizer
    start = (SPECIAL[0], backend.token_to_id(SPECIAL[0]))
    backend.post_processor = TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[start])
    rendered = prompt_of(found, {"messages": [user("Hi")]})
    assert rendered == "<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    encoder = PromptEncoder(found, len(found.tokenizer), 100_000)
    for prompt in (rendered, rendered.removeprefix("<|bos|>")):
        assert prompt_of(found, {"prompt": prompt}) == rendered
        assert found.tokenizer.decode(encoder.from_prompt(prompt, special=True)) == rendered
        assert found.tokenizer.decode(encoder.from_prompt(prompt, special=False)) == prompt
        row = {"prompt": prompt, "completion": "Hello.<|im_end|>"}
        assert trained_on(found, row) == [(rendered, "Hello.<|im_end|>")]
        assert trained_on(found, {**row, "completion": "Hello.<|im_end|>\n"}) == [(rendered, "Hello.<|im_end|>")]
        assert trained_on(found, {"text": prompt}) == [("<|bos|>", rendered.removeprefix("<|bos|>"))]
        with pytest.raises(BadRow, match=r"the answer continues after <\|im_end\|>"):
            trained_on(found, {**row, "completion": "Hello.<|im_end|>\nBye."})
    assert prompt_of(found, {"text": "Hi"}) == "<|bos|>Hi"


def test_a_completion_got_a_space_or_an_end_token_that_the_row_does_not_have() -> None:
    """As Llama 2's tokenizer, this one puts a space before each text."""
    backend = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    kept = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(kept)
    words = ["def foo(x): return x + 1", "The capital of France is Paris"] * 50
    backend.train_from_iterator(words, BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    for prompt, answer in (
        ("def f", "oo(x): return x"),
        ("The capital of Fran", "ce is Paris"),
        ("The capital of France is ", "Paris"),
    ):
        [sample] = samples(ChatTemplate(tokenizer), {"prompt": prompt, "completion": answer})
        assert tokenizer.decode(sample.tokens) == f"{prompt}{answer}</s>"
    ends = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    backend.post_processor = ends
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    [sample] = samples(ChatTemplate(tokenizer), {"prompt": "def f", "completion": "oo(x)"})
    assert tokenizer.decode(sample.tokens) == "<s> def foo(x)</s>"


def served(found: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    return str(found.tokenizer.decode(served_tokens(found, messages)))


def served_tokens(found: ChatTemplate, messages: list[dict[str, Any]]) -> list[int]:
    encoder = PromptEncoder(found, len(found.tokenizer), 100_000)
    return encoder.chat(ChatRequest.model_validate({"messages": messages}))[0]


PIECES = [*"ab .,:é\n\t<>{}\"'\\", "🌳", "the ", "</think>", "<think>", "<|im_end|>"]
TEXT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.dictionaries(TEXT, VALUES, max_size=3).map(lambda given: [{"function": {"name": "f", "arguments": given}}])
known_template_of = cache(template_of)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(TEXT)))
        if draw(st.integers(0, 4)) == 0:
            messages += [says(draw(st.none() | TEXT), tool_calls=draw(CALLS)), RESULT | {"content": draw(TEXT)}]
        more: dict[str, Any] = {"reasoning_content": draw(TEXT)} if draw(st.integers(0, 3)) == 0 else {}
        more |= {"weight": draw(st.integers(0, 1))} if draw(st.booleans()) else {}
        messages.append(says(draw(TEXT), **more))
    return messages


@pytest.mark.parametrize("name", slow_unless(("llama3", "qwen3", "deepseek_r1", "gpt_oss", "llama2"), FAMILIES))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(messages=conversations())
def test_tokens_before_each_answer_are_the_served_prompt(name: str, messages: list[dict[str, Any]]) -> None:
    """Each range of a row that is kept follows the served prompt and ends with the family's end mark."""
    (tokenizer, masks), family = known_template_of(name), FAMILIES[name]
    row = {"messages": messages}
    try:
        found = given_samples(masks, parse_row(row, masks.template.is_turn), row, section(responses="given"))
    except BadRow:
        return
    spans = [(sample.tokens, *span) for sample in found for span in sample.spans]
    answers = [turn["role"] == "assistant" and turn.get("weight") != 0 for turn in messages]
    places = [place for place, is_trained_on in enumerate(answers) if is_trained_on]
    for (tokens, start, end), place in zip(spans, places, strict=True):
        asked = [{key: value for key, value in turn.items() if key != "weight"} for turn in messages[:place]]
        assert tokens[:start] == served_tokens(masks.template, asked)
        words = str(tokenizer.decode(tokens[start:end]))
        if not messages[place].get("tool_calls"):
            assert words.endswith(family.end.strip())
            assert messages[place]["content"].rpartition("</think>")[2].strip() in words
            assert not family.end or words.count(family.end.strip()) == 1


def test_calls_took_the_form_of_the_template_for_conversations_without_tools() -> None:
    """A tokenizer with a template for tools: its calls have text arguments, and the default one has no calls."""
    found = template(CHATML)
    found.tokenizer.chat_template = {"default": CHATML, "tool_use": REASONING}
    turns = [user("a"), says("", tool_calls=[{"type": "function", "function": CALL}])]
    assert '<|calls|>weather\n{"city": "Oslo"}<|eos|>' in found.render(turns, TOOLS)
    assert "weather" not in found.render(turns)
    developer = [{"role": "developer", "content": "b"}]
    found.tokenizer.chat_template = {"default": CHATML, "tool_use": CHATML + "{# developer #}"}
    assert found.render(developer, TOOLS, ask=False) == "<|im_start|>developer\nb<|im_end|>\n"
    assert found.render(developer, ask=False) == "<|im_start|>system\nb<|im_end|>\n"
