"""The plan of a training run, which train.dry_run prints: sizes, memory, disk space and steps."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn

from headstart.data_pipelines.features.shards import MANIFEST, FeatureStore, stored_taps
from headstart.data_pipelines.features.state_encoding import bytes_per_token
from headstart.data_pipelines.prompts.count_rows import most_samples
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import head_taps
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.schema import BlockSection, MedusaSection
from headstart.trainers.new_head import head_without_weights
from headstart.trainers.objectives.medusa2 import trainable_section
from headstart.trainers.objectives.unrolled import positions_at_once
from headstart.trainers.run_checkpoints import KEPT

FLOAT32 = 4  # bytes
TRAINED = 16  # bytes of memory per trained parameter: weight, gradient and AdamW's two moments in float32
SAVED = 12  # bytes of a checkpoint per trained parameter: without the gradient
LOGITS_KEPT = 4  # copies of a chunk's logits: the target's, the head's, their loss and its gradient


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
        if data.mode == "offline" and (folder / MANIFEST).is_file():
            stores = [FeatureStore(folder, split) for split in ("train", "heldout")]
            stored = sum(shard["bytes"] for store in stores for shard in store.shards)
            return cls(True, len(stores[0]), stores[0].num_tokens, longest, stored)
        taps = stored_taps(head_taps(recipe.head, target), target.num_layers)
        per_token = bytes_per_token(target.hidden_size, len(taps), data.dtype) if data.mode == "offline" else 0
        samples = most_samples(data)
        tokens = samples * longest
        return cls(False, samples, tokens, longest, per_token * (tokens + data.heldout_samples * longest))


Row = tuple[str, str, str]  # what, how much, why
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
    table = Table("what", "how much", "why", title=f"plan of {recipe.run_dir}, ranks: {num_ranks}", box=None)
    for row in [parameter_row(head), *memory_rows(needs), *data_rows(recipe, data, trained)]:
        table.add_row(*row)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    table.add_row("the target itself", decimal(weights) if weights else "unknown", target_note(recipe))
    Console(width=120, highlight=False).print(table)
    if recipe.joint.mode == "lora" and find_spec("peft") is None:
        print("joint.mode: the run itself needs peft, which is not installed; run pip install -e '.[lora]'")
    print("dry run: nothing was written")


def parameter_row(head: DraftHead) -> Row:
    each = ", ".join(f"{name} {num_parameters(child):,}" for name, child in head.named_children())
    return "parameters of the head", f"{num_parameters(head):,}", each


def head_needs(recipe: Recipe, head: DraftHead, samples: int, longest: int, device: torch.device) -> list[Need]:
    """Memory on a rank that trains on `samples` texts of `longest` tokens at once."""
    drafted, target = 0 if head.vocab.is_full else len(head.vocab.ids), head.target
    frozen = (2 * target.vocab_size + drafted) * target.hidden_size * FLOAT32
    micro_batch = f"{samples} samples of {longest} tokens, unroll {recipe.unroll}, {recipe.train.precision}"
    activations = activation_bytes(recipe, head, samples, longest, device)
    return [
        ("the head, per rank", TRAINED * num_parameters(head), "weights, gradients, two moments of AdamW in float32"),
        ("the target's embedding and lm_head, per rank", frozen, "frozen, with the final norm, in float32"),
        ("activations, per rank, about", activations, micro_batch),
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
    element = FLOAT32 if recipe.train.precision == "float32" else FLOAT32 // 2
    own_logits = {id(parameter) for parameter in head.logits_parameters}
    layers = passes * saved_elements(head, own_logits) * element
    if recipe.train.activation_checkpointing:
        layers //= unroll  # the backward pass computes one unroll step at a time again
    features = (len(head.taps) + 2) * hidden * tokens * FLOAT32
    states = 2 * unroll * scored * hidden * FLOAT32
    logits = unroll * len(head.vocab.ids)  # logits of one position
    chunk = min(positions_at_once(logits, device), scored)
    return features + layers + states + LOGITS_KEPT * chunk * logits * FLOAT32


def saved_elements(module: nn.Module, without: Collection[int] = ()) -> int:
    """About how many numbers a forward pass saves for each position: what goes into and out of each linear layer.

    `without` holds the ids of weights that do not count.
    """
    linear = [each for each in module.modules() if isinstance(each, nn.Linear) and id(each.weight) not in without]
    return sum(each.in_features + each.out_features for each in linear)


def tuned_parameters(recipe: Recipe, model: nn.Module) -> int:
    """The number of the target's parameters that joint.mode trains: its layers', or those of adapters."""
    layers = decoder_layers(model)
    if recipe.joint.mode == "full":
        return num_parameters(layers)
    return recipe.joint.lora_rank * saved_elements(layers)


def target_needs(recipe: Recipe, model: nn.Module, tuned: int, tokens: int) -> list[Need]:
    """Memory for a target that is trained with its heads."""
    parameters, size = num_parameters(model), next(model.parameters()).element_size()
    fixed = parameters
    if recipe.joint.mode == "full":
        fixed -= tuned
    else:
        parameters += tuned
    learning = f"{tuned:,} of {parameters:,} parameters learn, joint.mode {recipe.joint.mode}"
    return [
        ("the target in training", fixed * size + TRAINED * tuned, learning),
        ("activations of the target, about", tokens * saved_elements(decoder_layers(model)) * size, f"{tokens} tokens"),
    ]


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def memory_rows(needs: list[Need]) -> list[Row]:
    total = sum(size for _, size, _ in needs)
    return [(name, decimal(size), why) for name, size, why in needs] + [
        ("total memory, per rank, about", decimal(total), "as data parallel; FSDP and ZeRO hold slices")
    ]


def data_rows(recipe: Recipe, data: DataSizes, trained: int) -> list[Row]:
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


def target_note(recipe: Recipe) -> str:
    """Where the target is loaded."""
    if recipe.data.mode == "online":
        where = "on every rank" if recipe.data.online_devices is None else "on data.online_devices"
        return f"{where} while training, and again on the main rank, which decodes train.eval_prompts"
    if not recipe.train.eval_prompts:
        return "only for the harvest, as train.eval_prompts is 0"
    return "on every rank of the harvest, and on the main rank while training"
