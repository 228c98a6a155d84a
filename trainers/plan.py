"""A run before it starts: mistakes that would show only after the harvest, and the plan that train.dry_run prints."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn

from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.features.shards import MANIFEST, FeatureStore, stored_taps
from headstart.data_pipelines.preflight import check_harvest
from headstart.data_pipelines.prompts.rows import most_samples
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import head_taps
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.inference.engine.budget import free_memory, refuse_trees_of
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.schema import BlockSection, MedusaSection
from headstart.trainers.new_head import head_without_weights, load_start
from headstart.trainers.objectives.medusa2 import trainable_section
from headstart.trainers.objectives.unrolled import positions_at_once
from headstart.trainers.run_checkpoints import KEPT
from headstart.trainers.tracking import refuse_unusable_wandb

FLOAT32 = 4  # bytes
TRAINED = 16  # bytes of memory per trained parameter: weight, gradient and AdamW's two moments in float32
SAVED = 12  # bytes of a checkpoint per trained parameter: without the gradient
GRADIENTS_AND_WEIGHTS = 2  # copies of a head in float32 that every optimizer needs at the least
LOGITS_KEPT = 4  # copies of a chunk's logits: the target's, the head's, their loss and its gradient


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
            "joint.mode: lora given, null or full is allowed without peft; install it with pip install -e '.[lora]'"
        )


def refuse_sizes(recipe: Recipe, num_ranks: int, num_samples: int, num_heldout: int | None = None) -> None:
    """Raise ValueError if there is nothing to train or measure on, or a batch would repeat a sample or be empty."""
    size, accumulate = recipe.train.batch_size, recipe.train.accumulate
    if num_samples == 0:
        raise ValueError("the features hold no samples to train on; check data.num_prompts and harvest again")
    if num_heldout == 0:
        raise ValueError(
            f"data.heldout_prompts: {recipe.data.heldout_prompts} given, which yields no held-out sample; add prompts"
        )
    if size < num_ranks:
        raise ValueError(
            f"train.batch_size: {size} given, {num_ranks} or more is allowed on {num_ranks} ranks; raise it"
        )
    if (most := size // num_ranks) < accumulate:
        raise ValueError(
            f"train.accumulate: {accumulate} given, up to {most} is allowed for the {most} sequences of each rank "
            f"(train.batch_size {size} on {num_ranks} ranks); lower it or raise train.batch_size"
        )
    if size > num_samples:
        raise ValueError(
            f"train.batch_size: {size} given, up to {num_samples} is allowed for {num_samples} training samples; lower "
            "it or raise data.num_prompts"
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
            f"head: {sizes} given, sizes that fit the target are allowed ({error}); leave them out for the target's own"
        ) from error
    weights = num_parameters(head) * FLOAT32
    needed, free = GRADIENTS_AND_WEIGHTS * weights // num_ranks, free_memory(device)
    if needed > free:
        raise ValueError(
            f"head: {decimal(weights)} of weights given, {decimal(needed)} per rank with their gradients, and {device} "
            f"has {decimal(free)} free, which is the most that is allowed; lower head.intermediate_size, num_heads, "
            "hidden_size or draft_vocab_size"
        )


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the training split: measured if it is on disk, otherwise the largest that the recipe allows."""

    is_measured: bool
    samples: int
    tokens: int
    longest: int  # tokens of the longest sample that memory is planned for
    feature_bytes: int  # bytes of both splits

    @classmethod
    def of(cls, recipe: Recipe, target: TargetConfig) -> "DataSizes":
        data, longest = recipe.data, recipe.data.prompt_tokens + recipe.data.response_tokens
        folder = data.store or recipe.features_dir
        if data.online is None and (folder / MANIFEST).is_file():
            stores = [FeatureStore(folder, split) for split in ("train", "heldout")]
            stored = sum(shard["bytes"] for store in stores for shard in store.shards)
            return cls(True, len(stores[0]), stores[0].num_tokens, longest, stored)
        taps = stored_taps(head_taps(recipe.head, target), target.num_layers)
        per_token = bytes_per_token(target.hidden_size, len(taps), data.dtype) if data.online is None else 0
        samples = most_samples(data)
        tokens = samples * longest
        return cls(False, samples, tokens, longest, per_token * (tokens + data.heldout_samples * longest))


Need = tuple[str, int, str]  # what, bytes of memory, why


def print_plan(recipe: Recipe, num_ranks: int, device: torch.device) -> None:
    """Print the whole plan as a table; nothing is allocated."""
    folder = locate_target(recipe.target.path, recipe.target.revision, ["config.json"])
    target = TargetConfig.from_folder(folder)
    data, head = DataSizes.of(recipe, target), head_without_weights(recipe, target)
    samples = math.ceil(math.ceil(recipe.train.batch_size / num_ranks) / recipe.train.accumulate)  # per micro-batch
    needs, trained = head_needs(recipe, head, samples, data.longest, device), num_parameters(head)
    if recipe.joint.mode is not None:
        model = TargetModel.without_weights(trainable_section(recipe, device)).model
        tuned = tuned_parameters(recipe, model)
        needs += target_needs(recipe, model, tuned, samples * data.longest)
        trained += tuned
    needs.append(("total, per rank, about", sum(size for _, size, _ in needs), "as data parallel; others hold slices"))
    table = Table("what", "how much", "why", title=f"plan of {recipe.run_dir}, ranks: {num_ranks}", box=None)
    parts = ", ".join(f"{name} {num_parameters(child):,}" for name, child in head.named_children())
    table.add_row("parameters of the head", f"{num_parameters(head):,}", parts)
    for what, size, why in needs:
        table.add_row(f"memory: {what}", decimal(size), why)
    for row in data_rows(recipe, data, trained):
        table.add_row(*row)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    table.add_row("the target itself", decimal(weights) if weights else "unknown", "its weights, wherever it is loaded")
    Console(width=120, highlight=False).print(table)
    if recipe.joint.mode == "lora" and find_spec("peft") is None:
        print("joint.mode: the run itself needs peft, which is not installed; run pip install -e '.[lora]'")
    print("dry run: nothing was written")


