"""Decoder layers compiled for a CPU, a target's and a head's: a dozen fused operations instead of a hundred.

One layer of each form is traced (torch's make_fx) and compiled (Inductor) in the background, while decoding continues
with the layers' own code. Products with packed weights and attention to the cache stay in Python: see `outside_graph`.
Every layer's own code runs once more next to its compiled form, which is used only if both results have the same bits:
Inductor adds fast what torch adds in another order, so sums, and functions that it computes otherwise, stay torch's.
"""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from operator import getitem
from queue import SimpleQueue
from types import NoneType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from transformers.cache_utils import Cache

from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.side_by_side import PackedCache
from headstart.inference.kernels.outside_graph import CURRENT, Call, CannotTrace, LayerTrace, Operation
from headstart.inference.kernels.private import (
    end_thread,
    lower_priority,
    no_untraceable_warnings,
    patch_only_tracing_thread,
    use_huge_pages,
)

MAX_PASS_TOKENS = 256  # a pass over more tokens only waits for products
COMPILE_AFTER_CALLS = 30  # of a layer: nothing is compiled during the first tokens of a text
IDLE_SECONDS = 0.5  # without a pass
LONG_RUN_CALLS = 30_000  # of layers; a run of that length gains although compiling slows it down
MAX_KERNELS = 32  # of a target and its heads, in case shapes change in every pass
TRACED_SIZES = (3, 5)  # rows and tokens that a layer is traced with
INDUCTOR_OPTIONS = {
    "compile_threads": 1,  # the other cores decode
    "cpp.threads": 1,  # the fused operations are small
    "emulate_precision_casts": True,  # rounded where the layer rounds
    "size_asserts": False,  # the form fixes the shapes
}
ATEN = torch.ops.aten
OTHER_BITS = {  # in Inductor's form
    *(ATEN.mean, ATEN.sum, ATEN.var, ATEN.var_mean, ATEN.native_layer_norm, ATEN._softmax, ATEN.cumsum),
    *(ATEN.mm, ATEN.bmm, ATEN.addmm, ATEN.convolution, ATEN.gelu, ATEN.exp, ATEN.tanh, ATEN.erf, ATEN.log),
    *(ATEN.sin, ATEN.cos, ATEN.linalg_vector_norm),
}
CACHES = (KVCache, PackedCache, Slots)  # in which a second pass over the same tokens changes nothing
MASKS = ("attention_mask", "mask")  # the argument's name in transformers' layers, and in our heads'
Form = tuple[object, ...]  # what a layer is specialised for: constants, and whether rows and tokens are more than one


@dataclass
class Arguments:
    """The arguments of a layer's forward, by name, and by kind."""

    values: dict[str, Any]
    tensors: list[Tensor]
    cache: Any
    mask: Any
    form: Form

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Arguments":
        tensors: list[Tensor] = []
        cache = mask = None
        form: list[object] = []
        for name, value in values.items():
            if name in MASKS:
                mask = value
            elif isinstance(value, Tensor):
                tensors.append(value)
            elif is_tensors(value):
                tensors.extend(value)
            elif isinstance(value, (Cache, Slots)):
                cache = value
            else:
                form.append((name, value))
        rows, tokens = tensors[0].shape[:2]
        form += [rows == 1, tokens == 1]
        for tensor in tensors:
            shape = tensor.shape
            form.append(shape if len(shape) < 2 else (shape[0] == rows, shape[1] == tokens, shape[2:]))
            form.append(tensor.is_contiguous())
        return cls(values, tensors, cache, mask, tuple(form))

    @property
    def has_clear_axes(self) -> bool:
        """Whether the numbers of rows and tokens differ, and tensors lie in memory in the order of their axes."""
        rows, tokens = self.tensors[0].shape[:2]
        return (rows != tokens or rows == 1) and all(tensor.is_contiguous() for tensor in self.tensors)


def is_tensors(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value)


