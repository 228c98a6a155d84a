"""How much memory training a head takes: counted on tensors that have shapes and no content."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from data_pipelines.batches import Batch
from heads.base import DraftHead
from heads.checkpoint import KINDS, draft_vocab
from heads.frozen import FrozenTarget
from heads.target_config import TargetConfig
from inference.target.model import TargetModel
from recipes import Recipe
from trainers.medusa2 import LiveTarget, trained_target
from trainers.objective import Objective, Supervision, Teacher, UnrolledHead, positions_at_once
from trainers.optimizers import build_optimizers
from trainers.precision import autocast


@dataclass(frozen=True)
class HeadSizes:
    """Parameters by part of the head; everything else in bytes."""

    parts: dict[str, int]
    weights: int
    moments: int  # the optimizers' state
    average: int
    frozen: int
    activations: int


def head_sizes(recipe: Recipe, target: TargetConfig, rows: int, longest: int, device: torch.device) -> HeadSizes:
    """Of one rank that trains on `rows` samples of `longest` tokens at once; nothing is allocated."""
    vocab = draft_vocab(recipe.head, torch.zeros(target.vocab_size, dtype=torch.long))
    with torch.device("meta"):
        head = KINDS[recipe.head.kind].from_section(recipe.head, empty_ends(target), vocab)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        head, frozen = head.to_empty(device=device), empty_ends(target)
        weights = sum(parameter.nbytes for parameter in head.parameters())
        activations = activation_bytes(recipe, head, frozen, rows, longest)
        drafted = 0 if vocab.is_full else len(vocab.ids) * target.hidden_size * 4
        moments = sum(
            parameter.nbytes * (1 if isinstance(optimizer, torch.optim.Muon) else 2)
            for optimizer in build_optimizers(head, recipe.train)
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        return HeadSizes(
            parts={name: sum(p.numel() for p in child.parameters()) for name, child in head.named_children()},
            weights=weights,
            moments=moments,
            average=0 if recipe.train.ema_decay is None else weights,
            frozen=2 * frozen.embedding.nbytes + drafted,
            activations=activations,
        )


@dataclass(frozen=True)
class LiveSizes:
    """Of a target under training, in bytes but for the counts of parameters."""

    learning: int
    parameters: int
    weights: int
    gradients: int
    moments: int
    activations: int


def live_sizes(recipe: Recipe, rows: int, longest: int, device: torch.device) -> LiveSizes:
    """Of the target that joint.mode trains, on `rows` samples of `longest` tokens at once; nothing is allocated.

    Raises ValueError where LoRA is asked for and peft is missing.
    """
    target = TargetModel.without_weights(trained_target(recipe, device))
    live = LiveTarget(target, recipe)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        target.model.to_empty(device=device)
        weights = list(target.model.parameters())
        learning = [weight for weight in weights if weight.requires_grad]
        own = {storage_of(tensor) for tensor in [*weights, *target.model.buffers()]}
        with Saved(own) as kept:
            hidden = live(torch.zeros(rows, longest, dtype=torch.long))
        gradients = sum(weight.nbytes for weight in learning)
        return LiveSizes(
            learning=sum(weight.numel() for weight in learning),
            parameters=sum(weight.numel() for weight in weights),
            weights=sum(weight.nbytes for weight in weights),
            gradients=gradients,
            moments=2 * gradients,
            activations=kept.num_bytes + hidden.nbytes,
        )


def empty_ends(target: TargetConfig) -> FrozenTarget:
    embedding, lm_head = (torch.empty(target.vocab_size, target.hidden_size) for _ in range(2))
    return FrozenTarget(target, embedding, torch.empty(target.hidden_size), None, lm_head)


def activation_bytes(recipe: Recipe, head: DraftHead, frozen: FrozenTarget, rows: int, longest: int) -> int:
    """The batch, what the unroll keeps for its gradient, and one chunk of scores with its gradient."""
    unrolled = UnrolledHead(
        head, Teacher(frozen, head.vocab), Objective.from_recipe(recipe), recipe.train.activation_checkpointing
    )
    stored = sum(1 for tap in head.taps if tap < frozen.config.num_layers) * frozen.config.hidden_size
    batch = Batch(
        tokens=torch.zeros(rows, longest, dtype=torch.long),
        loss_mask=torch.ones(rows, longest, dtype=torch.bool),
        taps=torch.empty(rows, longest, stored),
        last_hidden=torch.empty(rows, longest, frozen.config.hidden_size),
    )
    places = torch.zeros(rows * longest, dtype=torch.long)
    supervision = Supervision(places, places, places, batch.last_hidden.flatten(0, 1), outside=0)
    own = {storage_of(tensor) for tensor in [*head.parameters(), *head.buffers()]}
    unroll = unrolled.objective.unroll
    with autocast(recipe.train, head.embedding.device):
        with Saved(own) as kept:
            hidden = unrolled.unroll(batch, supervision, None)
        with Saved(own) as scored:
            part = slice(0, positions_at_once(unroll * len(head.vocab.ids), head.embedding.device))
            unrolled.score(supervision, torch.ones(unroll), hidden[:, part], part)
    return batch.taps.nbytes + 2 * batch.last_hidden.nbytes + kept.num_bytes + hidden.nbytes + 2 * scored.num_bytes


class Saved:
    """A context manager that adds up the storages that autograd keeps, each once, but for those in `known`."""

    def __init__(self, known: set[int]) -> None:
        self.known, self.tensors = known, dict[int, Tensor]()
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)

    def _keep(self, tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in self.known:
            self.tensors[storage_of(tensor)] = tensor  # held, so that no later storage takes its number
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
