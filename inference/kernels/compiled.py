"""Decoder layers compiled for a CPU, a target's and a head's: a dozen fused operations in place of a hundred.

One layer of each form is traced (torch's make_fx) and compiled (Inductor) in the background, while decoding goes on
with the layers' own code. Products with packed weights and attention to the cache stay what they are: see `apart`.
Every layer's own code runs once more beside its compiled one, which is used only if both find the same.
"""

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from queue import SimpleQueue
from types import NoneType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx._symbolic_trace import _Patcher
from transformers.cache_utils import Cache

from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.side_by_side import PackedCache
from headstart.inference.kernels.outside_graph import HERE, CannotTrace, Operation, Run, Trace

MOST_TOKENS = 256  # in a pass; with more, it waits for products alone
WORTH = 30  # calls of a layer before it is compiled: a text's beginning has the processor to itself
SAME = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # relative difference of outputs that rounding stays below
PAUSE = 0.5  # seconds without a pass
MANY = 30_000  # calls of layers: a long run gains by what is compiled beside it
MOST_KERNELS = 32  # of a target and its heads, for layers whose form is another in every pass
HUGE = 2**21  # bytes of a huge page
MADV_COLLAPSE = 25  # as Linux 6.1 and later name it; earlier ones refuse it
HINTS = (3, 5)  # rows and tokens that a layer is traced with
OPTIONS = {
    "compile_threads": 1,  # the other cores decode
    "cpp.threads": 1,  # so small are the fused operations
    "emulate_precision_casts": True,  # rounded where the layer rounds
    "size_asserts": False,  # a form says what its tensors are like
}
REWRITTEN = (KVCache, PackedCache, Slots)  # where a second pass over the same tokens changes nothing
MASKS = ("attention_mask", "mask")  # as transformers' layers name it, and our heads'
Form = tuple[object, ...]  # what a layer is specialised for: constants, and whether rows and tokens are more than one


@dataclass
class Given:
    """The arguments of a layer's forward, by name."""

    values: dict[str, Any]
    tensors: list[Tensor]
    cache: Any
    mask: Any
    form: Form

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Given":
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


def is_tensors(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value)


@dataclass
class Kernel:
    """A compiled layer, for all layers of its form."""

    run: Any
    constants: list[str]  # the names of the layer's weights, which come before the arguments
    calls: list[tuple[str, Any]]  # of operations that are left to Python: the owner's name, and what makes it


class KernelOfLayer:
    """A kernel with one layer's weights."""

    def __init__(self, kernel: Kernel, layer: nn.Module) -> None:
        weights = weights_of(layer)
        self.run, self.constants = kernel.run, [weights[name] for name in kernel.constants]
        self.calls: list[Operation] = [make(layer.get_submodule(name)) for name, make in kernel.calls]
        self.is_checked = False

    def __call__(self, given: Given) -> Any:
        HERE.run = Run(self.calls, given.cache, given.mask)
        try:
            return self.run(*self.constants, *given.tensors)
        finally:
            HERE.run = None


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


