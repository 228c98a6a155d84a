"""Show how a model can be decoded: with trees of draft tokens, with chains, without drafts, or not at all.

    headstart targets                       # every model type that was tried, by how it decodes
    headstart targets qwen3_next            # one model type
    headstart targets path/to/model         # a model's folder, its config.json, or a GGUF file
    headstart targets Qwen/Qwen3-8B         # a model on the hub; only its config.json is fetched

No weights are read. How a model type decodes was found with a tiny random model (docs/targets.md has the whole table).
Loading a model tries its own weights in the same way, and that trial decides.
"""

import json
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TABLE = Path(__file__).with_name("families.json")  # which `benchmarks/target_families.py --write` makes
LINE_WIDTH, LABEL_WIDTH = 119, 14
# What each method means to users, in the order of the page; the last three are outcomes without a method.
METHODS = {
    "trees": "one pass of the target verifies a tree of draft tokens",
    "chains": "one pass of the target verifies one chain of draft tokens",
    "plain": "drafts nothing: the target writes one token per pass",
    "own cache": "one pass verifies one chain, in the model's own cache; the rows of a batch run one after the other",
    "own cache, plain": "drafts nothing, in the model's own cache; the rows of a batch run one after the other",
    "refused": "cannot be a target: loading it raises a ValueError that names the difference",
    "wrong": "must not be used: it wrote another text, or the process failed",
    "not tried": "was not tried; loading the model tries its weights",
}
HEADS = {
    "yes": "can be trained for it",
    "on text alone": "can be trained for it, on text alone: images and sounds are not read",
    None: "training was not tried; a harvest checks it before its first sample",
}
SAME = "same"
NOT_TARGETS = ("refused", "wrong", "not tried")


@dataclass(frozen=True)
class Family:
    """What a tiny random model of one model type did."""

    method: str  # a key of METHODS
    why: str | None = None  # why nothing better, where the method itself does not say it
    harvest: str | None = None  # whether heads can be trained: yes, on text alone, or why not; None: not tried
    decoder: str | None = None  # the model type of its language model, if it is another
    images: str | None = None  # SAME: texts after images are those of its own `generate`; else why not
    bits: str | None = None  # SAME, or the first operation that gives a token other bits in another pass

    @property
    def is_target(self) -> bool:
        return self.method not in NOT_TARGETS


@dataclass(frozen=True)
class FamilyTable:
    """Families by model type, tried with one version of transformers on one day."""

    transformers: str
    date: str
    families: dict[str, Family]

    @classmethod
    def packaged(cls) -> Self:
        table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
        families = {name: Family(**fields) for name, fields in table["families"].items()}
        return cls(table["transformers"], table["date"], families)

    @property
    def source(self) -> str:
        return f"transformers {self.transformers}, tried with tiny random models on {self.date}"

    def of(self, model_type: str) -> Family:
        """The family of a model type; a type that the table lacks was not tried."""
        absent = Family("not tried", f"transformers {self.transformers} had no such model type")
        return self.families.get(model_type, absent)

    def by_method(self) -> dict[str, list[str]]:
        """The model types of each method that occurs."""
        names = {
            method: [name for name in sorted(self.families) if self.of(name).method == method] for method in METHODS
        }
        return {method: listed for method, listed in names.items() if listed}


def main(arguments: Namespace) -> None:
    name, table = arguments.name, FamilyTable.packaged()
    print("\n".join(overview(table) if name is None else in_lines(name, table)))


def overview(table: FamilyTable) -> Iterator[str]:
    """Every model type of the table, by how it decodes."""
    yield f"{len(table.families)} model types of {table.source}"
    for method, names in table.by_method().items():
        yield f"\n{method} ({len(names)}): {METHODS[method]}"
        yield textwrap.fill(
            ", ".join(names), LINE_WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )


def in_lines(name: str, table: FamilyTable) -> Iterator[str]:
    """The description of one model, label by label."""
    for label, text in description(name, table):
        first, later = label.ljust(LABEL_WIDTH), " " * LABEL_WIDTH
        yield textwrap.fill(text, LINE_WIDTH, initial_indent=first, subsequent_indent=later)


def description(name: str, table: FamilyTable) -> Iterator[tuple[str, str]]:
    """Labels with their texts. `name` is a folder, its config.json, a name on the hub, or a model type.

    Raises ValueError for any other.
    """
    from headstart import target_description as model  # loads torch, which an overview can do without

    model_type = model.find_type(name)
    family = table.of(model_type)
    yield "model type", model_type
    yield "decodes by", f"{family.method}: {METHODS[family.method]}"
    if family.why is not None:
        yield "because", family.why
    if model_type not in model.MODEL_TYPES:
        yield "code", "not in this transformers; loading the model with target.trust_remote_code=true tries it"
        return
    if family.is_target or family.method == "not tried":
        if family.harvest in HEADS:
            yield "heads", HEADS[family.harvest]
            yield "exports", model.engines(family.decoder or model_type)
        else:
            yield "heads", f"cannot be trained for it: {str(family.harvest).removeprefix('no: ')}"
    if family.images is not None:
        yield "images", "are read" if family.images == SAME else family.images
    if family.bits is not None:
        holds = "a token has the same ones in every pass, in bfloat16 on a CPU"
        yield "bits", holds if family.bits == SAME else f"a token's depend on the pass: {family.bits}"
    yield "known from", f"{table.source}; loading a model tries its own weights"
