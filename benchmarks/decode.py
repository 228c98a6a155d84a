"""Where a decode step spends its time, and which draft tree is fastest, for one target and head.

    python benchmarks/decode.py recipes/tiny_full.yaml decode.head=assets/demo_head report.threads=1

Prints two kinds of tables: the overhead of a step (its wall time minus the forwards of target and head), and growth
policies compared with a sweep of trees. If decode.head is an export with custom_generate/, the first table also has
transformers' `generate` with it. Rows of a table alternate prompt by prompt, so compare within a table only.
For a CPU: on a GPU a captured step runs no functions that could be timed; benchmarks/gpu.py measures it as a whole.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headstart.heads.base import DraftHead
from headstart.heads.target_config import folder_of
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import DecodeStats
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.build import growth_from_recipe, load_drafting_head
from headstart.inference.drafters.cost_measurement import cost_table
from headstart.inference.drafters.costs import CostAware
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic, GrowthPolicy
from headstart.inference.engine.loop import generate
from headstart.inference.generate.loading import held_out_prompts, taps_to_read
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command

WIDE = ((3, 8), (4, 12), (5, 12), (5, 16), (5, 24), (7, 16), (7, 24), (7, 32))  # depth and nodes
SWEEP = [
    *(Dynamic.chain(depth) for depth in (2, 3, 4, 5, 6, 8)),
    *(Dynamic(depth, 2, nodes) for depth, nodes in ((3, 6), (5, 8), (5, 10), (7, 12))),
    *(Dynamic(depth, 4, nodes) for depth, nodes in WIDE),
    Dynamic(5, 8, 32),
]
HEAD_FUNCTIONS = ("project", "forward", "logits", "feedback")


@dataclass
class Clock:
    """Seconds spent inside the functions it wraps; nested calls are counted once."""

    seconds: float = 0.0
    depth: int = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.seconds += time.perf_counter() - started

        return timed


@contextmanager
def clocks(target: TargetModel, head: DraftHead) -> Iterator[tuple[Clock, Clock]]:
    """Time the target's model and the head's functions within the context."""
    target_clock, head_clock = Clock(), Clock()
    plain_forward = target.model.forward
    target.model.forward = target_clock.around(plain_forward)
    for name in HEAD_FUNCTIONS:
        object.__setattr__(head, name, head_clock.around(getattr(head, name)))
    try:
        yield target_clock, head_clock
    finally:
        target.model.forward = plain_forward
        for name in HEAD_FUNCTIONS:
            object.__delattr__(head, name)


@dataclass
class Row:
    """One method or tree, with its sums over prompts."""

    name: str
    run: Callable[[list[int]], DecodeStats]
    stats: DecodeStats = field(default_factory=DecodeStats)
    target_seconds: float = 0.0
    head_seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.stats.tokens / self.stats.seconds


def ours(target: TargetModel, drafter: Drafter | None, new_tokens: int, sampling: Sampling) -> Callable[..., Any]:
    """Our own decoding, with changing shapes."""
    return lambda prompt: generate(target, prompt, new_tokens, sampling, drafter, static=False).stats


def transformers_own(model: PreTrainedModel, new_tokens: int, texts: list[Any], **more: Any) -> Any:
    """transformers' `generate`, with `more` arguments; every forward after the first is a step."""

    def run(prompt: list[int]) -> DecodeStats:
        calls, inputs, write = list[int](), torch.tensor([prompt]), cast(Any, model).generate
        hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
        options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": new_tokens, "do_sample": False}
        started = time.perf_counter()
        texts.append(write(inputs, **options, **more))
        seconds = time.perf_counter() - started
        hook.remove()
        return DecodeStats(len(calls) - 1, texts[-1].shape[1] - len(prompt) - 1, seconds=seconds)

    return run


def measure(rows: list[Row], prompts: list[list[int]], target: TargetModel, head: DraftHead, title: str) -> None:
    """Run every row on every prompt in alternation; the longest prompt is decoded first, as a warm-up."""
    for row in rows:
        row.run(max(prompts, key=len))
    for number, prompt in enumerate(track(prompts, description=title, transient=True)):
        for turn in range(len(rows)):
            row = rows[(number + turn) % len(rows)]
            with clocks(target, head) as (target_clock, head_clock):
                row.stats = DecodeStats.sum_of([row.stats, row.run(prompt)])
            row.target_seconds += target_clock.seconds
            row.head_seconds += head_clock.seconds


