"""Where the time of decoding goes, what shared noise gains, and which tree is fastest, on one target and head.

    python benchmarks/decode.py recipes/tiny_full.yaml report.head=assets/demo_head report.threads=1

Four kinds of tables: the overhead of a step (its wall time less the forwards of target and head), accepted length by
temperature with and without the target's noise in the drafts, the same by size of the tree, and growth policies against
a sweep of trees. Ways take turns prompt by prompt, so compare rows within a table. Accepted lengths alone need no quiet
machine and more prompts than a clock has patience for: theirs are the first 100, whatever report.num_prompts says. For
a CPU: a captured step on a GPU has no functions to time, and benchmarks/gpu.py measures it as a whole.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributions import Categorical

from heads.base import DraftHead
from heads.build import load_head
from heads.target_config import locate_target
from inference.costs import CostTable
from inference.decode import DecodeStats, Generation, Request, generate, generate_batch
from inference.drafters import Drafter
from inference.drafters.cost_aware import Adaptive, CostAware, growth_from_recipe
from inference.drafters.growth import Dynamic, Growth
from inference.drafters.head import Frontier, HeadDrafter
from inference.report import head_folder, held_out_prompts, saved_taps
from inference.sampling import BatchSampling, Sampling
from inference.statistics import Interval, speedup
from inference.target import TargetModel
from recipes import Recipe, run_command

SWEEP = [
    *(Dynamic.chain(depth) for depth in (2, 3, 4, 5, 6, 8)),
    *(Dynamic(depth, 2, nodes) for depth, nodes in ((3, 6), (5, 8), (5, 10), (7, 12))),
    *(
        Dynamic(depth, 4, nodes)
        for depth, nodes in ((3, 8), (4, 12), (5, 12), (5, 16), (5, 24), (7, 16), (7, 24), (7, 32))
    ),
    Dynamic(5, 8, 32),
]


LARGER = [Dynamic(depth, *size) for depth in (3, 5) for size in ((4, 16), (8, 64), (32, 256))]
FINALISTS, AGAIN = 3, 2  # trees of the sweep that run again, and how often
TEMPERATURES = (0.3, 0.6, 1.0)  # of the table of noise
LENGTH_PROMPTS, SIZE_PROMPTS = 100, 8  # of the table of noise, and of the one of larger trees
HEAD_FUNCTIONS = ("project", "forward", "logits", "feedback")


class WithoutNoise(HeadDrafter):
    """Children by the head's own probability, as in EAGLE-2 and 3: the drafter does not look at the noise."""

    def chances(self, level: int, logits: Tensor, roots: Tensor, sampling: BatchSampling, frontier: Frontier) -> Tensor:
        return sampling.warp(logits, frontier.history, self.ids)


@dataclass
class Clock:
    """Seconds spent inside of what it wraps."""

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
    """Time the target's model and the head's functions while the context lasts."""
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
    name: str
    run: Callable[[list[int]], DecodeStats]
    stats: DecodeStats = field(default_factory=DecodeStats)
    target_seconds: float = 0.0
    head_seconds: float = 0.0
    target_calls: int = 0

    @property
    def rate(self) -> float:
        return self.stats.tokens / self.stats.seconds


def ours(target: TargetModel, drafter: Drafter | None, new_tokens: int, sampling: Sampling) -> Callable[..., Any]:
    return lambda prompt: generate(target, prompt, new_tokens, sampling, drafter, static=False).stats


def transformers_own(target: TargetModel, new_tokens: int, lookup: int | None = None) -> Callable[..., DecodeStats]:
    """`generate` of the same model; every call of it is a step."""

    def run(prompt: list[int]) -> DecodeStats:
        calls = []
        hook = target.model.register_forward_pre_hook(lambda *_: calls.append(1))
        started = time.perf_counter()
        written = target.generate([prompt], new_tokens, prompt_lookup=lookup)[0]
        seconds = time.perf_counter() - started
        hook.remove()
        return DecodeStats(steps=len(calls) - 1, tokens=len(written) - 1, seconds=seconds)

    return run