@dataclass
class Kernel:
    """A compiled layer, for all layers of its form."""

    run: Any
    constants: list[str]  # the names of the layer's weights, which come before the arguments
    calls: list[tuple[str, Any]]  # operations that are left to Python: the owner's name, and a function that makes it


class BoundKernel:
    """A kernel with one layer's weights."""

    def __init__(self, kernel: Kernel, layer: nn.Module) -> None:
        weights = weights_of(layer)
        self.run, self.constants = kernel.run, [weights[name] for name in kernel.constants]
        self.operations: list[Operation] = [make(layer.get_submodule(name)) for name, make in kernel.calls]
        self.is_checked = False

    def __call__(self, arguments: Arguments) -> Any:
        CURRENT.call = Call(self.operations, arguments.cache, arguments.mask)
        try:
            return self.run(*self.constants, *arguments.tensors)
        finally:
            CURRENT.call = None


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


class CompiledForward:
    """Replaces a layer's forward: in decoding it runs the layer's kernel once that is ready."""

    def __init__(self, layer: nn.Module, compiler: "Compiler", with_cache: bool = True) -> None:
        self.layer, self.compiler, self.with_cache = layer, compiler, with_cache
        self.kind = type(layer), repr(layer)
        self.names = [*signature(type(layer).forward).parameters][1:]
        self.kernels: dict[Form, BoundKernel | None] = {}
        self.requests: dict[Form, int] = {}  # calls without a kernel
        self.waiting: dict[Form, Arguments] = {}  # until kernels are compiled with them

    def own(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if CURRENT.trace is not None or not torch.is_inference_mode_enabled():
            return self.own(*args, **kwargs)
        self.compiler.calls += 1
        arguments = Arguments.of({**dict(zip(self.names, args, strict=False)), **kwargs})
        hidden = arguments.tensors[0]
        is_large = hidden.numel() > MAX_PASS_TOKENS * hidden.shape[-1]
        if is_large or not isinstance(arguments.cache, CACHES if self.with_cache else (*CACHES, NoneType)):
            return self.own(*args, **kwargs)
        if arguments.form not in self.kernels and (kernel := self.compiler.kernel(self, arguments)) is not None:
            self.kernels[arguments.form] = BoundKernel(kernel, self.layer)
        bound = self.kernels.get(arguments.form)
        if bound is None:
            return self.own(*args, **kwargs)
        return bound(arguments) if bound.is_checked else self.check(bound, arguments)

    def check(self, kernel: BoundKernel, arguments: Arguments) -> Any:
        """Compare the kernel with the layer's own code and return the latter's output. Both write to the same slots."""
        wanted = self.own(**arguments.values)
        with suppress(Exception):  # a kernel that fails does so here, not in a later pass
            kernel.is_checked = is_same(kernel(arguments), wanted)
        if not kernel.is_checked:
            self.kernels[arguments.form] = None
        return wanted


def is_same(output: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return torch.equal(output, wanted)
    if isinstance(wanted, tuple):
        return all(is_same(*pair) for pair in zip(output, wanted, strict=True))
    return bool(output == wanted)


@dataclass(eq=False)
class Compiler:
    """Compiles the layers of a target and its heads, in a thread of its own."""

    after_calls: int = COMPILE_AFTER_CALLS
    kernels: dict[tuple[object, Form], Kernel | None] = field(default_factory=dict)  # None: not ready, or impossible
    queue: "SimpleQueue[tuple[ref[CompiledForward], tuple[object, Form]] | None]" = field(default_factory=SimpleQueue)
    begun: int = 0
    ended: int = 0
    calls: int = 0  # of layers
    is_awaited: bool = False
    thread: threading.Thread | None = None

    def use_for(self, layers: Sequence[nn.Module], with_cache: bool = True) -> None:
        """Let layers run their kernels in decoding, once compiled; unless `with_cache`, without a cache too."""
        for layer in layers:
            if "forward" not in vars(layer):
                vars(layer)["forward"] = CompiledForward(layer, self, with_cache)

    def kernel(self, forward: CompiledForward, arguments: Arguments) -> Kernel | None:
        """The kernel of such layers, if it is ready. Compiling begins after enough calls of one of them."""
        key = forward.kind, arguments.form
        if key not in self.kernels and len(self.kernels) < MAX_KERNELS:
            forward.requests[arguments.form] = forward.requests.get(arguments.form, 0) + 1
            if forward.requests[arguments.form] >= self.after_calls and arguments.has_clear_axes:
                self.kernels[key] = None
                self.begin(forward, arguments)
        return self.kernels.get(key)

    def begin(self, forward: CompiledForward, arguments: Arguments) -> None:
        self.begun += 1
        forward.waiting[arguments.form] = arguments
        self.queue.put((ref(forward), (forward.kind, arguments.form)))
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name="compiling layers", daemon=True)
            self.thread.start()
            this = ref(self)
            atexit.register(lambda: None if (compiler := this()) is None else compiler.stop())

    def work(self) -> None:
        patch_only_tracing_thread()
        lower_priority()
        while (item := self.queue.get()) is not None:
            self.wait_until_idle()
            if not self.ended:
                use_huge_pages()
            kind, form = item[1]
            if (forward := item[0]()) is None:
                del self.kernels[kind, form]  # other layers may ask for it
            else:
                try:
                    self.kernels[kind, form] = compiled(forward, forward.waiting.pop(form))
                except Exception:  # on any error, the layer's own code runs, and its parts are compiled
                    parts = [child for child in forward.layer.children() if any(child.children())]
                    self.use_for(parts, with_cache=False)
            del forward  # it holds a layer, which may be dropped meanwhile
            self.ended += 1

    def wait_until_idle(self) -> None:
        """Wait until no text is running (compiling halves its speed), or until the run proves long."""
        first = self.calls
        while not self.is_awaited and self.calls - first < LONG_RUN_CALLS:
            before = self.calls
            time.sleep(IDLE_SECONDS)
            if self.calls == before:
                return

    def finish(self) -> None:
        """Wait until everything in the queue is compiled, before a measurement."""
        self.is_awaited = True
        while self.ended < self.begun:
            time.sleep(0.02)
        self.is_awaited = False

    def stop(self) -> None:
        """End the thread with the program."""
        if self.thread is not None and self.thread.is_alive():
            self.queue.put(None)
            end_thread(self.thread)


def compiled(forward: CompiledForward, arguments: Arguments) -> Kernel:
    """The kernel of layers like this one. Raises CannotTrace, or any error of tracing and compiling."""
    layer, trace = forward.layer, LayerTrace()
    graph = traced(forward, arguments, trace)
    if trace.updated is not None:
        raise CannotTrace("keys that no attention of ours reads")
    leave_to_torch(graph, trace)
    names = {id(tensor): name for name, tensor in weights_of(layer).items()}
    constants = take_constants(graph, names)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        run = torch._inductor.standalone_compile(graph, examples, options={"config_patches": INDUCTOR_OPTIONS})
    owners = {id(None): "", **{id(module): name for name, module in layer.named_modules()}}
    return Kernel(run, constants, [(owners[id(owner)], make) for owner, make in trace.calls])


def traced(forward: CompiledForward, arguments: Arguments, trace: LayerTrace) -> GraphModule:
    """The layer's graph, as a function of the tensors among its arguments."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode, fakes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), []
    for tensor in arguments.tensors:
        sizes, dynamic = list(tensor.shape), [DimDynamic.STATIC] * tensor.ndim
        for axis, (size, traced_size) in enumerate(zip(arguments.tensors[0].shape, TRACED_SIZES, strict=False)):
            if axis < len(sizes) and size > 1 and sizes[axis] == size:
                sizes[axis], dynamic[axis] = traced_size, DimDynamic.DYNAMIC
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        fakes.append(mode.from_tensor(torch.zeros(sizes, dtype=tensor.dtype), symbolic_context=context))

    def run(*tensors: Tensor) -> Any:
        remaining = list(tensors)
        stand_ins = {name: stand_in(name, value, remaining, trace) for name, value in arguments.values.items()}
        CURRENT.trace = trace
        try:
            return forward.own(**stand_ins)
        finally:
            CURRENT.trace = None

    with torch.no_grad(), mode, no_untraceable_warnings():
        return make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)


def leave_to_torch(graph: GraphModule, trace: LayerTrace) -> None:
    """Make the operations of a graph that Inductor computes with other bits than torch operations outside the graph."""
    for node in [node for node in graph.graph.nodes if getattr(node.target, "overloadpacket", None) in OTHER_BITS]:
        inputs, found = node.all_input_nodes, node.meta["val"]
        first = found[0] if isinstance(found, tuple) else found
        is_single = first is found or all(user.target is getitem and user.args[1] == 0 for user in node.users)
        if not is_single or first.dtype != inputs[0].meta["val"].dtype:
            raise CannotTrace(f"{node.target} with several results, or of another dtype")
        trace.calls.append((None, in_torch(node, inputs)))
        with graph.graph.inserting_before(node):
            size = [size_node(graph, inputs, length) for length in first.shape]
            call = graph.graph.call_function(
                torch.ops.headstart.outside_graph.default, (inputs, len(trace.calls) - 1, size)
            )
        call.meta["val"] = first
        for user in [node] if first is found else list(node.users):
            user.replace_all_uses_with(call)
            if user is not node:
                graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    graph.recompile()


def in_torch(node: Node, inputs: list[Node]) -> Callable[[Any], Operation]:
    """What makes, for any owner, a node of a graph a function of its tensors, `inputs`."""
    target: Any = node.target
    args, kwargs = node.args, dict(node.kwargs)
    if [each for each in args if isinstance(each, Node)] != inputs or args[: len(inputs)] != tuple(inputs):
        raise CannotTrace(f"{target} whose first arguments are not its tensors")
    constants = args[len(inputs) :]

    def run(*tensors: Tensor) -> Tensor:
        found = target(*tensors, *constants, **kwargs)
        return (found[0] if isinstance(found, tuple) else found).contiguous()

    return lambda _: run


def size_node(graph: GraphModule, inputs: list[Node], length: Any) -> Any:
    """A length of an axis: a number, or a node that reads it from one of the inputs."""
    if isinstance(length, int):
        return length
    axes = [(node, axis) for node in inputs for axis in range(node.meta["val"].ndim)]
    node, axis = next(at for at in axes if str(at[0].meta["val"].shape[at[1]]) == str(length))
    made = graph.graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
    made.meta["val"] = length
    return made


def stand_in(name: str, value: Any, tensors: list[Tensor], trace: LayerTrace) -> Any:
    """An argument as the traced layer gets it: the next of `tensors`, or the trace instead of the cache.

    There is no mask: the operations that read it stay in Python.
    """
    if name in MASKS:
        return None
    if isinstance(value, Tensor):
        return tensors.pop(0)
    if is_tensors(value):
        return tuple(tensors.pop(0) for _ in value)
    return trace if isinstance(value, (Cache, Slots)) else value


def take_constants(graph: GraphModule, names: dict[int, str]) -> list[str]:
    """Make the layer's weights the first inputs of its graph; returns their names."""
    first = next(iter(graph.graph.nodes))
    inputs: dict[str, Any] = {}
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        tensor = getattr(graph, node.target)
        if id(tensor) not in names:
            raise CannotTrace(f"{node.target} is not a weight of the layer")
        name = names[id(tensor)]
        if name not in inputs:
            with graph.graph.inserting_before(first):
                inputs[name] = graph.graph.placeholder(f"weight_{len(inputs)}")
                inputs[name].meta["val"] = tensor
        node.replace_all_uses_with(inputs[name])
        graph.graph.erase_node(node)
    graph.recompile()
    return list(inputs)
