"""What a run will take, known before anything is spent: sizes that cannot work are refused, the rest is a table."""

import math
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from data_pipelines.shards import MANIFEST, FeatureStore, stored_taps
from data_pipelines.state_encoding import bytes_per_token
from heads.checkpoint import head_taps
from heads.target_config import TargetConfig, locate_target
from recipes import Recipe
from trainers.memory_estimate import HeadSizes, LiveSizes, head_sizes, live_sizes


def refuse_sizes(recipe: Recipe, num_ranks: int, num_samples: int, num_heldout: int | None = None) -> None:
    """ValueError for what could not be trained on, or would repeat a sample within a batch."""
    section = recipe.train
    if num_samples == 0:
        raise ValueError("the features hold no samples to train on; check data.num_prompts and harvest again")
    if num_heldout == 0:
        raise ValueError(f"data.heldout_prompts: {recipe.data.heldout_prompts} gave no sample to measure on; add some")
    if section.batch_size < num_ranks:
        raise ValueError(
            f"train.batch_size: {section.batch_size} sequences for {num_ranks} ranks; give each rank at least one"
        )
    if section.batch_size // num_ranks < section.accumulate:
        raise ValueError(
            f"train.accumulate: {section.accumulate} pieces of a rank's {section.batch_size // num_ranks} sequences "
            f"(train.batch_size {section.batch_size} on {num_ranks} ranks); lower it or raise train.batch_size"
        )
    if section.batch_size > num_samples:
        raise ValueError(
            f"train.batch_size: {section.batch_size} sequences of {num_samples} to train on; lower it or raise "
            "data.num_prompts"
        )


@dataclass(frozen=True)
class DataSizes:
    """Of the training split, as it is on disk or as large as the recipe allows."""

    is_measured: bool
    samples: int
    tokens: int
    longest: int  # tokens of a sample that memory is planned for
    feature_bytes: int

    @classmethod
    def of(cls, recipe: Recipe, target: TargetConfig) -> "DataSizes":
        data, longest = recipe.data, recipe.data.prompt_tokens + recipe.data.response_tokens
        folder = data.store or recipe.features_dir
        if data.mode == "offline" and (folder / MANIFEST).is_file():
            stores = [FeatureStore(folder, split) for split in ("train", "heldout")]
            stored = sum(shard["bytes"] for store in stores for shard in store.shards)
            return cls(True, len(stores[0]), stores[0].num_tokens, longest, stored)
        taps = stored_taps(head_taps(recipe.head, target), target.num_layers)
        stored = data.mode == "offline"
        per_token = bytes_per_token(target.hidden_size, len(taps), data.dtype) if stored else 0
        tokens = data.num_prompts * longest
        return cls(False, data.num_prompts, tokens, longest, per_token * (tokens + data.heldout_samples * longest))


def print_plan(recipe: Recipe, num_ranks: int, device: torch.device) -> None:
    """The whole plan as a table on the terminal; raises ValueError for sizes that cannot work."""
    folder = locate_target(recipe.target.path, recipe.target.revision, ["config.json"])
    target = TargetConfig.from_folder(folder)
    data = DataSizes.of(recipe, target)
    refuse_sizes(recipe, num_ranks, data.samples)
    rows = math.ceil(math.ceil(recipe.train.batch_size / num_ranks) / recipe.train.accumulate)
    sizes = head_sizes(recipe, target, rows, data.longest, device)
    table = Table("what", "how much", "why", title=f"plan of {recipe.run_dir}, {num_ranks} ranks", box=None)
    needs, live = head_needs(recipe, sizes, rows, data), None
    if recipe.joint.mode is not None:
        live = live_sizes(recipe, rows, data.longest, device)
        needs += target_needs(recipe, live, rows, data)
    for row in [*head_rows(sizes), *memory_rows(needs), *data_rows(recipe, data, sizes, live)]:
        table.add_row(*row)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    table.add_row("the target itself", decimal(weights) if weights else "unknown", measuring(recipe))
    Console(width=120, highlight=False).print(table)
    print("dry run: nothing was written")


Row = tuple[str, str, str]
Need = tuple[str, int, str]  # of memory, in bytes


def head_rows(sizes: HeadSizes) -> list[Row]:
    parts = ", ".join(f"{name} {count:,}" for name, count in sizes.parts.items())
    return [("parameters of the head", f"{sum(sizes.parts.values()):,}", parts)]


def head_needs(recipe: Recipe, sizes: HeadSizes, rows: int, data: DataSizes) -> list[Need]:
    piece = f"{rows} samples of {data.longest} tokens, train.unroll {recipe.train.unroll}"
    return [
        ("weights, per rank", sizes.weights, "float32"),
        ("gradients, per rank", sizes.weights, "float32"),
        ("optimizer, per rank", sizes.moments, recipe.train.optimizer),
        ("average, per rank", sizes.average, f"train.ema_decay {recipe.train.ema_decay}"),
        ("the target's two ends, per rank", sizes.frozen, "embedding, norm and lm_head in float32"),
        ("activations, per rank, about", sizes.activations, f"{piece}, {recipe.train.precision}"),
    ]


def target_needs(recipe: Recipe, sizes: LiveSizes, rows: int, data: DataSizes) -> list[Need]:
    """Of the target that is trained beside the heads."""
    learning = f"{sizes.learning:,} of {sizes.parameters:,} parameters learn, joint.mode {recipe.joint.mode}"
    return [
        ("weights of the target", sizes.weights, learning),
        ("gradients of the target", sizes.gradients, "float32"),
        ("optimizer of the target", sizes.moments, "adamw"),
        ("activations of the target, about", sizes.activations, f"{rows} samples of {data.longest} tokens"),
    ]


def memory_rows(needs: list[Need]) -> list[Row]:
    total = sum(size for _, size, _ in needs)
    return [(name, decimal(size), why) for name, size, why in needs if size] + [
        ("all of these, per rank, about", decimal(total), "as data parallel; shares of FSDP and ZeRO are smaller")
    ]


def data_rows(recipe: Recipe, data: DataSizes, sizes: HeadSizes, live: LiveSizes | None) -> list[Row]:
    at_most, why = ("", "as harvested") if data.is_measured else ("at most ", "not harvested yet; lengths are unknown")
    epoch = data.samples / recipe.train.batch_size
    files = sizes.weights + sizes.moments + sizes.average
    if live is not None:
        files += live.gradients + live.moments  # what learns of the target is as large as its gradients
    checkpoints = recipe.train.keep_checkpoints * files + (sizes.weights if recipe.train.eval_prompts else 0)
    return [
        ("tokens per epoch", f"{at_most}{data.tokens:,}", f"{data.samples:,} samples, {why}"),
        ("steps per epoch", f"{epoch:,.1f}", f"train.batch_size {recipe.train.batch_size}"),
        ("epochs of the run", f"{recipe.train.steps / epoch:,.2f}", f"train.steps {recipe.train.steps:,}"),
        ("features on disk", f"{at_most}{decimal(data.feature_bytes)}", why),
        ("checkpoints on disk", decimal(checkpoints), f"the newest {recipe.train.keep_checkpoints}, and the best"),
    ]


def measuring(recipe: Recipe) -> str:
    if recipe.data.mode == "online":
        where = "on every rank" if recipe.data.online_devices is None else "on data.online_devices"
        return f"{where} while training, and once more on the main one, which decodes train.eval_prompts"
    if not recipe.train.eval_prompts:
        return "only for the harvest, as train.eval_prompts is 0"
    return "on every rank of the harvest, and on the main rank while training"
