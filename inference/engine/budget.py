"""Limits that are checked before any work: positions, vocabulary, the cache's memory, the memory of a step."""

import math
import mmap
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass

import torch
from rich.filesize import decimal

from headstart.heads.target_config import TargetConfig, folder_of
from headstart.inference.core.cache_memory import Shape, free_memory, layer_shapes
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import check_bias
from headstart.inference.drafters.growth import Growth
from headstart.inference.targets.loading import pick_device
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

CHECKED_STEP_BYTES_MIN = 2**30  # a smaller step is not compared with the free memory


def check_request(target: TargetModel, request: Request) -> None:
    """Raise ValueError for a request that does not fit the target's positions or vocabulary."""
    check_length(target, request.prompt, request.max_new_tokens)
    check_vocabulary(target, request.prompt)
    if request.images is not None:
        target.refuse_images(request.prompt, request.images)
    check_bias(request.sampling.logit_bias, target.config.vocab_size)


def check_length(
    target: TargetModel, prompt: list[int], max_new_tokens: int, field: str = "decode.max_new_tokens"
) -> None:
    """Raise ValueError for a request that does not fit the target's positions.

    `field` is the name under which the user gave `max_new_tokens`.
    """
    limit = target.max_positions
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"{field}: {max_new_tokens} given, 1 or more is allowed; raise it")
    if len(prompt) + max_new_tokens > limit:
        left, shorter = limit - len(prompt), limit - max_new_tokens
        remedies = [f"lower {field}"] * (left > 0) + [f"shorten the prompt to {shorter} tokens"] * (shorter > 0)
        raise ValueError(
            f"{field}: a prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the target's "
            f"{limit} positions; up to {max(left, 0)} new tokens are allowed after this prompt: "
            f"{', or '.join(remedies) or f'shorten the prompt, and lower {field}'}"
        )


def check_vocabulary(target: TargetModel, prompt: list[int]) -> None:
    """Raise ValueError for a prompt with token ids outside the target's vocabulary."""
    size = target.config.vocab_size
    if outside := [token for token in (min(prompt), max(prompt)) if not 0 <= token < size]:
        raise ValueError(
            f"a prompt holds token id {outside[0]}, 0 to {size - 1} of the target is allowed; encode it with the "
            f"target's own tokenizer (the one in the target's folder may be another model's)"
        )


class CacheBudget:
    """Reserves the cache of each text up to its longest possible end, so that no text is ever preempted."""

    def __init__(
        self,
        memory: int | None,
        shapes: list[Shape],
        dtype: torch.dtype,
        devices: Collection[torch.device],
        rows: int,
        lazy: bool,
        states: int = 0,
    ) -> None:
        """`memory` is in bytes; None sets no limit. `shapes` are the target's and the drafter's cache shapes, and
        `states` the bytes of one row's recurrent states.

        A `lazy` cache takes up only the memory that its rows have written. Any other is one block, in which all `rows`
        have the capacity of the longest. Raises ValueError for more memory than is free on the target's devices.
        """
        self.memory, self.rows, self.lazy, self.states = memory, rows, lazy, states
        parts = [part for shape in shapes for layer in layer_shapes(shape) for part in layer] or [(1, 1)]
        self.slot = sum(heads * size * dtype.itemsize for heads, size in parts)  # bytes of a token
        # Each layer and key head writes pages of its own; the smallest heads fill a page with the most tokens.
        self.grain = math.ceil(mmap.PAGESIZE / min(size * dtype.itemsize for _, size in parts)) if lazy else 1
        if memory is not None:
            free = sum(map(free_memory, devices))
            if not 0 < memory <= free:
                raise ValueError(
                    f"memory: {memory} bytes given, 1 to {free} are allowed, as {decimal(free)} is free on "
                    f"{', '.join(map(str, devices))}; lower it"
                )

    def needed(self, slots: int) -> int:
        """Bytes that one text needs at most, with `slots` slots for its tokens and a tree."""
        if not self.lazy:
            return self.rows * (slots * self.slot + self.states)
        # It may begin and end within a page.
        return (math.ceil(slots / self.grain) + 1) * self.grain * self.slot + self.states

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
        """Whether texts with these numbers of slots fit together. A cache in one block fits all of its rows."""
        return self.memory is None or not self.lazy or sum(map(self.needed, slots)) <= self.memory

    def used(self, slots: list[int], longest: int) -> float:
        """The share of the memory that these texts reserve; without a limit, the share of rows of `longest` slots."""
        capacity = self.memory or (self.rows if self.lazy else 1) * self.needed(longest)
        reserved = self.needed(max(slots, default=0)) if not self.lazy else sum(map(self.needed, slots))
        return reserved / capacity if slots else 0.0


