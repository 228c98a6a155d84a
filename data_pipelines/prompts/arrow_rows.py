"""Rows of Arrow tables (parquet, Hugging Face datasets) as the JSON that they were written from.

Arrow gives every struct the keys of all rows, and null where a row had no such key. A key that is null is therefore
taken as not there; nulls in lists and maps, and in text of the type arrow.json, are the row's own.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from headstart.data_pipelines.stages.stage import Json

Reader = Callable[[Any], Any]  # from a value that is not null, as `to_pylist` gives it


@dataclass(frozen=True)
class NotJson:
    """Stands for a value that JSON cannot hold, and says why."""

    why: str


def arrow_rows(table: Any) -> Iterator[Json]:
    """The rows of a table or batch; a column's value is NotJson if JSON cannot hold all of it."""
    columns = [json_values(column) for column in table.columns]
    return (dict(zip(table.schema.names, values, strict=True)) for values in zip(*columns, strict=True))


def json_values(column: Any) -> Iterator[Any]:
    """Each value of a column as JSON, or as NotJson."""
    read = reader_of(column.type)
    for scalar in column:
        try:
            yield read(scalar.as_py()) if scalar.is_valid else None
        except (ValueError, OverflowError, RecursionError) as error:  # raised by a reader, json or pyarrow
            yield NotJson(str(error))


def reader_of(kind: Any) -> Reader:
    """How to read values of an Arrow type; the reader raises ValueError for what JSON cannot hold."""
    pyarrow = importlib.import_module("pyarrow")
    types = pyarrow.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return reader_of(kind.value_type)
    if types.is_struct(kind):
        fields = {field.name: reader_of(field.type) for field in kind}
        return lambda row: {name: read(row[name]) for name, read in fields.items() if row[name] is not None}
    if types.is_map(kind) and is_text(kind.key_type):
        read_item = or_null(reader_of(kind.item_type))
        return lambda pairs: {key: read_item(item) for key, item in pairs}
    if any(is_list(kind) for is_list in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        read_item = or_null(reader_of(kind.value_type))
        return lambda items: [read_item(item) for item in items]
    if isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == "arrow.json":
        return from_json
    plain = (is_text, types.is_null, types.is_boolean, types.is_integer, types.is_floating)
    if any(is_plain(kind) for is_plain in plain):
        return lambda value: value
    return partial(refuse, kind)


def is_text(kind: Any) -> bool:
    types = importlib.import_module("pyarrow").types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def or_null(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def from_json(text: str) -> Any:
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair, which is not text
    return value


def refuse(kind: Any, value: Any) -> None:
    raise ValueError(f"type {kind}")
