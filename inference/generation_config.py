"""The fields of transformers' GenerationConfig, and what they mean here; those that we do not implement are refused."""

import operator
import reprlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

from inference.request import Detokenize, StopStrings
from inference.sampling import Sampling

Settings = Mapping[str, Any]

# What a field means when nobody sets it: transformers' own defaults. None is off.
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
OWN = ("seed", "presence_penalty", "frequency_penalty", "logit_bias", "tokenizer")
SUPPORTED = frozenset({*DEFAULTS, *OWN, "eos_token_id"})  # without the latter the target's own end tokens hold
IRRELEVANT = frozenset({"bos_token_id", "transformers_version", "_from_model_config"})  # to one who gives a prompt
DEFAULT_NEW_TOKENS = 20

# Values with which fields that we do not implement do nothing; so do None and False with every field.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), (10,)),
    "assistant_confidence_threshold": (0.4,),
    "cache_implementation": ("dynamic", "hybrid"),  # Gemma's files say hybrid, and transformers ignores it as well
    "encoder_repetition_penalty": (1,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "use_cache": (True,),
}
OFF_WHEN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0, 1),
    "top_k": (None, 0, 50),
    "top_p": (None, 1),
    "min_p": (None, 0),
}


@runtime_checkable  # the shape checks of the tests look at instances
class Config(Protocol):
    """transformers' GenerationConfig."""

    def to_dict(self) -> dict[str, Any]: ...


def read_settings(config: Config | None, overrides: Settings) -> dict[str, Any]:
    """What a call means, by field; ValueError naming all fields that are not supported.

    As in transformers, None in a GenerationConfig leaves the default, and None in the call switches a field off.
    """
    defaults = {} if config is None else type(config)().to_dict()
    found = {} if config is None else config.to_dict()
    given = {name: value for name, value in found.items() if value is not None and value != defaults.get(name)}
    settings = {**DEFAULTS, **given, **overrides}
    wrong = [
        f"{name}: {reprlib.repr(value)} given, {' or '.join(map(repr, NO_EFFECT.get(name, (None,))))} is allowed"
        for name, value in settings.items()
        if name not in SUPPORTED | IRRELEVANT and not has_no_effect(name, value)
    ]
    # Whoever says do_sample=False in the call knows that his configuration's temperature is idle.
    explicit = overrides.keys() if "do_sample" in overrides else settings.keys()
    if not settings["do_sample"]:
        wrong += [
            f"{name}: {settings[name]} given, which needs do_sample=True"
            for name, off in OFF_WHEN_SAMPLING.items()
            if name in explicit and settings[name] not in off
        ]
    elif settings["temperature"] == 0:
        wrong.append("temperature: 0 given with do_sample=True, more than 0 is allowed; do_sample=False is greedy")
    if not settings["return_dict_in_generate"]:
        wrong += [
            f"{name}: True given, which needs return_dict_in_generate=True"
            for name in ("output_scores", "output_logits")
            if settings[name]
        ]
    if wrong:
        raise ValueError("; ".join(wrong) + f"; supported are {', '.join(sorted(SUPPORTED))}")
    return settings


def has_no_effect(name: str, value: Any) -> bool:
    """Does a field that we do not implement ask for nothing? 0 is not False here: it may be a token."""
    plain = isinstance(value, str | int | float)  # a tensor has no truth
    return value is None or value is False or (plain and value in NO_EFFECT.get(name, ()))


def with_config(base: Sampling, settings: Settings) -> Sampling:
    """The Sampling that transformers' fields and ours mean together; ValueError for a value that is not allowed."""

    def number(name: str, off: float, absent: float | None = None) -> float:
        found = settings.get(name, absent)
        return off if found is None else float(found)

    greedy, top_k = not settings["do_sample"], settings["top_k"]
    return replace(
        base,
        temperature=0.0 if greedy else number("temperature", 1.0),
        top_k=None if greedy or top_k is None else whole("top_k", top_k) or None,  # 0 is off, too
        top_p=1.0 if greedy else number("top_p", 1.0),
        min_p=0.0 if greedy else number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
        presence_penalty=number("presence_penalty", 0.0, base.presence_penalty),
        frequency_penalty=number("frequency_penalty", 0.0, base.frequency_penalty),
        logit_bias=read_bias(settings),
    )


