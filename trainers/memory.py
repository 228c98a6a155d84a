"""The memory that a run needs on each device, the target that decodes included, and the settings that make it fit."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from rich.filesize import decimal
from torch import nn

from headstart.common.files import read_json
from headstart.data_pipelines.features.sample_stores import IN_THIS_PROCESS, ON_DEVICE, STEPS
from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.features.shards import MANIFEST, stored_taps
from headstart.heads.base import DraftHead
from headstart.heads.target_config import TargetConfig, folder_of
from headstart.inference.core.cache_memory import free_memory
from headstart.inference.drafters.growth import Growth
from headstart.inference.engine.budget import StepMemory
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.loading import model_without_weights, num_devices
from headstart.recipes import Recipe
from headstart.recipes.command_line import DeviceMemory
from headstart.trainers.new_head import head_without_weights
from headstart.trainers.objectives.medusa2 import trainable_section
from headstart.trainers.objectives.unrolled import positions_at_once

FLOAT32 = 4  # bytes
TRAINED = 16  # bytes of memory per trained parameter: weight, gradient and AdamW's two moments in float32
GRADIENTS_AND_WEIGHTS = 2  # copies of a head in float32 that every optimizer needs at the least
CHEAPER = ("precision", "accumulate", "activation_checkpointing", "eval_prompts")  # fields of train that save memory
LOGITS_KEPT = 4  # copies of a chunk's logits: the target's, the head's, their loss and its gradient


@dataclass(frozen=True)
class Machine:
    """Where a run trains: the ranks of its launch, and the memory that each has on a device of its own."""

    ranks: int
    device: torch.device
    memory: int  # bytes that a rank can allocate on its device
    devices: int = 1  # that target.split layers spreads the target over
    slices: int = 1  # that the head is cut into, one for each rank (FSDP2, DeepSpeed); 1: every rank has all of it
    is_here: bool = True  # otherwise it is one that the user describes

    @classmethod
    def running(cls, ranks: int, device: torch.device, slices: int) -> "Machine":
        """The machine that this process runs on."""
        return cls(ranks, device, free_memory(device), max(num_devices(device.type), 1), slices)

    @classmethod
    def described(cls, recipe: Recipe, given: DeviceMemory) -> "Machine":
        """A machine with these GPUs: a rank for each, or one process if it trains the target or has it on all GPUs."""
        alone = recipe.target.split == "layers" or recipe.joint.mode is not None
        return cls(1 if alone else given.count, torch.device("cuda"), given.size, given.count, is_here=False)

    def devices_of_target(self, split: str | None) -> int:
        """How many devices hold a target together."""
        return {"layers": self.devices, "tensor": self.ranks}.get(split or "", 1)


@dataclass(frozen=True)
class Need:
    """Memory for one purpose."""

    what: str
    size: int  # bytes
    why: str
    passes: bool = False  # whether it is free again when another such need arises


def total(needs: list[Need]) -> int:
    """The most that is needed at a time."""
    return sum(need.size for need in needs if not need.passes) + max(need.size for need in needs if need.passes)


def memory_needs(recipe: Recipe, head: DraftHead, machine: Machine, weights: int) -> list[Need]:
    """The memory of training on the device of the main rank, which needs the most; `weights` are the target's bytes.

    Samples may be as long as the recipe allows: most batches of texts hold one, to which the others are padded.
    """
    samples, longest = recipe.train.samples_at_once(machine.ranks), recipe.data.longest_sample
    needs = head_needs(recipe, head, samples, longest, machine)
    if recipe.joint.mode is not None:
        model = model_without_weights(trainable_section(recipe, machine.device))
        needs += target_needs(recipe, model, tuned_parameters(recipe, model), samples * longest)
    return needs + list(decoding_needs(recipe, head, machine, weights))


def fitted(recipe: Recipe, target: TargetConfig, machine: Machine) -> Recipe:
    """The recipe with the train.accumulate and activation_checkpointing of the plan, where it leaves them open.

    On a GPU the first choice that fits counts: few micro-batches, before anything is computed twice. Where none fits,
    and on a CPU, there is one micro-batch.
    """
    if machine.device.type == "cpu" or not left_open(recipe):
        return recipe
    head, weights = head_without_weights(recipe, target), target_bytes(recipe)
    settings = fitting_settings(recipe, head, machine, weights, left_open(recipe)) or {}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=settings)})


def left_open(recipe: Recipe) -> list[str]:
    """The fields of `train` that the plan chooses."""
    return [name for name in ("accumulate", "activation_checkpointing") if getattr(recipe.train, name) is None]


def fitting_settings(
    recipe: Recipe, head: DraftHead, machine: Machine, weights: int, names: Collection[str]
) -> dict[str, Any] | None:
    """The fewest changes of these fields of `train` with which the run fits the machine; None if there are none."""
    for settings in cheaper_settings(recipe, machine.ranks, names):
        changed = recipe.model_copy(update={"train": recipe.train.model_copy(update=settings)})
        if total(memory_needs(changed, head, machine, weights)) <= machine.memory:
            return settings
    return None


def refuse_more_than_memory(recipe: Recipe, target: TargetConfig, machine: Machine) -> None:
    """Raise ValueError, naming the settings that fit, if the harvest or training needs more memory than a GPU has.

    On a CPU, which can swap, the estimate is only printed.
    """
    if machine.device.type == "cpu":
        return
    weights = target_bytes(recipe)
    refuse_large_harvest(recipe, target, machine, weights)
    head, section, allowed = head_without_weights(recipe, target), recipe.train, decimal(machine.memory)
    if fitting_settings(recipe, head, machine, weights, left_open(recipe)) is not None:
        return
    needed = total(memory_needs(recipe, head, machine, weights))
    settings = fitting_settings(recipe, head, machine, weights, CHEAPER)
    advice = "no train.accumulate or activation_checkpointing makes it fit: take larger devices or a smaller head"
    if settings is not None:
        advice = "write " + " ".join(f"train.{name}={str(value).lower()}" for name, value in settings.items())
    again = str(bool(section.activation_checkpointing)).lower()
    raise ValueError(
        f"train.accumulate: {section.micro_batches} given, with precision {section.precision}, "
        f"activation_checkpointing {again} and eval_prompts {section.eval_prompts}, which needs about "
        f"{decimal(needed)} on the device of the main rank, and up to {allowed} is allowed there; {advice}"
    )


def refuse_large_harvest(recipe: Recipe, target: TargetConfig, machine: Machine, weights: int) -> None:
    """Raise ValueError if the target and the cache of one response do not fit, unless the features are there."""
    data, split = recipe.data, recipe.target.split
    if data.store or data.online or (recipe.features_dir / MANIFEST).exists() or not shares_device(recipe, machine):
        return
    shares = machine.devices_of_target(split)
    step = StepMemory.of(target, getattr(torch, recipe.target.dtype))
    needed = (weights + step.needed(1, 1, recipe.data.longest_sample)) // shares
    if needed > machine.memory:
        raise ValueError(
            f"target.split: {split or 'null'} given, with which the harvest needs about {decimal(needed)} on each "
            f"device ({shares} together), and up to {decimal(machine.memory)} is allowed there; start "
            f"{math.ceil(needed * shares / machine.memory)} ranks or more with target.split=tensor, or give data.store"
        )


def target_bytes(recipe: Recipe) -> int:
    """The size of the target's weights in memory; quantised ones stay as they are in their files."""
    section = recipe.target
    folder = folder_of(section, ["config.json"])
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if stored and "quantization_config" in read_json(folder / "config.json"):
        return stored
    return num_parameters(model_without_weights(section)) * getattr(torch, section.dtype).itemsize


