"""Scores of many positions over a large vocabulary, of which only one chunk of positions is ever in memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Score = Callable[[Tensor, slice], tuple[Tensor, Tensor]]  # hidden states of a chunk, and where it lies: loss, sums


def score_in_chunks(score: Score, hidden: Tensor, parameters: list[Tensor], chunk: int) -> tuple[Tensor, Tensor]:
    """The losses and the sums of all chunks, added up; hidden is [unroll, positions, feature].

    The loss has the gradient that it would have without chunks, towards `hidden` and the `parameters` that `score`
    uses. It is taken chunk by chunk, at once, so that neither logits nor graphs pile up.
    """
    loss, sums = SumOverChunks.apply(score, chunk, torch.is_grad_enabled(), hidden, *parameters)
    return loss, sums


class SumOverChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, score: Score, chunk: int, with_gradient: bool, hidden: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted = [hidden, *parameters]
        # Many small gradients are added up, which half precision would round away.
        kinds = [torch.promote_types(tensor.dtype, torch.float32) for tensor in wanted]
        gradients = [torch.zeros_like(t, dtype=k) for t, k in zip(wanted, kinds, strict=True)] if with_gradient else []
        parts = []
        # Without any position there is still one chunk, an empty one, so that sums have their shape.
        for start in range(0, max(hidden.shape[1], 1), chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(with_gradient):
                piece = hidden[:, part].detach().requires_grad_(with_gradient)
                loss, sums = score(piece, part)
            if with_gradient:
                found = torch.autograd.grad(loss, [piece, *parameters])
                gradients[0][:, part] = found[0]
                for gradient, more in zip(gradients[1:], found[1:], strict=True):
                    gradient += more
            parts.append((loss.detach(), sums))
        if with_gradient:
            ctx.save_for_backward(*(own.to(tensor.dtype) for own, tensor in zip(gradients, wanted, strict=True)))
        total = torch.stack([loss for loss, _ in parts]).sum(), torch.stack([sums for _, sums in parts]).sum(0)
        ctx.mark_non_differentiable(total[1])
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        # In float32: the scale that float16 training puts on a loss may be too large for float16 itself.
        factor = upstream[0].to(torch.promote_types(upstream[0].dtype, torch.float32))
        scaled = ((own.to(torch.promote_types(own.dtype, factor.dtype)) * factor, own) for own in ctx.saved_tensors)
        return None, None, None, *(gradient.to(own.dtype) for gradient, own in scaled)
