"""Medusa-2 (arXiv 2401.10774, section 2.2.2): train the target with its heads, and keep it close to the original."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError
from torch import Tensor, nn

from headstart.common.files import remove, whole_folder
from headstart.data_pipelines.features.batches import TrainingBatch
from headstart.heads.files import Tensors, as_os_error, give_umask_mode
from headstart.heads.frozen import at_least_float32
from headstart.heads.losses import forward_kl
from headstart.heads.target_config import SAFE_FILES, folder_of
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.loading import no_bars_of_transformers
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.schema import TargetSection
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.objective import Objective, score_in_chunks
from headstart.trainers.objectives.unrolled import Supervision, Teacher, UnrolledHead, UnrollScores, positions_at_once


class TrainableTarget(nn.Module):
    """A target under training: its layers or LoRA adapters of them; embedding, final norm and lm_head stay fixed."""

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

    @classmethod
    def load(cls, recipe: Recipe, device: torch.device) -> "TrainableTarget":
        """Load the recipe's target; raises ValueError if joint.mode is lora and it has no linear layer to adapt."""
        return cls(TargetModel.load(trainable_section(recipe, device), (), packed=False), recipe)

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Tensor:
        """The last hidden state before the final norm, with a gradient. [batch, seq, hidden]"""
        return self.target.passes.hidden_states(tokens)[1]

    @torch.no_grad()
    def restore(self, weights: Tensors) -> None:
        """Load the trained weights; a checkpoint of another target is refused earlier, by its inputs."""
        for name, parameter in self.trained.items():
            parameter.copy_(weights[name])

    @torch.no_grad()
    def weights(self) -> Tensors:
        """The tuned target's weights that may differ from the original, with adapters merged into their layers."""
        if self.section.mode == "full":
            return {name: each.detach() for name, each in self.trained.items()}
        from peft.tuners.lora import LoraLayer

        layers = ((name, each) for name, each in self.model.named_modules() if isinstance(each, LoraLayer))
        return {f"{name}.weight": merged_weight(layer) for name, layer in layers}

    def save(self, recipe: Recipe, folder: Path) -> None:
        """Write a plain Hugging Face folder, whole or not at all: tuned weights, and the original's other files."""
        plain = TargetModel.load(recipe.target, (), packed=False).model
        found = plain.load_state_dict(self.weights(), strict=False)
        assert not found.unexpected_keys, found.unexpected_keys
        with whole_folder(folder) as partial_folder:
            save_model(plain, partial_folder)
            copy_other_files(folder_of(recipe.target), partial_folder)
            remove(folder)


def save_model(model: Any, folder: Path) -> None:
    """Write a transformers model, with the permissions of other new files; raises OSError that names the folder."""
    try:
        with no_bars_of_transformers():
            model.save_pretrained(folder)
    except SafetensorError as error:
        raise as_os_error(error, folder) from error
    for weights in folder.glob("*.safetensors"):
        give_umask_mode(weights)


def copy_other_files(original: Path, folder: Path) -> None:
    """Copy a target's files except config.json and weights: tokenizer, chat template, generation settings."""
    for path in sorted({path for pattern in SAFE_FILES for path in original.glob(pattern)}):
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json") and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)


def trainable_section(recipe: Recipe, device: torch.device) -> TargetSection:
    """The target section to train with: float32 if whole layers learn, the recipe's own dtype under adapters."""
    dtype = "float32" if recipe.joint.mode == "full" else recipe.target.dtype
    return recipe.target.model_copy(update={"dtype": dtype, "device": str(device)})


def add_adapters(model: nn.Module, layers: nn.ModuleList, rank: int, seed: int) -> None:
    """Add float32 LoRA adapters to every linear layer; they change no output before their first step."""
    from peft import LoraConfig, inject_adapter_in_model  # an extra; `preflight` refuses lora without it

    linear = {each for each in layers.modules() if isinstance(each, nn.Linear)}
    names = [name for name, each in model.named_modules() if each in linear]
    if not names:
        raise ValueError("joint.mode: lora given, but no layer of the target is an nn.Linear; choose full")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # peft draws from the global generator
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=names), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def merged_weight(layer: Any) -> Tensor:
    """The weight of a peft layer plus its adapter, added in float32 or wider."""
    weight: Tensor = layer.get_base_layer().weight
    return (at_least_float32(weight) + layer.get_delta_weight("default")).to(weight.dtype)


class JointHead(UnrolledHead):
    """Medusa heads and the target that they read, trained together.

    The heads' loss takes features and distributions from the target's current weights; its gradient reaches the target
    through the features only. While `tunes_target` is false, only the heads learn.
    """

    def __init__(
        self, head: Any, teacher: Teacher, objective: Objective, section: TrainSection, target: TrainableTarget
    ) -> None:
        super().__init__(head, teacher, objective, section)
        self.target, self.tunes_target = target, True

    def forward(
        self, batch: TrainingBatch, supervision: Supervision, counts: Tensor, noise: Tensor | None = None
    ) -> UnrollScores:
        """`UnrolledHead.forward` on the current target; after warm-up with the divergence from the original."""
        with torch.set_grad_enabled(self.tunes_target and torch.is_grad_enabled()):
            last_hidden = self.target(batch.tokens).to(batch.last_hidden)  # [batch, seq, hidden]
        tuned = last_hidden[supervision.rows, supervision.columns]  # [positions, hidden]
        supervised = replace(supervision, last_hidden=tuned.detach())
        scores = super().forward(replace(batch, last_hidden=last_hidden), supervised, counts, noise)
        if torch.is_grad_enabled() and not self.tunes_target:
            return scores
        divergence = self.divergence(tuned, supervision)
        loss = scores.loss + divergence / counts[0].clamp(min=1)
        return scores._replace(loss=loss, divergence=divergence.detach())

    def divergence(self, tuned: Tensor, supervision: Supervision) -> Tensor:
        """KL(original || tuned) of the next token, in nats, summed over the positions that the first head predicts."""
        score = partial(self.chunk_divergence, supervision)
        chunk = positions_at_once(len(self.teacher.frozen.lm_head), tuned.device)
        return score_in_chunks(score, tuned.unsqueeze(0), [], chunk)[0]

    def chunk_divergence(self, supervision: Supervision, tuned: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The sum over a chunk of positions; the original's distribution comes from the harvested hidden states."""
        frozen = self.teacher.frozen
        log_p = frozen.logits(supervision.last_hidden[part]).log_softmax(-1)  # [chunk, vocab]
        log_q = frozen.logits(tuned[0]).log_softmax(-1)
        distances = forward_kl(log_q, log_p)  # [chunk]
        total = distances.where(supervision.can_predict(1)[0, part], 0.0).sum()
        return total, total.detach()
