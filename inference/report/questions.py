"""Prompts to measure with, by category: Spec-Bench's question files (arXiv 2401.07851), or a run's held-out prompts."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inference.target.tokenizer import Tokenizer
from recipes.jsonl import read_jsonl


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    category: str


def read_questions(path: Path, tokenizer: Tokenizer, longest: int, count: int) -> list[Prompt]:
    """`count` prompts of a JSONL file, of each category in turn, cut to their last `longest` tokens.

    A row holds `turns`, of which the first is asked (a later one needs the answer to the one before), or a `prompt`.
    Its category is its `category`, else its `source`. Raises ValueError for a row with neither turns nor prompt.
    """
    by_category: dict[str, list[str]] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        category = str(row.get("category", row.get("source", "all")))
        if row.get("turns"):
            by_category.setdefault(category, []).append(asked(row["turns"][0], tokenizer))
        elif row.get("prompt"):
            by_category.setdefault(category, []).append(row["prompt"])
        else:
            raise ValueError(f"report.prompts: row {number} of {path} has fields {sorted(row)}, turns or prompt needed")
    chosen = [question for _, question in zip(range(count), in_turn(by_category), strict=False)]
    # The template has written the special tokens already.
    templated = tokenizer.chat_template is not None
    prompts = []
    for category, text in chosen:
        tokens = list(tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"])
        prompts.append(Prompt(tokens[-longest:], category))
    return prompts


def asked(question: str, tokenizer: Tokenizer) -> str:
    """In the chat template where there is one, else as it is."""
    if tokenizer.chat_template is None:
        return question
    turns = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))


def in_turn(by_category: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """(category, text): the first of each category, then the second of each, ..."""
    for place in range(max(map(len, by_category.values()), default=0)):
        for category, texts in by_category.items():
            if place < len(texts):
                yield category, texts[place]
