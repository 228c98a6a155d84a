"""Medusa-2 (arXiv 2401.10774, section 2.2.2): the target learns with its heads, and is held to what it said."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Int
from torch import Tensor, nn

from data_pipelines.batches import Batch
from heads.base import DraftHead
from heads.frozen import at_least_float32
from heads.target_config import SAFE_FILES, locate_target
from inference.target.architecture import decoder_layers
from inference.target.model import TargetModel
from recipes import Recipe
from recipes.schema import TargetSection, TrainSection
from trainers.checkpoint import Tensors
from trainers.chunked_loss import score_in_chunks
from trainers.objective import Objective, Supervision, Teacher, UnrolledHead, UnrollScores, positions_at_once
from trainers.optimizers import set_learning_rates
from trainers.ranks.head_on_ranks import ReplicatedHead, named_state, put_state


class LiveTarget(nn.Module):
    """A target under training: its layers learn, or LoRA beside them; embedding, final norm and lm_head stay."""

    def __init__(self, target: TargetModel, recipe: Recipe) -> None:
        super().__init__()
        assert recipe.joint.mode is not None
        self.target, self.model, self.section = target, target.model, recipe.joint
        layers = decoder_layers(target.model)
        if self.section.mode == "lora":
            add_adapters(self.model, layers, self.section.lora_rank, recipe.seed)
        else:
            layers.requires_grad_(True)
        self.trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=self.section.learning_rate,
            betas=recipe.train.betas,
            weight_decay=recipe.train.weight_decay,
        )

    @classmethod
    def load(cls, recipe: Recipe, device: torch.device) -> "LiveTarget":
        """From the recipe's target; whole layers learn in float32, and adapters beside layers in the target's format.

        Raises ValueError where LoRA is asked for and peft is missing, or knows no layer of the target.
        """
        return cls(TargetModel.load(trained_target(recipe, device), ()), recipe)

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Tensor:
        """Its last hidden state before the final norm, [batch, seq, hidden], with a gradient."""
        return self.target.states(tokens)[1]

    def state(self) -> Tensors:
        """The weights that learn and their optimizer's state, as NAME and NAME.exp_avg."""
        return {name: each.detach() for name, each in self.trained.items()} | dict(
            named_state(self.model, [self.optimizer])
        )

    @torch.no_grad()
    def restore(self, state: Tensors) -> None:
        """Put back what `state` gave; raises ValueError where it is another target's."""
        for name, parameter in self.trained.items():
            if name not in state or state[name].shape != parameter.shape:
                raise ValueError(f"the checkpoint does not fit the target: {name} is missing or of another shape")
            parameter.copy_(state[name])
        put_state(
            self.model, [self.optimizer], {name: each for name, each in state.items() if name not in self.trained}
        )

    @torch.no_grad()
    def weights(self) -> Tensors:
        """The weights of a plain target that differ from the original's; adapters are added to what they adapt."""
        if self.section.mode == "full":
            return {name: each.detach() for name, each in self.trained.items()}
        return {f"{name}.weight": merged(layer) for name, layer in adapted_layers(self.model)}

    def save(self, recipe: Recipe, folder: Path) -> None:
        """A plain Hugging Face folder, whole or not at all: weights, configuration and all of the original's files."""
        plain = TargetModel.load(recipe.target, ()).model
        found = plain.load_state_dict(self.weights(), strict=False)
        assert not found.unexpected_keys, found.unexpected_keys
        partial_folder = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial_folder, ignore_errors=True)
        plain.save_pretrained(partial_folder)
        original = locate_target(recipe.target.path, recipe.target.revision)
        for path in sorted({path for pattern in SAFE_FILES for path in original.glob(pattern)}):
            if path.suffix != ".safetensors" and not path.name.endswith(".index.json") and path.name != "config.json":
                shutil.copyfile(path, partial_folder / path.name)
        if folder.exists():
            shutil.rmtree(folder)
        partial_folder.replace(folder)


def trained_target(recipe: Recipe, device: torch.device) -> TargetSection:
    """The recipe's target in the number format that it is trained in."""
    dtype = "float32" if recipe.joint.mode == "full" else recipe.target.dtype
    return recipe.target.model_copy(update={"dtype": dtype, "device": str(device)})


