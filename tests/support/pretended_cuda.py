"""CUDA devices without a GPU: tensors that say they are on one, while the CPU computes them with real numbers.

Within `pretended_cuda()`, every storage remembers the device that its tensors claim. As on a GPU, an operation on
tensors of different devices raises. Whatever a GPU would let the host wait for is counted, and so are copies from the
host, each under the line of headstart or transformers that asks for it. A function that CUDA would replay runs again.
"""

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from headstart.heads import attention_kernels
from headstart.heads.kinds import block_attention
from headstart.inference.drafters import cost_measurement
from headstart.inference.engine import budget
from headstart.inference.targets import cuda_graph

CPU, CUDA, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
# The host reads a tensor to know the result of these, or its shape. So it does for booleans as indices.
READING = {"_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero", "repeat_interleave"}
READING |= {"unique_consecutive", "unique_dim"}
INDEXING = {"_index_put_impl_", "_unsafe_index", "index", "index_put", "index_put_"}
READING_METHODS = {"__array__", "numpy", "tolist"}  # they are not made of operations that torch dispatches
FROM_PYTHON = {"as_tensor", "new_tensor", "tensor"}  # they copy numbers of Python


class Seen:
    """What passed between the host and the pretended devices, by line and function."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()  # the host waited for numbers of a device
        self.crossings: Counter[str] = Counter()  # numbers of the host were copied to a device
        self.in_graphs: Counter[str] = Counter()  # either of the two, in functions that CUDA would replay
        self.replays = 0  # of such functions

    @property
    def readers(self) -> set[str]:
        return {where.rpartition(" ")[2] for where in self.reads}


class WrongDevice(RuntimeError):
    """An operation on tensors of different devices."""


def device_of(tensor: Tensor) -> torch.device | None:
    """The device that a tensor claims; None if torch made it on the way to a result."""
    with torch._C.DisableTorchFunction():
        found: torch.device | None = vars(tensor.untyped_storage()).get("claimed")
    return found


def claim(tensors: Sequence[Tensor], device: torch.device) -> None:
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            vars(tensor.untyped_storage())["claimed"] = device


def claim_unclaimed(tensors: Sequence[Tensor], device: torch.device | None) -> None:
    """Let tensors be on a device, unless they are on one; None leaves them as they are."""
    if device is None:
        return
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            vars(tensor.untyped_storage()).setdefault("claimed", device)


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


def with_index(device: Any) -> torch.device:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


def place() -> str:
    """The innermost line of headstart or transformers that runs, and its function."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if found := re.search(r"/((?:headstart(?!.*/site-packages/)|transformers)/.*)", frame.f_code.co_filename):
            return f"{found[1]}:{frame.f_lineno} {frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return "elsewhere"


can_decompose = functools.cache(torch._ops.OpOverload._can_decompose)


