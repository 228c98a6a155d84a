"""The memory that a run needs on each device, the target that decodes included, and the settings that make it fit."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import torch
from rich.filesize import decimal
from torch import nn

from headstart.common.errors import wrong_value
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
PLANNED = ("accumulate", "activation_checkpointing")  # fields of train that the plan chooses where they are left out
CHEAPER = (*PLANNED, "precision", "eval_prompts")  # fields of train that save memory
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
        """How many devices hold the target's weights together."""
        return {"layers": self.devices, "tensor": self.ranks}.get(split or "", 1)


@dataclass(frozen=True)
class Need:
    """Memory for one purpose."""

    what: str
    size: int  # bytes
    why: str
    passes: bool = False  # whether it is free again when another such need arises


@dataclass(frozen=True)
class RunMemory:
    """The memory of training on the device of the main rank, which needs the most.

    Samples may be as long as the recipe allows: most batches of texts hold one, to which the others are padded.
    """

    recipe: Recipe
    head: DraftHead  # without weights
    machine: Machine
    weights: Callable[[], int]  # bytes of the target, for which its layers are built without weights

    @classmethod
    def of(cls, recipe: Recipe, target: TargetConfig, machine: Machine) -> "RunMemory":
        """Raises ValueError if the head cannot be built, or is too large by itself."""
        try:
            head = head_without_weights(recipe, target)
        except (RuntimeError, TypeError) as error:  # sizes that overflow, or that a layer refuses
            remedy, given = f"leave them out for the target's own ({error})", recipe.head.model_dump(exclude_none=True)
            raise wrong_value("head", given, "sizes that fit the target are", remedy) from error
        weights = FLOAT32 * num_parameters(head)
        if weights > machine.memory * machine.slices:
            remedy = "lower head.intermediate_size, num_heads, hidden_size or draft_vocab_size"
            allowed = f"up to the {decimal(machine.memory)} free on {machine.device} is"
            raise wrong_value("head", f"{decimal(weights)} of weights", allowed, remedy)
        return cls(recipe, head, machine, cache(lambda: target_bytes(recipe)))

    @cached_property
    def needs(self) -> list[Need]:
        return [*self._head(), *self._decoding(), *(() if self.recipe.joint.mode is None else self._tuned_target())]

    @property
    def total(self) -> int:
        """The most that is needed at a time."""
        passing = max(need.size for need in self.needs if need.passes)
        return passing + sum(need.size for need in self.needs if not need.passes)

    @cached_property
    def model(self) -> Any:
        """The target that is trained with its heads, without weights."""
        return model_without_weights(trainable_section(self.recipe, self.machine.device))

    @property
    def tuned(self) -> int:
        """The number of the target's parameters that joint.mode trains: its layers', or the adapters' own."""
        if (mode := self.recipe.joint.mode) is None:
            return 0
        layers = decoder_layers(self.model)
        return num_parameters(layers) if mode == "full" else self.recipe.joint.lora_rank * linear_widths(layers)

    @property
    def samples(self) -> int:
        """The samples of a micro-batch."""
        return self.recipe.train.samples_at_once(self.machine.ranks)

    @property
    def is_online(self) -> bool:
        return self.recipe.data.online == IN_THIS_PROCESS

    @property
    def shares_device(self) -> bool:
        """Whether the target is on the device that trains, unless the recipe gives it one of its own."""
        device = self.machine.device
        return self.recipe.target.device in ("auto", device.type, str(device))

    @property
    def holds_target(self) -> bool:
        """Whether the device that trains holds the target meanwhile, to make samples or to decode."""
        return self.shares_device and (self.recipe.train.eval_prompts > 0 or self.is_online)

    def _head(self) -> list[Need]:
        """Memory of training on a micro-batch."""
        recipe, head, machine, precision = self.recipe, self.head, self.machine, self.recipe.train.precision
        # The target's own lm_head scores the loss.
        is_shared = self.holds_target and recipe.target.dtype == precision and recipe.joint.mode is None
        drafted, vocab_size = 0 if head.vocab.is_full else len(head.vocab.ids), head.target.vocab_size
        # A head that scores with the target's lm_head holds it in float32.
        holds = head.trained_by != "blocks" and any("lm_head" in name for name, _ in head.named_buffers())
        in_float32 = vocab_size * (1 + (holds and (is_shared or precision != "float32")))
        scored = (drafted + vocab_size * (not is_shared)) * getattr(torch, precision).itemsize
        frozen = (in_float32 * FLOAT32 + scored) * head.target.hidden_size
        formats = " and ".join(dict.fromkeys(["float32", precision])) + ", lm_head the target's own" * is_shared
        parameters, longest = num_parameters(head), recipe.data.longest_sample
        state, why = TRAINED * parameters, "weights, gradients, two moments of AdamW in float32"
        if machine.slices > 1:
            state, why = state // machine.slices + 2 * FLOAT32 * parameters, "its slices of them, and all of it twice"
        elif machine.ranks > 1:
            state, why = state + FLOAT32 * parameters, f"{why}, and gradients to send"
        activations = activation_bytes(recipe, head, self.samples, longest, machine.device)
        micro_batch = f"{self.samples} samples of {longest} tokens, unroll {recipe.unroll}, {precision}"
        return [
            Need("the head", state, why),
            Need("the target's embedding and lm_head", frozen, f"frozen, with the final norm, in {formats}"),
            Need("activations, about", activations, micro_batch, passes=True),
        ]

    def _decoding(self) -> Iterator[Need]:
        """Memory of the target and the copy of the head that decode at each checkpoint, or harvest during training."""
        if not self.holds_target:
            return
        recipe, section, data, config = self.recipe, self.recipe.target, self.recipe.data, self.head.target
        dtype, prompts, is_online = getattr(torch, section.dtype), recipe.train.eval_prompts, self.is_online
        devices = self.machine.devices if section.split == "layers" else 1
        copies = (prompts > 0) + is_online if recipe.joint.mode is not None else 1  # a tuned target is another one
        why = " and ".join([f"train.eval_prompts {prompts}"] * (prompts > 0) + ["data.online"] * is_online)
        spread = f", over {devices} devices" if devices > 1 else ""
        yield Need("the target", copies * self.weights() // devices, f"{section.dtype}{spread}, {why}")
        if is_online:
            tokens = recipe.train.batch_size // self.machine.ranks * data.longest_sample
            taps = len(stored_taps(self.head.taps, config.num_layers))
            states = tokens * bytes_per_token(config.hidden_size, taps, section.dtype)
            yield Need("its states", STEPS * min(states, ON_DEVICE), f"of {STEPS} steps, data.online")
        if prompts:
            rows, nodes = min(prompts, recipe.decode.max_batch), Growth.from_section(recipe.decode).max_nodes
            length = data.prompt_tokens + min(recipe.decode.max_new_tokens, data.response_tokens)
            yield Need("the head's copy that decodes", num_parameters(self.head) * dtype.itemsize, section.dtype)
            needed, why = StepMemory.of(config, dtype).needed(rows, nodes, length), f"{rows} texts of {length} tokens"
            yield Need("decoding, about", needed, f"{why}, after the activations", passes=True)

    def _tuned_target(self) -> list[Need]:
        """Memory of a target that is trained with its heads."""
        size, tokens = next(self.model.parameters()).element_size(), self.samples * self.recipe.data.longest_sample
        fixed, mode = num_parameters(self.model), self.recipe.joint.mode
        fixed -= self.tuned if mode == "full" else 0  # adapters are added to the others
        learning = f"{self.tuned:,} of {fixed + self.tuned:,} parameters learn, joint.mode {mode}"
        saved = tokens * linear_widths(decoder_layers(self.model)) * size
        return [
            Need("the target", fixed * size + TRAINED * self.tuned, learning),
            Need("activations of the target, about", saved, f"{tokens} tokens"),
        ]

    def fitted(self) -> "RunMemory":
        """The run with the train.accumulate and activation_checkpointing of the plan, where the recipe leaves them out.

        On a GPU the first choice that fits counts: few micro-batches, before anything is computed twice. Where none
        fits, and on a CPU, there is one micro-batch.
        """
        left_out = [name for name in PLANNED if getattr(self.recipe.train, name) is None]
        return self if self.machine.device.type == "cpu" else self._fitting(left_out) or self

    def _fitting(self, names: Collection[str]) -> "RunMemory | None":
        """The fastest run that fits, with other values of these fields of `train`; None if none fits."""
        section = self.recipe.train
        most = max(section.batch_size // self.machine.ranks, section.micro_batches)
        choices: dict[str, list[Any]] = {
            "eval_prompts": [section.eval_prompts, 0],
            "activation_checkpointing": [section.activation_checkpointing, True],
            "precision": [section.precision, "bfloat16"],
            "accumulate": [section.accumulate, *range(section.micro_batches + 1, most + 1)],
        }
        for values in product(*(each if name in names else each[:1] for name, each in choices.items())):
            train = section.model_copy(update=dict(zip(choices, values, strict=True)))
            run = replace(self, recipe=self.recipe.model_copy(update={"train": train}))
            if run.total <= self.machine.memory:
                return run
        return None

    def refuse(self) -> None:
        """Raise ValueError, naming the settings that fit, if the harvest or training needs more memory than a GPU has.

        On a CPU, which can swap, the estimate is only printed.
        """
        if self.machine.device.type == "cpu":
            return
        self._refuse_large_harvest()
        if self.fitted().total <= self.machine.memory:
            return
        needed, allowed, old = decimal(self.total), decimal(self.machine.memory), self.recipe.train
        advice = "no train.accumulate or activation_checkpointing makes it fit: take larger devices or a smaller head"
        if (fits := self._fitting(CHEAPER)) is not None:
            changes = {name: getattr(fits.recipe.train, name) for name in CHEAPER}
            changed = [f"train.{name}={value}" for name, value in changes.items() if value != getattr(old, name)]
            advice = f"write {' '.join(changed).lower()}"
        raise ValueError(
            f"train.accumulate: {old.micro_batches} given, with which training in {old.precision} needs about {needed} "
            f"on the device of the main rank, and up to {allowed} is allowed there; {advice}"
        )

    def _refuse_large_harvest(self) -> None:
        """Raise ValueError if the target and the cache of one response do not fit, unless the features are there."""
        data, section, machine = self.recipe.data, self.recipe.target, self.machine
        if data.store or data.online or (self.recipe.features_dir / MANIFEST).exists() or not self.shares_device:
            return
        shares = machine.devices_of_target(section.split)
        step = StepMemory.of(self.head.target, getattr(torch, section.dtype)).needed(1, 1, data.longest_sample)
        if (needed := self.weights() + step) > machine.memory * shares:
            ranks, each = math.ceil(needed / machine.memory), decimal(needed // shares)
            raise ValueError(
                f"target.split: {section.split or 'null'} given, with which the harvest needs about {each} on each "
                f"device ({shares} together), and up to {decimal(machine.memory)} is allowed there; start {ranks} "
                "ranks or more with target.split=tensor, or give data.store"
            )


def target_bytes(recipe: Recipe) -> int:
    """The size of the target's weights in memory; quantised ones stay as they are in their files."""
    section = recipe.target
    folder = folder_of(section, ["config.json"])
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if stored and "quantization_config" in read_json(folder / "config.json"):
        return stored
    return num_parameters(model_without_weights(section)) * getattr(torch, section.dtype).itemsize


def activation_bytes(recipe: Recipe, head: DraftHead, samples: int, longest: int, device: torch.device) -> int:
    """About what a micro-batch takes: its features, what each pass saves, and the logits of a chunk."""
    tokens, unroll, hidden = samples * longest, recipe.unroll, head.target.hidden_size
    passes = head.training_passes(samples, longest, unroll, recipe.train.anchors)
    logits_weights = {id(parameter) for parameter in head.logits_parameters}
    widths = linear_widths(head, logits_weights | {id(each.weight) for each in passes.read_once})
    element, norms, copies = FLOAT32, passes.kept_in_float32, 0
    if recipe.train.precision == "bfloat16":
        element = FLOAT32 // 2
        norms += sum(weight.numel() for weight in head.parameters() if weight.ndim == 1)  # they keep float32
        copies = num_parameters(head) * element  # autocast's copies of the weights
    layers = passes.positions * (widths * element + norms * FLOAT32)
    kept = layers // passes.count if recipe.train.activation_checkpointing else layers
    gradients = layers // passes.count // 2  # of one pass
    features = (len(head.taps) + 2) * hidden * tokens * FLOAT32
    features += tokens * sum(map(linear_widths, passes.read_once)) * element
    states = 2 * unroll * passes.scored * hidden * FLOAT32
    logits = unroll * len(head.vocab.ids)  # logits of one position
    chunk = min(positions_at_once(logits, device), passes.scored)
    summed = 2 * FLOAT32 * sum(parameter.numel() for parameter in head.logits_parameters)  # over the chunks
    return features + copies + kept + gradients + states + summed + LOGITS_KEPT * chunk * logits * FLOAT32


def linear_widths(module: nn.Module, without: Collection[int] = ()) -> int:
    """The widths of linear layers, but `without` (ids of weights): about what a forward pass saves for a position."""
    linear = [each for each in module.modules() if isinstance(each, nn.Linear) and id(each.weight) not in without]
    return sum(each.in_features + each.out_features for each in linear)


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
