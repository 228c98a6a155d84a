"""The sampling fields of a request and their bounds: one model for the Python API, the server and recipes."""

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ValidationError
from pydantic_core.core_schema import CoreSchema, custom_error_schema

from headstart.common.errors import wrong_value

TEMPERATURE_MAX = 100


@dataclass(frozen=True)
class Allowed:
    """Refuses values of another type with these words. A list is refused at its first wrong item."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        schema = handler(source)
        if schema["type"] == "list":
            schema["fail_fast"] = True
        return custom_error_schema(schema, "not_allowed", custom_error_message=self.words)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, as an annotation of a pydantic field; `above` excludes `low` itself."""

    low: int
    high: int | None = None
    above: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        schema = {**handler(source), "gt" if self.above else "ge": self.low}
        words = f"of at least {self.low}"
        if self.high is not None:
            schema["le"] = self.high
            words = f"above {self.low}, at most {self.high}" if self.above else f"from {self.low} to {self.high}"
        kind = "a whole number" if source is int else "a number"
        return custom_error_schema(schema, "not_allowed", custom_error_message=f"{kind} {words} is")


class SamplingFields(BaseModel, strict=True, allow_inf_nan=False):
    """How a request samples. A field that is None has the default of its reader."""

    temperature: Annotated[float, Range(0, TEMPERATURE_MAX)] | None = None  # 0 is greedy
    top_k: Annotated[int, Range(-1)] | None = None  # -1 and 0: off
    top_p: Annotated[float, Range(0, 1, above=True)] | None = None
    min_p: Annotated[float, Range(0, 1)] | None = None
    repetition_penalty: Annotated[float, Range(0, 100, above=True)] | None = None
    presence_penalty: Annotated[float, Range(-2, 2)] | None = None
    frequency_penalty: Annotated[float, Range(-2, 2)] | None = None
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] | None = None

    @classmethod
    def checked(cls, values: dict[str, Any]) -> Self:
        """The fields with these values; raises ValueError, naming the field and its bounds, for the first wrong one."""
        try:
            return cls(**values)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise wrong_value(
                str(wrong["loc"][0]), wrong["input"], wrong["msg"], "correct it or leave it out"
            ) from None
