"""How much memory training a head takes, measured on fake tensors: shapes without data."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from headstart.data_pipelines.features.batches import Batch
from headstart.heads.base import DraftHead
from headstart.heads.block_attention import Blocks
from headstart.heads.checkpoint import KINDS, draft_vocab
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetConfig
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.trainers.objectives.block import BlockSupervision, TrainedBlocks
from headstart.trainers.objectives.medusa2 import trainable_section
from headstart.trainers.objectives.unrolled import Supervision, Teacher, UnrolledHead, positions_at_once
from headstart.trainers.optimizers import build_optimizers
from headstart.trainers.precision import autocast
from headstart.trainers.run_state import head_in_training


@dataclass(frozen=True)
class HeadSizes:
    """What training a head keeps in memory on one rank, in bytes."""

    parameters: dict[str, int]  # number of parameters of each submodule, not bytes
    weights: int
    optimizers: int  # their state
    average: int
    frozen: int  # the target's embedding, final norm and lm_head
    activations: int


def head_sizes(recipe: Recipe, target: TargetConfig, samples: int, longest: int, device: torch.device) -> HeadSizes:
    """Sizes on a rank that trains on `samples` sequences of `longest` tokens at once; nothing is allocated."""
    vocab = draft_vocab(recipe.head, torch.zeros(target.vocab_size, dtype=torch.long))
    with torch.device("meta"):
        head = KINDS[recipe.head.kind].from_section(recipe.head, frozen_without_weights(target), vocab)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        head, frozen = head.to_empty(device=device), frozen_without_weights(target)
        weights = sum(parameter.nbytes for parameter in head.parameters())
        activations = activation_bytes(recipe, head, frozen, samples, longest)
        draft_lm_head = 0 if vocab.is_full else len(vocab.ids) * target.hidden_size * 4
        optimizers = sum(
            parameter.nbytes * (1 if isinstance(optimizer, torch.optim.Muon) else 2)
            for optimizer in build_optimizers(head, recipe.train)
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        return HeadSizes(
            parameters={name: sum(p.numel() for p in child.parameters()) for name, child in head.named_children()},
            weights=weights,
            optimizers=optimizers,
            average=0 if recipe.train.ema_decay is None else weights,
            frozen=2 * frozen.embedding.nbytes + draft_lm_head,
            activations=activations,
        )


@dataclass(frozen=True)
class TargetSizes:
    """What training the target with its heads keeps in memory, in bytes."""

    trained_parameters: int  # number of parameters, not bytes
    parameters: int  # number of parameters, not bytes
    weights: int
    gradients: int
    optimizer: int  # its state
    activations: int


def target_sizes(recipe: Recipe, samples: int, longest: int, device: torch.device) -> TargetSizes:
    """Sizes of the target that joint.mode trains on `samples` sequences of `longest` tokens; nothing is allocated.

    Adapters are planned without peft, which a plan does not need.
    """
    target = TargetModel.without_weights(trainable_section(recipe, device))
    layers = decoder_layers(target.model)
    if recipe.joint.mode == "lora":
        plan_adapters(layers, recipe.joint.lora_rank)
    else:
        layers.requires_grad_(True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        target.model.to_empty(device=device)
        weights = list(target.model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        own = {storage_of(tensor) for tensor in [*weights, *target.model.buffers()]}
        with SavedForBackward(own) as saved:
            hidden = target.states(torch.zeros(samples, longest, dtype=torch.long))[1]
        gradients = sum(weight.nbytes for weight in trained)
        return TargetSizes(
            trained_parameters=sum(weight.numel() for weight in trained),
            parameters=sum(weight.numel() for weight in weights),
            weights=sum(weight.nbytes for weight in weights),
            gradients=gradients,
            optimizer=2 * gradients,
            activations=saved.num_bytes + hidden.nbytes,
        )


class PlannedAdapter(nn.Module):
    """A linear layer with a low-rank addition in float32, as peft adds one: same sizes, same tensors for autograd."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        with torch.device("meta"):
            self.down = nn.Linear(layer.in_features, rank, bias=False, dtype=torch.float32)
            self.up = nn.Linear(rank, layer.out_features, bias=False, dtype=torch.float32)

    def forward(self, inputs: Tensor) -> Tensor:
        added = self.up(self.down(inputs.to(self.down.weight.dtype)))
        return self.layer(inputs) + added.to(inputs.dtype)


