"""The target's own tokenizer, for prompts and templates, other tokenizers' drafts, question files and pages."""

from pathlib import Path

from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["REPLACEMENT_CHARACTER", "Tokenizer", "load_tokenizer", "same_tokenizer", "text_of"]

REPLACEMENT_CHARACTER = "\ufffd"  # a decoder writes it while the last bytes of a character are still missing


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return tokenizer


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Special tokens included."""
    return str(tokenizer.decode(tokens))


def same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Does each token mean the same text to both? Tokens that only one of them has are left out."""
    mine, theirs = one.get_vocab(), other.get_vocab()
    shared = mine.keys() & theirs.keys()
    most = min(len(mine), len(theirs))
    return len(shared) >= 0.99 * most and all(mine[token] == theirs[token] for token in shared)
