"""Mistakes of a recipe or a launch, found in the first second of a training run instead of after the harvest."""

from importlib.util import find_spec

import torch
from rich.filesize import decimal

from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.preflight import check_harvest
from headstart.data_pipelines.prompts.count_rows import most_samples
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.inference.engine.step_memory import free_memory, refuse_trees_of
from headstart.recipes import Recipe
from headstart.trainers.new_head import head_without_weights, load_start
from headstart.trainers.tracking import refuse_unusable_wandb

GRADIENTS_AND_WEIGHTS = 2  # copies of a head in float32 that every optimizer needs at the least


def preflight(recipe: Recipe, num_ranks: int, device: torch.device) -> None:
    """Raise ValueError for whatever is known to fail later in the run; writes nothing."""
    target = check_harvest(recipe)
    samples = recipe.data.num_prompts
    if recipe.data.store is None:
        refuse_few_rows(recipe)
    else:
        samples = len(FeatureStore(recipe.data.store, "train"))
    refuse_sizes(recipe, num_ranks, samples)
    refuse_unusable_wandb(recipe)
    if recipe.train.start_from is not None:
        folder = locate_target(recipe.target.path, recipe.target.revision)
        load_start(recipe, FrozenTarget.from_folder(folder, torch.float32))
    refuse_large_head(recipe, target, num_ranks, device)
    if recipe.train.eval_prompts:
        refuse_trees_of(recipe, min(recipe.train.eval_prompts, recipe.decode.max_batch))
    if recipe.joint.mode == "lora" and not recipe.train.dry_run and find_spec("peft") is None:
        raise ValueError(
            "joint.mode: lora given, null or full is allowed without peft, which is not installed; run pip install -e "
            "'.[lora]'"
        )


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


def refuse_few_rows(recipe: Recipe) -> None:
    """Raise ValueError if the prompts cannot fill one training step."""
    data, step = recipe.data, recipe.train.batch_size
    rows = most_samples(data, enough=step)
    if rows < min(step, data.num_prompts):
        raise ValueError(
            f"data.prompts: {data.prompts} given, which has {rows} row{'s' * (rows != 1)}; {step} or more are allowed, "
            f"as many as train.batch_size; add prompts, or write train.batch_size={max(rows, 1)}"
        )


def refuse_large_head(recipe: Recipe, target: TargetConfig, num_ranks: int, device: torch.device) -> None:
    """Raise ValueError if the head cannot be built, or its weights and gradients would not fit into memory."""
    try:
        head = head_without_weights(recipe, target)
    except (RuntimeError, TypeError) as error:  # sizes that overflow, or that a layer refuses
        sizes = ", ".join(f"{name} {value}" for name, value in recipe.head.model_dump().items() if value is not None)
        raise ValueError(
            f"head: {sizes} given, sizes of a layer that fits the target are allowed ({error}); leave them out for the "
            "target's own sizes"
        ) from error
    weights = sum(parameter.numel() for parameter in head.parameters()) * torch.float32.itemsize
    needed, free = GRADIENTS_AND_WEIGHTS * weights // num_ranks, free_memory(device)
    if needed > free:
        raise ValueError(
            f"head: {decimal(weights)} of weights given, {decimal(needed)} per rank with their gradients, and {device} "
            f"has {decimal(free)} free, which is the most that is allowed; lower head.intermediate_size, num_heads, "
            "hidden_size or draft_vocab_size"
        )
