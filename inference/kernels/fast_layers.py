"""Layers of a model as its device runs them fastest. A decoding step waits for little else.

On a CPU, for the weights of linear layers to be read. float32 weights that are float16 or bfloat16 numbers, as
published ones are, are kept as such, half the bytes, and those that a GGUF file holds in 8 to 4 bits as whole numbers
of 8 bits and what scales them; the products and sums stay in float32. The kernel is our own (products.py), or FBGEMM's
for float16 numbers (Khudia et al. 2021, arXiv 2101.05615) where there is no compiler. So is that of bfloat16 on a
processor with tiles (AMX); elsewhere the weights are put into oneDNN's blocked layout once, where torch's own layer
does it again in every call. None of this changes a weight, so the text stays.

On a GPU, for kernels to be launched, if rows are few: RMS norms take two where transformers' code launches eight,
rounded where transformers rounds. Only the order of sums changes. In training the layers run their own code.

On both, layers that read the same input, such as the projections to queries, keys and values, are one product.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.inference.kernels.outside_graph import HERE, apart
from headstart.inference.kernels.products import (
    TILED,
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
# Without what `torch.ops` does for operators that take objects: it searches the arguments for traced ones.
HALF_PRODUCT: Callable[..., Tensor] = torch.ops.quantized.linear_dynamic_fp16._op
SMALL_BYTES = 32 * 2**20  # float32 weights, or as many bfloat16 ones, that stay in a processor's cache


class PackedLinear(nn.Module):
    """A linear layer in inference, its weights as a kernel reads them fastest."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def product(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        if HERE.trace is not None:
            return apart(self, lambda own: own.product, [inputs], (*inputs.shape[:-1], self.out_features))
        return self.product(inputs)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class OwnLinear(PackedLinear):
    """Its sums are float32, its weights have 16 or 8 bits; inputs and outputs are those of the layer."""

    def __init__(self, linear: nn.Linear, weight: Tensor | EightBits) -> None:
        super().__init__(linear)
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.own = Product(weight, bias, tiled=linear.weight.dtype == torch.bfloat16)

    def product(self, inputs: Tensor) -> Tensor:
        return self.own(inputs)


class HalfLinear(PackedLinear):
    """The same with float16 weights, by FBGEMM."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), bias)

    def product(self, inputs: Tensor) -> Tensor:
        return HALF_PRODUCT(inputs, self.packed)


class BlockedLinear(PackedLinear):
    """Everything is bfloat16, and its weights are in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.own_bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def product(self, inputs: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.own_bias, "none", [], "")


class JointProduct:
    """One product for several layers that read the same input: the layer that is called first computes it for all."""

    def __init__(self, product: Callable[[Tensor], Tensor], sizes: list[int]) -> None:
        """`sizes` are the layers' numbers of outputs, in their order."""
        self.product, self.sizes = product, sizes
        self.inputs: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}  # by place, for layers that have not asked for theirs yet

    @torch.compiler.disable  # what one layer leaves for the next is no part of a graph
    def of(self, place: int, inputs: Tensor) -> Tensor:
        """The output of the layer at this place. [..., out_features]"""
        if self.inputs is not inputs or place not in self.outputs:
            self.inputs, self.outputs = inputs, dict(enumerate(self.product(inputs).split(self.sizes, dim=-1)))
        found = self.outputs.pop(place)
        if not self.outputs:
            self.inputs = None
        return found


