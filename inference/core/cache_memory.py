"""The memory of a KV cache: which tensors its layers need, one allocation for them on each device, and what is free."""

import mmap
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from jaxtyping import UInt8
from torch import Tensor

CGROUP = Path("/sys/fs/cgroup")  # Linux only
MAP_NORESERVE = 0x4000  # Linux: only what is written counts as used, not what is mapped
# What a layer caches of a token: (heads, size) of its keys, its values and an indexer's keys; () for nothing.
LayerShape = tuple[tuple[int, int], ...]
Shape = tuple[int, int, int] | tuple[LayerShape, ...]  # equal layers as (layers, kv_heads, head_dim), or each layer
LayerParts = tuple[tuple[int, int, int], ...]  # where a layer's parts are: (storage, layer in it, part in it)


def layer_shapes(shape: Shape) -> tuple[LayerShape, ...]:
    """What each layer caches of a token."""
    if shape and isinstance(shape[0], int):
        layers, heads, size = shape
        return (((heads, size), (heads, size)),) * layers
    return shape


def storages_for(
    shapes: Sequence[LayerShape], devices: Sequence[torch.device], rows: int, capacity: int
) -> tuple[list["StorageShape"], list[LayerParts]]:
    """The storages of a stack of layers, and where each layer's parts are in them.

    Layers of one shape on one device share a storage, in which parts of one shape lie side by side.
    """
    groups: dict[tuple[torch.device, LayerShape], list[int]] = {}
    for layer, key in enumerate(zip(devices, shapes, strict=True)):
        groups.setdefault(key, []).append(layer)
    storages, parts = list[StorageShape](), [LayerParts()] * len(shapes)
    for (device, shape), layers in groups.items():
        together = len(set(shape)) == 1
        for heads, size in shape[:1] if together else shape:
            count = len(shape) if together else 1
            for index, layer in enumerate(layers):
                parts[layer] += tuple((len(storages), index, part) for part in range(count))
            storages.append(StorageShape((len(layers), count, rows, heads, capacity, size), device))
    # A stack without slots has an empty storage, which tells the numbers of rows and slots.
    return storages or [StorageShape((0, 2, rows, 1, capacity, 1), devices[0])], parts


class StorageShape(NamedTuple):
    """The shape and device of a storage."""

    shape: tuple[int, ...]
    device: torch.device


def allocate(stacks: Sequence[Sequence[StorageShape]], dtype: torch.dtype, static: bool) -> list[list[Tensor]]:
    """Storages in one allocation on each device.

    A single row never reads a slot that it has not written. With more rows, masks hide unwritten slots, but a fused
    kernel may multiply a hidden slot by weight 0. As 0 x NaN is NaN, the slots must then start as zeros.
    """
    sizes: dict[torch.device, list[int]] = {}
    for shape, device in chain(*stacks):
        sizes.setdefault(device, []).append(torch.Size(shape).numel())
    rows, parts = stacks[0][0].shape[2], {}
    for device, counts in sizes.items():
        if takes_memory_lazily(device, static, rows):
            memory = untouched_zeros(sum(counts) * dtype.itemsize).view(dtype)
        else:
            create = torch.empty if rows == 1 and not static else torch.zeros
            memory = create((sum(counts),), dtype=dtype, device=device)
        parts[device] = iter(memory.split(counts))
    return [[next(parts[device]).view(shape) for shape, device in stack] for stack in stacks]


def takes_memory_lazily(device: torch.device | str, static: bool, rows: int) -> bool:
    """Whether a cache takes up memory only where slots were written, so that its size costs nothing.

    A cache of one row does not: it grows with its text, in memory that the process has used before.
    """
    return sys.platform == "linux" and torch.device(device).type == "cpu" and not static and rows > 1


def untouched_zeros(num_bytes: int) -> UInt8[Tensor, " num_bytes"]:
    """Zeros in host memory that take up memory only where they are written."""
    mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)  # else a write to one slot takes up two megabytes
    return torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, as far as the system reports them."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    free = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"  # set for a container
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        held = int((CGROUP / "memory.current").read_text()) - int(stat["inactive_file"])
        free = min(free, int(most) - held)
    return free