class CompiledForward:
    """What a layer runs in place of its own code: its kernel, where that is ready, in decoding."""

    def __init__(self, layer: nn.Module, compiler: "Compiler", with_cache: bool = True) -> None:
        self.layer, self.compiler, self.with_cache = layer, compiler, with_cache
        self.kind = type(layer), repr(layer)
        self.names = [*signature(type(layer).forward).parameters][1:]
        self.kernels: dict[Form, KernelOfLayer | None] = {}
        self.asked: dict[Form, int] = {}  # calls without a kernel

    def own(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if HERE.trace is not None or not torch.is_inference_mode_enabled():
            return self.own(*args, **kwargs)
        self.compiler.calls += 1
        given = Given.read({**dict(zip(self.names, args, strict=False)), **kwargs})
        states = given.tensors[0]
        large = states.numel() > MOST_TOKENS * states.shape[-1]
        if large or not isinstance(given.cache, REWRITTEN if self.with_cache else (*REWRITTEN, NoneType)):
            return self.own(*args, **kwargs)
        if given.form not in self.kernels and (kernel := self.compiler.kernel(self, given)) is not None:
            self.kernels[given.form] = KernelOfLayer(kernel, self.layer)
        found = self.kernels.get(given.form)
        if found is None:
            return self.own(*args, **kwargs)
        return found(given) if found.is_checked else self.check(found, given)

    def check(self, kernel: KernelOfLayer, given: Given) -> Any:
        """Compare the kernel with the layer's own code, whose output this is. Both write to the same slots."""
        wanted = self.own(**given.values)
        with suppress(Exception):  # what it did not foresee fails here, not in a later pass
            kernel.is_checked = is_same(kernel(given), wanted)
        if not kernel.is_checked:
            self.kernels[given.form] = None
        return wanted


def is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return bool((found - wanted).norm() <= SAME[wanted.dtype] * wanted.norm())
    if isinstance(wanted, tuple):
        return all(is_same(*pair) for pair in zip(found, wanted, strict=True))
    return bool(found == wanted)


@dataclass(eq=False)
class Compiler:
    """Compiles a target's layers, in a thread of its own."""

    worth: int = WORTH
    kernels: dict[tuple[object, Form], Kernel | None] = field(default_factory=dict)  # None: not yet, or it cannot be
    wishes: "SimpleQueue[tuple[CompiledForward, Given] | None]" = field(default_factory=SimpleQueue)
    begun: int = 0
    ended: int = 0
    calls: int = 0  # of layers
    hurries: bool = False
    thread: threading.Thread | None = None

    def kernel(self, forward: CompiledForward, given: Given) -> Kernel | None:
        """The kernel of such layers, if it is ready. It is begun when one of them has asked for it often."""
        key = forward.kind, given.form
        if key not in self.kernels and len(self.kernels) < MOST_KERNELS:
            forward.asked[given.form] = forward.asked.get(given.form, 0) + 1
            if forward.asked[given.form] >= self.worth and has_clear_axes(given.tensors):
                self.kernels[key] = None
                self.begin(forward, given)
        return self.kernels.get(key)

    def begin(self, forward: CompiledForward, given: Given) -> None:
        self.begun += 1
        self.wishes.put((forward, given))
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name="compiling layers", daemon=True)
            self.thread.start()
            stop = ref(self)
            atexit.register(lambda: None if (compiler := stop()) is None else compiler.stop())

    def work(self) -> None:
        patch_own_thread_alone()
        with suppress(AttributeError, OSError):  # where a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        is_first = True
        while (wish := self.wishes.get()) is not None:
            self.wait_for_rest()
            if is_first:
                use_huge_pages()
            is_first, (forward, given) = False, wish
            try:
                self.kernels[forward.kind, given.form] = compiled(forward, given)
            except Exception:  # whatever a layer may do, its own code can
                for child in forward.layer.children():
                    if any(child.children()):
                        use_compiled(child, self, with_cache=False)
            del wish, forward, given  # with a cache and a layer, which may be dropped while this waits
            self.ended += 1

    def wait_for_rest(self) -> None:
        """Wait for a pause between texts, as one that is being written would take twice as long, or for long work."""
        first = self.calls
        while not self.hurries and self.calls - first < MANY:
            before = self.calls
            time.sleep(PAUSE)
            if self.calls == before:
                return

    def finish(self) -> None:
        """Wait until everything is compiled that was begun; measurements begin after that."""
        self.hurries = True
        while self.ended < self.begun:
            time.sleep(0.02)
        self.hurries = False

    def stop(self) -> None:
        """End with the program: a thread that Python ends inside compiled code would end it with an error."""
        thread = self.thread
        if thread is not None and thread.is_alive():
            self.wishes.put(None)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            thread.join()


@cache
def patch_own_thread_alone() -> None:
    """Let torch.fx, while it traces, change `nn.Module` for the thread that traces; for others it stays as it is.

    A tracer replaces `nn.Module.__call__` in the whole process, and a pass of another thread would fail in it.
    """
    patch_method: Any = _Patcher.patch_method

    def patch(patcher: _Patcher, kind: type, name: str, new: Callable[..., Any], deduplicate: bool = True) -> None:
        before, own = getattr(kind, name), threading.get_ident()

        @wraps(new)
        def by_thread(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == own else before)(*args, **kwargs)

        patch_method(patcher, kind, name, by_thread, deduplicate)

    setattr(_Patcher, "patch_method", patch)  # noqa: B010 - mypy refuses to assign to a method


