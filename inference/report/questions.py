"""Prompts to measure with, each in a category: read from question files such as Spec-Bench's (arXiv 2401.07851) and
SPEED-Bench's (arXiv 2604.09557)."""

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

from headstart.common.files import read_jsonl
from headstart.inference.targets.chat_template import ChatTemplate

# Spec-Bench files the conversations of MT-Bench under eight topics of ten questions each; its tables have one group.
CONVERSATION = "multi-turn conversation"
MT_BENCH_TOPICS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
# SPEED-Bench has some of these topics as categories of its own, also of several turns.
# Its rows have these keys: as prepare_data.py writes them, and as aiperf reads them.
SPEED_BENCH_KEYS = ({"sub_category", "multiturn"}, {"question_id", "category", "messages"})
SPEED_BENCH_CATEGORIES = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization"),
    *("writing", "low_entropy", "mixed", "high_entropy"),  # the last three are those of its throughput splits
)
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # in the published files, in place of a question
SPEC_BENCH = "Spec-Bench's is data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"


@dataclass(frozen=True)
class Prompt:
    """The tokens to continue; in a chat also the messages they were made of, and what the user says later."""

    tokens: list[int]
    category: str
    said: tuple[str, ...] = ()  # messages of user and target in turn, the user's first; empty for a text to continue
    later: tuple[str, ...] = ()  # the user's further turns
    left_out: int = 0  # tokens that were left out in the middle, so that the rest fits the target's positions


@dataclass(frozen=True)
class Chat:
    """Turns messages into prompts of at most `room` tokens."""

    template: ChatTemplate
    room: int

    def shortened(self, prompt: Prompt) -> Prompt:
        """A chat that is too long loses its middle, as instructions are at either end; a text to continue stays."""
        excess = len(prompt.tokens) - self.room
        if not prompt.said or excess <= 0 or self.room <= 0:
            return prompt
        start, end = self.room - self.room // 2, len(prompt.tokens) - self.room // 2
        return replace(prompt, tokens=prompt.tokens[:start] + prompt.tokens[end:], left_out=excess)

    def next_turn(self, prompt: Prompt, answer: list[int]) -> Prompt | None:
        """The user's next message with the chat and this answer before it; None if there is no further message."""
        if not prompt.later:
            return None
        said = (*prompt.said, str(self.template.tokenizer.decode(answer, skip_special_tokens=True)), prompt.later[0])
        return self.shortened(chat_prompt(said, prompt.later[1:], prompt.category, self.template))


def read_questions(path: Path, template: ChatTemplate, longest: int, count: int) -> list[Prompt]:
    """The prompts of the first `count` rows of a JSONL or parquet file, taken from each category in turn.

    A row has `turns`, which are asked one after the other, a `prompt`, which is the only turn, or a `text`, which is
    continued from its last `longest` tokens; so is a prompt without a chat template, or one that is rendered already.
    The category is `category`, else `source`; the topics of MT-Bench's conversations are one category, taken in turn
    too. SPEED-Bench's categories stay as they are. Raises ValueError for a row with none of the three, for rows of
    SPEED-Bench that lack their question or have another category, and for a file without rows.
    """
    by_category: dict[str, dict[str, list[Prompt]]] = {}
    for number, row in enumerate(rows_of(path), start=1):
        is_speed_bench = any(row.keys() >= keys for keys in SPEED_BENCH_KEYS)
        topic = str(row.get("category", row.get("source", "all")))
        turns, text = row.get("turns", contents(row.get("messages"))), row.get("prompt", row.get("text"))
        if is_speed_bench:
            check_speed_bench(topic, turns, f"report.prompts: row {number} of {path}")
        if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns):
            is_mt_bench = len(turns) > 1 and topic in MT_BENCH_TOPICS and not is_speed_bench
            category = CONVERSATION if is_mt_bench else topic
            found = chat_prompt((turns[0],), tuple(turns[1:]), category, template)
        elif not isinstance(text, str) or not text:
            allowed = "turns (a list of texts), prompt or text (a text) is allowed; fix or remove the row"
            raise ValueError(f"report.prompts: row {number} of {path} is {reprlib.repr(row)}, {allowed}")
        elif "prompt" in row and template.is_turn(text):
            found = chat_prompt((text,), (), topic, template)
        else:
            found = Prompt(template.encode_text(text)[-longest:], topic)
        by_category.setdefault(found.category, {}).setdefault(topic, []).append(found)
    if not by_category:
        allowed = 'a JSONL file with one prompt or more is allowed; add rows such as {"prompt": "import os"}'
        raise ValueError(f"report.prompts: {path} given, which is empty; {allowed}")
    return in_turn(in_turn(by_topic.values()) for by_topic in by_category.values())[:count]


def rows_of(path: Path) -> Iterable[dict[str, Any]]:
    """The rows of a JSONL or a parquet file."""
    if path.suffix != ".parquet":
        return read_jsonl(path)
    try:
        parquet, arrow = import_module("pyarrow.parquet"), import_module("pyarrow")
    except ImportError as error:
        raise ValueError(
            f"report.prompts: {path} given, for which pyarrow is needed; run pip install -e '.[data]', or give JSONL"
        ) from error
    try:
        return parquet.read_table(path).to_pylist()
    except arrow.ArrowException as error:
        raise ValueError(
            f"report.prompts: {path} given ({error}), a whole parquet file is allowed; copy it again"
        ) from error


def contents(messages: Any) -> Any:
    """The texts of a list of messages; whatever else it is, as it is."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages
    return [message.get("content") for message in messages]


def check_speed_bench(category: str, turns: Any, place: str) -> None:
    """Raise ValueError, naming field and place, for a row of SPEED-Bench that is not one to ask."""
    if category not in SPEED_BENCH_CATEGORIES:
        allowed = f"one of {', '.join(SPEED_BENCH_CATEGORIES)} is allowed in rows of SPEED-Bench; correct it"
        raise ValueError(f"{place}: category is {category!r}, {allowed}")
    if isinstance(turns, list) and any(isinstance(turn, str) and turn.startswith(PLACEHOLDER) for turn in turns):
        raise ValueError(
            f"{place}: turns begins with {PLACEHOLDER!r}, the question itself is allowed: the published files are not "
            f"complete; run prepare_data.py of examples/specdec_bench in github.com/NVIDIA/Model-Optimizer, and give "
            f"the test.parquet that it writes"
        )


def chat_prompt(said: tuple[str, ...], later: tuple[str, ...], category: str, template: ChatTemplate) -> Prompt:
    """The messages in the chat template; paragraphs of plain text if there is none."""
    if not template.exists:
        tokens = template.encode_text("\n\n".join(said))
    else:
        tokens = template.tokens(
            [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        )
    return Prompt(tokens, category, said, later)


def in_turn(lists: Iterable[list[Prompt]]) -> list[Prompt]:
    """The first prompt of each list, then the second of each, and so on."""
    return [prompt for prompts in zip_longest(*lists) for prompt in prompts if prompt is not None]
