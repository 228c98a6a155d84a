"""Layers of a model on a GPU in fewer kernels: a captured step of one row waits for their launches, not for memory.

RMS norms take two kernels where transformers' code launches eight, rounded where transformers rounds; layers that read
the same input, such as the projections to queries, keys and values, are one product, and keep their weights as parts of
one tensor. Only the order of sums changes. In training the layers run their own code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.inference.targets.packed_weights import JointProduct, siblings


class Fused:
    """What a fused layer runs in place of its own code."""

    def __init__(self, module: nn.Module, compute: Callable[[Tensor], Tensor]) -> None:
        self.module, self.compute = module, compute

    def __call__(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            own: Tensor = type(self.module).forward(self.module, inputs)
            return own
        return self.compute(inputs)


def fuse_norms(model: nn.Module) -> None:
    """Fuse the RMS norms that compute the usual formula: each is tried on made-up states."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module) and is_usual(module):
            vars(module)["forward"] = Fused(module, partial(normed, module, epsilon(module)))


def epsilon(module: nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


@torch.no_grad()
def is_usual(module: nn.Module) -> bool:
    """Is it weight * states / sqrt(mean(states^2) + eps), the states rounded to their dtype before they are weighed?"""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or epsilon(module) is None:
        return False
    states = torch.linspace(-3, 2, 4 * len(weight), dtype=torch.float32, device=weight.device).view(4, -1)
    wanted: Tensor = module(states)
    found = normed(module, epsilon(module), states)
    return wanted.shape == found.shape and torch.allclose(wanted.float(), found.float(), rtol=1e-5, atol=1e-6)


def normed(module: nn.Module, eps: float | None, states: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight * functional.rms_norm(states, weight.shape, None, eps)


@torch.no_grad()
def join_linears(model: nn.Module) -> None:
    """Compute linear layers that read the same input together."""
    named = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    plain = [each for each in named if type(each[-1]) is nn.Linear and "forward" not in vars(each[-1])]
    for group in siblings([(parent, name, child) for parent, name, child in plain if isinstance(child, nn.Linear)]):
        layers = [linear for *_, linear in group]
        if len(layers) == 1 or len({linear.weight.dtype for linear in layers}) > 1:
            continue
        weight = torch.cat([linear.weight for linear in layers])
        bias = None if layers[0].bias is None else torch.cat([linear.bias for linear in layers])
        sizes = [linear.out_features for linear in layers]
        product = JointProduct(partial(functional.linear, weight=weight, bias=bias), sizes)
        for place, (linear, own) in enumerate(zip(layers, weight.split(sizes), strict=True)):
            linear.weight.data = own
            if bias is not None:
                linear.bias.data = bias.split(sizes)[place]
            vars(linear)["forward"] = Fused(linear, partial(product.of, place))


@contextmanager
def own_layers_of(model: nn.Module) -> Iterator[None]:
    """Within this context the layers run their own code, as in a baseline."""
    fused = {module: found for module in model.modules() if isinstance(found := vars(module).get("forward"), Fused)}
    for module in fused:
        del vars(module)["forward"]
    try:
        yield
    finally:
        for module, found in fused.items():
            vars(module)["forward"] = found
