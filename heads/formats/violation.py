"""One line of a head check: where a head's files break an engine's contract, what was found and what is allowed."""

from dataclasses import dataclass

MISSING = "missing"  # the value of a tensor that the file does not hold


@dataclass(frozen=True)
class Violation:
    """One breach of an engine's contract."""

    engine: str
    severity: str  # error: the engine fails or drafts worse than trained; warning: correct only if trained that way
    where: str  # a key of config.json, or a tensor of the weights file
    value: object  # what the file holds; None for an absent key
    allowed: str  # what is allowed, or what to do

    @property
    def text(self) -> str:
        """The violation without engine and severity."""
        value = repr(self.value)
        shown = value if len(value) <= 80 else f"{value[:77]}..."
        found = MISSING if self.value is None or self.value == MISSING else f"{shown} found"
        return f"{self.where}: {found}; {self.allowed}"

    def __str__(self) -> str:
        return f"{self.engine}: {self.severity}: {self.text}"


def config_error(engine: str, key: str, value: object, allowed: str) -> Violation:
    return Violation(engine, "error", f"config.json {key}", value, allowed)


def tensor_error(engine: str, name: str, value: object, allowed: str) -> Violation:
    return Violation(engine, "error", f"tensor {name}", value, allowed)