def add_adapters(model: nn.Module, layers: nn.ModuleList, rank: int, seed: int) -> None:
    """LoRA in float32 beside every linear map of the layers; it adds nothing before its first step."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("joint.mode: lora given, which needs peft; run pip install 'headstart[lora]'") from error
    linear = {each for each in layers.modules() if isinstance(each, nn.Linear)}
    names = [name for name, each in model.named_modules() if each in linear]
    if not names:
        raise ValueError("joint.mode: lora given, the target's layers have no nn.Linear; choose full")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # peft draws from the global generator
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=names), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every layer that has an adapter, by its name in the plain model."""
    from peft.tuners.lora import LoraLayer

    return ((name, each) for name, each in model.named_modules() if isinstance(each, LoraLayer))


def merged(layer: Any) -> Tensor:
    """The weight of one of peft's layers with its adapter, summed up in float32 at least."""
    weight: Tensor = layer.get_base_layer().weight
    return (at_least_float32(weight) + layer.get_delta_weight("default")).to(weight.dtype)


class JointHead(UnrolledHead):
    """Medusa heads and the target that they read, under training together.

    The heads' loss takes features and distributions from the target as it is now; its gradient reaches the target by
    the features alone. `tunes` says whether the target learns too, or the heads alone.
    """

    def __init__(
        self, head: DraftHead, teacher: Teacher, objective: Objective, live: LiveTarget, activation_checkpointing: bool
    ) -> None:
        super().__init__(head, teacher, objective, activation_checkpointing)
        self.live, self.tunes = live, True

    def forward(
        self, batch: Batch, supervision: Supervision, counts: Tensor, noise: Tensor | None = None
    ) -> UnrollScores:
        """As `UnrolledHead.forward` on live features; while the target learns, the loss holds it to the original.

        How far it has come from there is in the scores, but not in the warm-up, where it is the original.
        """
        with torch.set_grad_enabled(self.tunes and torch.is_grad_enabled()):
            last_hidden = self.live(batch.tokens).to(batch.last_hidden)  # [batch, seq, hidden]
        tuned = last_hidden[supervision.rows, supervision.columns]  # [positions, hidden]
        read = replace(supervision, last_hidden=tuned.detach())
        scores = super().forward(replace(batch, last_hidden=last_hidden), read, counts, noise)
        if torch.is_grad_enabled() and not self.tunes:
            return scores
        divergence = self.divergence(tuned, supervision)
        loss = scores.loss + self.live.section.distill_weight * divergence / counts[0].clamp(min=1)
        return scores._replace(loss=loss, divergence=divergence.detach())

    def divergence(self, tuned: Tensor, supervision: Supervision) -> Tensor:
        """KL(original || tuned) of the next token, summed over the positions that the first head can predict."""
        score = partial(self.diverge, supervision)
        chunk = positions_at_once(len(self.teacher.frozen.lm_head), tuned.device)
        return score_in_chunks(score, tuned.unsqueeze(0), [], chunk)[0]

    def diverge(self, supervision: Supervision, tuned: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """A chunk's sum; the original's distribution is read off the hidden state that was harvested."""
        frozen = self.teacher.frozen
        log_p = frozen.logits(supervision.last_hidden[part]).log_softmax(-1)  # [chunk, vocab]
        log_q = frozen.logits(tuned[0]).log_softmax(-1)
        distances = (log_p.exp() * (log_p - log_q)).sum(-1)  # [chunk]
        total = distances.where(supervision.reached(1)[0, part], 0.0).sum()
        return total, total.detach()


class JointRanks(ReplicatedHead):
    """Heads and target on one process; a step clips both gradients together."""

    def __init__(self, accelerator: Accelerator, joint: JointHead, section: TrainSection) -> None:
        super().__init__(accelerator, joint, section)
        self.joint = joint
        self.prepared.append(accelerator.prepare(joint.live.optimizer))

    def set_learning_rates(self, section: TrainSection, step: int) -> float:
        """The heads' schedule, which the target follows behind its own warm-up."""
        factor = set_learning_rates(self.optimizers, section, step)
        live = self.joint.live
        self.joint.tunes = step >= live.section.warmup_steps
        for group in live.optimizer.param_groups:
            group["lr"] = live.section.learning_rate * factor
        return factor