def overhead_table(rows: list[Row]) -> Table:
    title = "ms per step, greedy; overhead: the rest of a step, in %"
    table = Table("method", title=title)
    for column in ("tokens\na step", "tokens/s", "x generate", "step", "target", "head", "overhead"):
        table.add_column(column, justify="right")
    base = next(row.rate for row in rows if row.name == "generate")
    for row in rows:
        steps = row.stats.steps
        whole, target, head = (1000 * s / steps for s in (row.stats.seconds, row.target_seconds, row.head_seconds))
        table.add_row(
            row.name,
            f"{row.stats.acceptance_length:.2f}",
            f"{row.rate:.1f}",
            f"{row.rate / base:.2f}",
            *(f"{value:.2f}" for value in (whole, target, head)),
            f"{100 * (whole - target - head) / whole:.1f}",
        )
    return table


def growth_table(rows: list[Row], best: float, title: str) -> Table:
    """`best` is the tokens/s of the sweep's fastest tree."""
    table = Table(title=title)
    for column in ("growth", "tokens\na step", "draft tokens\na step", "tokens/s", "over the\nsweep's best"):
        table.add_column(column, justify="left" if column == "growth" else "right")
    for row in rows:
        nodes = row.stats.drafted / row.stats.steps
        table.add_row(
            row.name, f"{row.stats.acceptance_length:.2f}", f"{nodes:.1f}", f"{row.rate:.1f}", f"{row.rate / best:.2f}"
        )
    return table


def name_of(growth: Dynamic) -> str:
    tree = f"tree {growth.depth} x {growth.width}, {growth.nodes} nodes"
    return f"chain of {growth.depth}" if growth.width == 1 else tree


def run(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    prompts, folder = [each.prompt for each in held_out_prompts(recipe)], recipe.head_in_use
    target = TargetModel.load(recipe.target, taps_to_read(recipe))
    head = load_drafting_head(folder, target)
    model = AutoModelForCausalLM.from_pretrained(folder_of(recipe.target), dtype=target.dtype).eval()
    plain, drafted, new_tokens, console = list[Tensor](), list[Tensor](), recipe.decode.max_new_tokens, Console()
    greedy, warm = Sampling(), Sampling(1.0, seed=recipe.seed)

    def with_head(growth: GrowthPolicy, sampling: Sampling = greedy) -> Any:
        return ours(target, head_drafter(head, growth), new_tokens, sampling)

    rows = [
        Row("plain", ours(target, None, new_tokens, greedy)),
        Row("generate", transformers_own(model, new_tokens, plain)),
        Row("chain", with_head(Dynamic.chain(recipe.decode.depth))),
        Row("tree", with_head(growth_from_recipe(recipe.decode, target, head))),
    ]
    if (folder / "custom_generate").is_dir():
        own = transformers_own(model, new_tokens, drafted, custom_generate=str(folder), trust_remote_code=True)
        rows.append(Row("custom_generate", own))
    measure(rows, prompts, target, head, "overhead")
    console.print(overhead_table(rows))
    if len(rows) > 4:
        console.print(
            f"{sum(map(torch.equal, plain, drafted))} of {len(plain)} texts by custom_generate are generate's"
        )

    for sampling in (greedy, warm):
        title = f"growth policies, temperature {sampling.temperature:g}"
        sweep = [Row(name_of(growth), with_head(growth, sampling)) for growth in SWEEP]
        chain = Row("cost-aware chain", with_head(CostAware(8, 1, 8, cost_table(target, head, 1, 8)), sampling))
        cost_aware = Row("cost-aware", with_head(CostAware(8, 4, 32, cost_table(target, head, 4, 32)), sampling))
        rows = [*sweep, chain, cost_aware]
        measure(rows, prompts, target, head, title)
        console.print(growth_table(rows, max(row.rate for row in sweep), title))


if __name__ == "__main__":
    run_command(__doc__, run)
