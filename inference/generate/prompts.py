"""The texts of a call of `generate`: prompts as token ids with an attention mask, and stop strings."""

import reprlib
import warnings
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from headstart.common.errors import wrong_value
from headstart.inference.core.request import ALL_OF_IT, BY_TOKEN, Detokenize, Images, StopStrings

TOKENIZED = 'generate(**tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"))'


def read_input_ids(ids: Any) -> Tensor:
    """The token ids, [batch, seq]; raises ValueError for anything but a matrix of whole numbers."""
    if ids is None:
        raise ValueError(f"input_ids: missing; give prompts of shape [batch, seq]: {TOKENIZED}")
    if not isinstance(ids, Tensor):
        remedy = f"write {TOKENIZED}, or torch.tensor([[5, 6, 7]]) for a prompt of three tokens"
        raise wrong_value("input_ids", f"{type(ids).__name__} {reprlib.repr(ids)}", "a torch tensor is", remedy)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        allowed, remedy = "token ids of an integer type such as torch.long are", "give what a tokenizer returns"
        raise wrong_value("input_ids", f"a tensor of {ids.dtype}", allowed, remedy)
    if ids.ndim != 2 or not ids.numel():
        remedy = "one prompt of n tokens is [1, n]: use input_ids.unsqueeze(0)" if ids.ndim == 1 else "give prompts"
        allowed = "[batch, seq] with at least one row and one column is"
        raise wrong_value("input_ids", f"shape {list(ids.shape)}", allowed, remedy)
    return ids


def read_mask(mask: Any, input_ids: Tensor, pad: int | None, ends: tuple[int, ...]) -> Tensor:
    """Which tokens are text; without a mask, pad tokens are padding unless they end texts too, as in transformers."""
    if mask is None:
        if pad is None or pad not in ends:
            return torch.ones_like(input_ids, dtype=torch.bool) if pad is None else input_ids.ne(pad)
        if len(input_ids) > 1:
            missing = (
                f"attention_mask: missing for {len(input_ids)} prompts, and the pad token {pad} is also an end token"
            )
            warnings.warn(f"{missing}; all tokens count as text: pass the tokenizer's attention_mask", stacklevel=5)
        return torch.ones_like(input_ids, dtype=torch.bool)
    if not isinstance(mask, Tensor):
        value = f"{type(mask).__name__} {reprlib.repr(mask)}"
        raise wrong_value("attention_mask", value, "a torch tensor is", "write torch.tensor([[0, 1, 1]])")
    if mask.shape != input_ids.shape:
        allowed, remedy = f"{list(input_ids.shape)} is", "pass the mask that the tokenizer returned with input_ids"
        raise wrong_value("attention_mask", f"shape {list(mask.shape)}", allowed, remedy)
    mask = mask.to(input_ids.device)
    if not bool(((mask == 0) | (mask == 1)).all()):  # such as an additive mask of 0 and -infinity
        shown = f"values {sorted(set(mask.flatten().tolist()))[:4]}"
        raise wrong_value("attention_mask", shown, "only 0 (padding) and 1 (text) are", "pass the tokenizer's mask")
    return mask.bool()


def read_prompts(
    ids: Any, attention_mask: Any, pad: int | None, ends: tuple[int, ...], vocab_size: int
) -> list[list[int]]:
    """Each prompt without its padding; raises ValueError for padding on the right and ids outside the vocabulary."""
    input_ids = read_input_ids(ids)
    mask = read_mask(attention_mask, input_ids, pad, ends)
    text = input_ids[mask].long()
    outside = text[(text < 0) | (text >= vocab_size)]
    if len(outside):
        remedy = "use the target's own tokenizer, and mask padding out with attention_mask"
        raise wrong_value("input_ids", f"token id {int(outside[0])}", f"0 to {vocab_size - 1} is", remedy)
    if empty := (~mask).all(dim=1).nonzero().flatten().tolist():
        wrong = f"prompt {empty[0] + 1} of {len(mask)} consists of padding"
        raise ValueError(f"input_ids: {wrong}, at least one token is allowed; leave empty prompts out")
    if not mask[:, -1].all():
        wrong = f"a prompt ends with padding (prompt {int((~mask[:, -1]).nonzero()[0]) + 1} of {len(mask)})"
        remedy = "tokenize with padding_side='left' and pass its attention_mask"
        raise ValueError(f"input_ids: {wrong}, padding is allowed on the left only; {remedy}")
    return [row[seen].tolist() for row, seen in zip(input_ids, mask, strict=True)]


def is_of_images(name: str) -> bool:
    """Whether a call's argument may be one that processors give for prompts with images, such as pixel_values."""
    return name in BY_TOKEN or name.startswith(("pixel_", "image_", "num_image", "batch_num_image"))


def read_images(prompts: list[list[int]], given: Mapping[str, Any], config: Any) -> Images | None:
    """The images of a call's only prompt; `config` is transformers' of the target, which knows the placeholders.

    Raises ValueError for more prompts, as the tensors do not say whose image is whose, and for prompts whose images are
    not given.
    """
    known = {vars(config).get("image_token_id"), vars(config).get("image_token_index")} - {None}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise wrong_value(
                name, type(value).__name__, "a torch tensor is", 'give processor(..., return_tensors="pt")'
            )
    by_token = {name: value for name, value in given.items() if name in BY_TOKEN}
    places = sum(token in known for prompt in prompts for token in prompt)
    if places and not any(value.is_floating_point() for value in given.values()):
        raise wrong_value("input_ids", f"{places} placeholders of images", "only with their pixels they are", ALL_OF_IT)
    if len(by_token) == len(given) and not any(value.any() for value in by_token.values()):
        return None  # a processor's output for text
    if len(prompts) > 1:
        name = min(given, key=lambda name: name in by_token)
        raise wrong_value(name, f"with {len(prompts)} prompts", "1 prompt is", "call generate for each one")
    ids = torch.tensor(prompts)
    cut = {name: value[:, -ids.shape[1] :] for name, value in by_token.items()}  # without padding on the left
    return Images.of({**given, **cut, "input_ids": ids}, tuple(known))


def read_stop_strings(stops: Any, tokenizer: Any, vocab_size: int) -> StopStrings | None:
    """The call's stop strings, or None.

    Special tokens count as text, as in transformers. Unlike there, a stop string that begins in the prompt is ignored.
    """
    if stops is None:
        return None
    strings = (stops,) if isinstance(stops, str) else stops
    known = isinstance(strings, Sequence | Set) and len(strings) > 0
    if not known or not all(isinstance(each, str) and each for each in strings):
        allowed, remedy = "a text or a list of texts, none empty, is", "leave it out to stop at end tokens only"
        raise wrong_value("stop_strings", reprlib.repr(stops), allowed, remedy)
    if tokenizer is None:
        raise ValueError("stop_strings: given without a tokenizer; pass a tokenizer to SpeculativeModel or to the call")
    return StopStrings(tuple(strings), mid_text_decode(tokenizer, vocab_size))


def mid_text_decode(tokenizer: Any, vocab_size: int) -> Detokenize:
    """Decodes tokens from mid-text: a word in front keeps the leading space that many tokenizers strip."""

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
