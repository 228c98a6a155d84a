"""The fastest form of a model's layers on its device; they are most of a step.

On a CPU, reading the weights of linear layers is the bottleneck. float32 weights that are exactly float16 or bfloat16
numbers, as published ones are, are kept in 16 bits, and weights that a GGUF file holds in 8 to 4 bits as 8-bit integers
with scales; products and sums stay in float32. The kernel is our own (products.py), whose sums do not depend on the
number of tokens. None of this changes a weight, so the text stays.

On a GPU with few rows, launching kernels is the bottleneck: RMS norms take two kernels instead of transformers' eight,
and with Triton norms, gates and rotary embeddings are one kernel each (gpu/fused.py), rounded where transformers
rounds. Only the order of sums changes. In training the layers run their own code.

On both, layers that read the same input, such as the projections to queries, keys and values, are one product.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.inference.kernels.matmul import kernels_on_gpu, order_products, weights_read_by
from headstart.inference.kernels.outside_graph import CURRENT, outside_graph
from headstart.inference.kernels.private import forget_file_pages, mapped_files
from headstart.inference.kernels.products import (
    EightBits,
    Product,
    eight_bits_of,
    exact_weight,
    library,
    remember_eight_bits,
)

Named = tuple[nn.Module, str, nn.Linear]  # a layer's parent, its name there, and the layer
GATED = ("gate_proj", "up_proj", "down_proj")
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
SILU, GELU = ("SiLU", "SiLUActivation"), "GELUTanh"  # torch's and transformers' classes
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers names them, and our heads


class PackedLinear(nn.Module):
    """A linear layer in inference by our own kernel, whose weights lie in memory as it reads them fastest."""

    def __init__(self, linear: nn.Linear, weight: Tensor | EightBits) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.kernel = Product(weight, bias, is_half=linear.weight.dtype != torch.float32)

    def product(self, inputs: Tensor) -> Tensor:
        return self.kernel(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        if CURRENT.trace is not None:
            return outside_graph(self, lambda layer: layer.product, [inputs], (*inputs.shape[:-1], self.out_features))
        return self.product(inputs)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


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
def weight_to_pack(linear: nn.Linear, exact: bool) -> Tensor | EightBits:
    """A layer's weight in the fewest bits, 16 at most unless packing must be `exact`."""
    if linear.weight.dtype != torch.float32:
        return linear.weight.detach()
    weight = exact_weight(linear)
    return weight.half() if isinstance(weight, Tensor) and weight.dtype == torch.float32 and not exact else weight


def packed_linear(linear: nn.Linear, exact: bool) -> PackedLinear:
    return PackedLinear(linear, weight_to_pack(linear, exact))


def can_pack(weight: Tensor) -> bool:
    """Whether our kernels multiply with weights on this device and of this dtype."""
    return weight.is_cpu and weight.dtype in (torch.float32, torch.float16, torch.bfloat16) and library() is not None


def pack_weights(model: nn.Module, exact: bool) -> bool:
    """Replace the model's linear layers on a CPU by packed ones; returns whether any was replaced.

    Unless `exact`, float32 weights are rounded to float16 where that is not exact.
    """
    for parent, name, layer in [each for each in linear_layers(model, "Conv1D") if can_pack(each[-1].weight)]:
        setattr(parent, name, as_linear(layer))
    groups = siblings([each for each in linear_layers(model) if can_pack(each[-1].weight)])
    was_packed, files = bool(groups), mapped_files()
    while groups:  # a group's own weights are freed as soon as it is packed
        layers = groups.pop(0)
        linears = [linear for *_, linear in layers]
        whole = joined(linears) if len(layers) > 1 else linears[0]
        weight = weight_to_pack(whole, exact)
        if len(layers) > 1 and getattr(weight, "dtype", None) == torch.float32:  # each alone may need fewer bits
            groups += [[layer] for layer in layers]
            continue
        packed = PackedLinear(whole, weight)
        product = JointProduct(packed, [linear.out_features for linear in linears])
        for number, (parent, name, linear) in enumerate(layers):
            setattr(parent, name, JointLinear(product, number, linear) if len(layers) > 1 else packed)
        forget_file_pages([linear.weight for linear in linears], files)
    for weight in model.parameters():
        remember_eight_bits(weight, None)
    if was_packed:
        order_products(model)
        fuse_norms(model)
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


def linear_layers(model: nn.Module, kind: str = "Linear") -> list[Any]:
    """The model's linear layers as `Named`: torch's, or transformers' `Conv1D`.

    Those whose weights their parent's own code reads, as Mamba's does, stay as they are.
    """
    children: Any = ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
    named = [each for each in children if each[1] not in weights_read_by(each[0].__class__)]
    modules = {"Linear": "torch.nn.modules.linear", "Conv1D": "transformers.pytorch_utils"}
    return [each for each in named if (type(each[2]).__name__, type(each[2]).__module__) == (kind, modules[kind])]


def as_linear(layer: Any) -> nn.Linear:
    """GPT-2's kind of linear layer, whose weight lies transposed, as torch's."""
    size, outputs = layer.weight.shape
    linear = nn.Linear(size, outputs, device="meta")
    linear.weight = nn.Parameter(layer.weight.detach().T, requires_grad=False)
    linear.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return linear


class FusedForward:
    """Replaces a module's forward by a fused computation of the same arguments, except in training."""

    def __init__(self, module: Any, compute: Callable[..., Any], whole: nn.Linear | None = None) -> None:
        """`whole` computes a linear layer together with its siblings."""
        self.module, self.compute, self.whole = module, compute, whole

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            return type(self.module).forward(self.module, *args, **options)
        if CURRENT.trace is not None:
            return outside_graph(self.module, lambda module: module.forward.compute, [*args], args[0].shape)
        return self.compute(*args, **options)


