"""How each model type of transformers decodes as a target: the packaged table, and what its words mean to users.

`benchmarks/target_families.py --write` makes the table, families.json, from what tiny random models did.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TABLE = Path(__file__).with_name("families.json")

# What a way of decoding means, in the order of the page. The last three are no ways to decode.
WAYS = {
    "trees": "one pass of the target verifies a tree of draft tokens",
    "chains": "one pass of the target verifies one chain of draft tokens",
    "plain": "drafts nothing: the target writes one token per pass",
    "own cache": "one pass verifies one chain, in the model's own cache; the rows of a batch run one after the other",
    "own cache, plain": "drafts nothing, in the model's own cache; the rows of a batch run one after the other",
    "refused": "is no target: a ValueError names the difference when it is loaded",
    "wrong": "must not be used: it wrote another text, or the process failed",
    "not tried": "was not tried; loading the model tries its weights",
}
NOT_TARGETS = ("refused", "wrong", "not tried")


@dataclass(frozen=True)
class Family:
    """What a tiny random model of one model type did."""

    way: str  # a key of WAYS
    why: str | None = None  # why nothing better, where the way itself does not say it
    harvest: str | None = None  # whether heads can be trained: yes, on text alone, or why not; None: not tried
    decoder: str | None = None  # the model type of its language model, if it is another

    @property
    def is_target(self) -> bool:
        return self.way not in NOT_TARGETS


@dataclass(frozen=True)
class FamilyTable:
    """Families by model type, tried with one version of transformers on one day."""

    transformers: str
    date: str
    families: dict[str, Family]

    @classmethod
    def packaged(cls) -> Self:
        found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
        families = {name: Family(**fields) for name, fields in found["families"].items()}
        return cls(found["transformers"], found["date"], families)

    @property
    def source(self) -> str:
        return f"transformers {self.transformers}, tried with tiny random models on {self.date}"

    def of(self, model_type: str) -> Family:
        """The family of a model type; one that the table does not have was not tried."""
        absent = Family("not tried", f"it was no model type of transformers {self.transformers}")
        return self.families.get(model_type, absent)

    def by_way(self) -> dict[str, list[str]]:
        """The model types of each way that occurs."""
        found = {way: sorted(name for name, family in self.families.items() if family.way == way) for way in WAYS}
        return {way: names for way, names in found.items() if names}
