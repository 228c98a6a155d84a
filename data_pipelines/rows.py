"""Read the rows of a data source: JSONL, parquet, plain text, or a Hugging Face dataset on disk or on the hub.

Formats that can run code are refused: pickles and dataset loading scripts.
"""

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.data_pipelines.stage import Json, file_digest
from headstart.recipes.schema import HUB_PREFIX

PLAIN_FORMATS = ("parquet", "json", "text", "arrow")  # formats allowed for hub datasets


class BadRow(ValueError):
    """An unusable row: `kind` is a short category for counting, the message says why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True)
class Row:
    """One row of a source, or the reason that it could not be read; `line` counts from 1."""

    line: int
    fields: Json | BadRow


def read_rows(source: str) -> Iterator[Row]:
    """Read every row of a source, unreadable ones as BadRow; raises ValueError for an unknown kind of source."""
    path = Path(source)
    if source.startswith(HUB_PREFIX):
        return good_rows(hub_dataset(source.removeprefix(HUB_PREFIX)))
    if path.is_dir():
        return good_rows(disk_dataset(path))
    readers = {".jsonl": jsonl_rows, ".json": jsonl_rows, ".parquet": parquet_rows, ".txt": text_rows}
    if path.suffix not in readers:
        raise ValueError(
            f"data: {source} given, a file that ends in {', '.join(readers)}, a dataset folder or "
            f"{HUB_PREFIX}org/name:split is allowed; convert it to one of them"
        )
    return readers[path.suffix](path)


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


def jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Row(number, json_object(line))


def json_object(line: bytes) -> Json | BadRow:
    try:
        row = json.loads(line.decode("utf-8"))
        if rb"\u" in line:
            # An escape can hold half of a surrogate pair, which is not text.
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except (json.JSONDecodeError, UnicodeError, RecursionError) as error:
        return BadRow("broken", f"not JSON ({error})")
    return row if isinstance(row, dict) else BadRow("broken", f"{type(row).__name__} given, a JSON object is needed")


def text_rows(path: Path) -> Iterator[Row]:
    """Each line that is not blank is one text."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield Row(number, {"text": line.decode("utf-8").rstrip("\r\n")})
                except UnicodeDecodeError as error:
                    yield Row(number, BadRow("broken", f"not UTF-8 ({error})"))


def parquet_rows(path: Path) -> Iterator[Row]:
    batches = optional_library("pyarrow.parquet").ParquetFile(path).iter_batches(batch_size=256)
    return good_rows(row for batch in batches for row in batch.to_pylist())


def good_rows(rows: Iterable[Any]) -> Iterator[Row]:
    return (Row(number, dict(row)) for number, row in enumerate(rows, start=1))


def disk_dataset(folder: Path) -> Any:
    """Load a folder written by `save_to_disk`; from several splits, the one named train or the only one."""
    datasets = optional_library("datasets")
    try:
        found = datasets.load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise ValueError(f"data: {folder} is not a dataset ({error}); give a folder written by save_to_disk") from error
    if not isinstance(found, dict):
        return found
    if "train" not in found and len(found) > 1:
        raise ValueError(f"data: {folder} has splits {', '.join(found)}; give the folder of one split")
    return found.get("train", next(iter(found.values())))


def hub_dataset(name: str) -> Any:
    """Load `org/name:split` (default split: train) from the hub, if it is stored in a format without code."""
    datasets = optional_library("datasets")
    name, _, split = name.partition(":")
    try:
        builder = datasets.load_dataset_builder(name)
    except Exception as error:  # the hub client and the readers raise many types
        raise ValueError(
            f"data: {HUB_PREFIX}{name} cannot be loaded ({type(error).__name__}: {error}); check the name"
        ) from error
    stored_as = type(builder).__module__.rpartition(".")[2]
    if stored_as not in PLAIN_FORMATS:
        raise ValueError(
            f"data: {HUB_PREFIX}{name} is stored as {stored_as}, {', '.join(PLAIN_FORMATS)} are allowed; convert it"
        )
    builder.download_and_prepare()
    return builder.as_dataset(split=split or "train")


def optional_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"data: this format needs {name}; run pip install -e '.[data]'") from error
