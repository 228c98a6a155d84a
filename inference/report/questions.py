"""Prompts to measure with, each in a category: read from question files such as Spec-Bench's (arXiv 2401.07851)."""

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from headstart.inference.target.tokenizer import Tokenizer
from headstart.recipes.jsonl import read_jsonl


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    category: str


def read_questions(path: Path, tokenizer: Tokenizer, longest: int, count: int) -> list[Prompt]:
    """The first `count` prompts of a JSONL file, taken from each category in turn, cut to their last `longest` tokens.

    A row has `turns`, of which only the first is asked because a later one needs the answer before it, or a `prompt`.
    Its category is its `category`, else its `source`. Raises ValueError for a row with neither `turns` nor `prompt`,
    and for a file without rows.
    """
    by_category: dict[str, list[str]] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        category = str(row.get("category", row.get("source", "all")))
        turns, prompt = row.get("turns"), row.get("prompt")
        if isinstance(turns, list) and turns and is_text(turns[0]):
            by_category.setdefault(category, []).append(as_chat(turns[0], tokenizer))
        elif is_text(prompt):
            by_category.setdefault(category, []).append(prompt)
        else:
            raise ValueError(
                f"report.prompts: row {number} of {path} is {reprlib.repr(row)}, turns (a list of texts) or prompt (a "
                "text) is allowed; fix or remove the row"
            )
    if not by_category:
        raise ValueError(
            f"report.prompts: {path} given, which is empty; a JSONL file with one prompt or more is allowed; add rows "
            'such as {"prompt": "import os"}'
        )
    chosen = [question for _, question in zip(range(count), round_robin(by_category), strict=False)]
    # A chat template writes the special tokens itself.
    templated = tokenizer.chat_template is not None
    prompts = []
    for category, text in chosen:
        tokens = list(tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"])
        prompts.append(Prompt(tokens[-longest:], category))
    return prompts


def is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value != ""


def as_chat(question: str, tokenizer: Tokenizer) -> str:
    """The question in the tokenizer's chat template, unchanged if it has none."""
    if tokenizer.chat_template is None:
        return question
    turns = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))


def round_robin(by_category: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Yield (category, text): the first text of each category, then the second of each, and so on."""
    for place in range(max(map(len, by_category.values()), default=0)):
        for category, texts in by_category.items():
            if place < len(texts):
                yield category, texts[place]
