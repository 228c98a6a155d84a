"""Prompts to measure with, each in a category: read from question files such as Spec-Bench's (arXiv 2401.07851) and
SPEED-Bench's (arXiv 2604.09557)."""

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

from headstart.common.errors import named_errors
from headstart.common.files import read_jsonl
from headstart.inference.core.request import Images
from headstart.inference.targets.chat_template import ChatTemplate

# Spec-Bench files the conversations of MT-Bench under eight topics of ten questions each; its tables have one group.
CONVERSATION = "multi-turn conversation"
MT_BENCH_TOPICS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
# A row of SPEED-Bench has these keys: as prepare_data.py writes it, or as aiperf reads it.
SPEED_BENCH_KEYS = ({"sub_category", "multiturn"}, {"question_id", "category", "messages"})
# Of datasets whose rows name no category: keys of a row as published, and the key of what is asked.
DATASETS = {
    "GSM8K": ({"question", "answer"}, "question"),
    "HumanEval": ({"prompt", "canonical_solution", "entry_point"}, "prompt"),
    "MATH-500": ({"problem", "solution"}, "problem"),
    "MBPP": ({"text", "code", "test_list"}, "text"),
    "MBPP, sanitized": ({"prompt", "code", "test_list"}, "prompt"),
}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # replaces a question in the published files
SPEC_BENCH = "Spec-Bench's is data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"


@dataclass(frozen=True)
class Prompt:
    """The tokens to continue; in a chat also the messages they encode, and the user's later messages."""

    tokens: list[int]
    category: str
    said: tuple[str, ...] = ()  # messages of user and target in turn, the user's first; empty for a text to continue
    later: tuple[str, ...] = ()  # the user's further turns
    left_out: int = 0  # tokens that were left out in the middle, so that the rest fits the target's positions
    images: Images | None = None  # of the tokens


@dataclass(frozen=True)
class QuestionTemplate:
    """Encodes messages as prompts of at most `max_tokens`."""

    template: ChatTemplate
    max_tokens: int

    def shortened(self, prompt: Prompt) -> Prompt:
        """A chat that is too long loses its middle, as instructions are at either end; a text to continue stays."""
        excess = len(prompt.tokens) - self.max_tokens
        if not prompt.said or excess <= 0 or self.max_tokens <= 0:
            return prompt
        start = self.max_tokens - self.max_tokens // 2
        return replace(prompt, tokens=prompt.tokens[:start] + prompt.tokens[start + excess :], left_out=excess)

    def next_turn(self, prompt: Prompt, answer: list[int]) -> Prompt | None:
        """The user's next message after the chat and this answer; None if there is no further message."""
        if not prompt.later:
            return None
        said = (*prompt.said, str(self.template.tokenizer.decode(answer, skip_special_tokens=True)), prompt.later[0])
        return self.shortened(chat_prompt(said, prompt.later[1:], prompt.category, self.template))


def read_questions(path: Path, template: ChatTemplate, max_tokens: int, count: int) -> list[Prompt]:
    """The prompts of the first `count` rows of a JSONL or parquet file, taken from each category in turn.

    A row is one of `DATASETS`, or has `turns`, which are asked one after the other, a `prompt`, which is the only turn,
    or a `text`, which is continued from its last `max_tokens`; so is a prompt without a chat template, or one that is
    rendered already. The category is `category`, else `source`; MT-Bench's topics are one category, taken in turn too,
    and SPEED-Bench's categories stay as they are. Raises ValueError for a row with none of the three, for rows of
    SPEED-Bench that lack their question, and for a file without rows.
    """
    by_category: dict[str, dict[str, list[Prompt]]] = {}
    for number, row in enumerate(rows_of(path), start=1):
        dataset = next((name for name, (keys, _) in DATASETS.items() if row.keys() >= keys), None)
        if dataset is not None:
            row = {"category": dataset, **row, "prompt": row[DATASETS[dataset][1]]}
        topic = str(row.get("category", row.get("source", "all")))
        with named_errors(f"report.prompts: row {number} of {path}"):
            prompt = prompt_of(row, topic, template, max_tokens)
        by_category.setdefault(prompt.category, {}).setdefault(topic, []).append(prompt)
    if not by_category:
        allowed = 'a JSONL file with one prompt or more is allowed; add rows such as {"prompt": "import os"}'
        raise ValueError(f"report.prompts: {path} given, which is empty; {allowed}")
    return in_turn(in_turn(by_topic.values()) for by_topic in by_category.values())[:count]


def prompt_of(row: dict[str, Any], topic: str, template: ChatTemplate, max_tokens: int) -> Prompt:
    """The prompt in one row of a question file."""
    is_speed_bench = any(row.keys() >= keys for keys in SPEED_BENCH_KEYS)
    messages, text = row.get("messages"), row.get("prompt", row.get("text"))
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        messages = [message.get("content") for message in messages]
    turns = row.get("turns", messages)
    if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns):
        if any(turn.startswith(PLACEHOLDER) for turn in turns):
            raise ValueError(
                f"turns: {PLACEHOLDER!r} given, the question itself is allowed, which SPEED-Bench's published files "
                "lack; run prepare_data.py of examples/specdec_bench in github.com/NVIDIA/Model-Optimizer, and give "
                "its test.parquet"
            )
        is_mt_bench = len(turns) > 1 and topic in MT_BENCH_TOPICS and not is_speed_bench
        return chat_prompt((turns[0],), tuple(turns[1:]), CONVERSATION if is_mt_bench else topic, template)
    if not isinstance(text, str) or not text:
        allowed = "turns (a list of texts), prompt or text (a text) is allowed; fix or remove the row"
        raise ValueError(f"{reprlib.repr(row)} given, {allowed}")
    if "prompt" in row and template.is_turn(text):
        return chat_prompt((text,), (), topic, template)
    return Prompt(template.encode_text(text)[-max_tokens:], topic)


def rows_of(path: Path) -> Iterable[dict[str, Any]]:
    """The rows of a JSONL or a parquet file."""
    if path.suffix != ".parquet":
        return read_jsonl(path)
    given = f"report.prompts: {path} given"
    try:
        return import_module("pyarrow.parquet").read_table(path).to_pylist()
    except ImportError as error:
        remedy = "run pip install -e '.[data]', or give JSONL"
        raise ValueError(f"{given}, pyarrow is needed to read parquet; {remedy}") from error
    except ValueError as error:  # pyarrow's errors are
        raise ValueError(f"{given} ({error}), a complete parquet file is allowed; copy it again") from error


def chat_prompt(said: tuple[str, ...], later: tuple[str, ...], category: str, template: ChatTemplate) -> Prompt:
    """The messages in the chat template; paragraphs of plain text if the target has none."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    tokens = template.tokens(messages) if template.exists else template.encode_text("\n\n".join(said))
    return Prompt(tokens, category, said, later)


def in_turn(lists: Iterable[list[Prompt]]) -> list[Prompt]:
    """The first prompt of each list, then the second of each, and so on."""
    return [prompt for prompts in zip_longest(*lists) for prompt in prompts if prompt is not None]
