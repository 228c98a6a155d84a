"""Reads the fields of transformers' GenerationConfig and our own; refuses fields that are not implemented."""

import difflib
import math
import operator
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from headstart.common.errors import wrong_value
from headstart.inference.core.sampling import AcceptanceRule, Sampling
from headstart.inference.generate.text_rules import TextRules
from headstart.recipes.sampling import SamplingFields

Settings = Mapping[str, Any]
Bias = tuple[tuple[int, float], ...]  # (token id, value added to its logit)


def read_integer(name: str, given: Any) -> int:
    """A Python, numpy or torch integer as an int; raises ValueError for anything else, True and False included."""
    found: Any = given.item() if isinstance(given, torch.Tensor) and given.numel() == 1 else given
    if isinstance(found, bool):
        raise wrong_value(name, given, "a whole number is", "write it as a number")
    try:
        return operator.index(found)
    except TypeError:
        remedy = "write it without a point or quotes"
        raise wrong_value(name, reprlib.repr(given), "a whole number is", remedy) from None


def read_count(name: str, given: Any) -> int:
    """An integer that counts something: 0 or more."""
    found = read_integer(name, given)
    if found < 0:
        raise wrong_value(name, found, "0 or more is", "leave it out for no minimum")
    return found


def read_integers(name: str, given: Any) -> int | list[int]:
    """One integer as an int, or an iterable of integers (list, array, tensor) as a list."""
    plain = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(plain, Iterable) and not isinstance(plain, str | bytes | Mapping):
        return [read_integer(name, each) for each in plain]
    return read_integer(name, plain)


def read_number(name: str, given: Any) -> float:
    """A number of any numeric type as a float; `Sampling` checks its range."""
    if not isinstance(given, bool | str | bytes):
        try:
            return float(given)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass  # refused below, with the field's name
    raise wrong_value(name, reprlib.repr(given), "one number is", "write it without quotes or brackets")


def read_flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool | int) or given not in (0, 1):
        raise wrong_value(name, reprlib.repr(given), "True or False is", "write one of them")
    return bool(given)


def read_bias(settings: Mapping[str, Any]) -> Bias:
    """logit_bias and sequence_bias together; raises ValueError for a biased sequence of more than one token."""
    by_token = settings.get("logit_bias") or {}
    if not isinstance(by_token, Mapping):
        allowed = "a mapping of token ids to biases is"
        raise wrong_value("logit_bias", reprlib.repr(by_token), allowed, "write logit_bias={5: -1.0}")
    given = settings["sequence_bias"] or {}
    pairs = list(given.items()) if isinstance(given, Mapping) else given  # transformers has both forms
    if not isinstance(pairs, list | tuple) or not all(map(is_pair, pairs)):
        allowed = "a mapping of tuples of token ids to biases is"
        raise wrong_value("sequence_bias", reprlib.repr(given), allowed, "write sequence_bias={(5,): -1.0}")
    if too_long := [list(sequence) for sequence, _ in pairs if len(sequence) != 1]:
        raise wrong_value("sequence_bias", too_long, "sequences of 1 token are", "leave out longer ones")
    single = [read_pair("sequence_bias", sequence[0], bias) for sequence, bias in pairs]
    return (*single, *(read_pair("logit_bias", token, bias) for token, bias in by_token.items()))


def is_pair(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], list | tuple)


def read_pair(name: str, token: Any, bias: Any) -> tuple[int, float]:
    value = read_number(f"{name} of token {token!r}", bias)
    if not value < math.inf:  # NaN fails every comparison
        allowed = "a number below infinity is allowed; -infinity forbids a token"
        raise ValueError(f"{name}: {value} given for token {token!r}, {allowed}")
    return read_integer(name, token), value


