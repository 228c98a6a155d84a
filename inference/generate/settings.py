"""The settings of a call of `generate`: fields of transformers' GenerationConfig and our own; others are refused."""

import difflib
import math
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import BeforeValidator, Field, ValidationError

from headstart.common.errors import wrong_value
from headstart.inference.core.sampling import Sampling
from headstart.inference.generate.text_rules import TextRules
from headstart.recipes.sampling import Allowed, Range, SamplingFields

Fields = Mapping[str, Any]  # by name, as a caller or a file gives them


def plain(value: Any) -> Any:
    """Numbers of numpy and torch, and lists and mappings of them, as Python's own; other values stay."""
    if hasattr(value, "tolist"):
        value = value.tolist()
        return value[0] if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list) else value
    if isinstance(value, Mapping):
        return {
            tuple(key) if isinstance(key := plain(each), list) else key: plain(bias) for each, bias in value.items()
        }
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        return [plain(each) for each in value]
    return value


def as_flag(value: Any) -> Any:
    return bool(value) if isinstance(value, int) and value in (0, 1) else value


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


def as_single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def as_mapping(value: Any) -> Any:
    """The biases of sequences, for which transformers also allows a list of pairs."""
    is_pairs = isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value)
    return {tuple(key) if isinstance(key, list) else key: bias for key, bias in value} if is_pairs else value


Flag = Annotated[bool, BeforeValidator(as_flag), Allowed("True or False is")]
Whole = Annotated[int, Allowed("a whole number is")]
Count = Annotated[int, Range(0)]
TokenId = Annotated[int, BeforeValidator(as_single), Allowed("one token id, a whole number, is")]
TokenIds = Annotated[list[int], BeforeValidator(as_list), Allowed("a token id, a whole number, or a list of them is")]
Words = Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1)]
SEQUENCES = "a mapping of tuples of 1 token id to numbers below infinity, such as {(5,): -1.0}, is"
SEED = "a whole number, or a list with one for each prompt, is"
Bias = Annotated[float, Field(lt=math.inf, allow_inf_nan=True)]  # -infinity forbids a token; NaN fails every comparison


class Settings(SamplingFields):
    """The supported settings of a call, with transformers' defaults. None switches a field off."""

    do_sample: Flag | None = False
    top_k: Annotated[int, Range(-1)] | None = 50
    max_new_tokens: Whole | None = None
    max_length: Whole | None = None
    min_new_tokens: Count | None = None
    min_length: Count | None = None
    eos_token_id: TokenIds | None = None  # if it is not set, the target's end tokens apply
    pad_token_id: Whole | None = None
    forced_eos_token_id: TokenId | None = None
    suppress_tokens: TokenIds | None = None
    begin_suppress_tokens: TokenIds | None = None
    bad_words_ids: Annotated[Words, Allowed("a list of lists of token ids is")] | None = None
    no_repeat_ngram_size: Count | None = 0
    sequence_bias: Annotated[dict[tuple[int], Bias], BeforeValidator(as_mapping), Allowed(SEQUENCES)] | None = None
    stop_strings: Any = None  # checked with the tokenizer
    num_return_sequences: Whole | None = 1
    return_dict_in_generate: Flag | None = False
    output_scores: Flag | None = False
    output_logits: Flag | None = False
    renormalize_logits: Flag | None = False
    # Not in GenerationConfig:
    seed: Annotated[int | list[int], Allowed(SEED)] | None = None  # type: ignore[assignment]
    tokenizer: Any = None


SUPPORTED = Settings.model_fields.keys()
SAMPLING_NAMES = SamplingFields.model_fields.keys() - {"seed"}  # which may be a list
IGNORED = frozenset({"bos_token_id", "transformers_version", "_from_model_config"})  # no effect when a prompt is given
# In a target's configuration these do not concern its text, but encoders, beams, assistants or speed.
IGNORED_IN_TARGET = IGNORED | {
    *("eos_token_id", "pad_token_id"),  # which TargetModel holds
    *("decoder_start_token_id", "early_stopping", "length_penalty", "use_mtp", "is_assistant", "speculation_type"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size"),
    *("low_memory", "continuous_batching_config"),
}
ONLY_WHEN_SAMPLING = frozenset({"typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"})  # besides supported ones
OF_TARGET = "the target's generation_config.json"
DEFAULT_NEW_TOKENS = 20
# Unimplemented fields are accepted with these values, which switch them off; None and False are accepted for any field.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "diversity_penalty"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), (10,)),
    "assistant_confidence_threshold": (0.4,),
    "disable_compile": (True,),  # TRL gives it
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
    "top_k": (None, -1, 0, 50),
    "top_p": (None, 1),
    "min_p": (None, 0),
}


@runtime_checkable  # the shape checks in tests use isinstance
class Config(Protocol):
    """transformers' GenerationConfig."""

    def to_dict(self) -> dict[str, Any]: ...