def read_bias(settings: Settings) -> tuple[tuple[int, float], ...]:
    """logit_bias and sequence_bias together, whose sequences must be single tokens."""
    sequences = settings["sequence_bias"] or {}
    pairs = list(sequences.items()) if isinstance(sequences, Mapping) else sequences
    long = [list(sequence) for sequence, _ in pairs if len(sequence) != 1]
    if long:
        raise ValueError(f"sequence_bias: {long} given, sequences of 1 token are allowed")
    single = [(int(sequence[0]), float(bias)) for sequence, bias in pairs]
    own = settings.get("logit_bias") or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"logit_bias: {reprlib.repr(own)} given, a mapping of tokens to what is added is allowed")
    return (*single, *((int(token), float(bias)) for token, bias in own.items()))


def whole(name: str, given: Any) -> int:
    """A whole number of Python, numpy or torch; ValueError for anything else."""
    try:
        return operator.index(given)
    except TypeError:
        raise ValueError(f"{name}: {given!r} given, a whole number is allowed") from None


def one_or_more(name: str, given: Any) -> int | list[int]:
    """One whole number, or several: a list, an array, a tensor, ..."""
    plain = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(plain, Iterable) and not isinstance(plain, str):
        return [whole(name, each) for each in plain]
    return whole(name, plain)


def read_seeds(given: Any, default: int, count: int) -> list[int]:
    """One for each prompt."""
    seeds = one_or_more("seed", default if given is None else given)
    if isinstance(seeds, int):
        return [seeds] * count
    if len(seeds) != count:
        raise ValueError(f"seed: {len(seeds)} given for {count} prompts, one for all or one for each is allowed")
    return seeds


def read_ends(settings: Settings, own: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """What ends a text: the call's eos_token_id (None: nothing), or the target's own, without those it cannot write."""
    if "eos_token_id" not in settings:
        return tuple(token for token in own or () if token < vocab_size)
    given = settings["eos_token_id"]
    found = [] if given is None else one_or_more("eos_token_id", given)
    ends = (found,) if isinstance(found, int) else tuple(found)
    if not all(0 <= token < vocab_size for token in ends):
        raise ValueError(f"eos_token_id: {given} given, 0 to {vocab_size - 1} is allowed, and None for no end token")
    return ends


def read_stop(settings: Settings, tokenizer: Any, vocab_size: int) -> StopStrings | None:
    """Special tokens count as text, as in transformers; unlike there, a string that begins in the prompt does not."""
    given = settings["stop_strings"]
    if given is None:
        return None
    if tokenizer is None:
        raise ValueError("stop_strings: given without a tokenizer; pass one to SpeculativeModel or to the call")
    strings = (given,) if isinstance(given, str) else tuple(given)
    return StopStrings(strings, behind_a_word(tokenizer, vocab_size))


def behind_a_word(tokenizer: Any, vocab_size: int) -> Detokenize:
    """A tokenizer's decode, of tokens in the midst of a text: many tokenizers take a text's first space away."""

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    def is_word(token: int) -> bool:
        text = decode([token])  # of more than a byte, which could be the beginning of a character
        return len(text) > 1 and text.isascii() and text.isalnum()

    middle = vocab_size // 2  # where special tokens and bytes seldom are
    word = next(filter(is_word, chain(range(middle, vocab_size), range(middle))), None)
    if word is None:
        return decode
    start = len(decode([word]))
    return lambda tokens: decode([word, *tokens])[start:]


def new_tokens(settings: Settings, width: int, max_positions: int) -> int:
    """How many tokens each text may get; max_length counts the prompts' padding in, as transformers does."""
    most, total = settings["max_new_tokens"], settings["max_length"]
    if most is not None:
        if total is not None:
            warnings.warn(f"max_new_tokens ({most}) and max_length ({total}) are given; the former holds", stacklevel=4)
        return whole("max_new_tokens", most)
    if total is not None:
        longest = whole("max_length", total)
        if longest <= width:
            raise ValueError(f"max_length: {longest} given, more than the {width} columns of input_ids is allowed")
        return longest - width
    warnings.warn(f"neither max_new_tokens nor max_length given: {DEFAULT_NEW_TOKENS} new tokens", stacklevel=4)
    return min(DEFAULT_NEW_TOKENS, max(max_positions - width, 1))


def forbids_end(settings: Settings, width: int, limit: int) -> bool:
    """Must every text run to its limit? Shorter minima would need a bias that changes on the way."""
    least, name = settings["min_new_tokens"], "min_new_tokens"
    if least is None:
        least, name = (settings["min_length"] or 0) - width, "min_length"
    if not settings["eos_token_id"] or least <= 0:
        return False
    if least != limit:
        raise ValueError(f"{name}: {settings[name]} given, none or all of the {limit} new tokens is allowed")
    return True
