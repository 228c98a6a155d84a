"""The fastest form of a model's layers on its device; they are most of a step.

On a CPU, reading the weights of linear layers is the bottleneck. float32 weights that are exactly float16 or bfloat16
numbers, as published ones are, are kept in 16 bits, and weights that a GGUF file holds in 8 to 4 bits as 8-bit integers
with scales; products and sums stay in float32. The kernel is our own (products.py), or FBGEMM's for float16 numbers
(Khudia et al. 2021, arXiv 2101.05615) where there is no compiler. bfloat16 layers have our own kernel on a processor
with tiles (AMX); elsewhere their weights are put into oneDNN's blocked layout once, which torch's own layer does in
every call. None of this changes a weight, so the text stays.

On a GPU with few rows, launching kernels is the bottleneck: RMS norms take two kernels instead of transformers' eight,
rounded where transformers rounds. Only the order of sums changes. In training the layers run their own code.

On both, layers that read the same input, such as the projections to queries, keys and values, are one product.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.inference.kernels.outside_graph import CURRENT, outside_graph
from headstart.inference.kernels.products import (
    TILE_SIZE,
    EightBits,
    Product,
    eight_bits_of,
    exact_weight,
    has_tiles,
    library,
    remember_eight_bits,
)

Named = tuple[nn.Module, str, nn.Linear]  # a layer's parent, its name there, and the layer
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers names them, and our heads
# Bypasses the search for traced arguments of `torch.ops`, which takes longer than a small product.
HALF_PRODUCT: Callable[..., Tensor] = torch.ops.quantized.linear_dynamic_fp16._op


class PackedLinear(nn.Module):
    """A linear layer in inference whose weights lie in memory as a kernel reads them fastest."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def product(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        if CURRENT.trace is not None:
            return outside_graph(self, lambda layer: layer.product, [inputs], (*inputs.shape[:-1], self.out_features))
        return self.product(inputs)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class OwnLinear(PackedLinear):
    """By our own kernel: its sums are float32, its weights have 16 or 8 bits."""

    def __init__(self, linear: nn.Linear, weight: Tensor | EightBits) -> None:
        super().__init__(linear)
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.kernel = Product(weight, bias, tiled=linear.weight.dtype == torch.bfloat16)

    def product(self, inputs: Tensor) -> Tensor:
        return self.kernel(inputs)


class HalfLinear(PackedLinear):
    """By FBGEMM, with float16 weights and float32 sums."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), bias)

    def product(self, inputs: Tensor) -> Tensor:
        return HALF_PRODUCT(inputs, self.packed)


class BlockedLinear(PackedLinear):
    """By oneDNN in bfloat16, with weights in its blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def product(self, inputs: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")


class JointProduct:
    """One product for several layers that read the same input: the layer that is called first computes it for all."""

    def __init__(self, product: Callable[[Tensor], Tensor], sizes: list[int]) -> None:
        """`sizes` are the layers' numbers of outputs, in their order."""
        self.product, self.sizes = product, sizes
        self.inputs: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}  # by number, for layers that have not asked for theirs yet

    def of(self, number: int, inputs: Tensor) -> Tensor:
        """The output of one of the layers. [..., out_features]"""
        if self.inputs is not inputs or number not in self.outputs:
            self.inputs, self.outputs = inputs, dict(enumerate(self.product(inputs).split(self.sizes, dim=-1)))
        output = self.outputs.pop(number)
        if not self.outputs:
            self.inputs = None
        return output