class JointLinear(nn.Module):
    """A linear layer in inference that is computed together with its siblings."""

    def __init__(self, product: JointProduct, place: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product, self.place = product, place

    def forward(self, inputs: Tensor) -> Tensor:
        product = self.product
        if HERE.trace is not None:
            product = HERE.trace.copies.setdefault(id(product), JointProduct(self.apart, product.sizes))
        return product.of(self.place, inputs)

    def apart(self, inputs: Tensor) -> Tensor:
        size = (*inputs.shape[:-1], sum(self.product.sizes))
        return apart(self, lambda own: own.product.product.product, [inputs], size)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are those of all these side by side."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=layers[0].bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    remember_eight_bits(made.weight, EightBits.joined([eight_bits_of(layer.weight) for layer in layers]))
    if layers[0].bias is not None:
        made.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
    return made


@torch.no_grad()
def packed_linear(linear: nn.Linear, exact: bool) -> PackedLinear | None:
    """The layer with packed weights; None if that, `exact`, would change one of them."""
    if linear.weight.dtype == torch.bfloat16:
        is_tiled = has_tiles() and linear.in_features % TILED == 0
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


@torch.inference_mode()
def seconds_of_products(dtype: torch.dtype, eight_bits: bool = False) -> float:
    """What packed layers of 32 million weights take for one token and for eight, the least of a few runs each.

    With `eight_bits`, float32 weights are such that they are kept in 8 bits.
    """
    linears = [nn.Linear(1024, 4096, bias=False, dtype=dtype) for _ in range(8)]
    for linear in linears if eight_bits else ():
        numbers, factors = torch.zeros(4096, 1024, dtype=torch.int8), torch.zeros(4096, 32, dtype=torch.half)
        remember_eight_bits(linear.weight.zero_(), EightBits(numbers, factors, None))
    layers = [packed for linear in linears if (packed := packed_linear(linear, exact=False))]
    total = 0.0
    for tokens in (1, 8):
        inputs, times = torch.zeros(tokens, 1024, dtype=dtype), []
        for _ in range(5):
            started = time.perf_counter()
            for layer in layers:
                layer(inputs)
            times.append(time.perf_counter() - started)
        total += min(times)
    return total


def gains_by_packing(model: nn.Module) -> bool:
    """Whether reading the weights of this model's linear layers is what a step waits for."""
    return sum(linear.weight.numel() * 4 for *_, linear in linear_layers(model) if linear.weight.is_cpu) >= SMALL_BYTES


def pack_weights(model: nn.Module, exact: bool) -> bool:
    """Replace the model's linear layers on a CPU by packed ones; returns whether any was replaced.

    With `exact`, a float32 layer stays as it is if one of its weights is no number of 16 bits, or of 8 with scales.
    """
    was_packed = False
    groups = siblings(
        [each for each in linear_layers(model) if each[-1].weight.is_cpu and can_pack(each[-1].weight.dtype)]
    )
    while groups:  # a group's own weights are freed as soon as it is packed
        layers = groups.pop(0)
        linears = [linear for *_, linear in layers]
        whole = packed_linear(joined(linears), exact) if len(layers) > 1 else None
        product = None if whole is None else JointProduct(whole, [linear.out_features for linear in linears])
        for place, (parent, name, linear) in enumerate(layers):
            packed = JointLinear(product, place, linear) if product else packed_linear(linear, exact)
            if packed is not None:
                setattr(parent, name, packed)
                was_packed = True
    for weight in model.parameters():
        remember_eight_bits(weight, None)
    return was_packed


def forms_of(model: nn.Module) -> list[str]:
    """The forms in which a model's linear layers keep their weights packed."""
    packed = [each.product.product if isinstance(each, JointLinear) else each for each in model.modules()]
    own = {each.own.form for each in packed if isinstance(each, OwnLinear)}
    return sorted(own | {type(each).__name__ for each in packed if isinstance(each, HalfLinear | BlockedLinear)})


def siblings(layers: Sequence[Named]) -> list[list[Named]]:
    """The layers in groups that read the same input; most are alone."""
    groups: dict[tuple[object, ...], list[Named]] = {}
    for parent, name, linear in layers:
        known = [names for names in getattr(parent, "same_input", SAME_INPUT) if name in names]
        whole = (names for names in known if all(isinstance(getattr(parent, each, None), nn.Linear) for each in names))
        group = next(whole, (name,))
        groups.setdefault((parent, group, linear.in_features, linear.bias is None), []).append((parent, name, linear))
    return list(groups.values())


def linear_layers(model: nn.Module) -> list[Named]:
    """The model's linear layers, each with its parent and its name there."""
    named = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    return [(parent, name, child) for parent, name, child in named if type(child) is nn.Linear]


class Fused:
    """What a fused layer runs in place of its own code."""

    def __init__(self, module: nn.Module, compute: Callable[[Tensor], Tensor]) -> None:
        self.module, self.compute = module, compute

    def __call__(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return type(self.module).forward(self.module, inputs)
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
    for group in siblings([each for each in linear_layers(model) if "forward" not in vars(each[-1])]):
        layers = [linear for *_, linear in group]
        if len(layers) == 1 or len({linear.weight.dtype for linear in layers}) > 1:
            continue
        whole, sizes = joined(layers), [linear.out_features for linear in layers]
        product = JointProduct(whole, sizes)
        for place, (linear, weight) in enumerate(zip(layers, whole.weight.split(sizes), strict=True)):
            linear.weight.data = weight
            if whole.bias is not None:
                linear.bias.data = whole.bias.split(sizes)[place]
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