def read_words(name: str, given: Any) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids, none of them empty."""
    words = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(words, list | tuple) or not words or not all(isinstance(w, list | tuple) and w for w in words):
        raise wrong_value(name, reprlib.repr(given), "a list of lists of token ids is", f"write {name}=[[5], [7, 8]]")
    return tuple(tuple(read_integer(name, token) for token in word) for word in words)


def read_one(name: str, given: Any) -> int:
    """A token id, alone or in a list."""
    found = read_integers(name, given)
    if isinstance(found, list) and len(found) != 1:
        raise wrong_value(name, reprlib.repr(given), "one token id is", "name one of them")
    return found if isinstance(found, int) else found[0]


FLAGS = ("do_sample", "return_dict_in_generate", "output_scores", "output_logits", "renormalize_logits")
# transformers' own defaults; None means off.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "min_new_tokens", "min_length", "min_p"), None),
    **dict.fromkeys(("sequence_bias", "pad_token_id", "stop_strings", "bad_words_ids", "suppress_tokens"), None),
    **dict.fromkeys(("begin_suppress_tokens", "forced_eos_token_id"), None),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(FLAGS, False),
    "top_k": 50,
    "no_repeat_ngram_size": 0,
    "num_return_sequences": 1,
}
EXTRA_FIELDS = ("seed", "presence_penalty", "frequency_penalty", "logit_bias", "tokenizer")  # not in GenerationConfig
SUPPORTED = frozenset({*DEFAULTS, *EXTRA_FIELDS, "eos_token_id"})  # without eos_token_id, the target's end tokens apply
IGNORED = frozenset({"bos_token_id", "transformers_version", "_from_model_config"})  # no effect when a prompt is given
# In a target's own configuration these are no part of how it writes: they serve encoders, beams, assistants or speed.
IGNORED_IN_TARGET = frozenset(
    {
        *IGNORED,
        *("eos_token_id", "pad_token_id"),  # which TargetModel holds
        *("decoder_start_token_id", "early_stopping", "length_penalty", "use_mtp", "is_assistant", "speculation_type"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size"),
        *("low_memory", "continuous_batching_config"),
    }
)
ONLY_WHEN_SAMPLING = frozenset({"typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"})  # besides supported ones
OF_TARGET = "the target's generation_config.json"
DEFAULT_NEW_TOKENS = 20

SAMPLING_NAMES = SamplingFields.model_fields.keys() - {"seed"}  # which may be a list

# How each field is read, unless it is None; the other fields are read where they are used.
READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(FLAGS, read_flag),
    **dict.fromkeys(("max_new_tokens", "max_length", "num_return_sequences", "pad_token_id"), read_integer),
    **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size"), read_count),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), read_integers),
    "bad_words_ids": read_words,
    "forced_eos_token_id": read_one,
    **dict.fromkeys(SAMPLING_NAMES, read_number),
    "top_k": read_integer,
}
# Unimplemented fields are accepted with these values, which switch them off; None and False are accepted for any field.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "diversity_penalty"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), (10,)),
    "assistant_confidence_threshold": (0.4,),
    # Gemma's files say hybrid, which transformers ignores too; the others hold the same values in other places.
    "cache_implementation": ("dynamic", "hybrid", "static", "offloaded", "offloaded_static"),
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


def read_settings(config: Config | None, overrides: Settings, target: Config | None = None) -> dict[str, Any]:
    """The settings of a call by field name: the target's own, overridden by a configuration, then by call arguments.

    As in transformers, None in a GenerationConfig keeps the default, and None in the call switches a field off.
    Raises ValueError naming every field that is not supported, has a value of a wrong type, or conflicts with another.
    """
    given, own = config_fields(config), target_fields(target)
    settings = {**DEFAULTS, **own, **given, **overrides}
    of_target = own.keys() - given.keys() - overrides.keys()
    wrong, unsupported = {}, unsupported_fields(settings)
    for name, read in READERS.items():
        if settings.get(name) is not None:
            try:
                settings[name] = read(name, settings[name])
            except ValueError as error:
                wrong[name] = str(error)
    if "do_sample" not in wrong and not settings["do_sample"]:
        unsupported = {name: line for name, line in unsupported.items() if name not in of_target & ONLY_WHEN_SAMPLING}
    if not wrong:
        # do_sample=False in the call overrides a configuration that samples, so its temperature is no mistake then.
        explicit = overrides.keys() if "do_sample" in overrides else settings.keys() - of_target
        wrong = conflicts(settings, explicit)
    lines = [
        f"{OF_TARGET}: {line}; override it, or set it to null in the file" if name in of_target else line
        for name, line in {**unsupported, **wrong}.items()
    ]
    if unsupported:
        lines.append(f"leave out unsupported fields; supported fields: {', '.join(sorted(SUPPORTED))}")
    if lines:
        raise ValueError("; ".join(lines))
    return settings


def target_fields(config: Config | None) -> dict[str, Any]:
    """What a target's own configuration says about how it writes; transformers ignores fields that it does not know."""
    known = {} if config is None else type(config)().to_dict()
    found = config_fields(config).items()
    return {name: value for name, value in found if name in known and name not in IGNORED_IN_TARGET}


