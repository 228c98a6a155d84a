"""Every recipe field described in words, generated from the schema, for error reports and --help."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from headstart.recipes.schema import Recipe
from headstart.recipes.schema_heads import HeadSection
from headstart.recipes.values import Section

KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class FieldInWords:
    path: str  # section.key, or key at the top of a recipe
    allowed: str  # "a whole number > 0, or null"
    choices: tuple[str, ...]  # the allowed words of a field with fixed choices, else empty
    default: str | None  # as written in YAML; None if the field is required
    description: str


@cache
def recipe_sections() -> dict[str, dict[str, type[Section]]]:
    """The sections of a recipe by name, then by `kind`; a section with a single kind has the kind ""."""
    found = {name: kinds_of(field.annotation) for name, field in Recipe.model_fields.items()}
    return {name: kinds for name, kinds in found.items() if kinds}


def kinds_of(annotation: Any) -> dict[str, type[Section]]:
    """The section types that a field of the recipe accepts, by kind; empty for a plain field."""
    models = [model for model in get_args(annotation) or (annotation,) if isinstance(model, type)]
    sections = [model for model in models if issubclass(model, Section)]
    if len(sections) == 1:
        return {"": sections[0]}
    return {get_args(section.model_fields["kind"].annotation)[0]: section for section in sections}


def head_kinds() -> dict[str, type[HeadSection]]:
    """The head sections by kind."""
    return {kind: model for kind, model in recipe_sections()["head"].items() if issubclass(model, HeadSection)}


def section_keys(name: str, kind: str | None = None) -> list[str]:
    """The keys of a section for one kind, or for all kinds if None; "" names the top level of a recipe."""
    if not name:
        return list(Recipe.model_fields)
    kinds = recipe_sections()[name]
    models = kinds.values() if kind is None else [kinds[kind]]
    return list(dict.fromkeys(key for model in models for key in model.model_fields))


@cache
def recipe_fields() -> dict[str, FieldInWords]:
    """Every field by its path, in schema order."""
    schemas = {name: schema for name, schema in properties(Recipe).items() if name not in recipe_sections()}
    for section in recipe_sections():
        schemas |= {f"{section}.{name}": schema for name, schema in section_properties(section).items()}
    return {path: field_in_words(path, schema) for path, schema in schemas.items()}


def section_properties(name: str) -> dict[str, dict[str, Any]]:
    """The JSON schemas of a section's fields, all its kinds merged."""
    kinds = {kind: properties(model) for kind, model in recipe_sections()[name].items()}
    merged = {}
    for key in section_keys(name):
        holders = [kind for kind in kinds if key in kinds[kind]]
        merged[key] = dict(kinds[holders[0]][key])
        if key == "kind":
            merged[key] = {"enum": holders, "description": merged[key]["description"]}
        elif len(holders) < len(kinds):
            merged[key]["description"] += f" Only {', '.join(holders[:-1])}{' and ' * (len(holders) > 1)}{holders[-1]}."
    return merged


def properties(model: type[Section]) -> dict[str, dict[str, Any]]:
    """The JSON schemas of a section's fields, by name."""
    return dict(model.model_json_schema()["properties"])


def field_in_words(path: str, schema: dict[str, Any]) -> FieldInWords:
    default = in_yaml(schema["default"]) if "default" in schema else None
    return FieldInWords(path, allowed_values(schema), tuple(schema.get("enum", ())), default, schema["description"])


def allowed_values(schema: dict[str, Any]) -> str:
    """The values that a field's JSON schema allows, in words."""
    if "anyOf" in schema:
        return ", or ".join(allowed_values(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return f"only {schema['const']}"
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if schema.get("additionalProperties") is True:
        return "names with their values"
    if "additionalProperties" in schema:
        return f"names, each with {allowed_values(schema['additionalProperties'])}"
    if "items" in schema:
        return f"a list of one or more, each {allowed_values(schema['items'])}"
    if schema["type"] == "string":
        return "a path" if schema.get("format") == "path" else "a string"
    bounds = [f"{sign} {bound_in_words(schema[key])}" for key, sign in BOUNDS.items() if key in schema]
    return f"{KINDS[schema['type']]} {' and '.join(bounds)}".rstrip()


def bound_in_words(bound: float) -> str:
    """A bound without rounding: 2147483648 rather than 2.14748e+09."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def in_yaml(value: object) -> str:
    """A value as written in a recipe."""
    return value if isinstance(value, str) else json.dumps(value)
