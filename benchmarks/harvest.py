"""What a harvest costs over the target's bare forward, how fast features are read, and what 8-bit storage costs.

    python benchmarks/harvest.py recipes/tiny.yaml

Deletes RUN_DIR/bench_harvest and works there, with 256 of the recipe's prompts and heads trained for 200 steps. A row
of the table is one storage format of the features; its last columns are the trained head's acceptance length (tau) and
how much that differs from float32.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from torch import Tensor

from headstart.common.files import read_jsonl
from headstart.data_pipelines.features.batches import Batch, length_buckets
from headstart.data_pipelines.features.features import tap, write_features
from headstart.data_pipelines.features.shard_files import bytes_per_token, note_path
from headstart.data_pipelines.features.shards import FeatureStore, shard_name
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.prompts.responses import Text, responses_path
from headstart.data_pipelines.stages.shard_work import ShardProgress, ShardPrompts, prompt_shards
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command
from headstart.trainers import run

PROMPTS, HELDOUT, STEPS = 256, 32, 200
SHARD = 64  # samples per shard
EVAL_PROMPTS = 16  # decoded for the acceptance length; fewer would be too imprecise to show what a storage costs
REPEATS = 6  # of each timing
STORAGES = ("float32", "bfloat16", "float8", "int8")


def main() -> None:
    run_command(__doc__, benchmark)


def benchmark(recipe: Recipe) -> None:
    """Harvest, time and train with each storage format, and print one table."""
    PartialState()
    folder = recipe.run_dir / "bench_harvest"
    shutil.rmtree(folder, ignore_errors=True)
    table = Table(
        "storage",
        "bytes per token",
        "of bfloat16",
        "harvest tokens/s",
        "of bare forward",
        "read tokens/s",
        "training tokens/s",
        "acceptance length",
        "change",
    )
    exact = 0.0
    for storage in STORAGES:
        small = smaller(recipe, storage)
        for name in ("prompts", "responses"):  # the same for every format
            if storage != STORAGES[0]:
                shutil.copytree(folder / STORAGES[0] / name, small.run_dir / name)
        harvest(small)
        columns, length = measured(small)
        exact = exact or length
        table.add_row(storage, *columns, f"{length:.2f}", f"{length / exact - 1:+.1%}")
    Console(width=100).print(table)


def measured(recipe: Recipe) -> tuple[list[str], float]:
    """The table's columns for a recipe whose features are harvested, and the acceptance length of its trained head."""
    store = FeatureStore(recipe.features_dir, "train")
    target = TargetModel.load(recipe.target, tuple(store.taps))
    work = [piece for piece in prompt_shards(recipe) if piece.split == "train"]
    if recipe.data.dtype == "float32":
        check_states(store, target, harvested_batches(recipe, work))
    # Timed shard by shard, about a second each: the machine's speed drifts over minutes, hardly between neighbours.
    timings = [
        alternate(
            partial(forward_only, target, harvested_batches(recipe, [piece])),
            partial(harvest_again, recipe, target, piece),
        )
        for piece in work
    ]
    share = median(alone / whole for bare, full in timings for alone, whole in zip(bare, full, strict=True))
    [read_seconds] = map(min, alternate(lambda: read_epoch(recipe)))
    run(recipe)
    lines = list(read_jsonl(recipe.metrics_path))
    trained = max(line["train/tokens_per_second"] for line in lines if "train/tokens_per_second" in line)
    length = [line["heldout/tau"] for line in lines if "heldout/tau" in line][-1]
    size = sum(path.stat().st_size for path in recipe.features_dir.glob("train-*.safetensors")) / store.num_tokens
    plain = bytes_per_token(target.config.hidden_size, len(target.taps), "bfloat16")
    harvested, read = store.num_tokens / sum(min(full) for _, full in timings), store.num_tokens / read_seconds
    speeds = [f"{harvested:,.0f}", f"{share:.0%}", f"{read:,.0f}", f"{trained:,.0f}"]
    return [f"{size:,.0f}", f"{size / plain:.2f}", *speeds], length


