"""Tokenizers of targets and draft models: loading, decoding and comparing them."""

from collections.abc import Collection
from itertools import takewhile
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import PreTrainedTokenizerFast as FastTokenizer

__all__ = [
    "REPLACEMENT_CHARACTER",
    "FastTokenizer",
    "Tokenizer",
    "end_tokens_of",
    "load_tokenizer",
    "same_tokenizer",
    "text_of",
    "visible_text_of",
]

REPLACEMENT_CHARACTER = "\ufffd"  # a decoder writes it while the last bytes of a character are still missing


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer saved in a folder; raises ValueError, naming the folder, if it has none that can be read."""
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        raise ValueError(
            f"{folder}: its tokenizer cannot be loaded ({' '.join(str(error).split())[:200]}); tokenizer.json and "
            f"tokenizer_config.json of the model are required: copy or download them again"
        ) from error
    return tokenizer


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of some tokens, special tokens included."""
    return str(tokenizer.decode(tokens))


def visible_text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of some tokens without special tokens, as a reader of an answer wants it."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def end_tokens_of(tokenizer: Tokenizer, known: Collection[int] = ()) -> list[int]:
    """The tokenizer's end token; and the last mark of those that the chat template writes after an answer, unless one
    of them is an end token already or is among the `known` ones."""
    ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    marks = marks_after_answer(tokenizer)
    return ends if {*marks} & {*ends, *known} else [*ends, *marks[-1:]]


def marks_after_answer(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that the chat template writes right after an assistant's words."""
    if tokenizer.chat_template is None:
        return []
    words = "The sky is blue."
    turns = [{"role": "user", "content": "Which colour has the sky?"}, {"role": "assistant", "content": words}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except (TemplateError, TypeError, ValueError, LookupError):  # a template may raise any; it writes no such turn
        return []
    special = {*tokenizer.all_special_ids, *(i for i, each in tokenizer.added_tokens_decoder.items() if each.special)}
    after = tokenizer(text.partition(words)[2].lstrip(), add_special_tokens=False)["input_ids"]
    return list(takewhile(special.__contains__, after))


def same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Do both give every shared token the same id, and share at least 99 % of the smaller vocabulary?"""
    ids, other_ids = one.get_vocab(), other.get_vocab()
    shared = ids.keys() & other_ids.keys()
    smaller = min(len(ids), len(other_ids))
    return len(shared) >= 0.99 * smaller and all(ids[token] == other_ids[token] for token in shared)
