"""Estimate what heads for Llama-3.1-8B and Llama-3.3-70B cost on 1 to 512 H100s, and which cards fit the recipes.

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
from torch import nn
from transformers import LlamaConfig

from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.features.shards import stored_taps
from headstart.heads.base import DraftHead
from headstart.heads.target_config import TargetConfig
from headstart.inference.engine.budget import StepMemory
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.loading import model_without_weights
from headstart.recipes import Recipe, load_recipe
from headstart.recipes.command_line import DeviceMemory
from headstart.trainers.memory import Machine, RunMemory, num_parameters
from headstart.trainers.new_head import head_without_weights

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
TARGETS = {
    "llama3_8b": LlamaConfig(**LLAMA, hidden_size=4096, intermediate_size=14336),
    "llama3_70b": LlamaConfig(
        **LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
}
PROMPT, ANSWER = 400, 600  # tokens of a sample on average: assumed
NODE = 8  # cards of a machine
# Recipe, cards that share a target, texts that they write at a time; samples, epochs, batch size; cards.
RUNS: tuple[tuple[str, int, int, int, float, int, tuple[int, ...]], ...] = (
    ("llama3_8b", 1, 64, 68_000, 9.4, 16, (1, 8)),
    ("llama3_70b", NODE, 256, 68_000, 10, 16, (8, 64, 512)),
    ("llama3_70b", NODE, 256, 500_000, 3, 64, (8, 64, 512)),
    ("llama3_70b", NODE, 256, 1_300_000, 2, 64, (8, 64, 512)),
)
KINDS = {"offline": (), "8 bits": ("data.dtype=int8",), "online": ()}  # of features, with the recipe's overrides
COUNTS, MEMORY = (1, 8), (24, 48, 80, 141)  # cards of the second table, and the gigabytes of each
FITTED = (("llama3_8b",), ("llama3_8b", "data.online=[auto]"), ("llama3_70b",))
PRICE = 2.5  # dollars for an hour of one H100: assumed
FROM_DISKS = 10e9  # bytes a second that one machine's disks, or its share of a shared file system, deliver: assumed
# The speed of the H100 of 80 GB that was measured (docs/gpu.md). Harvest and training wait for matrix products, at 58 %
# of that card's limit; decoding waits for weights and cache to be read, at 60 % of the rate at which it copies.
OPERATIONS = 578e12  # floating-point operations a second, in bfloat16
READ = 1.78e12  # bytes of weights and cache a second
ROW = 55e-6  # seconds of a decode step for each of its texts: logits, sampling, the loop
SUM = 20e-6  # seconds of a sum over the cards of a target, of which a layer has two; assumed, not measured
BACKWARD = 3  # how many times the operations of its forward pass a training step takes


@cache
def cost_of(name: str, *overrides: str) -> "TokenCost":
    recipe, target = recipe_and_target(name, *overrides)
    return TokenCost.of(recipe, target, head_without_weights(recipe, target))


@cache
def recipe_and_target(name: str, *overrides: str) -> tuple[Recipe, TargetConfig]:
    """A recipe of the repository for a target of which only config.json exists, in a folder that stays."""
    folder = Path(tempfile.mkdtemp(prefix=name))
    TARGETS[name].save_pretrained(folder)
    return load_recipe(RECIPES / f"{name}.yaml", [f"target.path={folder}", *overrides]), TargetConfig.from_folder(
        folder
    )


@dataclass(frozen=True)
class TokenCost:
    """What a token costs in each stage of a run, whatever the number of tokens and cards."""

    weights: int  # bytes that a decode step reads for all of its texts together
    cached: int  # bytes that it reads for each token before, of each text
    layers: int
    forward: float  # operations of the target's layers
    logits: float  # of its output layer
    training: float  # of a training step
    stored: int  # bytes of its features

    @classmethod
    def of(cls, recipe: Recipe, target: TargetConfig, head: DraftHead) -> "TokenCost":
        model = model_without_weights(recipe.target)
        layers, step = decoder_layers(model), StepMemory.of(target, model.dtype)
        of_output = target.hidden_size * target.vocab_size
        again = [*head.logits_parameters, *(each for layer in head.decoder_layers for each in layer.parameters())]
        depths = recipe.unroll if head.repeats_layers else 1  # that run the same weights again
        looked_up = sum(each.weight.numel() for each in head.modules() if isinstance(each, nn.Embedding))
        multiplied = num_parameters(head) - looked_up + (depths - 1) * sum(weight.numel() for weight in again)
        taps = stored_taps(head.taps, target.num_layers)
        return cls(
            weights=(num_parameters(layers) + of_output) * step.element,
            cached=step.cached,
            layers=len(layers),
            forward=2.0
            * multiplied_weights(layers, getattr(model.config.get_text_config(), "num_experts_per_tok", None)),
            logits=2.0 * of_output,
            training=BACKWARD * 2.0 * multiplied + 2.0 * of_output,
            stored=bytes_per_token(target.hidden_size, len(taps), recipe.data.dtype),
        )

    def decode_step(self, texts: int, context: float, cards: int = 1) -> float:
        """Seconds of a plain step of `texts` texts of `context` tokens, on a target that so many cards share."""
        read = (self.weights + texts * context * self.cached) / (cards * READ)
        computed = texts * (self.forward + self.logits) / (cards * OPERATIONS)
        return read + computed + texts * ROW + (2 * self.layers * SUM if cards > 1 else 0.0)

    def responses(self, tokens: float, texts: int, context: float, cards: int = 1) -> float:
        """Card seconds of written tokens, by steps of `texts` texts of `context` tokens on average."""
        return tokens * cards * self.decode_step(texts, context, cards) / texts

    def features(self, tokens: float) -> float:
        """Card seconds of reading texts once."""
        return tokens * self.forward / OPERATIONS

    def steps(self, tokens: float) -> float:
        """Card seconds of training on so many tokens, those of later epochs counted again."""
        return tokens * self.training / OPERATIONS


def multiplied_weights(layers: nn.ModuleList, chosen: int | None) -> float:
    """The weights of layers that a token meets: of experts, which are stacked, as many as are `chosen` for it."""
    found = 0.0
    for module in layers.modules():
        is_stack = type(module).__name__.endswith("Experts")
        for weight in module.parameters(recurse=False):
            found += weight.numel() * (1 if chosen is None or not is_stack else chosen / weight.shape[0])
    return found


@dataclass(frozen=True)
class Plan:
    """A run on so many cards: hours of each stage, bytes stored and read."""

    samples: int
    epochs: float
    batch: int
    cards: int
    kind: str
    cost: TokenCost
    sharing: int  # cards that share a target
    texts: int  # that they write at a time

    @property
    def tokens(self) -> int:
        return self.samples * (PROMPT + ANSWER)

    @property
    def ranks(self) -> int:
        """Of training, each with a sample of a batch at the least."""
        return min(self.cards, self.batch)

    def card_hours(self) -> dict[str, float]:
        cost, seen = self.cost, self.tokens * self.epochs
        written = cost.responses(self.samples * ANSWER, self.texts, PROMPT + ANSWER // 2, self.sharing)
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
    columns = ("recipe", "samples", "H100s", "features", "responses h", "features h", "training h", "H100 h", "$")
    table = Table(*columns, "disk", "training reads", "waits most for", title="EAGLE-3", box=None)
    for name, sharing, texts, samples, epochs, batch, numbers in RUNS:
        for cards in numbers:
            for kind, overrides in KINDS.items():
                plan = Plan(samples, epochs, batch, cards, kind, cost_of(name, *overrides), sharing, texts)
                hours, spent = plan.hours(), sum(plan.card_hours().values())
                stages = [f"{hours[stage]:.2f}" for stage in ("responses", "features", "training")]
                read = "" if kind == "online" else f"{decimal(int(plan.read_rate))}/s"
                sizes = [name, f"{samples:,} x {epochs}", str(cards), kind, *stages]
                table.add_row(
                    *sizes, f"{spent:,.0f}", f"{spent * PRICE:,.0f}", decimal(int(plan.disk)), read, plan.bottleneck()
                )
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
    console = Console(width=180, highlight=False)
    console.print(costs(), fits(), sep="\n\n")


if __name__ == "__main__":
    main()