def read_settings(config: Config | None, overrides: Fields, target: Config | None = None) -> Settings:
    """The settings of a call: the target's own, overridden by a configuration, then by call arguments.

    As in transformers, None in a GenerationConfig keeps the default, and None in the call switches a field off.
    Raises ValueError naming every field that is not supported, has a value of a wrong type, or conflicts with another.
    """
    given, own = config_fields(config), target_fields(target)
    fields = {**own, **given, **overrides}
    of_target = own.keys() - given.keys() - overrides.keys()
    unsupported, wrong = unsupported_fields(fields), {}
    if not plain(fields.get("do_sample")):
        unsupported = {name: line for name, line in unsupported.items() if name not in of_target & ONLY_WHEN_SAMPLING}
    try:
        settings = Settings(**{name: plain(value) for name, value in fields.items() if name in SUPPORTED})
        # do_sample=False in the call overrides a configuration that samples, so its temperature is not a mistake then.
        explicit = overrides.keys() if "do_sample" in overrides else settings.model_fields_set - of_target
        wrong = conflicts(settings, explicit)
    except ValidationError as error:
        for each in error.errors():
            name = str(each["loc"][0])
            value, remedy = reprlib.repr(fields[name]), "correct it or leave it out"
            wrong[name] = str(wrong_value(name, value, each["msg"], remedy))
    lines = [
        f"{OF_TARGET}: {line}; override it, or set it to null in the file" if name in of_target else line
        for name, line in {**unsupported, **wrong}.items()
    ]
    if unsupported:
        lines.append(f"leave out unsupported fields; supported fields: {', '.join(sorted(SUPPORTED))}")
    if lines:
        raise ValueError("; ".join(lines))
    return settings


@contextmanager
def named_by_source(names: Set[str]) -> Iterator[None]:
    """Put the target's file in front of a ValueError about one of these fields, which only the file sets."""
    try:
        yield
    except ValueError as error:
        if str(error).partition(":")[0] in names:
            raise ValueError(f"{OF_TARGET}: {error}; or override it in the call") from None
        raise


def target_fields(config: Config | None) -> dict[str, Any]:
    """The sampling and length fields of a target's configuration; like transformers, without unknown fields."""
    known = {} if config is None else type(config)().to_dict()
    fields = config_fields(config).items()
    return {name: value for name, value in fields if name in known and name not in IGNORED_IN_TARGET}


def config_fields(config: Config | None) -> dict[str, Any]:
    """The fields that a GenerationConfig sets; raises ValueError for an object of another type."""
    if config is None:
        return {}
    if isinstance(config, type) or not isinstance(config, Config):
        remedy = "write GenerationConfig(**fields), or give the fields to the call: generate(input_ids, **fields)"
        raise wrong_value("generation_config", reprlib.repr(config), "a GenerationConfig of transformers is", remedy)
    defaults = type(config)().to_dict()
    return {name: value for name, value in config.to_dict().items() if value not in (None, defaults.get(name))}


def unsupported_fields(fields: Fields) -> dict[str, str]:
    """A line for each field that is not implemented, by name."""
    lines = {}
    for name, value in fields.items():
        if name not in SUPPORTED | IGNORED and not has_no_effect(name, value):
            allowed = " or ".join(map(repr, NO_EFFECT.get(name, (None,))))
            meant = "".join(f" (did you mean {near}?)" for near in difflib.get_close_matches(name, SUPPORTED, 1, 0.8))
            lines[name] = f"{name}: {reprlib.repr(value)} given, {allowed} is allowed{meant}"
    return lines


def has_no_effect(name: str, value: Any) -> bool:
    """Does this value of an unimplemented field switch it off? 0 does not count as False: it may be a token id."""
    is_plain = isinstance(value, str | int | float)  # comparing a tensor gives no single truth value
    is_empty = isinstance(value, list | tuple | dict) and not value  # such as logits_processor=[]
    return value is None or value is False or is_empty or (is_plain and value in NO_EFFECT.get(name, ()))


def conflicts(settings: Settings, explicit: Set[str]) -> dict[str, str]:
    """A line for each field that contradicts another; `explicit` names the fields that count without do_sample."""
    lines = {}
    if not settings.do_sample:
        lines = {
            name: f"{name}: {value} given, which needs do_sample=True; set it, or leave {name} out"
            for name, allowed in ALLOWED_WHEN_GREEDY.items()
            if name in explicit and (value := getattr(settings, name)) not in allowed
        }
    elif settings.temperature == 0:
        allowed = "more than 0 is allowed; use do_sample=False for greedy"
        lines["temperature"] = f"temperature: 0 given with do_sample=True, {allowed}"
    if not settings.return_dict_in_generate:
        lines |= {
            name: f"{name}: True given, which needs return_dict_in_generate=True; set it, or leave {name} out"
            for name in ("output_scores", "output_logits")
            if getattr(settings, name) and name in explicit
        }
    return lines


