"""A fixed budget of memory for the cache: which requests fit together, and which never will."""

import math
import mmap

import torch
from rich.filesize import decimal

from headstart.inference.core.cache import Shape
from headstart.inference.core.request import Request
from headstart.inference.engine.step_memory import free_memory


class CacheBudget:
    """Reserves the cache of each text up to its longest possible end, so that no text ever has to give way."""

    def __init__(
        self, memory: int | None, shapes: list[Shape], dtype: torch.dtype, device: torch.device, rows: int, lazy: bool
    ) -> None:
        """`memory` is in bytes; None sets no limit. `shapes` are those of the target's slots and the drafter's.

        A `lazy` cache takes up what its rows have written. Any other is one block of memory, in which all `rows` have
        the room of the longest. Raises ValueError for more memory than the device has left.
        """
        self.memory, self.rows, self.lazy = memory, rows, lazy
        self.slot = sum(2 * layers * heads * dim * dtype.itemsize for layers, heads, dim in shapes)  # bytes of a token
        # Each layer and key head writes pages of its own; the smallest heads fill a page with the most tokens.
        self.grain = math.ceil(mmap.PAGESIZE / min(dim * dtype.itemsize for _, _, dim in shapes)) if lazy else 1
        if memory is not None:
            refuse_absent_memory(memory, device)

    def needed(self, slots: int) -> int:
        """Bytes that one text takes up at most, with so many slots for its tokens and a tree."""
        if not self.lazy:
            return self.rows * slots * self.slot
        return (math.ceil(slots / self.grain) + 1) * self.grain * self.slot  # it may begin and end within a page

    def refuse_too_long(self, request: Request, nodes: int) -> None:
        """Raise ValueError for a request that would not fit even if it were the only one."""
        needed = self.needed(request.length + nodes)
        if self.memory is not None and needed > self.memory:
            together = "" if self.lazy else f" in each of {self.rows} rows, which share one block of memory"
            raise ValueError(
                f"memory: {decimal(self.memory)} of cache given, and a prompt of {len(request.prompt)} tokens with "
                f"max_new_tokens {request.max_new_tokens} needs {decimal(needed)}{together}; shorten the prompt, lower "
                f"max_new_tokens, or give the cache more memory"
            )

    def fits(self, slots: list[int]) -> bool:
        """Whether texts with so many slots fit together. A cache that is one block has room for all of its rows."""
        return self.memory is None or not self.lazy or sum(map(self.needed, slots)) <= self.memory

    def used(self, slots: list[int], longest: int) -> float:
        """The share of the memory that these texts have reserved; without a limit, of what `longest` texts need."""
        room = self.memory or (self.rows if self.lazy else 1) * self.needed(longest)
        reserved = self.needed(max(slots, default=0)) if not self.lazy else sum(map(self.needed, slots))
        return reserved / room if slots else 0.0


def refuse_absent_memory(memory: int, device: torch.device) -> None:
    """Raise ValueError for a budget that the device cannot give."""
    free = free_memory(device)
    if not 0 < memory <= free:
        raise ValueError(
            f"memory: {memory} bytes given, 1 to {free} are allowed, as {device} has {decimal(free)} free; lower it"
        )
