"""Read the rows of a data source: JSONL, parquet, plain text, or a Hugging Face dataset on disk or on the hub.

Formats that can run code are refused: pickles and dataset loading scripts.
"""

import codecs
import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any

from headstart.common.errors import wrong_value
from headstart.data_pipelines.stages.stage import Json, file_digest
from headstart.recipes.schema import HUB_PREFIX, SELF, DataSection

PLAIN_FORMATS = ("parquet", "json", "text", "arrow")  # formats allowed for hub datasets
BATCH = 256  # rows of Arrow data in memory at once
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # UTF-32 starts with the first of them too


class BadRow(ValueError):
    """An unusable row: `kind` is a short category for counting, the message says why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True)
class Row:
    """One row of a source, or the reason that it could not be read.

    `line` is its line in a file of lines, else its place among the rows; both count from 1, and `counts` says which.
    """

    line: int
    fields: Json | BadRow
    counts: str = "line"  # or row

    def read(self) -> Json:
        """The fields; raises BadRow if the row could not be read."""
        if isinstance(self.fields, BadRow):
            raise self.fields
        return self.fields


def read_rows(source: str) -> Iterator[Row]:
    """Read every row of a source, unreadable ones as BadRow; raises ValueError for an unknown kind of source."""
    path = Path(source)
    if source.startswith(HUB_PREFIX):
        return dataset_rows(hub_dataset(source.removeprefix(HUB_PREFIX)))
    if path.is_dir():
        return dataset_rows(disk_dataset(path))
    readers = {".jsonl": json_rows, ".json": json_rows, ".parquet": parquet_rows, ".txt": text_rows}
    if path.suffix.lower() not in readers:
        allowed = f"a file that ends in {', '.join(readers)}, a dataset folder or {HUB_PREFIX}org/name:split is"
        raise wrong_value("data", source, allowed, "convert it to one of them")
    return readers[path.suffix.lower()](path)


def most_samples(data: DataSection, enough: int | None = None) -> int:
    """data.num_prompts, or the readable rows of data.prompts if these are fewer; counting stops at `enough`.

    The rows of a hub dataset are not counted, nor given conversations, one of which can give several samples.
    """
    if data.responses == "given" or data.prompts == SELF or data.prompts.startswith(HUB_PREFIX):
        return data.num_prompts
    readable = (row for row in read_rows(data.prompts) if not isinstance(row.fields, BadRow))
    return sum(1 for _ in islice(readable, min(data.num_prompts, enough or data.num_prompts)))


def source_digest(source: str) -> str:
    """The identity of a source: a digest of its files' content, or the name of a hub dataset."""
    path = Path(source)
    if source.startswith(HUB_PREFIX):
        return source
    if path.is_file():
        return file_digest(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    named = "".join(f"{file.relative_to(path).as_posix()} {file_digest(file)}\n" for file in files)
    return hashlib.sha256(named.encode()).hexdigest()


def json_rows(path: Path) -> Iterator[Row]:
    """One JSON object on each line, or a single JSON array of objects, indented or not."""
    with path.open("rb") as file:
        numbered = enumerate(lines_of(path, file), start=1)
        first = next(((number, line) for number, line in numbered if line.strip()), None)
        if first is None:
            return
        if first[1].lstrip().startswith(b"[") and (listed := json_array(path, first[1])) is not None:
            yield from (Row(number, row, "row") for number, row in enumerate(listed, start=1))
            return
        for number, line in chain([first], numbered):
            if line.strip():
                yield Row(number, json_object(line))


def lines_of(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a UTF-8 file, without the mark that some editors write first; raises ValueError for UTF-16."""
    first = file.readline()
    if first.startswith(UTF_16_MARKS):
        raise ValueError(f"data: {path} is UTF-16 text, UTF-8 is allowed; save it as UTF-8 without changing its rows")
    yield first.removeprefix(codecs.BOM_UTF8)
    yield from file


def json_array(path: Path, first: bytes) -> list[Json | BadRow] | None:
    """The rows of a file that is one JSON array; None if `first`, its first line, is a whole row by itself."""
    content = path.read_bytes()
    try:
        listed = json.loads(content.decode("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeError, RecursionError) as error:
        if not isinstance(json_value(first), BadRow):
            return None
        problem = f"data: {path} starts as a JSON array but cannot be read as one ({error})"
        allowed = "a whole array or one JSON object on each line is allowed, so fix the file there or write it again"
        raise ValueError(f"{problem}; {allowed}") from error
    return [checked_object(row, has_escapes=rb"\u" in content) for row in listed]


def json_object(line: bytes) -> Json | BadRow:
    row = json_value(line)
    return row if isinstance(row, BadRow) else checked_object(row, has_escapes=rb"\u" in line)


def json_value(line: bytes) -> object | BadRow:
    try:
        return json.loads(line.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeError, RecursionError) as error:
        return BadRow("unreadable", f"not valid JSON ({error}); one JSON object on each line is needed")


def checked_object(row: object, has_escapes: bool) -> Json | BadRow:
    """The row if it is a JSON object of real text: an escape can hold half of a surrogate pair, which is not text."""
    if not isinstance(row, dict):
        return BadRow("unreadable", f"the row is {in_words(row)}, a JSON object is needed")
    try:
        if has_escapes:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        return BadRow("unreadable", f"not text ({error})")
    return row


def in_words(value: object) -> str:
    """A JSON value as a message names it."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"a number ({value})"
    for kind, name in ((str, "text"), (list, "a list"), (dict, "an object"), (bytes, "bytes")):
        if isinstance(value, kind):
            return name
    assert isinstance(value, NotJson), value
    return f"Arrow data that JSON cannot hold ({value.why})"


def text_rows(path: Path) -> Iterator[Row]:
    """Each line that is not blank is one text."""
    with path.open("rb") as file:
        for number, line in enumerate(lines_of(path, file), start=1):
            if line.strip():
                try:
                    yield Row(number, {"text": line.decode("utf-8").rstrip("\r\n")})
                except UnicodeDecodeError as error:
                    yield Row(number, BadRow("unreadable", f"not UTF-8 ({error})"))


def parquet_rows(path: Path) -> Iterator[Row]:
    parquet, errors = optional_library("pyarrow.parquet"), optional_library("pyarrow").ArrowException
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=BATCH)
        yield from good_rows(batches)
    except errors as error:
        needed = "a whole parquet file is needed, so write it again"
        raise ValueError(f"data: {path} cannot be read as parquet ({error}); {needed}") from error


def good_rows(batches: Iterable[Any]) -> Iterator[Row]:
    """The rows of Arrow tables as the JSON that they were written from; NotJson where JSON cannot hold a value.

    Arrow gives every struct the keys of all rows, and null where a row had no such key. A key that is null is therefore
    taken as not there; nulls in lists and maps, and in text of the type arrow.json, are the row's own.
    """
    numbers = count(1)
    for table in batches:
        columns = [json_values(column) for column in table.columns]
        for values in zip(*columns, strict=True):
            yield Row(next(numbers), dict(zip(table.schema.names, values, strict=True)), "row")


def dataset_rows(dataset: Any) -> Iterator[Row]:
    return good_rows(dataset.with_format("arrow").iter(batch_size=BATCH))


def disk_dataset(folder: Path) -> Any:
    """Load a folder written by `save_to_disk`; from several splits, the one named train or the only one."""
    datasets = optional_library("datasets")
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # the readers raise many types
        advice = "give a folder written by save_to_disk, or a file"
        raise ValueError(f"data: {folder} is not a dataset ({in_one_line(error)}); {advice}") from error
    if not isinstance(dataset, dict):
        return dataset
    if "train" not in dataset and len(dataset) > 1:
        raise ValueError(f"data: {folder} has splits {', '.join(dataset)}; give the folder of one split")
    return dataset.get("train", next(iter(dataset.values())))


def hub_dataset(name: str) -> Any:
    """Load `org/name:split` (default split: train) from the hub, if it is stored in a format without code."""
    datasets = optional_library("datasets")
    name, _, split = name.partition(":")
    try:
        builder = datasets.load_dataset_builder(name)
    except Exception as error:  # the hub client and the readers raise many types
        allowed = f"{HUB_PREFIX}org/name:split is allowed, so check the name and the network"
        raise ValueError(f"data: {HUB_PREFIX}{name} cannot be loaded ({in_one_line(error)}); {allowed}") from error
    stored_as = type(builder).__module__.rpartition(".")[2]
    if stored_as not in PLAIN_FORMATS:
        allowed = f"{', '.join(PLAIN_FORMATS)} are allowed; convert it"
        raise ValueError(f"data: {HUB_PREFIX}{name} is stored as {stored_as}, {allowed}")
    try:
        builder.download_and_prepare()
        return builder.as_dataset(split=split or "train")
    except Exception as error:
        wrong = f"data: split {split or 'train'} of {HUB_PREFIX}{name} cannot be loaded ({in_one_line(error)})"
        raise ValueError(f"{wrong}; give one of its splits, as in {HUB_PREFIX}{name}:train") from error


def in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def optional_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"data: this format needs {name}; run pip install -e '.[data]'") from error