def read_sampling(settings: Settings) -> Sampling:
    """The sampling fields of a call, without its seed."""
    values = settings.model_dump(include=SAMPLING_NAMES, exclude_none=True)
    if settings.do_sample:
        values.setdefault("temperature", 1.0)
    else:
        values = {name: value for name, value in values.items() if name not in ALLOWED_WHEN_GREEDY}
    bias = tuple((token, bias) for (token,), bias in (settings.sequence_bias or {}).items())
    return Sampling(**values, logit_bias=bias)


def forbid(sampling: Sampling, tokens: Iterable[int]) -> Sampling:
    """The same sampling, which never chooses these tokens."""
    return replace(sampling, logit_bias=(*sampling.logit_bias, *((token, -math.inf) for token in tokens)))


def read_forbidden(settings: Settings, ends: Sequence[int], vocab_size: int) -> list[int]:
    """The tokens that a text never contains; like transformers, without ids outside the vocabulary."""
    alone = {word[0] for word in settings.bad_words_ids or () if len(word) == 1} - {*ends}
    return sorted({*in_vocabulary(settings.suppress_tokens, vocab_size), *alone})


def read_seeds(seed: int | list[int] | None, count: int) -> list[int]:
    """One seed per prompt."""
    if not isinstance(seed, list):
        return [seed or 0] * count
    if len(seed) != count:
        given = f"{len(seed)} given for {count} prompts, 1 for all or {count} is allowed"
        raise ValueError(f"seed: {given}; give one number for all")
    return seed


def read_end_tokens(settings: Settings, targets: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """The call's eos_token_id (None: no end token); if the call has none, the target's own end tokens."""
    if "eos_token_id" not in settings.model_fields_set:
        return in_vocabulary(targets, vocab_size)  # some checkpoints also name ids outside it
    ends = tuple(settings.eos_token_id or ())
    refuse_outside("eos_token_id", ends, vocab_size, "correct it, or give None for no end token")
    return ends


def read_pad_token(settings: Settings, targets: int | None, ends: Sequence[int], vocab_size: int) -> int | None:
    """The call's pad_token_id, else the target's own if its vocabulary has it, else the first end token, else None."""
    if (pad := settings.pad_token_id) is not None:
        refuse_outside("pad_token_id", [pad], vocab_size, "leave it out for the target's own")
        return pad
    return targets if targets is not None and 0 <= targets < vocab_size else next(iter(ends), None)


def read_max_new_tokens(settings: Settings, width: int, max_positions: int) -> int:
    """The maximum number of new tokens per text; max_length includes the prompts' padding, as in transformers."""
    new, total = settings.max_new_tokens, settings.max_length
    if new is not None:
        if total is not None:
            warnings.warn(f"max_new_tokens {new} and max_length {total} given; max_length is ignored", stacklevel=4)
        return new
    if total is not None:
        if total <= width:
            allowed = f"more than the {width} columns of input_ids is"
            raise wrong_value("max_length", total, allowed, "or give max_new_tokens")
        return total - width
    warnings.warn(
        f"neither max_new_tokens nor max_length given; generating up to {DEFAULT_NEW_TOKENS} new tokens", stacklevel=4
    )
    return min(DEFAULT_NEW_TOKENS, max(max_positions - width, 1))


def read_rules(
    settings: Settings, prompt: list[int], width: int, limit: int, ends: tuple[int, ...], vocab_size: int
) -> TextRules:
    """The rules of a text of at most `limit` new tokens; `width` is the prompt's length, padding included.

    Raises ValueError for tokens outside the vocabulary.
    """
    words = tuple(tuple(word) for word in settings.bad_words_ids or () if word not in [[end] for end in ends])
    forced = settings.forced_eos_token_id
    refuse_outside("bad_words_ids", [token for word in words for token in word], vocab_size, "leave it out")
    refuse_outside("forced_eos_token_id", [forced or 0], vocab_size, "leave it out")
    least = settings.min_new_tokens
    return TextRules(
        tuple(prompt),
        vocab_size,
        limit,
        ends,
        min_new_tokens=max((settings.min_length or 0) - width, 0) if least is None else least,
        no_repeat_ngram_size=settings.no_repeat_ngram_size or 0,
        bad_words=tuple(word for word in words if len(word) > 1),
        begin_suppress_tokens=in_vocabulary(settings.begin_suppress_tokens, vocab_size),
        forced_eos=forced,
    )


def refuse_outside(name: str, tokens: Iterable[int], vocab_size: int, remedy: str) -> None:
    """Raise ValueError for a token id that the target does not have."""
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise wrong_value(name, repr(token), f"token ids 0 to {vocab_size - 1} of the target are", remedy)


def in_vocabulary(tokens: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """The tokens that the target has."""
    return tuple(token for token in tokens or () if 0 <= token < vocab_size)
