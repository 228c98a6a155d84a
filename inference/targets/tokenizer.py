"""Tokenizers of targets and draft models: loading, decoding and comparing them."""

import re
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

FastTokenizer = PreTrainedTokenizerFast
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # the fallback for characters that are not tokens
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}  # in names of byte-level tokens
SPACE = "\u2581"  # in names of SentencePiece's tokens
REPLACEMENT_CHARACTER = "\ufffd"  # decoders write it for an incomplete character


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer saved in a folder; raises ValueError, naming the folder, if it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        raise ValueError(
            f"{folder}: its tokenizer cannot be loaded ({' '.join(str(error).split())[:200]}); tokenizer.json and "
            f"tokenizer_config.json of the model are required: copy or download them again"
        ) from error


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of some tokens, special tokens included."""
    return str(tokenizer.decode(tokens))


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of one token, which may be a part of a character."""
    text = text_of(tokenizer, [token])
    spelled = str(tokenizer.convert_ids_to_tokens(token))
    if REPLACEMENT_CHARACTER in text:
        if byte := BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(byte[1], 16)])
        if {*spelled} <= BYTE_OF.keys():
            return bytes(BYTE_OF[character] for character in spelled)
    if spelled.startswith(SPACE):  # a decoder may drop the space that begins a text
        return spelled.replace(SPACE, " ").encode()
    return text.encode()


def visible_text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of some tokens without special tokens, as an answer shows it."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def spells_special_token(tokenizer: Tokenizer, text: str) -> bool:
    """Does a text contain a special token's text, which `visible_text_of` leaves out?"""
    return any(added.special and added.content in text for added in tokenizer.added_tokens_decoder.values())


def same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Do both give every shared token the same id, and share at least 99 % of the smaller vocabulary?"""
    ids, other_ids = one.get_vocab(), other.get_vocab()
    shared = ids.keys() & other_ids.keys()
    smaller = min(len(ids), len(other_ids))
    return len(shared) >= 0.99 * smaller and all(ids[token] == other_ids[token] for token in shared)
