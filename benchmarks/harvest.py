"""What a harvest costs beside the target's own forward, how fast its store is read, and what 8 bits cost in tau.

    python benchmarks/harvest.py recipes/tiny.yaml

Works in RUN_DIR/bench_harvest, which it makes anew, with 256 of the recipe's prompts and heads of 200 steps.
"""

import shutil
import time
from collections.abc import Callable

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from data_pipelines.batches import Batch
from data_pipelines.codec import bytes_per_token
from data_pipelines.harvest import harvest, write_features
from data_pipelines.responses import Text, responses_path
from data_pipelines.shards import FeatureStore
from data_pipelines.work import Piece, pieces
from inference.target import TargetModel
from recipes import Recipe, run_command
from recipes.jsonl import read_jsonl
from trainers.eagle import run

PROMPTS, HELDOUT, STEPS = 256, 32, 200
REPEATS = 3  # of each timing; the fastest counts
STORAGES = ("float32", "bfloat16", "float8", "int8")


def main() -> None:
    run_command(__doc__, benchmark)


def benchmark(recipe: Recipe) -> None:
    """Print one table."""
    PartialState()
    folder = recipe.run_dir / "bench_harvest"
    shutil.rmtree(folder, ignore_errors=True)
    table = Table(
        "storage",
        "bytes/token",
        "of bfloat16",
        "harvest tokens/s",
        "of bare forward",
        "read tokens/s",
        "trained",
        "tau",
    )
    for storage in STORAGES:
        small = smaller(recipe, storage)
        for name in ("prompts", "responses"):  # written once
            if storage != STORAGES[0]:
                shutil.copytree(folder / STORAGES[0] / name, small.run_dir / name)
        harvest(small)
        table.add_row(storage, *measured(small))
    Console().print(table)


def measured(recipe: Recipe) -> list[str]:
    """The columns of the table, of a recipe whose features are there."""
    store = FeatureStore(recipe.features_dir, "train")
    target = TargetModel.load(recipe.target, tuple(store.taps))
    work = [piece for piece in pieces(recipe) if piece.split == "train"]
    bare = store.num_tokens / fastest(lambda: forward_only(recipe, target, work))
    full = store.num_tokens / fastest(lambda: harvest_again(recipe, target, work))
    read = store.num_tokens / fastest(lambda: read_epoch(recipe))
    run(recipe)
    lines = list(read_jsonl(recipe.metrics_path))
    trained = max(line["train/tokens_per_second"] for line in lines if "train/tokens_per_second" in line)
    tau = [line["heldout/tau"] for line in lines if "heldout/tau" in line][-1]
    size = sum(path.stat().st_size for path in recipe.features_dir.glob("train-*.safetensors")) / store.num_tokens
    plain = bytes_per_token(target.config.hidden_size, len(target.taps), "bfloat16")
    speeds = [f"{full:,.0f}", f"{full / bare:.0%}", f"{read:,.0f}", f"{trained:,.0f}"]
    return [f"{size:,.0f}", f"{size / plain:.2f}", *speeds, f"{tau:.2f}"]


def smaller(recipe: Recipe, storage: str) -> Recipe:
    """The recipe with little data and few steps, in a folder of its own."""
    data = {"num_prompts": PROMPTS, "heldout_samples": HELDOUT, "dtype": storage, "folder": None}
    train = {
        "steps": STEPS,
        "checkpoint_every": STEPS,
        "eval_every": STEPS,
        "eval_prompts": max(recipe.train.eval_prompts, 4),
    }
    return recipe.model_copy(
        update={
            "run_dir": recipe.run_dir / "bench_harvest" / storage,
            "data": recipe.data.model_copy(update=data),
            "train": recipe.train.model_copy(update=train),
        }
    )


def forward_only(recipe: Recipe, target: TargetModel, work: list[Piece]) -> None:
    """The target over the batches of a harvest, and nothing else."""
    for piece in work:
        texts = sorted((Text.from_row(row).tokens for row in read_jsonl(responses_path(recipe, piece))), key=len)
        for start in range(0, len(texts), recipe.data.harvest_batch):
            batch = texts[start : start + recipe.data.harvest_batch]
            longest = max(map(len, batch))
            tokens = torch.tensor([text + [0] * (longest - len(text)) for text in batch], device=target.device)
            with torch.inference_mode():
                target.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def harvest_again(recipe: Recipe, target: TargetModel, work: list[Piece]) -> None:
    """The same with everything that a harvest does."""
    for path in recipe.features_dir.glob("train-*.safetensors"):
        path.rename(path.with_suffix(".kept"))
    for piece in work:
        write_features(recipe, target, piece, "a benchmark")
    for path in recipe.features_dir.glob("train-*.kept"):
        path.replace(path.with_suffix(".safetensors"))


def read_epoch(recipe: Recipe) -> None:
    """Every sample once, in the batches of training; the first time the shards are checked too."""
    store, size = FeatureStore(recipe.features_dir, "train"), recipe.train.batch_size
    for start in range(0, len(store), size):
        Batch.collate([store[n] for n in range(start, min(start + size, len(store)))], torch.float32)


def fastest(work: Callable[[], None]) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    main()
