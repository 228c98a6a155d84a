"""The target's own tokenizer."""

from pathlib import Path

from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return tokenizer
