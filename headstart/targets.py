"""Say how headstart decodes a model: with trees of draft tokens, with chains, without drafts, or not at all.

    headstart targets                       # every model type that was tried, by how it decodes
    headstart targets qwen3_next            # one model type, with the sizes of its default configuration
    headstart targets path/to/model         # a model's folder, or its config.json
    headstart targets Qwen/Qwen3-8B         # a model on the hub; only its config.json is fetched

No weights are read. How a model type decodes was found with a tiny random model, and stands in a table; docs/targets.md
has all of it and explains the words. What the layers keep in memory is computed from the configuration. When a model is
loaded, its own weights are tried in the same way, and that trial decides.
"""

import textwrap
from collections.abc import Iterator, Sequence

from headstart.common.errors import errors_as_messages
from headstart.options import targets_options
from headstart.target_families import WAYS, FamilyTable

WIDTH, INDENT = 119, 14


def main(argv: Sequence[str] | None = None) -> None:
    name = targets_options(__doc__, argv).name
    with errors_as_messages():
        table = FamilyTable.packaged()
        print("\n".join(overview(table) if name is None else in_lines(name, table)))


def overview(table: FamilyTable) -> Iterator[str]:
    """Every model type of the table, by how it decodes."""
    yield f"{len(table.families)} model types of {table.source}"
    for way, names in table.by_way().items():
        yield f"\n{way} ({len(names)}): {WAYS[way]}"
        yield textwrap.fill(
            ", ".join(names), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )


def in_lines(name: str, table: FamilyTable) -> Iterator[str]:
    """What is known of one model, label by label."""
    from headstart.target_description import description  # loads torch, which an overview can do without

    for label, text in description(name, table):
        yield textwrap.fill(text, WIDTH, initial_indent=label.ljust(INDENT), subsequent_indent=" " * INDENT)
