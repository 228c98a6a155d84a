"""A run before it starts: mistakes that would show only after the harvest, and the plan that train.dry_run prints."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn

from headstart.common.errors import wrong_value
from headstart.common.remote import shown
from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.features.shards import MANIFEST, FeatureStore, stored_taps
from headstart.data_pipelines.preflight import check_harvest
from headstart.data_pipelines.prompts.rows import most_samples
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import folder_of
from headstart.inference.engine.budget import StepMemory, refuse_trees_of
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.loading import model_without_weights
from headstart.recipes import Recipe
from headstart.trainers.memory import Machine, RunMemory, num_parameters
from headstart.trainers.new_head import load_start
from headstart.trainers.parallel.launch import refuse_lone_decoding
from headstart.trainers.run_checkpoints import KEPT
from headstart.trainers.tracking import refuse_unusable_wandb

SAVED = 12  # bytes of a checkpoint per trained parameter: without the gradient
# The speed of the H100 of 80 GB that was measured (docs/gpu.md). Harvest and training wait for matrix products, at 58 %
# of that card's limit; decoding waits for weights and cache to be read, at 60 % of the rate at which it copies.
OPERATIONS = 578e12  # floating-point operations a second, in bfloat16
READ = 1.78e12  # bytes of weights and cache a second
ROW = 55e-6  # seconds of a decode step for each of its texts: logits, sampling, the loop
SUM = 20e-6  # seconds of a sum over the cards of a target, of which a layer has two; assumed, not measured
BACKWARD = 3  # how many times the operations of its forward pass a training step takes


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


@dataclass(frozen=True)
class TokenCost:
    """What a token costs in each stage of a run, whatever the number of tokens and cards."""

    weights: int  # bytes that a decode step reads for all of its texts together
    cached: int  # bytes that it reads for each token before, of each text
    layers: int
    forward: float  # operations of the target's layers
    logits: float  # of its output layer
    training: float  # of a training step
    stored: int  # bytes of its features

    @classmethod
    def of(cls, recipe: Recipe, head: DraftHead) -> "TokenCost":
        target, model = head.target, model_without_weights(recipe.target)
        layers, step = decoder_layers(model), StepMemory.of(target, model.dtype)
        of_output = target.hidden_size * target.vocab_size
        again = [*head.logits_parameters, *(each for layer in head.decoder_layers for each in layer.parameters())]
        depths = recipe.unroll if head.repeats_layers else 1  # that run the same weights again
        looked_up = sum(each.weight.numel() for each in head.modules() if isinstance(each, nn.Embedding))
        multiplied = num_parameters(head) - looked_up + (depths - 1) * sum(weight.numel() for weight in again)
        taps = stored_taps(head.taps, target.num_layers)
        return cls(
            weights=(num_parameters(layers) + of_output) * step.element,
            cached=step.cached,
            layers=len(layers),
            forward=2.0
            * multiplied_weights(layers, getattr(model.config.get_text_config(), "num_experts_per_tok", None)),
            logits=2.0 * of_output,
            training=BACKWARD * 2.0 * multiplied + 2.0 * of_output,
            stored=bytes_per_token(target.hidden_size, len(taps), recipe.data.dtype),
        )

    def decode_step(self, texts: int, context: float, cards: int = 1) -> float:
        """Seconds of a plain step of `texts` texts of `context` tokens, on a target that so many cards share."""
        read = (self.weights + texts * context * self.cached) / (cards * READ)
        computed = texts * (self.forward + self.logits) / (cards * OPERATIONS)
        return read + computed + texts * ROW + (2 * self.layers * SUM if cards > 1 else 0.0)

    def responses(self, tokens: float, texts: int, context: float, cards: int = 1) -> float:
        """Card seconds of written tokens, by steps of `texts` texts of `context` tokens on average."""
        return tokens * cards * self.decode_step(texts, context, cards) / texts

    def features(self, tokens: float) -> float:
        """Card seconds of reading texts once."""
        return tokens * self.forward / OPERATIONS

    def steps(self, tokens: float) -> float:
        """Card seconds of training on so many tokens, those of later epochs counted again."""
        return tokens * self.training / OPERATIONS


def multiplied_weights(layers: nn.ModuleList, chosen: int | None) -> float:
    """The weights of layers that a token meets: of experts, which are stacked, as many as are `chosen` for it."""
    found = 0.0
    for module in layers.modules():
        is_stack = type(module).__name__.endswith("Experts")
        for weight in module.parameters(recurse=False):
            found += weight.numel() * (1 if chosen is None or not is_stack else chosen / weight.shape[0])
    return found


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the training split: measured if it is on disk, otherwise the largest that the recipe allows."""

    is_measured: bool
    samples: int
    tokens: int
    stored: int  # bytes of both splits

    @classmethod
    def of(cls, memory: RunMemory) -> "DataSizes":
        recipe, data = memory.recipe, memory.recipe.data
        folder = data.store or recipe.features_dir
        if data.online is None and (folder / MANIFEST).is_file():
            store, heldout = (FeatureStore(folder, split) for split in ("train", "heldout"))
            stored = sum(shard["bytes"] for shard in (*store.shards, *heldout.shards))
            return cls(True, len(store), store.num_tokens, stored)
        target, samples = memory.head.target, most_samples(data)
        taps = len(stored_taps(memory.head.taps, target.num_layers))
        per_token = 0 if data.online else bytes_per_token(target.hidden_size, taps, data.dtype)
        stored = per_token * (samples + data.heldout_samples) * data.longest_sample
        return cls(False, samples, samples * data.longest_sample, stored)


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


def time_rows(memory: RunMemory) -> list[tuple[str, str, str]]:
    """The hours of each stage, were every GPU an H100, and what disks must deliver to training."""
    recipe, machine, data = memory.recipe, memory.machine, DataSizes.of(memory)
    section, split, cost = recipe.data, recipe.target.split, TokenCost.of(recipe, memory.head)
    sharing = machine.devices_of_target(split)
    # GPUs with layers of their own compute one after another.
    abreast, waiting = (sharing, 1) if split == "tensor" else (1, sharing)
    cards, texts, mean = max(machine.ranks, sharing), section.generate_batch, data.tokens / max(data.samples, 1)
    stages: list[tuple[str, float, int, str]] = []  # name, seconds of GPUs, on how many, why
    if section.store is None and section.responses == "target" and section.server is None:
        written = data.samples * min(section.response_tokens, mean)
        seconds = waiting * cost.responses(written, texts, mean / 2, abreast)
        stages.append(("responses", seconds, cards, f"{written:,.0f} tokens, {texts} texts at once, at their longest"))
    if section.store is None and section.online is None:
        once = waiting * cost.features(data.tokens)
        stages.append(("features", once, cards, f"{data.tokens:,} tokens"))
    ranks = min(machine.ranks, recipe.train.batch_size)
    seen = recipe.train.steps * recipe.train.batch_size * mean
    seconds = cost.steps(seen) + (0 if section.online is None else waiting * cost.features(seen))
    read = f", which read {decimal(int(cost.stored * seen / seconds * ranks))}/s" if section.online is None else ""
    stages.append(("training", seconds, ranks, f"{seen:,.0f} tokens on {ranks} GPUs{read}"))
    rows = [(f"time: {stage}", f"{seconds / on / 3600:,.2f} h", why) for stage, seconds, on, why in stages]
    spent = sum(seconds for _, seconds, _, _ in stages) / 3600
    return [*rows, ("time of GPUs, in all", f"{spent:,.1f} h", "at the speed of one measured H100: docs/scale.md")]
