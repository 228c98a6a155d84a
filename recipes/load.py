"""Load a recipe, YAML plus overrides; one report has all mistakes of fields, or else all that lie between fields."""

import difflib
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headstart.common.remote import without_secrets
from headstart.recipes.checks import recipe_mistakes
from headstart.recipes.fields import in_yaml, recipe_fields, recipe_sections, section_keys
from headstart.recipes.schema import Recipe

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # errors of PyYAML; a number of 5000 digits is a ValueError
SHOWN = 60  # characters of a value in a message
SHORT = reprlib.Repr()  # looks no deeper than a message can show: nested aliases may stand for billions of values
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 2 * SHOWN


class RecipeError(ValueError):
    """A recipe that cannot be used; the message lists the mistakes, one per line."""


class RecipeLoader(yaml.SafeLoader):
    """YAML 1.2: 1e-4 is a number, while 010, 1:30 and 2026-11-26 are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (how PyYAML extends a loader)


for name, pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)",
    "float": r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF|nan|NaN|NAN))",
}.items():
    RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"({pattern})$"), None)


@dataclass
class RawRecipe:
    """A recipe before validation: the values given, where each was given, and the mistakes found so far."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)  # section.key -> "line 3" or "override section.key=value"
    mistakes: dict[str, str] = field(default_factory=dict)  # section.key -> its line in the report: the first mistake

    def put(self, path: str, value: object, place: str) -> None:
        """Set a section or one of its keys; what is no section takes no keys, which validation reports."""
        section, dot, key = path.partition(".")
        if not dot:
            self.values[section] = value
        elif isinstance(holder := self.values.setdefault(section, {}), dict):
            holder[key] = value
        self.places[path] = place
        self.places.setdefault(section, place)

    def given(self, path: str) -> str:
        """The value at section.key as the report shows it."""
        holder: Any = self.values
        for key in path.split(".", 1):
            if not isinstance(holder, dict) or key not in holder:
                return "nothing"
            holder = holder[key]
        text = in_yaml(holder) if holder is None or isinstance(holder, bool) else SHORT.repr(holder)
        half = (SHOWN - 3) // 2  # the end of a path says more than its middle
        return text if len(text) <= SHOWN else f"{text[:half]}...{text[-half:]}"

    def add_mistake(self, path: str, allowed_and_advice: str) -> None:
        """Report a field with its value; `allowed_and_advice` is "WHAT IS ALLOWED; what to do"."""
        place = f" ({self.places[path]})" if path in self.places else ""
        line = without_secrets(f"{path}: {self.given(path)} given, {allowed_and_advice}{place}")
        self.mistakes.setdefault(path, line)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a YAML recipe and apply the overrides; raises RecipeError listing the mistakes."""
    raw = RawRecipe()
    read_file(raw, Path(path))
    for override in overrides:
        apply_override(raw, override)
    try:
        recipe = Recipe.model_validate(raw.values)
        for mistake in recipe_mistakes(recipe):
            raw.add_mistake(*mistake)
    except ValidationError as error:
        for details in error.errors():
            add_schema_mistake(raw, details)
    if raw.mistakes:
        count = f"{len(raw.mistakes)} mistake{'s' * (len(raw.mistakes) > 1)}"
        raise RecipeError("\n  ".join([f"{path}: {count}", *raw.mistakes.values()]))
    return recipe


def read_file(raw: RawRecipe, path: Path) -> None:
    """Put in a recipe file's values with their lines; raises RecipeError if it is not a YAML mapping."""
    try:
        loader = RecipeLoader(path.read_text(encoding="utf-8"))
        document = loader.get_single_node() or yaml.MappingNode("", [])  # an empty file: required fields are missing
        for name, node, line in entries(document) if isinstance(document, yaml.MappingNode) else ():
            if name in raw.places:
                where = f"given in {raw.places[name]} and in {line}"
                raw.mistakes[name] = f"{name}: {where}, once is allowed; remove one"
            has_keys = isinstance(node, yaml.MappingNode) and "." not in name  # which follow
            value = {} if has_keys else loader.construct_document(node)
            raw.put(name, {} if value is None and name in recipe_sections() else value, line)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; give the path of a recipe, such as recipes/tiny.yaml") from error
    except NOT_YAML as error:
        raise RecipeError(f"{path}: not YAML: {in_one_line(error)}; fix the file there") from error
    if not isinstance(document, yaml.MappingNode):
        raise RecipeError(f"{path}: not a recipe; write sections, each with `key: value` lines below it")


