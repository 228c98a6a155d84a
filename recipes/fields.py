"""The fields of a recipe in words, generated from the schema: for error reports and for --help."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from recipes.schema import Recipe, Section

KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class FieldInWords:
    path: str  # section.key, or key at the top of a recipe
    allowed: str  # "a whole number > 0, or null"
    choices: tuple[str, ...]  # every allowed word, where only some words are allowed
    default: str | None  # as written in YAML; None where the field must be given
    description: str


@cache
def recipe_sections() -> dict[str, type[Section]]:
    """The sections of a recipe by name."""
    annotations = {name: field.annotation for name, field in Recipe.model_fields.items()}
    return {name: kind for name, kind in annotations.items() if isinstance(kind, type) and issubclass(kind, Section)}


@cache
def recipe_fields() -> dict[str, FieldInWords]:
    """Every field by its path, in the order of the schema."""
    schemas = {name: schema for name, schema in properties(Recipe).items() if name not in recipe_sections()}
    for section, model in recipe_sections().items():
        schemas |= {f"{section}.{name}": schema for name, schema in properties(model).items()}
    return {path: field_in_words(path, schema) for path, schema in schemas.items()}


def properties(model: type[Section]) -> dict[str, dict[str, Any]]:
    """A model's fields as JSON schemas."""
    return dict(model.model_json_schema()["properties"])


def field_in_words(path: str, schema: dict[str, Any]) -> FieldInWords:
    default = in_yaml(schema["default"]) if "default" in schema else None
    return FieldInWords(path, allowed_values(schema), tuple(schema.get("enum", ())), default, schema["description"])


def allowed_values(schema: dict[str, Any]) -> str:
    """A field's JSON schema in words."""
    if "anyOf" in schema:
        return ", or ".join(allowed_values(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return f"only {schema['const']}"
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}, each {allowed_values(schema['prefixItems'][0])}"
    if "items" in schema:
        return f"a list of one or more, each {allowed_values(schema['items'])}"
    if schema["type"] == "string":
        return "a path" if schema.get("format") == "path" else "a text"
    bounds = [f"{sign} {schema[key]:g}" for key, sign in BOUNDS.items() if key in schema]
    return f"{KINDS[schema['type']]} {' and '.join(bounds)}".rstrip()


def in_yaml(value: object) -> str:
    """A default as one would write it in a recipe."""
    return value if isinstance(value, str) else json.dumps(value)
