"""Reads the fields of transformers' GenerationConfig and our own; refuses fields that are not implemented."""

import operator
import reprlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

from headstart.inference.request import Detokenize, StopStrings
from headstart.inference.sampling import Sampling

Settings = Mapping[str, Any]

# transformers' own defaults; None means off.
DEFAULTS: dict[str, Any] = {
    "max_new_tokens": None,
    "max_length": None,
    "min_new_tokens": None,
    "min_length": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "pad_token_id": None,
    "stop_strings": None,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
}
EXTRA_FIELDS = ("seed", "presence_penalty", "frequency_penalty", "logit_bias", "tokenizer")  # not in GenerationConfig
SUPPORTED = frozenset({*DEFAULTS, *EXTRA_FIELDS, "eos_token_id"})  # without eos_token_id, the target's end tokens apply
IGNORED = frozenset({"bos_token_id", "transformers_version", "_from_model_config"})  # no effect when a prompt is given
DEFAULT_NEW_TOKENS = 20

# Unimplemented fields are accepted with these values, which switch them off; None and False are accepted for any field.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), (10,)),
    "assistant_confidence_threshold": (0.4,),
    "cache_implementation": ("dynamic", "hybrid"),  # Gemma's files say hybrid, which transformers ignores too
    "encoder_repetition_penalty": (1,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "use_cache": (True,),
}
# Values that sampling fields may have without do_sample: those that do nothing, and transformers' defaults.
ALLOWED_WHEN_GREEDY: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0, 1),
    "top_k": (None, 0, 50),
    "top_p": (None, 1),
    "min_p": (None, 0),
}


@runtime_checkable  # the shape checks in tests use isinstance
class Config(Protocol):
    """transformers' GenerationConfig."""

    def to_dict(self) -> dict[str, Any]: ...


def read_settings(config: Config | None, overrides: Settings) -> dict[str, Any]:
    """The settings of a call by field name: defaults, overridden by the configuration, then by the call's arguments.

    As in transformers, None in a GenerationConfig keeps the default, and None in the call switches a field off.
    Raises ValueError naming every field that is not supported or conflicts with another.
    """
    defaults = {} if config is None else type(config)().to_dict()
    found = {} if config is None else config.to_dict()
    given = {name: value for name, value in found.items() if value is not None and value != defaults.get(name)}
    settings = {**DEFAULTS, **given, **overrides}
    wrong = [
        f"{name}: {reprlib.repr(value)} given, {' or '.join(map(repr, NO_EFFECT.get(name, (None,))))} is allowed"
        for name, value in settings.items()
        if name not in SUPPORTED | IGNORED and not has_no_effect(name, value)
    ]
    # do_sample=False in the call overrides a configuration that samples, so its temperature is no mistake then.
    explicit = overrides.keys() if "do_sample" in overrides else settings.keys()
    if not settings["do_sample"]:
        wrong += [
            f"{name}: {settings[name]} given, which needs do_sample=True"
            for name, allowed in ALLOWED_WHEN_GREEDY.items()
            if name in explicit and settings[name] not in allowed
        ]
    elif settings["temperature"] == 0:
        wrong.append("temperature: 0 given with do_sample=True, more than 0 is allowed; use do_sample=False for greedy")
    if not settings["return_dict_in_generate"]:
        wrong += [
            f"{name}: True given, which needs return_dict_in_generate=True"
            for name in ("output_scores", "output_logits")
            if settings[name]
        ]
    if wrong:
        raise ValueError("; ".join(wrong) + f"; supported fields: {', '.join(sorted(SUPPORTED))}")
    return settings


def has_no_effect(name: str, value: Any) -> bool:
    """Does this value of an unimplemented field switch it off? 0 does not count as False: it may be a token id."""
    plain = isinstance(value, str | int | float)  # comparing a tensor gives no single truth value
    return value is None or value is False or (plain and value in NO_EFFECT.get(name, ()))


def with_settings(base: Sampling, settings: Settings) -> Sampling:
    """`base` with the sampling fields of a call's settings; raises ValueError for a value that is out of range."""

    def number(name: str, off: float, absent: float | None = None) -> float:
        found = settings.get(name, absent)
        return off if found is None else float(found)

    greedy, top_k = not settings["do_sample"], settings["top_k"]
    return replace(
        base,
        temperature=0.0 if greedy else number("temperature", 1.0),
        top_k=None if greedy or top_k is None else read_integer("top_k", top_k) or None,  # 0 also means off
        top_p=1.0 if greedy else number("top_p", 1.0),
        min_p=0.0 if greedy else number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
        presence_penalty=number("presence_penalty", 0.0, base.presence_penalty),
        frequency_penalty=number("frequency_penalty", 0.0, base.frequency_penalty),
        logit_bias=read_bias(settings),
    )