def config_fields(config: Config | None) -> dict[str, Any]:
    """The fields that a GenerationConfig sets; raises ValueError for an object of another type."""
    if config is None:
        return {}
    if isinstance(config, type) or not isinstance(config, Config):
        remedy = "write GenerationConfig(**fields), or give the fields to the call: generate(input_ids, **fields)"
        raise wrong_value("generation_config", reprlib.repr(config), "a GenerationConfig of transformers is", remedy)
    defaults = type(config)().to_dict()
    return {name: value for name, value in config.to_dict().items() if value not in (None, defaults.get(name))}


def unsupported_fields(settings: Settings) -> dict[str, str]:
    """A line for each field that is not implemented, by name."""
    wrong = {}
    for name, value in settings.items():
        if name not in SUPPORTED | IGNORED and not has_no_effect(name, value):
            allowed = " or ".join(map(repr, NO_EFFECT.get(name, (None,))))
            meant = "".join(f" (did you mean {near}?)" for near in difflib.get_close_matches(name, SUPPORTED, 1, 0.8))
            wrong[name] = f"{name}: {reprlib.repr(value)} given, {allowed} is allowed{meant}"
    return wrong


def conflicts(settings: Settings, explicit: Set[str]) -> dict[str, str]:
    """A line for each field that contradicts another; `explicit` names the fields that count without do_sample."""
    wrong = {}
    if not settings["do_sample"]:
        wrong = {
            name: f"{name}: {settings[name]} given, which needs do_sample=True; set it, or leave {name} out"
            for name, allowed in ALLOWED_WHEN_GREEDY.items()
            if name in explicit and settings[name] not in allowed
        }
    elif settings["temperature"] == 0:
        allowed = "more than 0 is allowed; use do_sample=False for greedy"
        wrong["temperature"] = f"temperature: 0 given with do_sample=True, {allowed}"
    if not settings["return_dict_in_generate"]:
        wrong |= {
            name: f"{name}: True given, which needs return_dict_in_generate=True; set it, or leave {name} out"
            for name in ("output_scores", "output_logits")
            if settings[name] and name in explicit
        }
    return wrong


def has_no_effect(name: str, value: Any) -> bool:
    """Does this value of an unimplemented field switch it off? 0 does not count as False: it may be a token id."""
    plain = isinstance(value, str | int | float)  # comparing a tensor gives no single truth value
    return value is None or value is False or (plain and value in NO_EFFECT.get(name, ()))


def read_sampling(settings: Settings, rule: AcceptanceRule = "seeded") -> Sampling:
    """The sampling fields of a call's settings, without its seed; raises ValueError for a value out of range."""
    given = {name: settings.get(name) for name in SAMPLING_NAMES}
    if not settings["do_sample"]:
        given |= dict.fromkeys(ALLOWED_WHEN_GREEDY)
    elif given["temperature"] is None:
        given["temperature"] = 1.0
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Sampling(**values, logit_bias=read_bias(settings), rule=rule)


def forbid(sampling: Sampling, tokens: Iterable[int]) -> Sampling:
    """The same sampling, which never chooses these tokens."""
    return replace(sampling, logit_bias=(*sampling.logit_bias, *((token, -math.inf) for token in tokens)))


def read_forbidden(settings: Settings, vocab_size: int) -> list[int]:
    """The tokens that may stand nowhere in a text; transformers ignores those that the target does not have."""
    alone = [word[0] for word in settings["bad_words_ids"] or () if len(word) == 1]
    never = {*in_vocabulary(settings["suppress_tokens"], vocab_size), *({*alone} - {*settings["eos_token_id"]})}
    return sorted(never)