class JointLinear(nn.Module):
    """A linear layer in inference that is computed together with its siblings."""

    def __init__(self, product: JointProduct, number: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product, self.number = product, number

    def forward(self, inputs: Tensor) -> Tensor:
        product = self.product
        if CURRENT.trace is not None:
            product = CURRENT.trace.copies.setdefault(id(product), JointProduct(self.traced_product, product.sizes))
        return product.of(self.number, inputs)

    def traced_product(self, inputs: Tensor) -> Tensor:
        size = (*inputs.shape[:-1], sum(self.product.sizes))
        return outside_graph(self, lambda layer: layer.product.product.product, [inputs], size)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of all these layers side by side."""
    weight = torch.cat([each.weight.detach() for each in layers])
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=layers[0].bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    remember_eight_bits(layer.weight, EightBits.joined([eight_bits_of(each.weight) for each in layers]))
    if layers[0].bias is not None:
        layer.bias = nn.Parameter(torch.cat([each.bias.detach() for each in layers]), requires_grad=False)
    return layer


@torch.no_grad()
def packed_linear(linear: nn.Linear, exact: bool) -> PackedLinear | None:
    """The layer with packed weights; None if packing must be `exact` but would change a weight."""
    if linear.weight.dtype == torch.bfloat16:
        is_tiled = has_tiles() and linear.in_features % TILE_SIZE == 0
        return OwnLinear(linear, linear.weight.detach()) if is_tiled else BlockedLinear(linear)
    weight = exact_weight(linear)
    if weight is None and not exact:
        weight = linear.weight.detach().half()
    if weight is not None and library() is not None:
        return OwnLinear(linear, weight)
    is_half = isinstance(weight, Tensor) and weight.dtype == torch.float16
    return HalfLinear(linear) if is_half or not exact else None


def can_pack(dtype: torch.dtype) -> bool:
    """Whether there are kernels for layers of this dtype on this processor, of our own or of this build of torch."""
    if dtype == torch.float32:
        return library() is not None or "fbgemm" in torch.backends.quantized.supported_engines
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return False


def pack_weights(model: nn.Module, exact: bool) -> bool:
    """Replace the model's linear layers on a CPU by packed ones; returns whether any was replaced.

    With `exact`, a float32 layer stays as it is if a weight is not exactly representable in 16 bits (or 8 with scales).
    """
    was_packed = False
    groups = siblings(
        [each for each in linear_layers(model) if each[-1].weight.is_cpu and can_pack(each[-1].weight.dtype)]
    )
    while groups:  # a group's own weights are freed as soon as it is packed
        layers = groups.pop(0)
        linears = [linear for *_, linear in layers]
        joint = packed_linear(joined(linears), exact) if len(layers) > 1 else None
        product = None if joint is None else JointProduct(joint, [linear.out_features for linear in linears])
        for number, (parent, name, linear) in enumerate(layers):
            packed = JointLinear(product, number, linear) if product else packed_linear(linear, exact)
            if packed is not None:
                setattr(parent, name, packed)
                was_packed = True
    for weight in model.parameters():
        remember_eight_bits(weight, None)
    return was_packed


def siblings(layers: Sequence[Named]) -> list[list[Named]]:
    """The layers in groups that read the same input; most are alone."""
    groups: dict[tuple[object, ...], list[Named]] = {}
    for parent, name, linear in layers:
        known = [names for names in getattr(parent, "same_input", SAME_INPUT) if name in names]
        complete = (names for names in known if all(isinstance(getattr(parent, n, None), nn.Linear) for n in names))
        group = next(complete, (name,))
        groups.setdefault((parent, group, linear.in_features, linear.bias is None), []).append((parent, name, linear))
    return list(groups.values())


def linear_layers(model: nn.Module) -> list[Named]:
    """The model's linear layers, each with its parent and its name there."""
    named = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    return [(parent, name, child) for parent, name, child in named if type(child) is nn.Linear]


class Fused:
    """Replaces a layer's forward by a fused computation, except in training."""

    def __init__(self, module: nn.Module, compute: Callable[[Tensor], Tensor]) -> None:
        self.module, self.compute = module, compute

    def __call__(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return type(self.module).forward(self.module, inputs)
        return self.compute(inputs)


def fuse_norms(model: nn.Module) -> None:
    """Fuse the RMS norms that compute the usual formula: each is tried on made-up hidden states."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module) and is_usual(module):
            vars(module)["forward"] = Fused(module, partial(normed, module, epsilon(module)))


def epsilon(module: nn.Module) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return value if isinstance(value, float) else None


@torch.no_grad()
def is_usual(module: nn.Module) -> bool:
    """Is it weight * hidden / sqrt(mean(hidden^2) + eps), rounded to the dtype before the weight is applied?"""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or epsilon(module) is None:
        return False
    hidden = torch.linspace(-3, 2, 4 * len(weight), dtype=torch.float32, device=weight.device).view(4, -1)
    wanted: Tensor = module(hidden)
    computed = normed(module, epsilon(module), hidden)
    return wanted.shape == computed.shape and torch.allclose(wanted.float(), computed.float(), rtol=1e-5, atol=1e-6)


def normed(module: nn.Module, eps: float | None, hidden: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight * functional.rms_norm(hidden, weight.shape, None, eps)


@torch.no_grad()
def join_linears(model: nn.Module) -> None:
    """Compute linear layers that read the same input together."""
    for group in siblings([each for each in linear_layers(model) if "forward" not in vars(each[-1])]):
        layers = [linear for *_, linear in group]
        if len(layers) == 1 or len({linear.weight.dtype for linear in layers}) > 1:
            continue
        joint, sizes = joined(layers), [linear.out_features for linear in layers]
        product = JointProduct(joint, sizes)
        for number, (linear, weight) in enumerate(zip(layers, joint.weight.split(sizes), strict=True)):
            linear.weight.data = weight
            if joint.bias is not None:
                linear.bias.data = joint.bias.split(sizes)[number]
            vars(linear)["forward"] = Fused(linear, partial(product.of, number))


@contextmanager
def own_layers_of(model: nn.Module) -> Iterator[None]:
    """Within this context fused layers run their own code, as in a baseline."""
    fused = {module: forward for module in model.modules() if isinstance(forward := vars(module).get("forward"), Fused)}
    for module in fused:
        del vars(module)["forward"]
    try:
        yield
    finally:
        for module, forward in fused.items():
            vars(module)["forward"] = forward
