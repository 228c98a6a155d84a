"""Estimate what a head for Llama-3.3-70B costs on 8, 64 and 512 H100s, and which cards fit the Llama recipes.

    python benchmarks/scale.py

Two tables: the costs, which docs/scale.md explains, and the memory, of docs/training.md. The speeds were measured on
one H100 (docs/gpu.md); no run of this size has been made.
"""

import argparse
import tempfile
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from transformers import LlamaConfig

from headstart.heads.target_config import TargetConfig
from headstart.recipes import Recipe, load_recipe
from headstart.recipes.command_line import DeviceMemory
from headstart.trainers.memory import Machine, RunMemory
from headstart.trainers.new_head import head_without_weights
from headstart.trainers.plan import TokenCost

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
TARGETS = {
    "llama3_8b": LlamaConfig(**LLAMA, hidden_size=4096, intermediate_size=14336),
    "llama3_70b": LlamaConfig(
        **LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
}
PROMPT, ANSWER = 400, 600  # tokens of a sample on average: assumed
NODE = 8  # cards of a machine, which share a target of 70B
TEXTS = 256  # that a machine writes at a time
DATA = ((68_000, 10, 16), (500_000, 3, 64), (1_300_000, 2, 64))  # samples, epochs, batch size
CARDS = (8, 64, 512)
COUNTS, MEMORY = (1, 8), (24, 48, 80, 141)  # cards of the second table, and the gigabytes of each
FITTED = (("llama3_8b",), ("llama3_8b", "data.online=[auto]"), ("llama3_70b",))
PRICE = 2.5  # dollars for an hour of one H100: assumed
FROM_DISKS = 10e9  # bytes a second that one machine's disks, or its share of a shared file system, deliver: assumed


@cache
def recipe_and_cost(name: str, *overrides: str) -> tuple[Recipe, TokenCost]:
    """A recipe of the repository, and what its tokens cost, by the sizes of its target alone."""
    recipe, target = recipe_and_target(name, *overrides)
    return recipe, TokenCost.of(recipe, head_without_weights(recipe, target))


@cache
def recipe_and_target(name: str, *overrides: str) -> tuple[Recipe, TargetConfig]:
    """A recipe of the repository for a target of which only config.json exists, in a folder that stays."""
    folder = Path(tempfile.mkdtemp(prefix=name))
    TARGETS[name].save_pretrained(folder)
    return load_recipe(RECIPES / f"{name}.yaml", [f"target.path={folder}", *overrides]), TargetConfig.from_folder(
        folder
    )


@dataclass(frozen=True)
class Plan:
    """A run on so many cards: hours of each stage, bytes stored and read."""

    samples: int
    epochs: int
    batch: int
    cards: int
    kind: str  # offline, in 8 bits, online
    cost: TokenCost

    @property
    def tokens(self) -> int:
        return self.samples * (PROMPT + ANSWER)

    @property
    def ranks(self) -> int:
        """Of training, each with a sample of a batch at the least."""
        return min(self.cards, self.batch)

    def card_hours(self) -> dict[str, float]:
        cost, seen = self.cost, self.tokens * self.epochs
        written = cost.responses(self.samples * ANSWER, TEXTS, PROMPT + ANSWER // 2, NODE)
        once, steps = cost.features(self.tokens), cost.steps(seen)
        seconds = {"responses": written, "features": once, "training": steps}
        if self.kind == "online":
            seconds |= {"features": 0.0, "training": steps + cost.features(seen)}
        return {stage: each / 3600 for stage, each in seconds.items()}

    def hours(self) -> dict[str, float]:
        """Beside the others, cards that training cannot use would be idle, so they are given back."""
        on = {"responses": self.cards, "features": self.cards, "training": self.ranks}
        if self.kind == "online":
            on["training"] = self.cards
        return {stage: each / on[stage] for stage, each in self.card_hours().items()}

    @property
    def disk(self) -> float:
        return 0.0 if self.kind == "online" else float(self.tokens * self.cost.stored)

    @property
    def read_rate(self) -> float:
        """Bytes a second that training reads."""
        return self.disk * self.epochs / (self.hours()["training"] * 3600)

    def bottleneck(self) -> str:
        hours, machines = self.hours(), max(self.ranks // NODE, 1)
        slowest = max(hours, key=lambda stage: hours[stage])
        if slowest == "training" and self.read_rate > FROM_DISKS * machines:
            return "disks"
        return f"{slowest}: {self.ranks} ranks" if slowest == "training" and self.ranks < self.cards else slowest


def costs() -> Table:
    columns = ("samples", "H100s", "features", "responses h", "features h", "training h", "H100 h", "$", "disk")
    table = Table(*columns, "training reads", "waits most for", title="Llama-3.3-70B, EAGLE-3", box=None)
    kinds = {
        "offline": recipe_and_cost("llama3_70b")[1],
        "8 bits": recipe_and_cost("llama3_70b", "data.dtype=int8")[1],
        "online": recipe_and_cost("llama3_70b")[1],
    }
    for samples, epochs, batch in DATA:
        for cards in CARDS:
            for kind, cost in kinds.items():
                plan = Plan(samples, epochs, batch, cards, kind, cost)
                hours, spent = plan.hours(), sum(plan.card_hours().values())
                stages = [f"{hours[stage]:.2f}" for stage in ("responses", "features", "training")]
                read = "" if kind == "online" else f"{decimal(int(plan.read_rate))}/s"
                row = [f"{samples:,} x {epochs}", str(cards), kind, *stages, f"{spent:,.0f}", f"{spent * PRICE:,.0f}"]
                table.add_row(*row, decimal(int(plan.disk)), read, plan.bottleneck())
    return table


def fits() -> Table:
    """The memory of each recipe on each card, and what the plan chooses, or the user has to."""
    table = Table("recipe", *(f"{count} x {size} GB" for count in COUNTS for size in MEMORY), title="fits", box=None)
    for name, *overrides in FITTED:
        cells = []
        for count, size in product(COUNTS, MEMORY):
            recipe, target = recipe_and_target(name, *overrides)
            machine = Machine.described(recipe, DeviceMemory(count, size * 10**9))
            run = RunMemory.of(recipe, target, machine).fitted()
            try:
                run.refuse()
            except ValueError as error:
                cells.append(str(error).rpartition("; ")[2])
                continue
            again = ", computed again" if run.recipe.train.activation_checkpointing else ""
            cells.append(f"{decimal(run.total)}: {run.recipe.train.micro_batches} micro-batches{again}")
        table.add_row(" ".join([name, *overrides]), *cells)
    return table


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console = Console(width=160, highlight=False, markup=False)
    console.print(costs(), fits(), sep="\n\n")


if __name__ == "__main__":
    main()