def plan_adapters(layers: nn.Module, rank: int) -> None:
    """Put an adapter around every linear layer below `layers`."""
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(parent, PlannedAdapter):
                setattr(parent, name, PlannedAdapter(child, rank))


def frozen_without_weights(target: TargetConfig) -> FrozenTarget:
    """A frozen target of the right shapes; its values are undefined."""
    embedding, lm_head = (torch.empty(target.vocab_size, target.hidden_size) for _ in range(2))
    return FrozenTarget(target, embedding, torch.empty(target.hidden_size), None, lm_head)


def activation_bytes(recipe: Recipe, head: DraftHead, frozen: FrozenTarget, samples: int, longest: int) -> int:
    """The batch, what autograd saves in the unroll, and one chunk of scores with its gradient."""
    unrolled = head_in_training(recipe, head, Teacher(frozen, head.vocab))
    stored = sum(1 for tap in head.taps if tap < frozen.config.num_layers) * frozen.config.hidden_size
    batch = Batch(
        tokens=torch.zeros(samples, longest, dtype=torch.long),
        loss_mask=torch.ones(samples, longest, dtype=torch.bool),
        taps=torch.empty(samples, longest, stored),
        last_hidden=torch.empty(samples, longest, frozen.config.hidden_size),
    )
    supervision = planned_supervision(unrolled, batch)
    own = {storage_of(tensor) for tensor in [*head.parameters(), *head.buffers()]}
    unroll = unrolled.objective.unroll
    with autocast(recipe.train, head.embedding.device):
        with SavedForBackward(own) as saved:
            hidden = unrolled.unroll(batch, supervision, None)
        with SavedForBackward(own) as scored:
            part = slice(0, positions_at_once(unroll * len(head.vocab.ids), head.embedding.device))
            unrolled.score(supervision, torch.ones(unroll, 1), hidden[:, part], part)
    return batch.taps.nbytes + 2 * batch.last_hidden.nbytes + saved.num_bytes + hidden.nbytes + 2 * scored.num_bytes


def planned_supervision(unrolled: UnrolledHead, batch: Batch) -> Supervision | BlockSupervision:
    """As much as the samples of a batch can have: every position, or as many blocks as are drawn from each."""
    samples, longest = batch.tokens.shape
    if not isinstance(unrolled, TrainedBlocks):
        places = torch.zeros(samples * longest, dtype=torch.long)
        return Supervision(places, places, places, batch.last_hidden.flatten(0, 1), places, outside=0)
    anchors = range(1, longest - 1)[-unrolled.anchors :]
    blocks = Blocks(
        rows=tuple(row for row in range(samples) for _ in anchors),
        anchors=(*anchors,) * samples,
        starts=(0,) * samples * len(anchors),
    )
    places = torch.zeros(unrolled.objective.unroll, len(blocks), dtype=torch.long)
    last_hidden = torch.empty(*places.shape, batch.last_hidden.shape[-1])
    return BlockSupervision(blocks, places, places, places == 0, places, last_hidden, places, outside=0)


class SavedForBackward:
    """A context manager that adds up the storages that autograd saves, each once, except those in `known`."""

    def __init__(self, known: set[int]) -> None:
        self.known, self.tensors = known, dict[int, Tensor]()
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def __enter__(self) -> "SavedForBackward":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)

    def _keep(self, tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in self.known:
            self.tensors[storage_of(tensor)] = tensor  # kept alive, so that no later storage gets the same id
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
