"""The types of a recipe's values: paths, URLs, devices, the names that settings choose from, and a section of them."""

import os
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
)

from headstart.common.remote import is_url, mirror_of, shown
from headstart.recipes.sampling import TEMPERATURE_MAX

LONGEST_NAME = 255  # bytes of a file's name, on every common file system


def refuse_unusable_path(path: object) -> object:
    """Raise ValueError for text that can name no file; a Path would take "" for the current folder."""
    if isinstance(path, str) and (not path.strip() or "\0" in path):
        raise ValueError("a path of one or more characters is allowed; change it, or write . for the current folder")
    if isinstance(path, str) and any(len(os.fsencode(name)) > LONGEST_NAME for name in path.split("/")):
        raise ValueError(f"a path with names of up to {LONGEST_NAME} bytes is allowed; choose another, shorter one")
    return path


def mirrored(path: object) -> object:
    """The local mirror of a URL; anything else as it is."""
    return mirror_of(path) if isinstance(path, str) and is_url(path) else path


def refuse_url(path: object) -> object:
    if isinstance(path, str) and is_url(path):
        raise ValueError(
            "a path on this machine is allowed; copy it here: only run_dir, data.folder, data.store may be URLs"
        )
    return path


def refuse_file(folder: Path) -> Path:
    """Raise ValueError for a folder that is a file, or lies below one."""
    if taken := [each for each in (folder.absolute(), *folder.absolute().parents) if os.path.isfile(each)]:
        raise ValueError(f"a folder that exists or can be made is allowed, and {taken[0]} is a file; choose another")
    return folder


# Sections are strict: a quoted "600" is not a number. YAML has neither tuples nor paths, so those types convert.
HomePath = Annotated[
    Path,
    Field(strict=False),
    BeforeValidator(refuse_unusable_path),
    BeforeValidator(refuse_url),
    AfterValidator(lambda path: Path(os.path.expanduser(path))),
]
PathOrUrl = Annotated[
    Path,
    Field(strict=False),
    BeforeValidator(mirrored),
    BeforeValidator(refuse_unusable_path),
    AfterValidator(lambda path: Path(os.path.expanduser(path))),
    AfterValidator(refuse_file),
    PlainSerializer(shown, when_used="json"),
]
HomeText = Annotated[
    str, BeforeValidator(refuse_unusable_path), BeforeValidator(refuse_url), AfterValidator(os.path.expanduser)
]
Temperature = Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)]
Temperatures = Annotated[tuple[Temperature, ...], Field(strict=False, min_length=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
DEVICE_NAME = re.compile(r"auto|cpu|(cuda|mps|xpu|hpu)(:\d+)?")


def refuse_unknown_device(name: str) -> str:
    """Raise ValueError for a name that is no device; whether this machine has it is checked when a run starts."""
    if DEVICE_NAME.fullmatch(name):
        return name
    advice = "did you mean cuda?" if name.partition(":")[0].lower() in ("gpu", "cuda", "nvidia") else "choose one"
    raise ValueError(f"auto, cpu, cuda, a numbered device such as cuda:1, or mps, xpu, hpu is allowed; {advice}")


def with_day_as_text(variables: object) -> object:
    """The variables with `date` as text, which YAML reads as a day; raises ValueError for one that is no day."""
    if not isinstance(variables, dict) or "date" not in variables:
        return variables
    try:
        return {**variables, "date": date.fromisoformat(str(variables["date"])).isoformat()}
    except ValueError:
        raise ValueError("a day such as 2026-11-26 is allowed as its date; correct it, or remove it") from None


def refuse_other_schemes(url: str) -> str:
    """Raise ValueError for text that is no URL of a server."""
    if not re.match(r"https?://[^/\s]", url):
        written = url.lstrip("/") or "HOST:PORT"
        raise ValueError(f"a URL that starts with http:// or https:// is allowed; write http://{written}")
    return url


def refuse_repeats(values: tuple[object, ...]) -> tuple[object, ...]:
    if len({*values}) < len(values):
        raise ValueError(f"a list without repeats is allowed; write {list(dict.fromkeys(values))}")
    return values


DeviceName = Annotated[str, AfterValidator(refuse_unknown_device)]
Url = Annotated[str, AfterValidator(refuse_other_schemes)]
Servers = Annotated[
    tuple[Url, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(lambda urls: [urls] if isinstance(urls, str) else urls),
    AfterValidator(refuse_repeats),
]
Batches = Annotated[
    tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False, min_length=1), AfterValidator(refuse_repeats)
]
Devices = Annotated[tuple[DeviceName, ...], Field(strict=False, min_length=1)]
SystemPrompt = Annotated[str, Field(min_length=1)]
SystemPrompts = Annotated[tuple[SystemPrompt | None, ...], Field(strict=False, min_length=1)]
Folders = Annotated[dict[Annotated[str, Field(min_length=1)], HomePath], Field(strict=False)]
Objective = Literal["soft_cross_entropy", "reverse_kl", "total_variation", "log_acceptance", "blended_acceptance"]
DrafterKind = Literal["head", "draft_model", "prompt_lookup"]
DrafterRow = Literal["draft_model", "prompt_lookup"]
HeadRow = Literal["chain", "tree", "cost_aware", "repeats", "untrained"]
Baseline = Literal["plain", "generate", "generate_lookup", "generate_assisted", HeadRow, DrafterRow]
Baselines = Annotated[tuple[Baseline, ...], Field(strict=False, min_length=1), AfterValidator(refuse_repeats)]


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