def entries(mapping: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, yaml.Node, str]]:
    """Every field of a recipe's file and every key of its sections: path, value and line."""
    for key, value in mapping.value:
        yield f"{prefix}{key.value}", value, f"line {key.start_mark.line + 1}"
        if not prefix and isinstance(value, yaml.MappingNode):
            yield from entries(value, f"{key.value}.")


def apply_override(raw: RawRecipe, override: str) -> None:
    """Replace one of the file's values by `section.key=value`; the value is read as YAML."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        allowed = "section.key=value is allowed; for example train.steps=100"
        raw.mistakes[override] = f"{path}: {override!r} given, {allowed}"
        return
    try:
        raw.put(path, yaml.load(text, RecipeLoader), f"override {override}")  # RecipeLoader is a SafeLoader
    except NOT_YAML as error:
        allowed = f"YAML is allowed; put it in quotes ({in_one_line(error)})"
        raw.mistakes[path] = f"{path}: {text!r} given, {allowed}"


def add_schema_mistake(raw: RawRecipe, details: ErrorDetails) -> None:
    """Add one pydantic error to the report, in the report's words."""
    section, *inside = map(str, details["loc"])
    kind = inside.pop(0) if inside and inside[0] in recipe_sections().get(section, {}) else ""
    if details["type"].startswith("union_tag"):
        inside = ["kind"]
    path = ".".join([section, *inside[:1]])  # a bad list item is reported as the whole list
    known = recipe_fields().get(path)
    if details["type"] == "extra_forbidden":
        raw.add_mistake(path, unknown_key(path, kind))
    elif details["type"] == "value_error":  # from a validator of one field or of a whole section
        raw.add_mistake(path, str(details["ctx"]["error"]))
    elif known is None:
        keys = ", ".join(section_keys(path))
        raw.add_mistake(path, f"a section is allowed, with keys of {keys}; write them below `{path}:`, one per line")
    else:
        advice = "add it" if raw.given(path) == "nothing" else "change it"
        given = details.get("ctx", {}).get("tag", details["input"])
        if isinstance(given, str) and (near := difflib.get_close_matches(given, known.choices, n=1)):
            advice = f"did you mean {near[0]}?"
        elif known.default is not None:
            advice += f", or leave it out for the default, {known.default}"
        raw.add_mistake(path, f"{known.allowed} is allowed; {advice}")


def unknown_key(path: str, kind: str) -> str:
    """The message for a key that is not in the schema: the allowed keys and what was probably meant."""
    section, _, key = path.partition(".") if "." in path else ("", "", path)
    keys = section_keys(section, kind)
    if path in recipe_fields():
        others = " or ".join(other for other in recipe_sections()[section] if key in section_keys(section, other))
        return f"but kind {kind} allows only {', '.join(keys)}; remove it, or choose kind {others}"
    elsewhere = [other for other in recipe_fields() if other.rpartition(".")[2] == key]
    meant = difflib.get_close_matches(key, keys, n=1) or elsewhere
    advice = f"did you mean {' or '.join(meant)}?" if meant else "remove it"
    return f"but there is no such key, only {', '.join(keys)} are allowed; {advice}"


def in_one_line(error: Exception) -> str:
    """A YAML error in one line, without the excerpt of the file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
