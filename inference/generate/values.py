"""Reads single values of a call of `generate`: each reader returns the value, or raises ValueError naming its field."""

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Bias = tuple[tuple[int, float], ...]  # (token id, value added to its logit)


def read_integer(name: str, given: Any) -> int:
    """A Python, numpy or torch integer as an int; raises ValueError for anything else, True and False included."""
    found: Any = given.item() if isinstance(given, torch.Tensor) and given.numel() == 1 else given
    if isinstance(found, bool):
        raise ValueError(f"{name}: {given!r} given, a whole number is allowed; write it as a number")
    try:
        return operator.index(found)
    except TypeError:
        shown = reprlib.repr(given)
        raise ValueError(f"{name}: {shown} given, a whole number is allowed; write it without a point or quotes") from (
            None
        )


def read_count(name: str, given: Any) -> int:
    """An integer that counts something: 0 or more."""
    found = read_integer(name, given)
    if found < 0:
        raise ValueError(f"{name}: {found} given, 0 or more is allowed; leave it out for no minimum")
    return found


def read_integers(name: str, given: Any) -> int | list[int]:
    """One integer as an int, or an iterable of integers (list, array, tensor) as a list."""
    plain = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(plain, Iterable) and not isinstance(plain, str | bytes | Mapping):
        return [read_integer(name, each) for each in plain]
    return read_integer(name, plain)


def read_number(name: str, given: Any) -> float:
    """A number of any numeric type as a float; its range is checked by `Sampling`."""
    if not isinstance(given, bool | str | bytes):
        try:
            return float(given)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass  # refused below, with the field's name
    raise ValueError(f"{name}: {reprlib.repr(given)} given, one number is allowed; write it without quotes or brackets")


def read_flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool | int) or given not in (0, 1):
        raise ValueError(f"{name}: {reprlib.repr(given)} given, True or False is allowed; write one of them")
    return bool(given)


def read_bias(settings: Mapping[str, Any]) -> Bias:
    """logit_bias and sequence_bias together; raises ValueError for a biased sequence of more than one token."""
    by_token = settings.get("logit_bias") or {}
    if not isinstance(by_token, Mapping):
        raise ValueError(
            f"logit_bias: {reprlib.repr(by_token)} given, a mapping of token ids to biases is allowed; write "
            f"logit_bias={{5: -1.0}}"
        )
    pairs = sequence_pairs(settings["sequence_bias"] or {})
    too_long = [list(sequence) for sequence, _ in pairs if len(sequence) != 1]
    if too_long:
        raise ValueError(f"sequence_bias: {too_long} given, sequences of 1 token are allowed; leave out longer ones")
    single = [read_pair("sequence_bias", sequence[0], bias) for sequence, bias in pairs]
    return (*single, *(read_pair("logit_bias", token, bias) for token, bias in by_token.items()))


def sequence_pairs(given: Any) -> list[tuple[Sequence[Any], Any]]:
    """The (sequence, bias) pairs of a sequence_bias, in either of transformers' two forms."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, list | tuple) and all(map(is_pair, pairs)):
        return [(sequence, bias) for sequence, bias in pairs]
    raise ValueError(
        f"sequence_bias: {reprlib.repr(given)} given, a mapping of tuples of token ids to biases is allowed; write "
        f"sequence_bias={{(5,): -1.0}}"
    )


def is_pair(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], list | tuple)


def read_pair(name: str, token: Any, bias: Any) -> tuple[int, float]:
    value = read_number(f"{name} of token {token!r}", bias)
    if not value < math.inf:  # NaN fails every comparison
        raise ValueError(
            f"{name}: {value} given for token {token!r}, a number below infinity is allowed; -infinity forbids a token"
        )
    return read_integer(name, token), value


def refuse_empty_choice(bias: Bias, vocab_size: int) -> None:
    """Raise ValueError if a bias of -infinity forbids every token, end tokens that may not be written included."""
    forbidden = {token for token, value in bias if value == -math.inf}
    if len(forbidden) >= vocab_size:
        raise ValueError(
            f"logit_bias: -infinity given for {len(forbidden)} tokens, at least 1 of the target's {vocab_size} must "
            f"stay allowed; forbid fewer tokens"
        )
