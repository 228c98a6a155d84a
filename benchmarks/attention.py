"""What a target step costs here and as transformers runs the model, from short to long contexts.

    python benchmarks/attention.py recipes/smollm2_135m.yaml

A step reads a tree of 16 nodes after a context of random tokens: on one row, and on eight. Three ways to run it take
turns: *transformers*, its sdpa and the weights as they were loaded; *its attention*, the same with the weights packed
for the processor where that is done by default; and *headstart*, our attention as well. A row of the table gives the
median milliseconds of each, and what headstart takes over either of the others.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from headstart.inference.core.cache import KVCache
from headstart.inference.core.tree import Tree
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command

NODES = 16
CONTEXTS = (256, 1024, 4096, 8192)
ROWS = (1, 8)
MOST_KEYS = 16384  # of all rows together
REPEATS = 15
SDPA = {"attention": "sdpa"}
KINDS: tuple[tuple[dict[str, str], bool], ...] = ((SDPA, False), (SDPA, True), ({}, True))  # changed fields, packed?


def main() -> None:
    run_command(__doc__, benchmark)


def benchmark(recipe: Recipe) -> None:
    """Print one table: a row per context length and number of rows."""
    targets = [TargetModel.load(recipe.target.model_copy(update=kind), (), packed) for kind, packed in KINDS]
    table = Table("context", "rows", "transformers, ms", "its attention, ms", "headstart, ms", "ratio", "of attention")
    for context, rows in product(CONTEXTS, ROWS):
        if context > targets[0].max_positions - NODES or rows * context > MOST_KEYS:
            continue
        cache = targets[0].passes.new_cache(context + NODES, batch=rows)
        cache.target.storages[0].normal_()
        whole, attention, ours = alternate([partial(step, target, cache, context) for target in targets])
        times = (f"{taken:.1f}" for taken in (whole, attention, ours))
        table.add_row(f"{context:,}", str(rows), *times, f"{ours / whole:.2f}", f"{ours / attention:.2f}")
    Console().print(table)


def step(target: TargetModel, cache: KVCache, context: int) -> None:
    """One pass over a tree of pairs of siblings."""
    rows = cache.target.batch
    cache.set_lengths([context] * rows)
    parents = torch.tensor([[-1, *(max(node - 2, 0) // 2 * 2 for node in range(1, NODES))]])
    tree = Tree(torch.arange(NODES).repeat(rows, 1).to(target.device), parents.repeat(rows, 1).to(target.device))
    target.passes.tree(tree, cache)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def alternate(works: list[Callable[[], None]]) -> list[float]:
    """Median milliseconds of each function; they take turns, and the first round is a warm-up."""
    rounds = []
    for _ in range(1 + REPEATS):
        times = []
        for work in works:
            started = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - started))
        rounds.append(times)
    return [median(times) for times in zip(*rounds[1:], strict=True)]


if __name__ == "__main__":
    main()
