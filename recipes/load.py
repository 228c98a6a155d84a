"""Load a recipe: a YAML file plus `section.key=value` overrides, with all mistakes reported at once."""

import difflib
import re
import reprlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headstart.common.remote import without_secrets
from headstart.recipes.checks import file_mistakes, recipe_mistakes
from headstart.recipes.fields import in_yaml, recipe_fields, recipe_sections, section_keys
from headstart.recipes.schema import Recipe
from headstart.recipes.values import Section

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # errors of PyYAML; a number of 5000 digits is a ValueError


class RecipeError(ValueError):
    """A recipe that cannot be used; the message lists every mistake, one per line."""


class RecipeLoader(yaml.SafeLoader):
    """YAML 1.1 with the numbers of YAML 1.2, and without dates, which no recipe needs.

    So 1e-4 is a number, while 010 and 1:30 are text, which YAML 1.1 would silently take for 8 and 90.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 (how PyYAML extends a loader)
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":float", ":int", ":timestamp"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"(?:[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)
SHOWN = 60  # characters of a value in a message


SHORT = reprlib.Repr()  # looks no deeper than a message can show: nested aliases may stand for billions of values
SHORT.maxlevel, SHORT.maxlist, SHORT.maxdict = 4, 10, 10
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 2 * SHOWN


@dataclass
class RawRecipe:
    """A recipe before validation: the values given, where each was given, and the mistakes found so far."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)  # section.key -> "line 3" or "override section.key=value"
    mistakes: list[str] = field(default_factory=list)

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
        if line not in self.mistakes:  # two bad items in one list count as one mistake
            self.mistakes.append(line)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a YAML recipe and apply the overrides; raises RecipeError listing every mistake."""
    if isinstance(overrides, str):  # it would be read letter by letter
        allowed = "a list of texts is allowed; write load_recipe(path, ['train.steps=100'])"
        raise RecipeError(f"overrides: {overrides!r} given, {allowed}")
    raw = read_recipe_file(Path(path))
    for override in overrides:
        apply_override(raw, override)
    recipe = None
    try:
        recipe = Recipe.model_validate(raw.values)
        sections = dict(recipe)
    except ValidationError as error:
        for details in error.errors():
            add_schema_mistake(raw, details)
        sections = valid_sections(raw.values, {details["loc"][0] for details in error.errors()})
    for field_path, allowed_and_advice in (*file_mistakes(raw.values.get("data")), *recipe_mistakes(sections)):
        raw.add_mistake(field_path, allowed_and_advice)
    if recipe is None or raw.mistakes:
        count = "1 mistake" if len(raw.mistakes) == 1 else f"{len(raw.mistakes)} mistakes"
        raise RecipeError("\n  ".join([f"{path}: {count}", *raw.mistakes]))
    return recipe


def valid_sections(values: dict[str, Any], invalid: Collection[object]) -> dict[str, Section]:
    """The sections that are valid, although the recipe is not."""
    sections = {}
    for name, kinds in recipe_sections().items():
        if name not in invalid:
            section = values.get(name, {})
            sections[name] = kinds[section.get("kind", "")].model_validate(section)
    return sections


def read_recipe_file(path: Path) -> RawRecipe:
    """Read a recipe file's values and their line numbers; raises RecipeError if it is not a YAML mapping."""
    raw = RawRecipe()
    try:
        loader = RecipeLoader(path.read_text(encoding="utf-8"))
        document = loader.get_single_node()
        if document is None:  # an empty file: every required field is reported later
            return raw
        if not isinstance(document, yaml.MappingNode):
            raise RecipeError(f"{path}: not a recipe; write sections, each with `key: value` lines below it")
        repeated = list(record_lines(document, raw.places))
        raw.values = with_text_keys(loader.construct_document(document))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; give the path of a recipe, such as recipes/tiny.yaml") from error
    except RecipeError:
        raise
    except NOT_YAML as error:
        raise RecipeError(f"{path}: not YAML: {in_one_line(error)}; fix the file there") from error
    for name in recipe_sections():
        if raw.values.get(name, ...) is None:  # a section whose keys are all commented out
            raw.values[name] = {}
        elif isinstance(raw.values.get(name), dict):
            raw.values[name] = with_text_keys(raw.values[name])
    for key, line in repeated:
        raw.mistakes.append(f"{key}: given in {raw.places[key]} and in {line}, once is allowed; remove one")
    return raw


def record_lines(mapping: yaml.MappingNode, places: dict[str, str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Record the line of every key, section keys included; yields each repeated key with its second line."""
    for key, value in mapping.value:
        path, line = f"{prefix}{key.value}", f"line {key.start_mark.line + 1}"
        if path in places and key.value != "<<":  # `<<` merges another mapping and may be repeated
            yield path, line
        places.setdefault(path, line)
        if not prefix and isinstance(value, yaml.MappingNode):
            yield from record_lines(value, places, f"{path}.")


def apply_override(raw: RawRecipe, override: str) -> None:
    """Replace one of the file's values by `section.key=value`; the value is read as YAML."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raw.mistakes.append(f"{path}: {override!r} given, section.key=value is allowed; for example train.steps=100")
        return
    raw.places[path] = f"override {override}"
    section, dot, key = path.partition(".")
    try:
        value = yaml.load(text, RecipeLoader)  # RecipeLoader is a SafeLoader
    except NOT_YAML as error:
        raw.mistakes.append(f"{path}: {text!r} given, YAML is allowed; put it in quotes ({in_one_line(error)})")
        return
    if not dot:
        raw.values[section] = value
    elif isinstance(holder := raw.values.setdefault(section, {}), dict):
        holder[key] = value
        raw.places.setdefault(section, f"override {override}")


def add_schema_mistake(raw: RawRecipe, details: ErrorDetails) -> None:
    """Add one pydantic error to the report, in the report's words."""
    section, *inside = map(str, details["loc"])
    kind = inside.pop(0) if inside and inside[0] in recipe_sections().get(section, {}) else ""
    if details["type"].startswith("union_tag"):
        inside = ["kind"]
    path = ".".join([section, *inside[:1]])  # a bad list item is reported as the whole list
    known = recipe_fields().get(path)
    if details["type"] in ("none_required", "too_short") and any(line.startswith(f"{path}: ") for line in raw.mistakes):
        return  # what is wrong with the value, or with each item of the list, has been said
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
    section, dot, key = path.partition(".")
    section, key = (section, key) if dot else ("", section)
    keys = section_keys(section, kind)
    if path in recipe_fields():
        others = " or ".join(other for other in recipe_sections()[section] if key in section_keys(section, other))
        return f"but kind {kind} allows only {', '.join(keys)}; remove it, or choose kind {others}"
    elsewhere = [other for other in recipe_fields() if other.rpartition(".")[2] == key]
    meant = difflib.get_close_matches(key, keys, n=1) or elsewhere
    advice = f"did you mean {' or '.join(meant)}?" if meant else "remove it"
    return f"but there is no such key, only {', '.join(keys)} are allowed; {advice}"


def with_text_keys(mapping: dict[Any, Any]) -> dict[str, Any]:
    """Convert keys to text, so YAML keys such as `1:` and `on:` are reported as unknown keys."""
    return {str(key): value for key, value in mapping.items()}


def in_one_line(error: Exception) -> str:
    """A YAML error in one line, without the excerpt of the file."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
