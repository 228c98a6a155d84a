"""Say how headstart decodes a model: with trees of draft tokens, with chains, without drafts, or not at all.

    headstart targets                       # every model type that was tried, by how it decodes
    headstart targets qwen3_next            # one model type, with the sizes of its default configuration
    headstart targets path/to/model         # a model's folder, or its config.json
    headstart targets Qwen/Qwen3-8B         # a model on the hub; only its config.json is fetched

No weights are read. How a model type decodes was found with a tiny random model, and stands in a table; docs/targets.md
has all of it and explains the words. What the layers keep in memory is computed from the configuration. When a model is
loaded, its own weights are tried in the same way, and that trial decides.
"""

from headstart.options import targets_options

if __name__ == "__main__":
    targets_options(__doc__)  # --help and mistakes end the process here, before torch is loaded

import difflib
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from headstart.common.errors import errors_as_messages, wrong_value
from headstart.common.files import read_json
from headstart.inference.targets.families import WAYS, Family, FamilyTable

WIDTH, INDENT = 120, 14
TRAINED = {
    "yes": "can be trained for it",
    "on text alone": "can be trained for it, on text alone: it also reads images or sounds, which headstart does not",
    None: "not tried; harvesting checks it before the first sample",
}


def main(argv: Sequence[str] | None = None) -> None:
    name = targets_options(__doc__, argv).name
    with errors_as_messages():
        table = FamilyTable.packaged()
        print("\n".join(overview(table) if name is None else description(name, table)))


def overview(table: FamilyTable) -> Iterator[str]:
    """Every model type of the table, by how it decodes."""
    yield f"{len(table.families)} model types of transformers {table.transformers}, tried on {table.date} with tiny random models"
    for way, names in table.by_way().items():
        yield f"\n{way} ({len(names)}): {WAYS[way]}"
        yield textwrap.fill(", ".join(names), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def description(name: str, table: FamilyTable) -> Iterator[str]:
    """What is known of one model, in lines."""
