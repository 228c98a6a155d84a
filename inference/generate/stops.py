"""Reads the stop strings of a call of `generate`, and decodes tokens from the middle of a text to find them."""

import reprlib
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any, Protocol, runtime_checkable

from headstart.inference.core.request import Detokenize, StopStrings


def read_stop_strings(settings: Mapping[str, Any], tokenizer: Any, vocab_size: int) -> StopStrings | None:
    """The call's stop strings, or None.

    Special tokens count as text, as in transformers. Unlike there, a stop string that begins in the prompt is ignored.
    """
    given = settings["stop_strings"]
    if given is None:
        return None
    strings = (given,) if isinstance(given, str) else given
    known = isinstance(strings, Sequence | Set) and len(strings) > 0
    if not known or not all(isinstance(each, str) and each for each in strings):
        raise ValueError(
            f"stop_strings: {reprlib.repr(given)} given, a text or a list of texts that are not empty is allowed; "
            f"leave it out to stop at end tokens only"
        )
    if tokenizer is None:
        raise ValueError("stop_strings: given without a tokenizer; pass a tokenizer to SpeculativeModel or to the call")
    check_tokenizer(tokenizer)
    strings = tuple(strings)
    return StopStrings(strings, mid_text_decode(tokenizer, vocab_size))


@runtime_checkable
class Decoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError for anything that cannot decode tokens, such as a tokenizer's name."""
    if isinstance(tokenizer, type | bytes) or not isinstance(tokenizer, Decoder):
        raise ValueError(
            f"tokenizer: {reprlib.repr(tokenizer)} given, an object with `decode` is allowed; load one with "
            f"AutoTokenizer.from_pretrained(target)"
        )


def mid_text_decode(tokenizer: Any, vocab_size: int) -> Detokenize:
    """A decode function for tokens from the middle of a text: it keeps a leading space that many tokenizers strip.

    It puts a word before the tokens, decodes, and cuts the word off again.
    """

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    def is_word(token: int) -> bool:
        text = decode([token])  # a single character could be a byte token, which may join the next token's bytes
        return len(text) > 1 and text.isascii() and text.isalnum()

    middle = vocab_size // 2  # special tokens and byte tokens are usually at the start or the end
    word = next(filter(is_word, chain(range(middle, vocab_size), range(middle))), None)
    if word is None:
        return decode
    start = len(decode([word]))
    return lambda tokens: decode([word, *tokens])[start:]
