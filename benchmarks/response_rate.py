"""How fast the target writes responses, beside the rate of a batch that never runs empty.

    python benchmarks/response_rate.py recipes/smollm2_135m.yaml

Answers 512 of the recipe's prompts, or all if there are fewer, as a harvest does: rows are refilled as texts end, and
each finished text goes to a journal in a temporary folder. The rate of a full batch is measured after them: as
many rows as data.generate_batch, which never end, after contexts as long as those of the real texts. Then 24 of the
texts are written again, each alone; in float32 they must be the same.
"""

import tempfile
import time
from pathlib import Path
from statistics import fmean

import torch
from accelerate import PartialState
from rich.console import Console

from headstart.common.files import read_jsonl
from headstart.data_pipelines.prompts.prompts import make_prompts_alone
from headstart.data_pipelines.prompts.responses import responses_path, sampling_of, target_writer, write_responses
from headstart.data_pipelines.stages.shard_work import ShardProgress, ShardPrompts, prompt_shards
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.core.request import Request
from headstart.inference.engine.loop import generate, loop_of
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command

PROMPTS, ALONE = 512, 24
STEPS = 12  # of the full batch


def main() -> None:
    run_command(__doc__, benchmark)


def benchmark(recipe: Recipe) -> None:
    """Print the rate of the responses, that of a full batch, their ratio, and how many texts a row alone repeats."""
    PartialState()
    make_prompts_alone(recipe)
    shards = first_shards(recipe, PROMPTS)
    target = TargetModel.load(recipe.target, ())
    with tempfile.TemporaryDirectory() as folder:
        data = recipe.data.model_copy(update={"folder": Path(folder)})
        here = recipe.model_copy(update={"data": data})
        here.responses_dir.mkdir()
        write = target_writer(here, target)
        before = time.perf_counter()
        with ShardProgress(shards, PartialState(), "responses") as meter:
            write_responses(here, write, shards, meter)
        seconds = time.perf_counter() - before
        rows = [row for shard in shards for row in read_jsonl(responses_path(here, shard))]
    tokens = sum(len(row["response"]) for row in rows)
    full = full_batch_rate(recipe, target, rows)
    same = sum(alone(recipe, target, shards[0].split, row) == row["response"] for row in rows[:ALONE])
    console = Console(highlight=False)
    console.print(f"{len(rows)} responses, {tokens:,} tokens in {seconds:.0f} s: {tokens / seconds:,.0f} tokens/s")
    console.print(f"a full batch of {recipe.data.generate_batch}: {full:,.0f} tokens/s")
    console.print(f"ratio: {tokens / seconds / full:.2f}")
    console.print(f"written alone again: {same} of {min(ALONE, len(rows))} texts are the same ({recipe.target.dtype})")


def first_shards(recipe: Recipe, count: int) -> list[ShardPrompts]:
    """The shards of the first training prompts."""
    found = []
    for shard in prompt_shards(recipe):
        if shard.split == "train" and count:
            found.append(ShardPrompts(shard.split, shard.index, shard.rows[:count]))
            count -= len(found[-1].rows)
    return found


@torch.inference_mode()
def full_batch_rate(recipe: Recipe, target: TargetModel, rows: list[Json]) -> float:
    """Tokens per second of a batch whose rows never end, over contexts as long as those of the responses."""
    size, length = recipe.data.generate_batch, round(fmean(len(row["response"]) for row in rows) / 2)
    chosen = [rows[number % len(rows)] for number in range(size)]
    requests = [
        Request(
            row["prompt"] + (row["response"] * length)[:length],
            STEPS + 3,
            sampling_of(recipe, "train", number),
            end_tokens=(),
        )
        for number, row in enumerate(chosen)
    ]
    loop = loop_of(target, requests, max_batch=size)
    while len(loop.batch.rows) < size:  # the prompts
        loop.step()
    loop.step()  # a warm-up
    started = time.perf_counter()
    for _ in range(STEPS):
        loop.step()
    rate = size * STEPS / (time.perf_counter() - started)
    loop.close()
    return rate


def alone(recipe: Recipe, target: TargetModel, split: str, row: Json) -> list[int]:
    """The response to a row's prompt, written in a batch of one."""
    return generate(target, row["prompt"], recipe.data.response_tokens, sampling_of(recipe, split, row["id"])).tokens


if __name__ == "__main__":
    main()