def measure(rows: list[Row], prompts: list[list[int]], target: TargetModel, head: DraftHead, title: str) -> None:
    """Every row on every prompt, in turns; the longest one warms up, so that all that is measured once is by then."""
    for row in rows:
        row.run(max(prompts, key=len))
    for number, prompt in enumerate(track(prompts, description=title, transient=True)):
        for turn in range(len(rows)):
            row = rows[(number + turn) % len(rows)]
            with clocks(target, head) as (target_clock, head_clock):
                row.stats.add(row.run(prompt))
            row.target_seconds += target_clock.seconds
            row.head_seconds += head_clock.seconds


def overhead_table(rows: list[Row]) -> Table:
    table = Table(title="where a step's time goes, greedy (ms; overhead is the rest, in % of the step)")
    for column in ("way", "tau", "tokens/s", "x generate", "step", "target", "head", "overhead", "bytes moved/step"):
        table.add_column(column, justify="left" if column == "way" else "right")
    base = next(row.rate for row in rows if row.name == "generate")
    for row in rows:
        steps = row.stats.steps
        whole, target, head = (1000 * s / steps for s in (row.stats.seconds, row.target_seconds, row.head_seconds))
        table.add_row(
            row.name,
            f"{row.stats.tau:.2f}",
            f"{row.rate:.1f}",
            f"{row.rate / base:.2f}",
            *(f"{value:.2f}" for value in (whole, target, head)),
            f"{100 * (whole - target - head) / whole:.1f}",
            f"{row.stats.bytes_moved / steps:,.0f}",
        )
    return table


def noise_table(greedy: list[Generation], warmer: list[tuple[float, list[Generation], list[Generation]]]) -> Table:
    """For each temperature the entropy, and the texts drafted with the noise and without."""
    table = Table(title=f"what the target's noise in the drafts gains, {len(greedy)} prompts")
    for column in (
        "temperature",
        "target's entropy, nats/token",
        "log q + noise",
        "of T = 0",
        "95 %",
        "top-k of q",
        "of T = 0",
    ):
        table.add_column(column, justify="right")
    base = f"{tau_of(greedy):.2f}"
    table.add_row("0", "", base, "1.00", "", base, "1.00")
    for temperature, (nats, noise, top) in zip(TEMPERATURES, warmer, strict=True):
        share = of_greedy(noise, greedy)
        table.add_row(
            f"{temperature:g}",
            f"{nats:.2f}",
            f"{tau_of(noise):.2f}",
            f"{share.value:.2f}",
            f"{share.low:.2f}-{share.high:.2f}",
            f"{tau_of(top):.2f}",
            f"{of_greedy(top, greedy).value:.2f}",
        )
    return table


def size_table(rows: list[tuple[str, list[Generation], list[Generation], list[Generation]]]) -> Table:
    """For each tree its name, and the texts greedy, sampled with the noise, sampled without."""
    table = Table(title=f"the same at temperature 1 for larger trees, {len(rows[0][1])} prompts")
    for column in ("tree", "T = 0", "log q + noise", "of T = 0", "top-k of q", "of T = 0"):
        table.add_column(column, justify="left" if column == "tree" else "right")
    for name, *found in rows:
        greedy, noise, top = map(tau_of, found)
        table.add_row(name, *(f"{value:.2f}" for value in (greedy, noise, noise / greedy, top, top / greedy)))
    return table


def tau_of(texts: list[Generation]) -> float:
    total = DecodeStats()
    for text in texts:
        total.add(text.stats)
    return total.tau


def of_greedy(texts: list[Generation], greedy: list[Generation]) -> Interval:
    """tau over tau at temperature 0; tokens per step compare as tokens per second do."""
    parts = [([t.stats.steps for t in each], [t.stats.tokens for t in each]) for each in (texts, greedy)]
    return speedup(*parts[0], *parts[1], seed=0)


def entropy(target: TargetModel, prompts: list[list[int]], texts: list[Generation], temperature: float) -> float:
    """Of what the target chose from, over the texts that it wrote at this temperature, nats per token."""
    total, count = 0.0, 0
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.tensor([prompt + text.tokens], device=target.device)
        logits = target.forward(tokens).logits[0, len(prompt) - 1 : -1]
        total += Categorical(logits=logits.float() / temperature).entropy().sum().item()
        count += len(text.tokens)
    return total / count


