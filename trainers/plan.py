"""A run before it starts: mistakes that would show only after the harvest, and the plan that train.dry_run prints."""

from importlib.util import find_spec

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from headstart.common.errors import wrong_value
from headstart.common.remote import shown
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.preflight import check_harvest
from headstart.data_pipelines.prompts.rows import most_samples
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import folder_of
from headstart.inference.engine.budget import refuse_trees_of
from headstart.recipes import Recipe
from headstart.trainers.hours import DataSizes, time_rows
from headstart.trainers.memory import Machine, RunMemory, num_parameters
from headstart.trainers.new_head import load_start
from headstart.trainers.parallel.launch import refuse_lone_decoding
from headstart.trainers.run_checkpoints import KEPT
from headstart.trainers.tracking import refuse_unusable_wandb

SAVED = 12  # bytes of a checkpoint per trained parameter: without the gradient


def preflight(recipe: Recipe, machine: Machine) -> RunMemory:
    """The run's memory; raises ValueError for whatever else is known to fail later in the run. Writes nothing."""
    target = check_harvest(recipe, machine.is_here)
    data, step = recipe.data, recipe.train.batch_size
    samples = most_samples(data, enough=step) if data.store is None else len(FeatureStore(data.store, "train"))
    refuse_sizes(recipe, machine.ranks, samples)
    refuse_unusable_wandb()
    if recipe.train.start_from is not None:
        load_start(recipe, FrozenTarget.from_folder(folder_of(recipe.target), torch.float32))
    memory = RunMemory.of(recipe, target, machine)
    refuse_lone_decoding(recipe, machine.ranks)
    if recipe.train.eval_prompts and machine.is_here:
        refuse_trees_of(recipe, min(recipe.train.eval_prompts, recipe.decode.max_batch))
    if recipe.joint.mode == "lora" and not recipe.train.dry_run and find_spec("peft") is None:
        raise wrong_value("joint.mode", "lora", "null or full is", "install peft: pip install -e '.[lora]'")
    return memory


def refuse_sizes(recipe: Recipe, num_ranks: int, num_samples: int, num_heldout: int | None = None) -> None:
    """Raise ValueError if there is nothing to train or measure on, or a batch would repeat a sample or be empty."""
    size, accumulate = recipe.train.batch_size, recipe.train.micro_batches
    if num_samples == 0:
        raise ValueError("the features hold no samples to train on; check data.num_prompts and harvest again")
    if num_heldout == 0:
        given = recipe.data.heldout_prompts
        raise ValueError(f"data.heldout_prompts: {given} given, which yields no held-out sample; add prompts")
    if size < num_ranks:
        raise wrong_value("train.batch_size", size, f"{num_ranks} or more is", f"raise it for {num_ranks} ranks")
    if (most := size // num_ranks) < accumulate:
        remedy = f"lower it or raise train.batch_size, {size} for {num_ranks} ranks"
        raise wrong_value("train.accumulate", accumulate, f"up to {most} is", remedy)
    if size > num_samples:
        remedy = f"lower it, or give more prompts (data.prompts, data.num_prompts) than {num_samples}"
        raise wrong_value("train.batch_size", size, f"up to {num_samples} is", remedy)


def print_plan(memory: RunMemory) -> None:
    """Print the whole plan as a table; nothing is allocated."""
    memory = memory.fitted()
    recipe, head, machine = memory.recipe, memory.head, memory.machine
    ranks = f"{machine.ranks}" if machine.is_here else f"{machine.ranks}, devices: {machine.devices}"
    table = Table("what", "how much", "why", title=f"plan of {shown(recipe.run_dir)}, ranks: {ranks}", box=None)
    parts = ", ".join(f"{name} {num_parameters(child):,}" for name, child in head.named_children())
    table.add_row("parameters of the head", f"{num_parameters(head):,}", parts)
    for need in memory.needs:
        table.add_row(f"memory: {need.what}", decimal(need.size), need.why)
    shares = "" if machine.slices > 1 else " as data parallel;"
    most = f"of {decimal(machine.memory)};{shares} the larger of activations and decoding"
    table.add_row("memory: total on the main rank, about", decimal(memory.total), most)
    for row in data_rows(memory) + (time_rows(memory) if machine.device.type == "cuda" else []):
        table.add_row(*row)
    again = ", each unroll step computed again" if recipe.train.activation_checkpointing else ""
    table.add_row("micro-batches", f"{recipe.train.micro_batches}", f"of {memory.samples} samples on each rank{again}")
    table.add_row("the target itself", decimal(memory.weights()), "its weights, wherever it is loaded")
    Console(width=120, highlight=False).print(table)
    if recipe.joint.mode == "lora" and find_spec("peft") is None:
        print("joint.mode: the run itself needs peft, which is not installed; run pip install -e '.[lora]'")
    print("dry run: nothing was written")


def data_rows(memory: RunMemory) -> list[tuple[str, str, str]]:
    """The training split and disk space."""
    train, data = memory.recipe.train, DataSizes.of(memory)
    at_most, why = ("", "as harvested") if data.is_measured else ("at most ", "not harvested yet; lengths are unknown")
    epoch, trained = data.samples / train.batch_size, num_parameters(memory.head) + memory.tuned
    return [
        ("tokens per epoch", f"{at_most}{data.tokens:,}", f"{data.samples:,} samples, {why}"),
        ("steps per epoch", f"{epoch:,.1f}", f"train.batch_size {train.batch_size}"),
        ("epochs of the run", f"{train.steps / epoch:,.2f}", f"train.steps {train.steps:,}"),
        ("features on disk", f"{at_most}{decimal(data.stored)}", why),
        ("checkpoints on disk", f"at most {decimal(KEPT * SAVED * trained)}", f"the newest {KEPT}"),
    ]