def shares_device(recipe: Recipe, machine: Machine) -> bool:
    """Whether the target is on the device that trains, unless the recipe gives it one of its own."""
    return recipe.target.device in ("auto", machine.device.type, str(machine.device))


def holds_target(recipe: Recipe, machine: Machine) -> bool:
    """Whether the target is on the device that trains, to make samples or to decode."""
    is_asked_for = recipe.train.eval_prompts > 0 or recipe.data.online == IN_THIS_PROCESS
    return is_asked_for and shares_device(recipe, machine)


def shares_lm_head(recipe: Recipe, machine: Machine) -> bool:
    """Whether the target's own lm_head scores the loss."""
    is_same = recipe.target.dtype == recipe.train.precision and recipe.joint.mode is None
    return is_same and holds_target(recipe, machine)


def cheaper_settings(recipe: Recipe, ranks: int, names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Changes of these fields of `train` that save memory, none first: faster, then slower, then without measuring."""
    section = recipe.train
    most = max(section.batch_size // ranks, 1)
    choices: dict[str, list[Any]] = {
        "precision": ["bfloat16"] if section.precision == "float32" else [],
        "accumulate": list(range(section.micro_batches + 1, most + 1)),
        "activation_checkpointing": [] if section.activation_checkpointing else [True],
        "eval_prompts": [0] if section.eval_prompts else [],
    }
    for count in range(len(choices) + 1):
        for chosen in combinations([name for name in choices if name in names], count):
            for values in product(*(choices[name] for name in chosen)):
                yield dict(zip(chosen, values, strict=True))


def head_needs(recipe: Recipe, head: DraftHead, samples: int, longest: int, machine: Machine) -> list[Need]:
    """Memory on a rank that trains on `samples` texts of `longest` tokens at once."""
    drafted, target = 0 if head.vocab.is_full else len(head.vocab.ids), head.target
    half, parameters = recipe.train.precision == "bfloat16", num_parameters(head)
    element, is_shared = FLOAT32 // 2 if half else FLOAT32, shares_lm_head(recipe, machine)
    # A head that scores with the target's lm_head holds it in float32.
    holds = head.trained_by != "blocks" and any("lm_head" in name for name, _ in head.named_buffers())
    in_float32 = target.vocab_size * (1 + (holds and (half or is_shared)))
    scored = drafted + target.vocab_size * (not is_shared)
    frozen = (in_float32 * FLOAT32 + scored * element) * target.hidden_size
    micro_batch = f"{samples} samples of {longest} tokens, unroll {recipe.unroll}, {recipe.train.precision}"
    activations = activation_bytes(recipe, head, samples, longest, machine.device)
    state, why = TRAINED * parameters, "weights, gradients, two moments of AdamW in float32"
    if machine.slices > 1:
        state, why = state // machine.slices + 2 * FLOAT32 * parameters, "its slices of them, and the whole head twice"
    elif machine.ranks > 1:
        state, why = state + FLOAT32 * parameters, f"{why}, and gradients to send"
    formats = ("float32 and bfloat16" if half else "float32") + (", lm_head the target's own" if is_shared else "")
    return [
        Need("the head", state, why),
        Need("the target's embedding and lm_head", frozen, f"frozen, with the final norm, in {formats}"),
        Need("activations, about", activations, micro_batch, passes=True),
    ]


def activation_bytes(recipe: Recipe, head: DraftHead, samples: int, longest: int, device: torch.device) -> int:
    """About what a micro-batch takes: its features, what each pass saves, and the logits of a chunk."""
    tokens, unroll, hidden = samples * longest, recipe.unroll, head.target.hidden_size
    passes = head.training_passes(samples, longest, unroll, recipe.train.anchors)
    logits_weights = {id(parameter) for parameter in head.logits_parameters}
    widths = linear_widths(head, logits_weights)
    element, norms, copies = FLOAT32, passes.kept_in_float32, 0
    if recipe.train.precision == "bfloat16":
        element = FLOAT32 // 2
        norms += sum(weight.numel() for weight in head.parameters() if weight.ndim == 1)  # they keep float32
        copies = num_parameters(head) * element  # autocast's copies of the weights
    layers = passes.positions * (widths * element + norms * FLOAT32)
    kept = layers // passes.count if recipe.train.activation_checkpointing else layers
    gradients = layers // passes.count // 2  # of one pass
    features = (len(head.taps) + 2) * hidden * tokens * FLOAT32 + passes.kept * element
    states = 2 * unroll * passes.scored * hidden * FLOAT32
    logits = unroll * len(head.vocab.ids)  # logits of one position
    chunk = min(positions_at_once(logits, device), passes.scored)
    summed = 2 * FLOAT32 * sum(parameter.numel() for parameter in head.logits_parameters)  # over the chunks
    return features + copies + kept + gradients + states + summed + LOGITS_KEPT * chunk * logits * FLOAT32


def decoding_needs(recipe: Recipe, head: DraftHead, machine: Machine, weights: int) -> Iterator[Need]:
    """Memory for the target and the copy of the head that decode at each checkpoint, or harvest during training."""
    section, prompts, is_online = recipe.target, recipe.train.eval_prompts, recipe.data.online == IN_THIS_PROCESS
    if not holds_target(recipe, machine):
        return
    dtype, config = getattr(torch, section.dtype), head.target
    devices = machine.devices if section.split == "layers" else 1
    copies = (prompts > 0) + is_online if recipe.joint.mode is not None else 1  # a tuned target is another one
    why = " and ".join([f"train.eval_prompts {prompts}"] * (prompts > 0) + ["data.online [auto]"] * is_online)
    spread = f", over {devices} devices" if devices > 1 else ""
    yield Need("the target", copies * weights // devices, f"{section.dtype}{spread}, {why}")
    if is_online:
        tokens = recipe.train.batch_size // machine.ranks * recipe.data.longest_sample
        taps = len(stored_taps(head.taps, config.num_layers))
        states = tokens * bytes_per_token(config.hidden_size, taps, section.dtype)
        yield Need("its states", STEPS * min(states, ON_DEVICE), f"of {STEPS} steps, data.online [auto]")
    if prompts:
        rows, nodes = min(prompts, recipe.decode.max_batch), Growth.from_section(recipe.decode).max_nodes
        length = recipe.data.prompt_tokens + min(recipe.decode.max_new_tokens, recipe.data.response_tokens)
        yield Need("the head's copy that decodes", num_parameters(head) * dtype.itemsize, section.dtype)
        needed = StepMemory.of(config, dtype).needed(rows, nodes, length)
        yield Need("decoding, about", needed, f"{rows} texts of {length} tokens, after the activations", passes=True)


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
        Need("the target", fixed * size + TRAINED * tuned, learning),
        Need(
            "activations of the target, about", tokens * linear_widths(decoder_layers(model)) * size, f"{tokens} tokens"
        ),
    ]


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
