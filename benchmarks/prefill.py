"""Do running rows stall while a long prompt is read? Their longest wait for tokens, in plain steps.

    python benchmarks/prefill.py recipes/smollm2_135m.yaml

For 1 and for 4 running rows: first the median time of a plain step, then a prompt of 4,000 tokens comes, and the times
between two blocks of a running row are taken until the long prompt has its first token, in plain steps: the median, the
99th percentile and the longest. *Longest before* is the same rows' longest step before the prompt came, which tells how
much the machine itself varies. Rows become longer while they wait, and their plain steps slower: *of its time* is the
longest wait in plain steps as they were then, the fastest of the last five. The last two columns tell what the
interruptions cost that prompt: its time to the first token, with running rows and alone. With a head (decode.head), a
second line per number of rows has the rows draft.
"""

import time
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median, quantiles

import torch
from rich.console import Console
from rich.table import Table

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Request
from headstart.inference.drafters.build import growth_from_recipe, load_drafting_head
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.loading import held_out_prompts, taps_to_read
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command

BAR = 3.0
TOKENS = 4_000
STEPS = 100  # before the long prompt comes


def main() -> None:
    run_command(__doc__, run)


def run(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    has_head = recipe.decode.head is not None
    target = TargetModel.load(recipe.target, taps_to_read(recipe) if has_head else ())
    prompts = [prompt[:64] for prompt in held_out_prompts(recipe)]
    count = min(TOKENS, target.max_positions - 1)
    flat = [token for prompt in held_out_prompts(recipe) for token in prompt]
    long = Request((flat * (count // len(flat) + 1))[:count], 1, end_tokens=())
    drafters: list[tuple[str, Drafter | None]] = [("plain", None)]
    if has_head:
        head = load_drafting_head(recipe.head_in_use, target)
        drafters.append(("drafting", head_drafter(head, growth_from_recipe(recipe.decode, target, head))))
    table = Table(title=f"a prompt of {count:,} tokens; a row may wait {BAR:g} plain steps")
    for column in (
        "rows",
        "steps",
        "plain step, ms",
        "longest before",
        "median wait",
        "p99",
        "longest",
        "of its time",
        "first token, s",
        "alone, s",
    ):
        table.add_column(column, justify="left" if column == "steps" else "right")
    alone = seconds_to_first_token(DecodeLoop(target, max_batch=1), long)
    for rows in (1, 4):
        plain = 0.0
        for name, drafter in drafters:
            loop = DecodeLoop(target, drafter, max_batch=rows + 1)
            for prompt in islice(cycle(prompts), rows):
                loop.submit(Request(prompt, target.max_positions - len(prompt), end_tokens=()))
            steps = running_steps(loop, rows)
            plain = median(steps) if drafter is None else plain
            waits = Waits(plain)
            first = seconds_to_first_token(loop, long, waits)
            loop.close()
            high = quantiles(waits.seconds, n=100, method="inclusive")[-1]
            in_steps = (seconds / plain for seconds in (max(steps), median(waits.seconds), high, max(waits.seconds)))
            numbers = (plain * 1000, *in_steps, max(waits.in_steps), first, alone)
            table.add_row(str(rows), name, *(f"{number:.2f}" for number in numbers))
    Console().print(table)


@dataclass
class Waits:
    """How long running rows waited for each next block, while the long prompt was read."""

    plain: float  # the seconds of a plain step before the prompt came
    seconds: list[float] = field(default_factory=list)
    in_steps: list[float] = field(default_factory=list)  # the same, in plain steps of that time


def running_steps(loop: DecodeLoop, rows: int) -> list[float]:
    """The seconds of each step after all rows have begun."""
    while len(loop.batch.rows) < rows:
        loop.step()
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        loop.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def seconds_to_first_token(loop: DecodeLoop, request: Request, waits: Waits | None = None) -> float:
    """Submit a request and run until its first token; `waits` gets the times between the blocks of other rows."""
    started = before = time.perf_counter()
    number = loop.submit(request)
    while True:
        numbers = {block.number for block in loop.step()}
        now = time.perf_counter()
        if numbers - {number} and waits is not None:
            waits.seconds.append(now - before)
            waits.in_steps.append((now - before) / (min(loop.pace.steps) if loop.pace.steps else waits.plain))
            before = now
        if number in numbers:
            return now - started


if __name__ == "__main__":
    main()
