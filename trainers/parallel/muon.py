"""Muon (Liu et al. 2025, arXiv 2502.16982) in a number format that is fast on the device."""

from typing import Any

import torch
from torch import Tensor

from headstart.inference.targets.loading import has_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steep at zero, so that few iterations are enough
ITERATIONS = 5
SYMMETRIC_ROWS = 128  # the fewest of a block on the diagonal of a symmetric product


class Muon(torch.optim.Muon):
    """torch's Muon without weight decay. torch iterates in bfloat16 everywhere, which takes a CPU without instructions
    for it 60 times as long as float32; here such a device iterates in float32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(gradient))
                momentum.lerp_(gradient, 1 - group["momentum"])
                update = orthogonal(gradient.lerp(momentum, group["momentum"]))
                rows, columns = parameter.shape
                parameter.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly U V^T of the matrix's singular value decomposition, by Newton-Schulz; singular values are 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    wide = matrix.to(torch.bfloat16 if has_bfloat16(matrix.device) else torch.float32)
    if is_tall := matrix.shape[0] > matrix.shape[1]:
        wide = wide.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = gram_of(wide)
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


def gram_of(matrix: Tensor) -> Tensor:
    """matrix @ matrix.T; on a CPU the blocks below the diagonal are copied from above it, which saves a third."""
    if matrix.device.type != "cpu" or matrix.dtype != torch.float32 or len(matrix) < 2 * SYMMETRIC_ROWS:
        return matrix @ matrix.T
    upper, lower = matrix.chunk(2)
    beside = upper @ lower.T
    return torch.cat([torch.cat([gram_of(upper), beside], 1), torch.cat([beside.T, gram_of(lower)], 1)])