def head_needs(recipe: Recipe, head: DraftHead, samples: int, longest: int, device: torch.device) -> list[Need]:
    """Memory on a rank that trains on `samples` texts of `longest` tokens at once."""
    drafted, target = 0 if head.vocab.is_full else len(head.vocab.ids), head.target
    frozen = (2 * target.vocab_size + drafted) * target.hidden_size * FLOAT32
    micro_batch = f"{samples} samples of {longest} tokens, unroll {recipe.unroll}, {recipe.train.precision}"
    activations = activation_bytes(recipe, head, samples, longest, device)
    return [
        ("the head", TRAINED * num_parameters(head), "weights, gradients, two moments of AdamW in float32"),
        ("the target's embedding and lm_head", frozen, "frozen, with the final norm, in float32"),
        ("activations, about", activations, micro_batch),
    ]


def activation_bytes(recipe: Recipe, head: DraftHead, samples: int, longest: int, device: torch.device) -> int:
    """About what a micro-batch takes: its features, what each unroll step saves, and the logits of a chunk."""
    tokens, unroll, hidden = samples * longest, recipe.unroll, head.target.hidden_size
    scored = tokens  # positions whose hidden states are kept for the loss
    passes = tokens * unroll  # positions that go through the head's layers
    if isinstance(recipe.head, MedusaSection):
        passes = tokens  # each Medusa head has layers of its own
    elif isinstance(recipe.head, BlockSection):
        scored = samples * min(recipe.train.anchors, longest)
        passes = scored * recipe.head.block_size
    element, copies = FLOAT32, 0
    if recipe.train.precision == "bfloat16":
        element = FLOAT32 // 2
        copies = num_parameters(head) * element  # autocast keeps a copy of the weights
    logits_weights = {id(parameter) for parameter in head.logits_parameters}
    layers = copies + passes * linear_widths(head, logits_weights) * element
    if recipe.train.activation_checkpointing:
        layers //= unroll  # the backward pass computes one unroll step at a time again
    features = (len(head.taps) + 2) * hidden * tokens * FLOAT32
    states = 2 * unroll * scored * hidden * FLOAT32
    logits = unroll * len(head.vocab.ids)  # logits of one position
    chunk = min(positions_at_once(logits, device), scored)
    return features + layers + states + LOGITS_KEPT * chunk * logits * FLOAT32


def linear_widths(module: nn.Module, without: Collection[int] = ()) -> int:
    """The widths of linear layers, but `without` (ids of weights): about what a forward pass saves for a position."""
    linear = [each for each in module.modules() if isinstance(each, nn.Linear) and id(each.weight) not in without]
    return sum(each.in_features + each.out_features for each in linear)


def tuned_parameters(recipe: Recipe, model: Any) -> int:
    """The number of the target's parameters that joint.mode trains: its layers', or those of adapters."""
    layers = decoder_layers(model)
    if recipe.joint.mode == "full":
        return num_parameters(layers)
    return recipe.joint.lora_rank * linear_widths(layers)


def target_needs(recipe: Recipe, model: Any, tuned: int, tokens: int) -> list[Need]:
    """Memory for a target that is trained with its heads."""
    parameters, size = num_parameters(model), next(model.parameters()).element_size()
    fixed = parameters - tuned if recipe.joint.mode == "full" else parameters  # adapters are added to the others
    learning = f"{tuned:,} of {fixed + tuned:,} parameters learn, joint.mode {recipe.joint.mode}"
    return [
        ("the target", fixed * size + TRAINED * tuned, learning),
        ("activations of the target, about", tokens * linear_widths(decoder_layers(model)) * size, f"{tokens} tokens"),
    ]


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def data_rows(recipe: Recipe, data: DataSizes, trained: int) -> list[tuple[str, str, str]]:
    """`trained` is the number of parameters that a checkpoint holds with their optimizer state."""
    at_most, why = ("", "as harvested") if data.is_measured else ("at most ", "not harvested yet; lengths are unknown")
    epoch = data.samples / recipe.train.batch_size
    return [
        ("tokens per epoch", f"{at_most}{data.tokens:,}", f"{data.samples:,} samples, {why}"),
        ("steps per epoch", f"{epoch:,.1f}", f"train.batch_size {recipe.train.batch_size}"),
        ("epochs of the run", f"{recipe.train.steps / epoch:,.2f}", f"train.steps {recipe.train.steps:,}"),
        ("features on disk", f"{at_most}{decimal(data.feature_bytes)}", why),
        ("checkpoints on disk", f"at most {decimal(KEPT * SAVED * trained)}", f"the newest {KEPT}"),
    ]