def read_seeds(given: Any, count: int) -> list[int]:
    """One seed per prompt."""
    seeds = read_integers("seed", 0 if given is None else given)
    if isinstance(seeds, int):
        return [seeds] * count
    if len(seeds) != count:
        given = f"{len(seeds)} given for {count} prompts, 1 for all or {count} is allowed"
        raise ValueError(f"seed: {given}; give one number for all")
    return seeds


def read_end_tokens(settings: Settings, targets: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """The call's eos_token_id (None: no end token); if the call has none, the target's own end tokens."""
    if "eos_token_id" not in settings:
        return tuple(token for token in targets or () if token < vocab_size)  # some checkpoints name others, too
    given = settings["eos_token_id"]
    found = [] if given is None else read_integers("eos_token_id", given)
    ends = (found,) if isinstance(found, int) else tuple(found)
    if not all(0 <= token < vocab_size for token in ends):
        raise wrong_value("eos_token_id", given, f"0 to {vocab_size - 1} is", "or give None for no end token")
    return ends


def read_pad_token(settings: Settings, targets: int | None, ends: Sequence[int], vocab_size: int) -> int | None:
    """The call's pad_token_id, else the target's own if its vocabulary has it, else the first end token, else None."""
    given = settings["pad_token_id"]
    if given is not None:
        if not 0 <= given < vocab_size:
            raise wrong_value("pad_token_id", given, f"0 to {vocab_size - 1} is", "leave it out for the target's own")
        return int(given)
    own = targets if targets is not None and 0 <= targets < vocab_size else None
    return next(iter(ends), None) if own is None else own


def read_max_new_tokens(settings: Settings, width: int, max_positions: int) -> int:
    """The maximum number of new tokens per text; max_length includes the prompts' padding, as in transformers."""
    most, total = settings["max_new_tokens"], settings["max_length"]
    if most is not None:
        if total is not None:
            warnings.warn(f"max_new_tokens {most} and max_length {total} given; max_length is ignored", stacklevel=4)
        return int(most)
    if total is not None:
        if total <= width:
            allowed = f"more than the {width} columns of input_ids is"
            raise wrong_value("max_length", total, allowed, "or give max_new_tokens")
        return int(total) - width
    warnings.warn(
        f"neither max_new_tokens nor max_length given; generating up to {DEFAULT_NEW_TOKENS} new tokens", stacklevel=4
    )
    return min(DEFAULT_NEW_TOKENS, max(max_positions - width, 1))


def read_rules(settings: Settings, prompt: list[int], width: int, limit: int, vocab_size: int) -> TextRules:
    """What a text of at most `limit` new tokens may not continue with; `width` is the prompt's, padding included.

    Raises ValueError for tokens outside the vocabulary.
    """
    ends, least = tuple(settings["eos_token_id"]), settings["min_new_tokens"]
    words = tuple(word for word in settings["bad_words_ids"] or () if word not in {(end,) for end in ends})
    forced = settings["forced_eos_token_id"]
    named = {"bad_words_ids": [token for word in words for token in word], "forced_eos_token_id": [forced or 0]}
    for name, tokens in named.items():
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise wrong_value(name, wrong[0], f"token ids 0 to {vocab_size - 1} of the target are", "leave it out")
    return TextRules(
        tuple(prompt),
        vocab_size,
        limit,
        ends,
        min_new_tokens=max((settings["min_length"] or 0) - width, 0) if least is None else least,
        no_repeat_ngram_size=settings["no_repeat_ngram_size"] or 0,
        bad_words=tuple(word for word in words if len(word) > 1),
        begin_suppress_tokens=in_vocabulary(settings["begin_suppress_tokens"], vocab_size),
        forced_eos=forced,
    )


def in_vocabulary(given: int | list[int] | None, vocab_size: int) -> tuple[int, ...]:
    """The tokens that the target has."""
    tokens = [given] if isinstance(given, int) else given or []
    return tuple(token for token in tokens if 0 <= token < vocab_size)