def fuse_norms(model: nn.Module) -> None:
    """Fuse the RMS norms that round to the dtype before the weight is applied, as Llama's: each is tried."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module) and offset_of(module) == 0:
            on_cpu = isinstance(module.weight, Tensor) and module.weight.is_cpu
            compute = ordered_norm(module) if on_cpu else partial(normed, module, epsilon(module))
            vars(module)["forward"] = FusedForward(module, compute)


def ordered_norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """`normed` by our own kernel, in one call and with sums that compiled layers share."""
    weight, eps = module.weight, epsilon(module)
    assert isinstance(weight, Tensor)
    size, address = len(weight), weight.data_ptr()
    kernel = getattr(library(), f"normalize_{str(weight.dtype).removeprefix('torch.')}")

    def compute(inputs: Tensor) -> Tensor:
        if inputs.dtype != weight.dtype:
            return normed(module, eps, inputs)
        inputs = inputs.contiguous()
        found = torch.empty_like(inputs)
        kernel(inputs.data_ptr(), address, found.data_ptr(), inputs.numel() // size, size, eps)
        return found

    return compute


def epsilon(module: nn.Module) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return value if isinstance(value, float) else None


@torch.no_grad()
def offset_of(module: nn.Module) -> float | None:
    """The number that an RMS norm adds to its weight, found by trial: 0, or 1 as in Gemma; None for other formulas."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or epsilon(module) is None:
        return None
    hidden = torch.linspace(-3, 2, 4 * len(weight), dtype=torch.float32, device=weight.device).view(4, -1)
    wanted: Tensor = module(hidden)
    plain = functional.rms_norm(hidden, weight.shape, None, epsilon(module))
    for offset in (0.0, 1.0):
        computed = (offset + weight.float()) * plain
        if wanted.shape == computed.shape and torch.allclose(wanted.float(), computed, rtol=1e-5, atol=1e-6):
            return offset
    return None


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
            vars(linear)["forward"] = FusedForward(linear, partial(product.of, number), joint)


def whole_of(linear: nn.Module) -> nn.Linear | None:
    """The layer that computes this one together with its siblings, if there is one."""
    return getattr(vars(linear).get("forward"), "whole", None)


def norms_on_gpu(model: nn.Module) -> list[nn.Module]:
    """Let our kernel compute the RMS norms of Llama's and Gemma's formulas; returns them."""
    norms = {each: offset_of(each) for each in model.modules() if type(each).__name__.endswith("RMSNorm")}
    known = {each: offset for each, offset in norms.items() if offset is not None}
    for each, offset in known.items():
        compute = partial(kernels_on_gpu("fused").norm, weight=each.weight, eps=epsilon(each), offset=offset)
        vars(each)["forward"] = FusedForward(each, compute)
    return [*known]


def layer_with_sum(layer: Any, offset: float, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
    """A decoder layer whose first sum and second norm are one kernel."""
    norm = layer.post_attention_layernorm
    mixed, _ = layer.self_attn(layer.input_layernorm(hidden_states), *args, **options)
    form = norm.weight, epsilon(norm), offset
    hidden_states, normed = kernels_on_gpu("fused").add_and_norm(mixed, hidden_states, *form)
    return hidden_states + layer.mlp(normed)


def residuals_on_gpu(model: nn.Module) -> list[nn.Module]:
    """Let our kernel compute the first sum of decoder layers of Llama's form together with their second norm."""
    layers: list[Any] = [each for each in model.modules() if {name for name, _ in each.named_children()} == LAYER]
    usual = {
        layer: offset
        for layer in layers
        if {*re.findall(r"self\.(\w+)", inspect.getsource(type(layer).forward))} == LAYER
        and type(layer.post_attention_layernorm).__name__.endswith("RMSNorm")
        and (offset := offset_of(layer.post_attention_layernorm)) is not None
    }
    for layer, offset in usual.items():
        vars(layer)["forward"] = FusedForward(layer, partial(layer_with_sum, layer, offset))
    return [*usual]


def gated_on_gpu(model: nn.Module) -> list[nn.Module]:
    """Let our kernel compute the activation of MLPs with SiLU(gate) * up or GELU(gate) * up; returns the MLPs."""
    gated = [each for each in model.modules() if is_gated(each)]
    for each in gated:
        vars(each)["forward"] = FusedForward(each, partial(gated_mlp, each))
    return gated


def is_gated(module: nn.Module) -> bool:
    """Is it down_proj(activation(gate_proj) * up_proj), with gate_proj and up_proj computed together?"""
    kind: Any = type(module)
    names = {name for name, _ in module.named_children()} - {"act_fn"}
    if names != set(GATED) or activation(module) not in (*SILU, GELU):
        return False
    reads = {*re.findall(r"self\.(\w+)", inspect.getsource(kind.forward))}
    return reads - {"act_fn"} == set(GATED) and whole_of(module.get_submodule("up_proj")) is not None


def activation(module: nn.Module) -> str:
    return type(getattr(module, "act_fn", nn.SiLU())).__name__


def gated_mlp(module: Any, inputs: Tensor) -> Tensor:
    joint = whole_of(module.up_proj)(inputs)  # type: ignore[misc]
    found: Tensor = module.down_proj(kernels_on_gpu("fused").gated(joint, activation(module) == GELU))
    return found


@contextmanager
def own_layers_of(model: nn.Module) -> Iterator[None]:
    """Within this context fused layers run their own code, as in a baseline."""
    fused = {
        module: forward
        for module in model.modules()
        if isinstance(forward := vars(module).get("forward"), FusedForward)
    }
    for module in fused:
        del vars(module)["forward"]
    try:
        yield
    finally:
        for module, forward in fused.items():
            vars(module)["forward"] = forward