def read_bias(settings: Settings) -> tuple[tuple[int, float], ...]:
    """logit_bias and sequence_bias together; raises ValueError for a biased sequence of more than one token."""
    sequences = settings["sequence_bias"] or {}
    pairs = list(sequences.items()) if isinstance(sequences, Mapping) else sequences
    too_long = [list(sequence) for sequence, _ in pairs if len(sequence) != 1]
    if too_long:
        raise ValueError(f"sequence_bias: {too_long} given, sequences of 1 token are allowed; leave out longer ones")
    single = [(int(sequence[0]), float(bias)) for sequence, bias in pairs]
    by_token = settings.get("logit_bias") or {}
    if not isinstance(by_token, Mapping):
        raise ValueError(f"logit_bias: {reprlib.repr(by_token)} given, a mapping of token ids to biases is allowed")
    return (*single, *((int(token), float(bias)) for token, bias in by_token.items()))


def read_integer(name: str, given: Any) -> int:
    """A Python, numpy or torch integer as an int; raises ValueError for anything else."""
    try:
        return operator.index(given)
    except TypeError:
        raise ValueError(f"{name}: {given!r} given, a whole number is allowed") from None


def read_integers(name: str, given: Any) -> int | list[int]:
    """One integer as an int, or an iterable of integers (list, array, tensor) as a list."""
    plain = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(plain, Iterable) and not isinstance(plain, str):
        return [read_integer(name, each) for each in plain]
    return read_integer(name, plain)


def read_seeds(given: Any, default: int, count: int) -> list[int]:
    """One seed per prompt."""
    seeds = read_integers("seed", default if given is None else given)
    if isinstance(seeds, int):
        return [seeds] * count
    if len(seeds) != count:
        raise ValueError(f"seed: {len(seeds)} given for {count} prompts, 1 for all or {count} is allowed")
    return seeds


def read_end_tokens(settings: Settings, targets: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """The call's eos_token_id (None: no end token); if the call has none, the target's own end tokens.

    Some checkpoints name end tokens outside the vocabulary; the target can never write them, so they are left out.
    """
    if "eos_token_id" not in settings:
        return tuple(token for token in targets or () if token < vocab_size)
    given = settings["eos_token_id"]
    found = [] if given is None else read_integers("eos_token_id", given)
    ends = (found,) if isinstance(found, int) else tuple(found)
    if not all(0 <= token < vocab_size for token in ends):
        raise ValueError(f"eos_token_id: {given} given, 0 to {vocab_size - 1} is allowed, or None for no end token")
    return ends


def read_stop_strings(settings: Settings, tokenizer: Any, vocab_size: int) -> StopStrings | None:
    """The call's stop strings, or None.

    Special tokens count as text, as in transformers. Unlike there, a stop string that begins in the prompt is ignored.
    """
    given = settings["stop_strings"]
    if given is None:
        return None
    if tokenizer is None:
        raise ValueError("stop_strings: given without a tokenizer; pass a tokenizer to SpeculativeModel or to the call")
    strings = (given,) if isinstance(given, str) else tuple(given)
    return StopStrings(strings, mid_text_decode(tokenizer, vocab_size))


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


def read_max_new_tokens(settings: Settings, width: int, max_positions: int) -> int:
    """The maximum number of new tokens per text; max_length includes the prompts' padding, as in transformers."""
    most, total = settings["max_new_tokens"], settings["max_length"]
    if most is not None:
        if total is not None:
            warnings.warn(f"max_new_tokens {most} and max_length {total} given; max_length is ignored", stacklevel=4)
        return read_integer("max_new_tokens", most)
    if total is not None:
        longest = read_integer("max_length", total)
        if longest <= width:
            raise ValueError(
                f"max_length: {longest} given, more than the {width} columns of input_ids is allowed; "
                f"or give max_new_tokens"
            )
        return longest - width
    warnings.warn(
        f"neither max_new_tokens nor max_length given; generating up to {DEFAULT_NEW_TOKENS} new tokens", stacklevel=4
    )
    return min(DEFAULT_NEW_TOKENS, max(max_positions - width, 1))


def has_fixed_length(settings: Settings, width: int, limit: int) -> bool:
    """Do min_new_tokens or min_length require all `limit` new tokens, so that end tokens must be forbidden throughout?

    Raises ValueError for a smaller minimum: end tokens would have to be allowed again after it.
    """
    least, name = settings["min_new_tokens"], "min_new_tokens"
    if least is None:
        least, name = (settings["min_length"] or 0) - width, "min_length"
    if not settings["eos_token_id"] or least <= 0:
        return False
    if least != limit:
        raise ValueError(
            f"{name}: {settings[name]} given, a minimum of none or all of the {limit} new tokens is allowed; "
            f"leave {name} out"
        )
    return True
