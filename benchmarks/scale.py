"""What a head for Llama-3.3-70B costs on 8, 64 and 512 H100s, by the arithmetic that train.dry_run prints.

    python benchmarks/scale.py

Two tables: the costs, and the same arithmetic next to budgets that others have published. The speeds were measured on
one H100 (docs/gpu.md); no run of this size has been made. docs/scale.md explains the numbers.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from transformers import LlamaConfig, Qwen3Config

from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.heads.target_config import TargetConfig
from headstart.recipes import Recipe, load_recipe
from headstart.trainers.new_head import head_without_weights
from headstart.trainers.plan import TokenCost

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
TARGETS = {
    "llama3_8b": LlamaConfig(**LLAMA, hidden_size=4096, intermediate_size=14336),
    "qwen3_8b": Qwen3Config(
        vocab_size=151936, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8, head_dim=128
    ),
    "llama3_70b": LlamaConfig(
        **LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
}
PROMPT, ANSWER = 400, 600  # tokens of a sample on average: assumed
NODE = 8  # cards of a machine, which share a target of 70B
TEXTS = 256  # that a machine writes at a time
DATA = ((68_000, 10, 16), (500_000, 3, 64), (1_300_000, 2, 64))  # samples, epochs, batch size
CARDS = (8, 64, 512)
PRICE = 2.5  # dollars for an hour of one H100: assumed
FROM_DISKS = 10e9  # bytes a second that one machine's disks, or its share of a shared file system, deliver: assumed


@cache
def recipe_and_cost(name: str, *overrides: str) -> tuple[Recipe, TokenCost]:
    """A recipe of the repository, and what its tokens cost, by the sizes of its target alone."""
    with tempfile.TemporaryDirectory() as folder:
        TARGETS[name].save_pretrained(folder)
        recipe = load_recipe(RECIPES / f"{name}.yaml", [f"target.path={folder}", *overrides])
        target = TargetConfig.from_folder(Path(folder))
        return recipe, TokenCost.of(recipe, target, head_without_weights(recipe, target))


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


def published() -> Iterator[tuple[str, str, str, float]]:
    """Budgets of others: what, published, computed here, and the published one over ours."""

    def row(what: str, theirs: float, ours: float, unit: str) -> tuple[str, str, str, float]:
        return what, f"{theirs:,.2f} {unit}", f"{ours:,.2f} {unit}", theirs / ours

    unrolled = "train.unroll=3"
    _, llama = recipe_and_cost("llama3_8b", unrolled)
    _, qwen = recipe_and_cost("qwen3_8b", unrolled)
    tokens = 5_000 * 1_024
    store = 50_000 * 1_024 * llama.stored / 1e12
    yield row("speculators: store of 50 k samples of 1,024 tokens, Llama-3.1-8B", 1.6, store, "TB")
    gpt_oss = 53 * 65_536 * bytes_per_token(2_880, 3, "bfloat16") / 1e9
    yield row("SpecForge issue 426: 53 samples of up to 65,536 tokens, gpt-oss-120b", 62, gpt_oss, "GB")
    yield row("speculators: states of 5 k samples, Llama-3.1-8B, 2 H100s", 143, llama.features(tokens) / 2, "s")
    yield row("speculators: 5 epochs on them, 2 H100s", 327, llama.steps(5 * tokens) / 2, "s")
    online = 5 * max(qwen.features(tokens), qwen.steps(tokens)) / 2
    yield row("speculators: 5 epochs online, Qwen3-8B, 2 + 2 H100s", 942, online, "s")


def beside_others() -> Table:
    table = Table("published", "theirs", "this arithmetic", "theirs / ours", title="Published budgets", box=None)
    for what, theirs, ours, ratio in published():
        table.add_row(what, theirs, ours, f"{ratio:.2f}")
    return table


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console = Console(width=160, highlight=False)
    console.print(costs(), beside_others(), sep="\n\n")


if __name__ == "__main__":
    main()