@dataclass(frozen=True)
class StepMemory:
    """The sizes from which the memory of a decode step follows."""

    cached: int  # bytes of one token in the target's KV cache
    vocab_size: int
    element: int  # bytes of one number
    states: int = 0  # bytes of one row's recurrent states

    @classmethod
    def of(cls, target: TargetConfig, dtype: torch.dtype) -> "StepMemory":
        cached = 2 * target.num_layers * target.num_kv_heads * target.head_dim * dtype.itemsize
        return cls(cached, target.vocab_size, dtype.itemsize)

    @classmethod
    def on(cls, device: torch.device, target: TargetModel) -> "StepMemory":
        """The sizes on one device: its layers, and the key heads that this rank holds of them."""
        layers = zip(target.passes.layout.shapes, target.passes.layout.devices, strict=True)
        entries = sum(heads * size for shape, where in layers if where == device for heads, size in shape)
        states = target.passes.layout.state_bytes
        return cls(entries * target.dtype.itemsize, target.config.vocab_size, target.dtype.itemsize, states)

    def needed(self, rows: int, nodes: int, length: int) -> int:
        """Bytes for `rows` texts of up to `length` tokens, each followed by a tree of `nodes` nodes.

        This counts the cache, the target's logits, its mask, and the matrix product from which the mask is made.
        """
        of_tree = nodes * (self.vocab_size * self.element + nodes * (self.element + 2 * torch.float32.itemsize))
        return rows * ((length + nodes) * self.cached + of_tree + self.states)

    def most_nodes(self, rows: int, length: int, free: int) -> int:
        """The largest tree that fits into `free` bytes."""
        return bisect_right(range(2**31), free, key=lambda nodes: self.needed(rows, nodes, length)) - 1


def refuse_more_than_memory(target: TargetModel, rows: int, nodes: int, length: int) -> None:
    """Raise ValueError if a device of the target lacks memory for `rows` texts with trees of `nodes` nodes."""
    for device in {*target.passes.layout.devices}:
        refuse_large_trees(StepMemory.on(device, target), device, rows, nodes, length)


def refuse_trees_of(recipe: Recipe, rows: int) -> None:
    """Raise ValueError if the device lacks memory for the recipe's trees, from the target's config.json alone."""
    target = TargetConfig.from_folder(folder_of(recipe.target, ["config.json"]))
    step = StepMemory.of(target, getattr(torch, recipe.target.dtype))
    device = pick_device(recipe.target.device)
    nodes, width = Growth.from_section(recipe.decode).max_nodes, recipe.decode.width
    is_limited_by_nodes = nodes == recipe.decode.nodes + 1
    field = "decode.nodes" if is_limited_by_nodes else f"decode.width: {width} given, draft tokens per tree"
    refuse_large_trees(step, device, rows, nodes, recipe.decode.max_new_tokens, field)


def refuse_large_trees(
    step: StepMemory, device: torch.device, rows: int, nodes: int, length: int, field: str = "decode.nodes"
) -> None:
    needed = step.needed(rows, nodes, length)
    if needed < CHECKED_STEP_BYTES_MIN or needed <= (free := free_memory(device)):
        return
    texts, name = f"a step of {rows} text{'s' * (rows > 1)} of up to {length} tokens", field.partition(":")[0]
    problem = f"{texts} would need {decimal(needed)} or more, and {decimal(free)} is free on {device}"
    fewer = "decode fewer texts together (data.generate_batch, decode.max_batch, --max-batch)"
    if nodes == 1 and rows > 1:  # plain decoding; another program may have taken memory since the rows were counted
        raise ValueError(f"{problem}, enough for {free // step.needed(1, nodes, length)}; {fewer}, or free some")
    most = max(step.most_nodes(rows, length, free) - 1, 0)
    remedy = f"lower {name}" + f", or {fewer}" * (rows > 1)
    raise ValueError(f"{field}: {nodes - 1} given, up to {most} is allowed here: {problem}; {remedy}")
