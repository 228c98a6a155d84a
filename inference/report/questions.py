"""Prompts to measure with, each in a category: read from question files such as Spec-Bench's (arXiv 2401.07851)."""

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from headstart.common.files import read_jsonl
from headstart.inference.targets.tokenizer import Tokenizer, chat_tokens

# Spec-Bench files the conversations of MT-Bench under eight topics of ten questions each; its tables have one group.
CONVERSATION = "multi-turn conversation"
MT_BENCH_TOPICS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = "Spec-Bench's is data/spec_bench/question.jsonl of github.com/hemingkexia/Spec-Bench"


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

    tokenizer: Tokenizer
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
        said = (*prompt.said, str(self.tokenizer.decode(answer, skip_special_tokens=True)), prompt.later[0])
        return self.shortened(chat_prompt(said, prompt.later[1:], prompt.category, self.tokenizer))


def read_questions(path: Path, tokenizer: Tokenizer, longest: int, count: int) -> list[Prompt]:
    """The prompts of the first `count` rows of a JSONL file, taken from each category in turn.

    A row has `turns`, which are asked one after the other, or a `prompt`, which is continued from its last `longest`
    tokens. Its category is its `category`, else its `source`; the topics of MT-Bench's conversations are one category,
    taken in turn too. Raises ValueError for a row with neither `turns` nor `prompt`, and for a file without rows.
    """
    by_category: dict[str, dict[str, list[Prompt]]] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        topic = str(row.get("category", row.get("source", "all")))
        turns, prompt = row.get("turns"), row.get("prompt")
        if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns):
            category = CONVERSATION if len(turns) > 1 and topic in MT_BENCH_TOPICS else topic
            found = chat_prompt((turns[0],), tuple(turns[1:]), category, tokenizer)
        elif isinstance(prompt, str) and prompt:
            found = Prompt(encoded(prompt, tokenizer)[-longest:], topic)
        else:
            allowed = "turns (a list of texts) or prompt (a text) is allowed; fix or remove the row"
            raise ValueError(f"report.prompts: row {number} of {path} is {reprlib.repr(row)}, {allowed}")
        by_category.setdefault(found.category, {}).setdefault(topic, []).append(found)
    if not by_category:
        allowed = 'a JSONL file with one prompt or more is allowed; add rows such as {"prompt": "import os"}'
        raise ValueError(f"report.prompts: {path} given, which is empty; {allowed}")
    return in_turn(in_turn(by_topic.values()) for by_topic in by_category.values())[:count]


def chat_prompt(said: tuple[str, ...], later: tuple[str, ...], category: str, tokenizer: Tokenizer) -> Prompt:
    """The messages in the tokenizer's chat template; paragraphs of plain text if it has none."""
    if tokenizer.chat_template is None:
        tokens = encoded("\n\n".join(said), tokenizer)
    else:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        tokens = chat_tokens(tokenizer, messages)
    return Prompt(tokens, category, said, later)


def encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text; a chat template writes the special tokens itself."""
    templated = tokenizer.chat_template is not None
    return list(tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"])


def in_turn(lists: Iterable[list[Prompt]]) -> list[Prompt]:
    """The first prompt of each list, then the second of each, and so on."""
    return [prompt for prompts in zip_longest(*lists) for prompt in prompts if prompt is not None]
