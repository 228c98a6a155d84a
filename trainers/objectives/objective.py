"""The loss that training minimises: that of the head's paper, except where the recipe names another; and how a loss is
added up over chunks of positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.recipes import Recipe
from headstart.recipes.schema_heads import HeadSection, Loss
from headstart.recipes.schema_train import TrainSection


@dataclass(frozen=True)
class Objective(Loss):
    """A loss, summed over weighted unroll steps."""

    unroll_weights: tuple[float, ...] = ()

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "Objective":
        return cls.of(recipe.head, recipe.train)

    @classmethod
    def of(cls, head: HeadSection, train: TrainSection) -> "Objective":
        """The objective of the head's paper, with the fields that the recipe gives."""
        paper, fields = head.loss, {"name": train.objective, "weight": train.objective_weight}
        decay = head.unroll_decay if train.unroll_decay is None else train.unroll_decay
        weights = tuple(decay**k for k in range(head.levels or train.unroll))
        chosen: dict[str, Any] = {field: value for field, value in fields.items() if value is not None}
        if "name" in chosen and not paper.weight:  # DFlash's own loss is that to the text alone
            chosen.setdefault("weight", 1.0)
        return cls(**{**vars(paper), **chosen}, unroll_weights=weights)

    @property
    def unroll(self) -> int:
        return len(self.unroll_weights)


Score = Callable[[Tensor, slice], tuple[Tensor, Tensor]]  # (hidden states, positions) of a chunk -> (loss, sums)


def score_in_chunks(score: Score, hidden: Tensor, parameters: list[Tensor], chunk: int) -> tuple[Tensor, Tensor]:
    """Add up the losses and the sums of all chunks of `chunk` positions; hidden is [unroll, positions, feature].

    The loss has the same gradient as without chunks, for `hidden` and for the `parameters` that `score` uses. The
    gradient of each chunk is taken at once, so neither logits nor autograd graphs accumulate.
    """
    loss, sums = SumOverChunks.apply(score, chunk, torch.is_grad_enabled(), hidden, *parameters)
    return loss, sums


class SumOverChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, score: Score, chunk: int, with_gradient: bool, hidden: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = [hidden, *parameters]
        # Half precision would round away many of the small gradients that are added up here.
        dtypes = [torch.promote_types(tensor.dtype, torch.float32) for tensor in inputs]
        gradients = [torch.zeros_like(t, dtype=d) for t, d in zip(inputs, dtypes, strict=True)] if with_gradient else []
        scored = []
        # Without any position there is still one chunk, an empty one, so that the sums have their shape.
        for start in range(0, max(hidden.shape[1], 1), chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(with_gradient):
                piece = hidden[:, part].detach().requires_grad_(with_gradient)
                loss, sums = score(piece, part)
            if with_gradient:
                of_piece, *of_parameters = torch.autograd.grad(loss, [piece, *parameters])
                gradients[0][:, part] = of_piece
                for gradient, more in zip(gradients[1:], of_parameters, strict=True):
                    gradient += more
            scored.append((loss.detach(), sums))
        if with_gradient:
            ctx.save_for_backward(*(own.to(tensor.dtype) for own, tensor in zip(gradients, inputs, strict=True)))
        total = torch.stack([loss for loss, _ in scored]).sum(), torch.stack([sums for _, sums in scored]).sum(0)
        ctx.mark_non_differentiable(total[1])
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        # In float32, so that gradients in half precision are rounded once.
        factor = upstream[0].to(torch.promote_types(upstream[0].dtype, torch.float32))
        scaled = ((own.to(torch.promote_types(own.dtype, factor.dtype)) * factor, own) for own in ctx.saved_tensors)
        return None, None, None, *(gradient.to(own.dtype) for gradient, own in scaled)
