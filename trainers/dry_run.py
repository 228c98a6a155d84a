"""What a training run will take, known before it starts: sizes that cannot work are refused, the rest is a table."""

import math
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.features.shards import MANIFEST, FeatureStore, stored_taps
from headstart.data_pipelines.prompts.rows import most_samples
from headstart.heads.checkpoint import head_taps
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.recipes import Recipe
from headstart.trainers.memory_estimate import HeadSizes, TargetSizes, head_sizes, target_sizes


def refuse_sizes(recipe: Recipe, num_ranks: int, num_samples: int, num_heldout: int | None = None) -> None:
    """Raise ValueError if there is nothing to train or measure on, or a batch would repeat a sample or be empty."""
    section = recipe.train
    if num_samples == 0:
        raise ValueError("the features hold no samples to train on; check data.num_prompts and harvest again")
    if num_heldout == 0:
        raise ValueError(
            f"data.heldout_prompts: {recipe.data.heldout_prompts} given, which yields no held-out sample; add prompts"
        )
    if section.batch_size < num_ranks:
        raise ValueError(
            f"train.batch_size: {section.batch_size} given, {num_ranks} or more is allowed on {num_ranks} ranks; give "
            "each rank one sequence or more"
        )
    if section.batch_size // num_ranks < section.accumulate:
        most = section.batch_size // num_ranks
        raise ValueError(
            f"train.accumulate: {section.accumulate} given, up to {most} is allowed for the {most} sequences of each "
            f"rank (train.batch_size {section.batch_size} on {num_ranks} ranks); lower it or raise train.batch_size"
        )
    if section.batch_size > num_samples:
        raise ValueError(
            f"train.batch_size: {section.batch_size} given, up to {num_samples} is allowed for {num_samples} "
            "training samples; lower it or raise data.num_prompts"
        )


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the training split: measured if it is on disk, otherwise the largest that the recipe allows."""

    is_measured: bool
    samples: int
    tokens: int
    longest: int  # tokens of the longest sample that memory is planned for
    feature_bytes: int  # of both splits

    @classmethod
    def of(cls, recipe: Recipe, target: TargetConfig) -> "DataSizes":
        data, longest = recipe.data, recipe.data.prompt_tokens + recipe.data.response_tokens
        folder = data.store or recipe.features_dir
        if data.online is None and (folder / MANIFEST).is_file():
            stores = [FeatureStore(folder, split) for split in ("train", "heldout")]
            stored = sum(shard["bytes"] for store in stores for shard in store.shards)
            return cls(True, len(stores[0]), stores[0].num_tokens, longest, stored)
        taps = stored_taps(head_taps(recipe.head, target), target.num_layers)
        stored = data.online is None
        per_token = bytes_per_token(target.hidden_size, len(taps), data.dtype) if stored else 0
        samples = most_samples(data)
        tokens = samples * longest
        return cls(False, samples, tokens, longest, per_token * (tokens + data.heldout_samples * longest))


def print_plan(recipe: Recipe, num_ranks: int, device: torch.device) -> None:
    """Print the whole plan as a table; raises ValueError for sizes that cannot work."""
    folder = locate_target(recipe.target.path, recipe.target.revision, ["config.json"])
    target = TargetConfig.from_folder(folder)
    data = DataSizes.of(recipe, target)
    refuse_sizes(recipe, num_ranks, data.samples)
    samples = math.ceil(math.ceil(recipe.train.batch_size / num_ranks) / recipe.train.accumulate)  # per micro-batch
    head = head_sizes(recipe, target, samples, data.longest, device)
    trained = None if recipe.joint.mode is None else target_sizes(recipe, samples, data.longest, device)
    needs = head_needs(recipe, head, samples, data)
    if trained is not None:
        needs += target_needs(recipe, trained, samples, data)
    table = Table("what", "how much", "why", title=f"plan of {recipe.run_dir}, ranks: {num_ranks}", box=None)
    for row in [parameter_row(head), *memory_rows(needs), *data_rows(recipe, data, head, trained)]:
        table.add_row(*row)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    table.add_row("the target itself", decimal(weights) if weights else "unknown", target_note(recipe))
    Console(width=120, highlight=False).print(table)
    if recipe.joint.mode == "lora" and find_spec("peft") is None:
        print("joint.mode: the run itself needs peft, which is not installed; run pip install -e '.[lora]'")
    print("dry run: nothing was written")


Row = tuple[str, str, str]  # what, how much, why
Need = tuple[str, int, str]  # what, bytes of memory, why


def parameter_row(sizes: HeadSizes) -> Row:
    parts = ", ".join(f"{name} {count:,}" for name, count in sizes.parameters.items())
    return "parameters of the head", f"{sum(sizes.parameters.values()):,}", parts


def head_needs(recipe: Recipe, sizes: HeadSizes, samples: int, data: DataSizes) -> list[Need]:
    micro_batch = f"{samples} samples of {data.longest} tokens, train.unroll {recipe.train.unroll}"
    return [
        ("weights, per rank", sizes.weights, "float32"),
        ("gradients, per rank", sizes.weights, "float32"),
        ("optimizer, per rank", sizes.optimizers, recipe.train.optimizer),
        ("moving average, per rank", sizes.average, f"train.ema_decay {recipe.train.ema_decay}"),
        ("the target's embedding and lm_head, per rank", sizes.frozen, "frozen, with the final norm, in float32"),
        ("activations, per rank, about", sizes.activations, f"{micro_batch}, {recipe.train.precision}"),
    ]


def target_needs(recipe: Recipe, sizes: TargetSizes, samples: int, data: DataSizes) -> list[Need]:
    """Memory for the target that is trained with its heads."""
    learning = f"{sizes.trained_parameters:,} of {sizes.parameters:,} parameters learn, joint.mode {recipe.joint.mode}"
    return [
        ("weights of the target", sizes.weights, learning),
        ("gradients of the target", sizes.gradients, "float32"),
        ("optimizer of the target", sizes.optimizer, "adamw"),
        ("activations of the target, about", sizes.activations, f"{samples} samples of {data.longest} tokens"),
    ]


def memory_rows(needs: list[Need]) -> list[Row]:
    total = sum(size for _, size, _ in needs)
    return [(name, decimal(size), why) for name, size, why in needs if size] + [
        ("total memory, per rank, about", decimal(total), "as data parallel; FSDP and ZeRO hold slices")
    ]


def data_rows(recipe: Recipe, data: DataSizes, head: HeadSizes, trained: TargetSizes | None) -> list[Row]:
    at_most, why = ("", "as harvested") if data.is_measured else ("at most ", "not harvested yet; lengths are unknown")
    epoch = data.samples / recipe.train.batch_size
    checkpoint = head.weights + head.optimizers + head.average
    if trained is not None:
        checkpoint += trained.gradients + trained.optimizer  # the trained weights are as large as their gradients
    checkpoints = recipe.train.keep_checkpoints * checkpoint + (head.weights if recipe.train.eval_prompts else 0)
    return [
        ("tokens per epoch", f"{at_most}{data.tokens:,}", f"{data.samples:,} samples, {why}"),
        ("steps per epoch", f"{epoch:,.1f}", f"train.batch_size {recipe.train.batch_size}"),
        ("epochs of the run", f"{recipe.train.steps / epoch:,.2f}", f"train.steps {recipe.train.steps:,}"),
        ("features on disk", f"{at_most}{decimal(data.feature_bytes)}", why),
        ("checkpoints on disk", decimal(checkpoints), f"the newest {recipe.train.keep_checkpoints}, and the best"),
    ]


def target_note(recipe: Recipe) -> str:
    """Where the target is loaded."""
    if recipe.data.online is not None:
        where = "on every rank" if "auto" in recipe.data.online else "on the devices of data.online"
        return f"{where} while training, and again on the main rank, which decodes train.eval_prompts"
    if not recipe.train.eval_prompts:
        return "only for the harvest, as train.eval_prompts is 0"
    return "on every rank of the harvest, and on the main rank while training"
