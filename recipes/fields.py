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
    allowed: str  # "a whole number > 0, or null"
    choices: tuple[str, ...]  # the allowed words of a field with fixed choices, else empty
    default: str | None  # as written in YAML; None if the field is required
    description: str


@cache
def recipe_sections() -> dict[str, dict[str, type[Section]]]:
    """The sections of a recipe by name, then by `kind`; a section with a single kind has the kind ""."""
    found: dict[str, dict[str, type[Section]]] = {}
    for name, field in Recipe.model_fields.items():
        for model in get_args(field.annotation) or (field.annotation,):
            if issubclass(model, Section):
                kind = get_args(model.model_fields["kind"].annotation)[0] if "kind" in model.model_fields else ""
                found.setdefault(name, {})[kind] = model
    return found


def head_kinds() -> dict[str, type[HeadSection]]:
    """The head sections by kind."""
    return {kind: model for kind, model in recipe_sections()["head"].items() if issubclass(model, HeadSection)}


def section_keys(name: str, kind: str | None = None) -> list[str]:
    """The keys of a section for one kind, or for all kinds if None; "" names the top level of a recipe."""
    kinds = recipe_sections().get(name, {"": Recipe})
    models = kinds.values() if kind is None else [kinds[kind]]
    return list(dict.fromkeys(key for model in models for key in model.model_fields))


@cache
def recipe_fields() -> dict[str, FieldInWords]:
    """Every field by its path, section.key or key at the top of a recipe, in schema order."""
    found: dict[str, FieldInWords] = {}
    everything: dict[str, dict[str, type[Section]]] = {"": {"": Recipe}, **recipe_sections()}
    for section, kinds in everything.items():
        schemas: dict[str, Any] = {kind: model.model_json_schema()["properties"] for kind, model in kinds.items()}
        for key in section_keys(section):
            path = f"{section}.{key}".lstrip(".")
            holders = [kind for kind in schemas if key in schemas[kind]]
            schema = schemas[holders[0]][key] | ({"enum": holders} if key == "kind" else {})
            if path in recipe_sections():
                continue
            default = in_yaml(schema["default"]) if "default" in schema else None
            only = " and ".join(", ".join(holders).rsplit(", ", 1))
            description = schema["description"] + (f" Only {only}." if len(holders) < len(kinds) else "")
            found[path] = FieldInWords(allowed_values(schema), tuple(schema.get("enum", ())), default, description)
    return found


def allowed_values(schema: dict[str, Any]) -> str:
    """The values that a field's JSON schema allows, in words."""
    if "anyOf" in schema:
        return ", or ".join(allowed_values(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if "const" in schema:
        return f"only {schema['const']}"
    if schema.get("additionalProperties") is True:
        return "names with their values"
    if "additionalProperties" in schema:
        return f"names, each with {allowed_values(schema['additionalProperties'])}"
    if "items" in schema:
        return f"a list of one or more, each {allowed_values(schema['items'])}"
    if schema["type"] == "string":
        return "a path" if schema.get("format") == "path" else "a string"
    bounds = [f"{sign} {schema[key]:.15g}" for key, sign in BOUNDS.items() if key in schema]
    return f"{KINDS[schema['type']]} {' and '.join(bounds)}".rstrip()


def in_yaml(value: object) -> str:
    """A value as written in a recipe."""
    return value if isinstance(value, str) else json.dumps(value)
