# ruff: noqa: RUF001 (DeepSeek's special tokens use full-width bars)
"""Laws of loss masks: exactly the text that the target would write is trained on, for many chat templates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_run import build_tokenizer
from transformers import PreTrainedTokenizerFast

from headstart.data_pipelines.prompts.chat_masks import ChatMasks, MaskedTokens
from headstart.data_pipelines.prompts.conversations import Conversation, parse_row
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.inference.targets.chat_template import ChatTemplate

TEMPLATES = Path(__file__).parents[1] / "support/chat_templates"
SYSTEM = {"role": "system", "content": "Be brief."}
WORDS = "Hi there", "Hello! <b>ok</b>", "And 2+2? Hello!", "Four — é, ÷.\n\nSure?", "Yes", "It is 4."
CHAT = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(WORDS)]


@dataclass(frozen=True)
class Family:
    """How a family writes an assistant turn, and whether it leaves earlier turns unchanged."""

    special: str  # special tokens separated by spaces; the first begins a text, the second ends it
    end: str  # what follows the words
    begin: str = ""  # what the target writes before the words
    keeps_past: bool = True
    system: bool = True


FAMILIES = {
    "chatml": Family("<s> </s> <|im_start|> <|im_end|>", "<|im_end|>"),
    "chatml_marked": Family("<s> </s> <|im_start|> <|im_end|>", "<|im_end|>"),
    "llama3": Family(
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>", "<|eot_id|>"
    ),
    "qwen3": Family("<s> </s> <|im_start|> <|im_end|>", "<|im_end|>", "<think>\n\n</think>\n\n", keeps_past=False),
    "mistral": Family("<s> </s> [INST] [/INST]", "</s>", " ", keeps_past=False),
    "gemma": Family("<bos> <eos> <start_of_turn> <end_of_turn>", "<end_of_turn>", system=False),
    "phi3": Family("<s> <|endoftext|> <|user|> <|system|> <|assistant|> <|end|>", "<|end|>"),
    "phi4": Family("<s> </s> <|im_start|> <|im_sep|> <|im_end|>", "<|im_end|>"),
    "deepseek_r1": Family(  # its prompt opens a reasoning block, which an answer without reasoning closes first
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "\n</think>\n\n",
        keeps_past=False,
    ),
    "deepseek_v3": Family(
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
        "<｜tool▁calls▁end｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "zephyr": Family("<s> </s>", "</s>"),
    "gpt_oss": Family(
        "<s> </s> <|start|> <|message|> <|channel|> <|end|> <|return|> <|call|>",
        "<|return|>",
        "<|channel|>final<|message|>",
        keeps_past=False,
    ),
    "llama2": Family("<s> </s>", " </s>", " "),
    "vicuna": Family("<s> </s>", "</s>", " "),
    "alpaca": Family("<s> </s>", ""),
    "command_r": Family(
        "<BOS> <EOS> <|START_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
    ),
    "glm4": Family("<s> </s> [gMASK] <sop> <|user|> <|assistant|> <|system|>", ""),
}


def template_of(name: str) -> tuple[PreTrainedTokenizerFast, ChatMasks]:
    tokenizer, special = build_tokenizer(), FAMILIES[name].special.split()
    marks = {"bos_token": special[0], "eos_token": special[1], "additional_special_tokens": special[2:]}
    tokenizer.add_special_tokens(marks)
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text().rstrip("\n")
    return tokenizer, ChatMasks(ChatTemplate(tokenizer))


def unmasked(tokenizer: PreTrainedTokenizerFast, sample: MaskedTokens) -> list[str]:
    return [str(tokenizer.decode(sample.tokens[start:end])) for start, end in sample.spans]


@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_assistants_words_and_end_mark_are_trained_on_after_the_prompt_used_in_serving(name: str) -> None:
    """[system] user WORDS user WORDS user WORDS: one sample, or one per turn if the template changes earlier turns."""
    family = FAMILIES[name]
    tokenizer, template = template_of(name)
    chat = [SYSTEM, *CHAT] if family.system else CHAT
    samples = template.masked(Conversation(chat), "all")
    answers = [number for number, turn in enumerate(chat) if turn["role"] == "assistant"]
    words = [family.begin + chat[number]["content"] + family.end for number in answers]
    assert [text for sample in samples for text in unmasked(tokenizer, sample)] == words
    assert len(samples) == (1 if family.keeps_past else len(words))
    before = [tokenizer.decode(sample.tokens[:start]) for sample in samples for start, _ in sample.spans]
    assert before == [tokenizer.decode(template.prompt(Conversation(chat[:number]))) for number in answers]
    [last] = template.masked(Conversation(chat), "last")[-1:]
    assert unmasked(tokenizer, last) == words[-1:]


def test_reasoning_is_trained_on_where_the_template_shows_it() -> None:
    """Qwen3 drops the reasoning of earlier turns, so each turn is a sample with its own reasoning."""
    thinking = [dict(turn) for turn in CHAT]
    for number, turn in enumerate(thinking):
        if turn["role"] == "assistant":
            turn["reasoning_content"] = f"thought {number}"
    conversation = parse_row({"messages": thinking})
    assert isinstance(conversation, Conversation)
    tokenizer, template = template_of("qwen3")
    samples = template.masked(conversation, "all")
    words = [f"<think>\nthought {number}\n</think>\n\n{thinking[number]['content']}<|im_end|>" for number in (1, 3, 5)]
    assert [unmasked(tokenizer, sample) for sample in samples] == [[each] for each in words]
    assert "thought" not in tokenizer.decode(samples[-1].tokens[: samples[-1].spans[0][0]])
    tokenizer, template = template_of("gpt_oss")
    assert unmasked(tokenizer, template.masked(conversation, "all")[0]) == [
        "<|channel|>analysis<|message|>thought 1<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello! <b>ok</b><|return|>"
    ]


CALL = {"function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ],
    "tools": '[{"type": "function", "function": {"name": "add"}}]',
}


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        (
            "qwen3",
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\nFour.<|im_end|>",
        ),
        (
            "deepseek_v3",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "Four.<｜end▁of▁sentence｜>",
        ),
        (
            "gpt_oss",
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>',
            "<|channel|>final<|message|>Four.<|return|>",
        ),
    ],
)
def test_tool_calls_are_trained_on_and_tool_results_are_not(name: str, call: str, answer: str) -> None:
    tokenizer, template = template_of(name)
    conversation = parse_row(TOOL_CHAT)
    assert isinstance(conversation, Conversation)
    samples = template.masked(conversation, "all")
    assert [text for sample in samples for text in unmasked(tokenizer, sample)] == [call, answer]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no such role') }}", "refuses these messages .*no such role"),
        ("{% for m in messages %}{{ m.content.missing.deeper }}{% endfor %}", "refuses these messages"),
        ("{% for m in messages %}[{{ m.role }}]{% endfor %}", "does not write the words of turn 1"),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content[:9] }}{% endfor %}", "does not write the words of turn 1"),
        (
            "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' and messages[-1].role == 'assistant' %}"
            "{{ m.content | upper }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "changes the turns before an answer",
        ),
    ],
)
def test_a_template_that_cannot_be_masked_exactly_is_refused(template: str, why: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(BadRow, match=why):
        ChatMasks(ChatTemplate(tokenizer)).masked(Conversation(CHAT), "all")


def test_a_tokenizer_whose_own_chat_template_gives_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, masks = template_of("chatml")
    own = tokenizer.apply_chat_template

    def other(*turns: Any, **options: Any) -> Any:
        return [7] if options["tokenize"] else own(*turns, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", other)
    with pytest.raises(BadRow, match="gives other tokens than its chat template as text"):
        masks.prompt(Conversation(CHAT))
