"""A loss over many positions and a large vocabulary; only the logits of one chunk of positions are ever in memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