@dataclass(frozen=True)
class NotJson:
    """Stands for a value that JSON cannot hold, and says why."""

    why: str


def json_values(column: Any) -> Iterator[Any]:
    """Each value of a column as JSON, or as NotJson."""
    for scalar in column:
        try:
            yield as_json(scalar.as_py(), column.type)
        except (ValueError, OverflowError, RecursionError) as error:  # raised by `as_json`, json or pyarrow
            yield NotJson(str(error))


def as_json(value: Any, kind: Any) -> Any:
    """A value of this Arrow type, as `to_pylist` gives it, as JSON; raises ValueError for what JSON cannot hold."""
    if value is None or isinstance(value, bool | int | float | bytes):
        return value
    pyarrow = importlib.import_module("pyarrow")
    types = pyarrow.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return as_json(value, kind.value_type)
    if isinstance(value, str):
        is_json = isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == "arrow.json"
        return parsed_json(value) if is_json else value
    if types.is_struct(kind):
        return {field.name: as_json(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if types.is_map(kind) and all(isinstance(key, str) for key, _ in value):
        return {key: as_json(item, kind.item_type) for key, item in value}
    if any(is_list(kind) for is_list in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        return [as_json(item, kind.value_type) for item in value]
    raise ValueError(f"type {kind}")


def parsed_json(text: str) -> Any:
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair, which is not text
    return value
