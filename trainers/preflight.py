"""What a training run needs, checked in its first second, so that no mistake is found after the harvest."""

from importlib.util import find_spec

import torch
from rich.filesize import decimal

from headstart.data_pipelines.preflight import check_harvest
from headstart.data_pipelines.prompts.rows import most_samples
from headstart.heads.checkpoint import KINDS, draft_vocab
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.inference.engine.budget import free_memory, refuse_trees_of
from headstart.recipes import Recipe
from headstart.trainers.dry_run import refuse_sizes
from headstart.trainers.memory_estimate import frozen_without_weights
from headstart.trainers.starting import load_start
from headstart.trainers.tracking import refuse_wandb_without_key

GRADIENTS_AND_WEIGHTS = 2  # copies of a head in float32 that every optimizer needs at the least


def preflight(recipe: Recipe, num_ranks: int, device: torch.device) -> None:
    """Raise ValueError for whatever is known to fail later in the run; writes nothing."""
    target = check_harvest(recipe)
    if recipe.data.store is None:
        refuse_few_rows(recipe)
        refuse_sizes(recipe, num_ranks, recipe.data.num_prompts)
    refuse_wandb_without_key(recipe)
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
    """Build the head without memory for its weights; raises ValueError if it cannot be built, or would not fit."""
    vocab = draft_vocab(recipe.head, torch.zeros(target.vocab_size, dtype=torch.long))
    try:
        with torch.device("meta"):
            head = KINDS[recipe.head.kind].from_section(recipe.head, frozen_without_weights(target), vocab)
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
