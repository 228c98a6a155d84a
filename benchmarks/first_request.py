"""Does the first request wait for anything but its own steps? The longest step of it, as a multiple of the median step.

    python benchmarks/first_request.py recipes/smollm2_135m.yaml decode.head=assets/smollm2_head

Target, head and drafter are loaded as the report loads them. The time in which the drafter is built, with what it
measures then, is printed on its own: with no measured costs on disk, and with those of the first time. Then one request
runs, the first that the loaded model sees, with the cost-aware tree and with the recipe's own.
"""

import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from headstart.heads.base import DraftHead
from headstart.inference.core.request import Request
from headstart.inference.drafters.build import growth_from_recipe, load_drafting_head
from headstart.inference.drafters.cost_measurement import cost_table
from headstart.inference.drafters.costs import CostAware
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import GrowthPolicy
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.loading import held_out_prompts, taps_to_read
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command

Grow = Callable[[TargetModel, DraftHead], GrowthPolicy]
BAR = 3.0


def step_seconds(target: TargetModel, drafter: TreeDrafter, prompt: list[int], new_tokens: int) -> list[float]:
    """The seconds of each step after the prompt's pass."""
    loop = DecodeLoop(target, drafter, max_batch=1)
    loop.submit(Request(prompt, new_tokens, end_tokens=()))
    while not loop.step():  # until the prompt is read
        pass
    seconds = []
    while not loop.idle:
        started = time.perf_counter()
        loop.step()
        seconds.append(time.perf_counter() - started)
    loop.close()
    return seconds


def main() -> None:
    run_command(__doc__, run)


def run(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    [prompt], folder = held_out_prompts(recipe)[:1], recipe.head_in_use

    def cost_aware(target: TargetModel, head: DraftHead) -> GrowthPolicy:
        return CostAware(8, 4, 32, cost_table(target, head, 4, 32))

    def own(target: TargetModel, head: DraftHead) -> GrowthPolicy:
        return growth_from_recipe(recipe.decode, target, head)

    table = Table(title=f"the first request after loading; the longest step may take {BAR:g} x the median")
    for column in ("tree", "built in, s", "steps", "median, ms", "longest, ms", "longest / median"):
        table.add_column(column, justify="left" if column == "tree" else "right")
    trees: list[tuple[str, Grow]] = [
        ("cost-aware, nothing measured before", cost_aware),
        ("cost-aware, costs on disk", cost_aware),
        ("the recipe's", own),
    ]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HEADSTART_CACHE"] = cache
        for name, grow in trees:
            target = TargetModel.load(recipe.target, taps_to_read(recipe))
            head = load_drafting_head(folder, target)
            started = time.perf_counter()
            drafter = head_drafter(head, grow(target, head))
            built = time.perf_counter() - started
            seconds = step_seconds(target, drafter, prompt, recipe.decode.max_new_tokens)
            usual, longest = median(seconds), max(seconds)
            numbers = (f"{1000 * usual:.1f}", f"{1000 * longest:.1f}", f"{longest / usual:.2f}")
            table.add_row(name, f"{built:.1f}", str(len(seconds)), *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