def smaller(recipe: Recipe, storage: str) -> Recipe:
    """The recipe with little data, few steps and its own folder."""
    data = {
        "num_prompts": PROMPTS,
        "heldout_samples": HELDOUT,
        "shard_samples": SHARD,
        "dtype": storage,
        "folder": None,
    }
    train = {
        "steps": STEPS,
        "checkpoint_every": STEPS,
        "eval_prompts": EVAL_PROMPTS,
    }
    return recipe.model_copy(
        update={
            "run_dir": recipe.run_dir / "bench_harvest" / storage,
            "data": recipe.data.model_copy(update=data),
            "train": recipe.train.model_copy(update=train),
        }
    )


@dataclass(frozen=True)
class HarvestBatch:
    """One forward of a harvest: the samples' numbers in the store, and their tokens."""

    numbers: list[int]
    texts: list[list[int]]


def harvested_batches(recipe: Recipe, work: list[ShardPrompts]) -> list[HarvestBatch]:
    """The same batches that the harvest itself forms."""
    found, first = [], 0
    for piece in work:
        texts = [Text.from_row(row).tokens for row in read_jsonl(responses_path(recipe, piece))]
        for numbers in length_buckets([len(text) for text in texts], recipe.data.harvest_batch):
            found.append(HarvestBatch([first + number for number in numbers], [texts[number] for number in numbers]))
        first += len(texts)
    return found


def padded(target: TargetModel, texts: list[list[int]]) -> Tensor:
    longest = max(map(len, texts))
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=target.device)


def check_states(store: FeatureStore, target: TargetModel, batches: list[HarvestBatch]) -> None:
    """Check that the stored features are transformers' own hidden states, up to float32 rounding."""
    for batch in batches:
        with torch.inference_mode():
            output = target.model(padded(target, batch.texts), use_cache=False, output_hidden_states=True)
        states = torch.cat([output.hidden_states[tap] for tap in store.taps], dim=-1).float().cpu()
        for number, row in zip(batch.numbers, states, strict=True):
            stored = store[number].taps
            error = float((row[: len(stored)] - stored).abs().max() / stored.abs().max())
            assert error < 1e-5, f"sample {number} differs from a bare forward by {error:.1e}"


def forward_only(target: TargetModel, batches: list[HarvestBatch]) -> None:
    """Run the target over the batches of a harvest, and nothing else."""
    for batch in batches:
        with torch.inference_mode():
            target.model(input_ids=padded(target, batch.texts), use_cache=False, logits_to_keep=1)
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def harvest_again(recipe: Recipe, target: TargetModel, piece: ShardPrompts) -> None:
    """Harvest a shard again, from reading the responses to its checksum."""
    path = recipe.features_dir / shard_name(piece.split, piece.index)
    path.rename(path.with_suffix(".kept"))
    made_from = {path.name: "a benchmark"}
    with ShardProgress([piece], PartialState(), "timing a harvest") as meter:
        write_features(recipe, target.taps, partial(tap, target), target.device, [piece], made_from, meter)
    path.with_suffix(".kept").replace(path)
    note_path(path).unlink()


def read_epoch(recipe: Recipe) -> None:
    """Read every sample once, in batches as in training; the first time also checks the shards."""
    store, size = FeatureStore(recipe.features_dir, "train"), recipe.train.batch_size
    for start in range(0, len(store), size):
        Batch.collate([store[n] for n in range(start, min(start + size, len(store)))], torch.float32)


def alternate(*works: Callable[[], None]) -> list[list[float]]:
    """Seconds of REPEATS runs of each function; they take turns at going first, so a busy machine hits all alike."""
    times: list[list[float]] = [[] for _ in works]
    order = list(zip(works, times, strict=True))
    for _ in range(REPEATS):
        for work, seconds in order:
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        order.reverse()
    return times


if __name__ == "__main__":
    main()