class Devices(TorchFunctionMode):
    """What torch's functions say of devices, and copies between them."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if func is torch.device:
            return with_index(*args)
        if name == "__get__" and func.__self__ in (Tensor.device, Tensor.is_cuda):
            device = device_of(args[0]) or CPU
            return device if func.__self__ is Tensor.device else device != CPU
        if name == "__get__":
            return func(*args)
        given = tensors_of((args, kwargs))
        claim_unclaimed(given, CPU)  # it was made before the pretence began
        if name in READING_METHODS and device_of(args[0]) != CPU:
            self.seen.reads[place()] += 1
        if name in ("to", "cuda", "cpu"):
            return self.moved(name, *args, **kwargs)
        kwargs.pop("pin_memory", None)
        device = kwargs.pop("device", None)
        if device is None:
            found = func(*args, **kwargs)
            claim_unclaimed(tensors_of(found), device_of(given[0]) if given else CPU)
            return found
        device = with_index(device)
        if device.type == "meta":
            return func(*args, **kwargs, device=device)
        if name in FROM_PYTHON and device != CPU:
            self.seen.crossings[place()] += 1
        found = func(*args, **kwargs)
        claim(tensors_of(found), device)
        return found

    def moved(self, name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype = kwargs.get("device", None if name == "to" else name), kwargs.get("dtype")
        for given in args:
            if isinstance(given, Tensor):
                device, dtype = device_of(given), given.dtype
            elif isinstance(given, torch.dtype):
                dtype = given
            elif given is not None and not isinstance(given, bool):
                device = given
        here, dtype = device_of(tensor) or CPU, dtype or tensor.dtype
        there = here if device is None else with_index(device)
        if there == here or there.type == "meta":
            return tensor.to(CPU if there == here else there, dtype)
        is_waited_for = there != CPU or not kwargs.get("non_blocking")  # else the host reads it after an event
        if CPU in (here, there) and is_waited_for:
            (self.seen.crossings if here == CPU else self.seen.reads)[place()] += 1
        copied = tensor.to(dtype, copy=True)
        claim([copied], there)
        return copied


class Operations(TorchDispatchMode):
    """Checks where the tensors of each operation are, and lets its results be there, too."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # else `Devices` would take the operation for a call of the program's
            if can_decompose(func):  # in inference mode, operations come whole that read a tensor inside
                with self:
                    return func.decompose(*args, **(kwargs or {}))
            device = self.device(func.name().partition("::")[2].partition(".")[0], args, kwargs)
            found = func(*args, **(kwargs or {}))
            claim_unclaimed(tensors_of(found), device)
            return found

    def device(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        """Where an operation runs, None if no tensor says it; counts what the host has to do for it.

        Raises WrongDevice for tensors of several devices. A number in a tensor of the host may go with any.
        """
        if name == "lift_fresh":  # numbers of Python
            return CPU
        places = [(tensor, device) for tensor in tensors_of((args, kwargs)) if (device := device_of(tensor))]
        if all(device == CPU for _, device in places):
            return CPU if places else None
        if name in READING:
            self.seen.reads[place()] += 1
        elif name == "copy_":
            goal, source = (device_of(each) for each in args[:2])
            if goal != source and CPU in (goal, source):
                (self.seen.reads if goal == CPU else self.seen.crossings)[place()] += 1
            return goal
        elif name in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.seen.reads[place()] += 1
            if device_of(args[0]) != CPU and any(device_of(index) == CPU for index in indices):
                self.seen.crossings[place()] += 1
                on_host = [id(index) for index in indices if device_of(index) == CPU]
                places = [(tensor, device) for tensor, device in places if id(tensor) not in on_host]
        devices = {device for tensor, device in places if device != CPU or tensor.ndim}
        if len(devices) > 1:
            found = ", ".join(f"{list(tensor.shape)} on {device}" for tensor, device in places)
            raise WrongDevice(f"{name} of {found}, at {place()}")
        return next(iter(devices))


class Replayed:
    """In place of a captured function: it runs at every call, on copies of its first inputs."""

    def __init__(self, seen: Seen, function: Callable[..., tuple[Tensor, ...]], memory: object) -> None:
        self.seen, self.function = seen, function
        self.inputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not self.inputs:  # what is made only once is made before a capture
            self.inputs = tuple(each.clone() for each in inputs)
            return self.function(*self.inputs)
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        before = self.seen.reads + self.seen.crossings
        outputs = self.function(*self.inputs)
        self.seen.in_graphs += self.seen.reads + self.seen.crossings - before
        self.seen.replays += 1
        return outputs


class GeneratorOnHost(torch.Generator):
    def __new__(cls, device: Any = CPU) -> "GeneratorOnHost":
        return super().__new__(cls, CPU)  # type: ignore[call-arg]


@contextmanager
def pretended_cuda() -> Iterator[Seen]:
    """Within this context there are CUDA devices, as many as anyone names."""
    seen, run_backward = Seen(), torch.autograd._engine_run_backward

    def run_backward_on_devices(*args: Any, **kwargs: Any) -> Any:
        with devices:  # torch takes a mode off while a function like `backward` runs
            return run_backward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, Operations(seen), Devices(seen) as devices:
        patch.setattr(torch.autograd, "_engine_run_backward", run_backward_on_devices)
        patch.setattr(cuda_graph, "Graphed", functools.partial(Replayed, seen))
        for module in (attention_kernels, block_attention):  # a torch built for CUDA would look for a real card
            patch.setattr(module, "flash_attention_takes", lambda query: False)
        patch.setattr(budget, "free_memory", lambda device: 2**40)
        patch.setattr(cost_measurement, "wait_for", lambda device: None)
        patch.setattr(cost_measurement, "processor_name", lambda device: "a pretended GPU")
        patch.setattr(torch, "Generator", GeneratorOnHost)
        # Autograd saves tensors where `Devices` is not asked, so a checkpoint cannot compare their devices.
        patch.setitem(torch.utils.checkpoint._allowed_determinism_checks_to_fns, "default", lambda saved: saved.shape)
        yield seen


def on_two_cards(model: PreTrainedModel) -> PreTrainedModel:
    """The model as `device_map=auto` spreads it over two cards: the second has the later layers, norm and lm_head."""
    count = model.config.num_hidden_layers
    layers = {f"model.layers.{number}": int(number > count // 2) for number in range(count)}
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, **layers, "model.norm": 1, "lm_head": 1}
    first: Any = CUDA  # transformers' own `to` is mistyped
    spread: PreTrainedModel = dispatch_model(model.to(first), places, skip_keys=model._skip_keys_device_placement)
    return spread
