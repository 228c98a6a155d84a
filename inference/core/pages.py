"""Zeroed memory of the host that takes up room only where it was written, and that can be given back in parts."""

import mmap
import sys

import torch
from jaxtyping import UInt8
from torch import Tensor

UNRESERVED = 0x4000  # MAP_NORESERVE of Linux: only what is written counts, not what is mapped


class Pages:
    """A mapping of the system's memory. Untouched pages are zeros and cost nothing."""

    available = sys.platform == "linux"

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNRESERVED
        self.mapping = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
        self.mapping.madvise(mmap.MADV_NOHUGEPAGE)  # else a write to one slot takes up two megabytes
        self.storage: UInt8[Tensor, " num_bytes"] = torch.frombuffer(self.mapping, dtype=torch.uint8)[:num_bytes]

    def release(self, start: int, count: int) -> None:
        """Give back the whole pages within these bytes; they are zeros again."""
        first, end = -(-start // mmap.PAGESIZE), (start + count) // mmap.PAGESIZE
        if first < end:
            self.mapping.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)
