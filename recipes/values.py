"""The types of a recipe's values: paths, URLs, devices, the names that settings choose from, and a section of them."""

import os
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

from headstart.common.remote import is_url, mirror_of, shown
from headstart.recipes.sampling import TEMPERATURE_MAX

LONGEST_NAME = 255  # bytes of a file's name, on every common file system


def usable_path(path: object) -> object:
    """A path with its ~ replaced; raises ValueError for text that can name no file: "" would be the current one."""
    if not isinstance(path, str | Path):
        return path
    text = str(path)
    if not text.strip() or "\0" in text:
        raise ValueError("a path of one or more characters is allowed; change it, or write . for the current folder")
    if any(len(os.fsencode(name)) > LONGEST_NAME for name in text.split("/")):
        raise ValueError(f"a path with names of up to {LONGEST_NAME} bytes is allowed; choose another, shorter one")
    if is_url(text):
        fields = "run_dir, data.folder, data.store"
        raise ValueError(f"a path on this machine is allowed; copy it here: only {fields} may be URLs")
    return os.path.expanduser(text)


def refuse_file(folder: Path) -> Path:
    """Raise ValueError for a folder that is a file, or lies below one."""
    if taken := [each for each in (folder.absolute(), *folder.absolute().parents) if os.path.isfile(each)]:
        raise ValueError(f"a folder that exists or can be made is allowed, and {taken[0]} is a file; choose another")
    return folder


def matching(pattern: str, allowed_and_advice: str) -> AfterValidator:
    """Refuses texts that do not match, with these words."""

    def matched(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(allowed_and_advice)
        return text

    return AfterValidator(matched)


def with_day_as_text(variables: object) -> object:
    """The variables with `date` as text, also a date of Python; raises ValueError for one that is no day."""
    if not isinstance(variables, dict) or "date" not in variables:
        return variables
    try:
        return {**variables, "date": date.fromisoformat(str(variables["date"])).isoformat()}
    except ValueError:
        raise ValueError("a day such as 2026-11-26 is allowed as its date; correct it, or remove it") from None


def refuse_repeats(values: tuple[object, ...]) -> tuple[object, ...]:
    if len({*values}) < len(values):
        raise ValueError(f"a list without repeats is allowed; write {list(dict.fromkeys(values))}")
    return values


# Sections are strict: a quoted "600" is not a number. YAML has neither tuples nor paths, so those types convert.
SOME = Field(strict=False, min_length=1)  # items of a tuple
NO_REPEATS = AfterValidator(refuse_repeats)
HomeText = Annotated[str, BeforeValidator(usable_path)]
HomePath = Annotated[Path, Field(strict=False), BeforeValidator(usable_path)]
PathOrUrl = Annotated[
    HomePath,
    BeforeValidator(lambda path: mirror_of(path) if isinstance(path, str) and is_url(path) else path),
    AfterValidator(refuse_file),
    PlainSerializer(shown, when_used="json"),
]
Folders = Annotated[dict[Annotated[str, Field(min_length=1)], HomePath], Field(strict=False)]
Temperature = Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)]
Temperatures = Annotated[tuple[Temperature, ...], SOME]
DEVICES = "auto, cpu, cuda, a numbered device such as cuda:1, or mps, xpu, hpu is allowed; choose one"
DeviceName = Annotated[str, matching(r"auto|cpu|(cuda|mps|xpu|hpu)(:\d+)?", DEVICES)]
Devices = Annotated[tuple[DeviceName, ...], SOME]
URLS = "a URL that starts with http:// or https:// is allowed; write http:// in front"
Servers = Annotated[
    tuple[Annotated[str, matching(r"https?://[^/\s].*", URLS)], ...],
    SOME,
    BeforeValidator(lambda urls: [urls] if isinstance(urls, str) else urls),
    NO_REPEATS,
]
Batches = Annotated[tuple[Annotated[int, Field(gt=0)], ...], SOME, NO_REPEATS]
SystemPrompt = Annotated[str, Field(min_length=1)]
SystemPrompts = Annotated[tuple[SystemPrompt | None, ...], SOME]
Dtype = Literal["float32", "bfloat16", "float16"]
Objective = Literal["soft_cross_entropy", "reverse_kl", "total_variation", "log_acceptance", "blended_acceptance"]
DrafterKind = Literal["head", "draft_model", "prompt_lookup"]
DrafterRow = Literal["draft_model", "prompt_lookup"]
HeadRow = Literal["chain", "tree", "cost_aware", "repeats", "untrained"]
Baseline = Literal["plain", "generate", "generate_lookup", "generate_assisted", HeadRow, DrafterRow]
Baselines = Annotated[tuple[Baseline, ...], SOME, NO_REPEATS]


class Section(BaseModel):
    """Base of all sections of a recipe: unknown keys fail, types are strict, and nothing changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def refuse_large_numbers(cls, value: object) -> object:
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, int) and abs(number) >= 2**63 for number in numbers):
            raise ValueError("a number of fewer than 64 bits is allowed; lower it")
        return value

    def origin(self, name: str) -> str:
        """How a message says where the value of a field comes from."""
        return "given" if name in self.model_fields_set else "by default"