def has_clear_axes(tensors: Sequence[Tensor]) -> bool:
    """Whether the number of rows cannot be mistaken for that of tokens, and memory has the order of the axes."""
    rows, tokens = tensors[0].shape[:2]
    return (rows != tokens or rows == 1) and all(tensor.is_contiguous() for tensor in tensors)


def compiled(forward: CompiledForward, given: Given) -> Kernel:
    """The kernel of layers like this one. Raises CannotTrace, or what tracing and compiling raise."""
    layer, trace = forward.layer, Trace()
    graph = traced(forward, given, trace)
    if trace.updated is not None:
        raise CannotTrace("keys that no attention of ours reads")
    names = {id(tensor): name for name, tensor in weights_of(layer).items()}
    constants = take_constants(graph, names)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        run = torch._inductor.standalone_compile(graph, examples, options={"config_patches": OPTIONS})
    owners = {id(None): "", **{id(module): name for name, module in layer.named_modules()}}
    return Kernel(run, constants, [(owners[id(owner)], make) for owner, make in trace.calls])


def traced(forward: CompiledForward, given: Given, trace: Trace) -> GraphModule:
    """The layer's graph, as a function of the tensors among its arguments."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode, fakes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), []
    for tensor in given.tensors:
        sizes, dynamic = list(tensor.shape), [DimDynamic.STATIC] * tensor.ndim
        for axis, (size, hint) in enumerate(zip(given.tensors[0].shape, HINTS, strict=False)):
            if axis < len(sizes) and size > 1 and sizes[axis] == size:
                sizes[axis], dynamic[axis] = hint, DimDynamic.DYNAMIC
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        fakes.append(mode.from_tensor(torch.zeros(sizes, dtype=tensor.dtype), symbolic_context=context))

    def run(*tensors: Tensor) -> Any:
        left = list(tensors)
        stand_ins = {name: stand_in(name, value, left, trace) for name, value in given.values.items()}
        HERE.trace = trace
        try:
            return forward.own(**stand_ins)
        finally:
            HERE.trace = None

    log = logging.getLogger("torch._subclasses.fake_tensor")
    with torch.no_grad(), mode, quiet(log):  # a layer that cannot be traced is no error
        return make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)


@contextmanager
def quiet(log: logging.Logger) -> Iterator[None]:
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def stand_in(name: str, value: Any, tensors: list[Tensor], trace: Trace) -> Any:
    """An argument as the traced layer gets it: tensors are the next of these, and the trace is the cache.

    There is no mask, as what reads it is left to Python.
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
            raise CannotTrace(f"{node.target} is no weight of the layer")
        name = names[id(tensor)]
        if name not in inputs:
            with graph.graph.inserting_before(first):
                inputs[name] = graph.graph.placeholder(f"weight_{len(inputs)}")
                inputs[name].meta["val"] = tensor
        node.replace_all_uses_with(inputs[name])
        graph.graph.erase_node(node)
    graph.recompile()
    return list(inputs)


def use_huge_pages() -> None:
    """Let Linux put what is in memory on pages of 2 MB: products with packed weights take about a tenth less time.

    It moves about 0.6 GB/s, while other threads read and write.
    """
    regions = Path("/proc/self/maps")
    if sys.platform != "linux" or not regions.is_file():
        return
    advise = ctypes.CDLL(None).madvise
    for line in regions.read_text().splitlines():
        span, access, _, _, file, *name = line.split()
        start, end = (int(place, 16) for place in span.split("-"))
        start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if access == "rw-p" and file == "0" and name in ([], ["[heap]"]) and start < end:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def use_compiled(layer: nn.Module, compiler: Compiler, with_cache: bool = True) -> None:
    """Let a layer run its kernel in decoding, once compiled; unless `with_cache`, in passes without a cache, too."""
    if "forward" not in vars(layer):
        vars(layer)["forward"] = CompiledForward(layer, compiler, with_cache)