def growth_table(rows: list[Row], best: float, title: str) -> Table:
    """`best` is the rate of the fastest tree of a sweep."""
    table = Table(title=title)
    for column in ("growth", "tau", "nodes/step", "tokens/s", "of the sweep's best"):
        table.add_column(column, justify="left" if column == "growth" else "right")
    for row in rows:
        nodes = row.stats.drafted / row.stats.steps
        table.add_row(row.name, f"{row.stats.tau:.2f}", f"{nodes:.1f}", f"{row.rate:.1f}", f"{row.rate / best:.2f}")
    return table


def name_of(growth: Dynamic) -> str:
    if growth.width == 1:
        return f"chain of {growth.depth}"
    return f"tree {growth.depth} x {growth.width}, {growth.nodes} nodes"


def with_prompts(recipe: Recipe, count: int) -> Recipe:
    return recipe.model_copy(update={"report": recipe.report.model_copy(update={"num_prompts": count})})


def main() -> None:
    run_command(__doc__, run)


def run(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    prompts, folder = held_out_prompts(recipe), head_folder(recipe)
    target = TargetModel.load(
        recipe.target, saved_taps(recipe, locate_target(recipe.target.path, recipe.target.revision))
    )
    head = load_head(folder, target.frozen)
    new_tokens, console = recipe.decode.max_new_tokens, Console()
    greedy, warm = Sampling(), Sampling(1.0, seed=recipe.decode.seed)

    def with_head(growth: Any, sampling: Sampling = greedy, drafter: type[HeadDrafter] = HeadDrafter) -> Any:
        return ours(target, drafter(head, growth), new_tokens, sampling)

    def recipes_growth() -> Growth:
        return growth_from_recipe(recipe.decode, target, head)

    rows = [
        Row("plain", ours(target, None, new_tokens, greedy)),
        Row("generate", transformers_own(target, new_tokens)),
        Row("generate, prompt lookup of 5", transformers_own(target, new_tokens, lookup=5)),
        Row("chain", with_head(Dynamic.chain(recipe.decode.depth))),
        Row("tree", with_head(recipes_growth())),
    ]
    measure(rows, prompts, target, head, "overhead")
    console.print(overhead_table(rows))

    def texts(
        few: list[list[int]], growth: Growth, temperature: float, drafter: type[HeadDrafter] = HeadDrafter
    ) -> list[Generation]:
        seed = recipe.decode.seed
        requests = [Request(p, new_tokens, Sampling(temperature, seed=seed + i)) for i, p in enumerate(few)]
        return generate_batch(target, requests, drafter(head, growth))

    many = held_out_prompts(with_prompts(recipe, LENGTH_PROMPTS))
    warmer = []
    for temperature in track(TEMPERATURES, description="noise", transient=True):
        noise, top = (texts(many, recipes_growth(), temperature, way) for way in (HeadDrafter, WithoutNoise))
        warmer.append((entropy(target, many, noise, temperature), noise, top))
    console.print(noise_table(texts(many, recipes_growth(), 0.0), warmer))

    few = many[:SIZE_PROMPTS]
    console.print(
        size_table(
            [
                (
                    name_of(growth),
                    texts(few, growth, 0.0),
                    texts(few, growth, 1.0),
                    texts(few, growth, 1.0, WithoutNoise),
                )
                for growth in track(LARGER, description="larger trees", transient=True)
            ]
        )
    )

    for sampling in (greedy, warm):
        title = f"growth policies, temperature {sampling.temperature:g}"
        sweep = [Row(name_of(growth), with_head(growth, sampling)) for growth in SWEEP]
        adaptive = Row("adaptive chain", with_head(Adaptive(8, CostTable(target, head, 1)), sampling))
        cost_aware = Row("cost-aware", with_head(CostAware(8, 4, 32, CostTable(target, head, 4)), sampling))
        rows = [*sweep, adaptive, cost_aware]
        measure(rows, prompts, target, head, title)
        console.print(growth_table(rows, max(row.rate for row in sweep), title))
        # The largest of so many noisy rates flatters its tree: what counts is how it does when it runs again.
        best = sorted(sweep, key=lambda row: row.rate)[-FINALISTS:]
        rows = [Row(row.name, row.run) for row in (*best, cost_aware)]
        measure(rows, prompts * AGAIN, target, head, f"{title}, the best again")
        console.print(growth_table(rows, max(row.rate for row in rows[:FINALISTS]), f"{title}, the best again"))


if __name__ == "__main__":
    main()
