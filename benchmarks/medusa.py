"""Four kinds of heads from one harvest, with the same steps: tokens per target step of each, in several trees.

    python benchmarks/medusa.py recipes/tiny_medusa.yaml

The recipe says everything but the head. Each kind is trained below RUN_DIR/compare, or taken from there, and decodes
the held-out prompts that its calibration has not seen. A head that is not Medusa's is unrolled as deep as Medusa's are.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from heads.base import DraftHead
from heads.build import load_head, new_head
from heads.target_config import locate_target
from inference.decode import DecodeStats, Request, generate_batch
from inference.drafters.cost_aware import searched_tree
from inference.drafters.growth import Dynamic, Fixed, Growth
from inference.drafters.head import HeadDrafter
from inference.report import held_out_prompts, saved_taps
from inference.sampling import sampling_from_recipe
from inference.target import TargetModel
from recipes import Recipe, run_command
from recipes.schema import HeadSection
from trainers.medusa import run

# EAGLE-3 comes first: what is harvested for it serves all.
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3", "fc_norm": True, "norm_output": True},
    "eagle1": {"kind": "eagle1"},
    "medusa": {"kind": "medusa"},
    "hydra": {"kind": "medusa", "sequential": True},
}
RANDOM_TREES, RANKS = 20, 10
COLUMNS = ("head", "parameters", "untrained", "chain", "searched", "dynamic", f"best of {RANDOM_TREES} random trees")


def main() -> None:
    run_command(__doc__, compare)


def compare(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    recipes = {name: variant(recipe, name) for name in KINDS}
    for each in recipes.values():
        run(each)
    rows: dict[float, list[list[str]]] = {temperature: [] for temperature in recipe.report.temperatures}
    for name, each in recipes.items():
        for temperature, cells in measure(each, name).items():
            rows[temperature].append(cells)
    console = Console()
    for temperature, table_rows in rows.items():
        title = f"tokens per target step, temperature {temperature:g}, {recipe.decode.nodes} nodes"
        table = Table(title=f"{title}, {recipe.train.steps} steps of {recipe.train.batch_size}")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "head" else "right")
        for cells in table_rows:
            table.add_row(*cells)
        console.print(table)


def variant(recipe: Recipe, name: str) -> Recipe:
    """The same run with another head, on the same harvest."""
    levels = recipe.decode.depth
    own = {"medusa_heads": levels} if KINDS[name]["kind"] == "medusa" else {}
    head = TypeAdapter(HeadSection).validate_python({**KINDS[name], **own})
    changes = {
        "run_dir": recipe.run_dir / "compare" / name,
        "data": recipe.data.model_copy(update={"folder": recipe.data_folder}),
        "head": head,
        "train": recipe.train.model_copy(update={"unroll": levels, "eval_prompts": max(recipe.train.eval_prompts, 1)}),
    }
    return recipe.model_copy(update=changes)


def measure(recipe: Recipe, name: str) -> dict[float, list[str]]:
    """A row of the table for each temperature."""
    taps = saved_taps(recipe, locate_target(recipe.target.path, recipe.target.revision))
    target = TargetModel.load(recipe.target, taps)
    head = load_head(recipe.head_dir, target.frozen)
    untrained = new_head(recipe.head, target.frozen, head.vocab, recipe.seed).eval().requires_grad_(False)
    prompts = held_out_prompts(recipe)[recipe.train.eval_prompts :]
    nodes, depth = recipe.decode.nodes, recipe.decode.depth
    searched = Fixed(searched_tree(head).best(nodes))
    generator = random.Random(recipe.seed)
    others = [Fixed(random_tree(nodes, depth, generator)) for _ in range(RANDOM_TREES)]
    found = {}
    for temperature in recipe.report.temperatures:
        tau = taker(recipe, target, prompts, temperature)
        best = f"{max(tau(head, tree) for tree in others):.2f}" if name == "medusa" else ""
        dynamic = Dynamic(depth, recipe.decode.width, nodes)
        lengths = [tau(untrained, searched), tau(head, Dynamic.chain(depth)), tau(head, searched), tau(head, dynamic)]
        size = f"{sum(parameter.numel() for parameter in head.parameters()):,}"
        found[temperature] = [name, size, *(f"{length:.2f}" for length in lengths), best]
    return found


def taker(
    recipe: Recipe, target: TargetModel, prompts: list[list[int]], temperature: float
) -> Callable[[DraftHead, Growth], float]:
    """What gives tau of a head with a way to grow, over all prompts."""
    sampling = sampling_from_recipe(recipe.decode, temperature)
    requests = [Request(prompt, recipe.decode.max_new_tokens, sampling) for prompt in prompts]

    def tau(head: DraftHead, growth: Growth) -> float:
        stats = DecodeStats()
        for generation in generate_batch(target, requests, HeadDrafter(head, growth), recipe.decode.max_batch):
            stats.add(generation.stats)
        return stats.tau

    return tau


def random_tree(nodes: int, depth: int, generator: random.Random) -> tuple[tuple[int, ...], ...]:
    """Grown node by node from whatever may come next."""
    tree: list[tuple[int, ...]] = []
    candidates: list[tuple[int, ...]] = [(0,)]
    while len(tree) < nodes:
        path = candidates.pop(generator.randrange(len(candidates)))
        tree.append(path)
        if path[-1] + 1 < RANKS:
            candidates.append((*path[:-1], path[-1] + 1))
        if len(path) < depth:
            candidates.append((*path, 0))
    return tuple(tree)


if __name__ == "__main__":
    main()
