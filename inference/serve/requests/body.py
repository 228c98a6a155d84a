"""Reads the fields of a JSON body one by one; whatever was not read in the end is refused by name."""

import difflib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from headstart.inference.serve.errors import ApiError, wrong

Number = int | float
# Accepted without effect: they tell OpenAI's service about the caller.
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id",
})  # fmt: skip
# Fields that other servers know and this one lacks, with the values that switch them off; null always does.
OFF: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "prompt_logprobs": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "spaces_between_special_tokens": (True,),
    "logits_processors": (),
    "chat_template": (),
    "documents": (),
}


class Body:
    """The fields of one request; null counts as left out."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.known: set[str] = set()

    def take(self, name: str) -> Any:
        self.known.add(name)
        return self.values.get(name)

    def integer(self, name: str, default: Any = None, low: Number = -math.inf, high: Number = math.inf) -> Any:
        """A whole number from `low` to `high`; `default` if the field is missing."""
        given = self.take(name)
        if given is None:
            return default
        if isinstance(given, bool) or not isinstance(given, int) or not low <= given <= high:
            raise wrong(name, given, f"{between(low, high, 'a whole number')} is", "correct it or leave it out")
        return given

    def number(self, name: str, default: Number, low: Number, high: Number, above: bool = False) -> float:
        """A number from `low` to `high`; `above` excludes `low` itself."""
        given = self.take(name)
        if given is None:
            return default
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if not number or not low <= given <= high or (above and given == low) or math.isinf(given):
            range_ = f"a number above {low:g}, at most {high:g}" if above else between(low, high, "a number")
            raise wrong(name, given, f"{range_} is", f"correct it, or leave it out for {default:g}")
        return float(given)

    def flag(self, name: str, default: bool = False) -> bool:
        given = self.take(name)
        if given is None:
            return default
        if not isinstance(given, bool):
            raise wrong(name, given, "true or false is", "write it without quotes")
        return given

    def text(self, name: str, default: Any = None, choices: Collection[str] = ()) -> Any:
        given = self.take(name)
        if given is None:
            return default
        if not isinstance(given, str) or (choices and given not in choices):
            raise wrong(name, given, f"{', '.join(choices) or 'a text'} is", "correct it or leave it out")
        return well_formed(given)

    def mapping(self, name: str) -> dict[str, Any]:
        given = self.take(name)
        if given is None:
            return {}
        if not isinstance(given, dict):
            raise wrong(name, given, "an object is", "write it in braces, or leave it out")
        return given

    def refuse_rest(self) -> None:
        """Raise ApiError for the first field that nobody has read and that would have an effect."""
        for name, value in self.values.items():
            if name in self.known or name in IGNORED or value is None:
                continue
            if name in OFF:
                if any(value == each and type(value) is type(each) for each in OFF[name]):
                    continue
                raise wrong(name, value, f"this server does not support it: only {off_values(name)} is", "leave it out")
            refuse_unknown(name, self.known)


def refuse_unknown(name: str, known: Collection[str]) -> NoReturn:
    near = difflib.get_close_matches(name, known, 1, 0.75)
    meant = f"did you mean {near[0]}?" if near else "leave it out"
    shown = name[:60]
    raise ApiError(400, f"{shown}: there is no such field; {', '.join(sorted(known))} are allowed; {meant}", shown)


def off_values(name: str) -> str:
    return " or ".join(json.dumps(each) for each in (None, *OFF[name]))


def between(low: Number, high: Number, what: str) -> str:
    if high == math.inf:
        return what if low == -math.inf else f"{what} of at least {low:g}"
    return f"{what} from {low:.20g} to {high:.20g}"


def well_formed(text: str) -> str:
    """JSON may hold halves of surrogate pairs, which no tokenizer reads."""
    return text.encode(errors="replace").decode()


def read_json_object(raw: bytes) -> dict[str, Any]:
    """A request's body; raises ApiError for anything but one JSON object."""
    try:
        found = json.loads(raw, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise not_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise not_json("nested too deeply") from None
    except ValueError:  # its message may repeat the body
        raise not_json("NaN, Infinity, a number of thousands of digits, or bytes that are not UTF-8") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is a JSON {type(found).__name__}; one object is allowed; write it in braces")
    return found


def not_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is no JSON ({reason}); one JSON object is allowed; correct it")


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
