"""The KV cache of a target and its head, one allocation per device. Models see it as a transformers Cache."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headstart.heads.layers import attention
from headstart.inference.core.cache_memory import LayerParts, Shape, StorageShape, allocate, layer_shapes, storages_for
from headstart.inference.core.recurrent import RecurrentStates

PAGE_TOKENS = 256  # a cache grows by whole pages
SlotContents = tuple[Float[Tensor, "_layers _parts _heads _count _size"], ...]  # keys and values of a row, by storage


LayerMaker = Callable[["KVCache"], list[Any]]


class Slots:
    """Slots of a stack of layers, mostly a key and a value each. Row b of the batch holds `lengths[b]` tokens.

    A block is written after the held tokens and after earlier pending blocks. It stays pending until `advance` or
    `keep` commits it; otherwise the next block overwrites it. With `static`, attention goes over the first `reach`
    slots and every offset is read on the device, so that a CUDA graph can replay a step.
    """

    def __init__(
        self,
        storages: Sequence[Float[Tensor, "_layers _parts batch _heads capacity _size"]],
        rows: int = 1,
        static: bool = False,
        device: torch.device | None = None,
        layers: Sequence[LayerParts] | None = None,
    ) -> None:
        """One storage holds all layers, unless they are on several devices or differ in shape.

        `layers` says where each layer's parts are: by default, the storages hold layers with keys and values, in order.
        `starts` are on `device`, by default the first layer's.
        """
        self.storages, self.static = tuple(storages), static
        self.parts = layers or [
            tuple((number, layer, part) for part in range(storage.shape[1]))
            for number, storage in enumerate(storages)
            for layer in range(len(storage))
        ]
        # The parts of each layer. [batch, heads, capacity, size] each
        self.layers = [[storages[storage][layer, part] for storage, layer, part in parts] for parts in self.parts]
        self.device = device or storages[0].device
        self.lengths = [0] * rows  # tokens held by each row in use, which are the first rows of the storages
        # The same buffer for a lifetime: a captured graph reads it at the address that it was captured with.
        self._starts = torch.zeros(self.batch, dtype=torch.long, device=self.device)
        self.starts = self._starts[:rows]  # the lengths, on the device
        # For a target whose images take fewer positions than tokens (M-RoPE): what to add to the index of each row's
        # later tokens. [batch]
        self.offsets: Int[Tensor, " batch"] | None = None
        self.reach = self.capacity
        self.pending = 0
        # Where the pending block goes, the same for all layers on a device.
        self._index: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def batch(self) -> int:
        """The rows of the storages, in use or not."""
        return self.storages[0].shape[2]

    @property
    def capacity(self) -> int:
        return self.storages[0].shape[4]

    @property
    def even(self) -> bool:
        """Whether offsets are plain numbers, the same for all rows."""
        return not self.static and (len(self.lengths) == 1 or min(self.lengths) == max(self.lengths))

    def positions(self, depths: Int[Tensor, "_ block"]) -> Int[Tensor, "rows block"]:
        """The rotary positions of a block's tokens."""
        positions = self.starts.unsqueeze(1) + depths
        return positions if self.offsets is None else positions + self.offsets[: len(self.starts)].unsqueeze(1)

    def set_offset(self, row: int, offset: int) -> None:
        """Set what is added to the index of the later tokens of a row, in use or not."""
        if self.offsets is not None:
            self.offsets[row] = offset

    def num_keys(self, block: int) -> int:
        """The number of keys that a block of this many tokens attends to."""
        return self.reach if self.static else max(self.lengths) + self.pending + block

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a block [batch, kv_heads, nodes, head_dim] and return all keys and values up to its end."""
        keys, values = self._append(self.layers[layer][:2], (key, value))
        return keys, values

    def append_part(
        self, layer: int, part: int, block: Float[Tensor, "rows heads block size"]
    ) -> Float[Tensor, "rows heads keys size"]:
        """Write a block of one of a layer's parts and return all of it up to the block's end."""
        return self._append([self.layers[layer][part]], (block,))[0]

    def _append(self, parts: list[Tensor], blocks: tuple[Tensor, ...]) -> list[Tensor]:
        block, even = blocks[0].shape[2], self.even
        attended = self.with_block(parts, block)
        for slots, new in zip(attended, blocks, strict=True):
            if even:
                slots.narrow(2, self.lengths[0] + self.pending, block).copy_(new)
            else:
                rows, columns = self._pending_index(block, slots.device)
                slots[rows, :, columns] = new.transpose(1, 2).to(slots.dtype)
        return attended

    def with_block(self, parts: list[Tensor], block: int) -> list[Float[Tensor, "rows _heads keys _size"]]:
        """These parts of a layer, up to the end of a block of this many tokens that goes after what is pending.

        Raises ValueError if it does not fit.
        """
        end, rows = max(self.lengths) + self.pending + block, len(self.lengths)
        if end > self.reach:
            raise ValueError(f"{end} tokens do not fit the cache's {self.reach} slots; make the cache larger")
        in_use = parts if rows == self.batch else [part[:rows] for part in parts]
        return [part.narrow(2, 0, self.reach if self.static else end) for part in in_use]

    def _pending_index(self, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and slot of each token in the pending block, on a device. [batch, 1] and [batch, block]"""
        if device not in self._index or self._index[device][1].shape[1] != block:
            columns = self.starts[:, None] + self.pending + torch.arange(block, device=self.device)
            self._index[device] = torch.arange(len(self.lengths), device=device)[:, None], columns.to(device)
        return self._index[device]

    def hold(self, count: int) -> None:
        """Keep the block just written pending, so that the next one goes after it."""
        self.pending += count
        self._index = {}

    def set_lengths(self, lengths: list[int], starts: Int[Tensor, " rows"] | None = None) -> None:
        """Set which rows are in use and how many tokens each holds. Later slots count as empty.

        `starts` are the lengths on the device, for a host that knows only that they are at most `lengths`.
        """
        if starts is not None:
            self._starts[: len(lengths)].copy_(starts)
        elif lengths != self.lengths or self.static:  # `shift` may have changed them on the device alone
            if len(lengths) == len(self.starts) == 1 and not self.static:
                self.starts.fill_(lengths[0])
            else:
                self._starts[: len(lengths)].copy_(torch.tensor(lengths, dtype=torch.long), non_blocking=True)
        self.lengths = list(lengths)
        self.reset()

    def set_rows(self, lengths: list[int], rows: int) -> None:
        """Take as many rows into use as there are `lengths`, of which the first `rows` stay as they are."""
        if rows < len(lengths):
            self._starts[rows : len(lengths)].copy_(torch.tensor(lengths[rows:]), non_blocking=True)
        self.lengths = lengths
        self.reset()

    def reset(self) -> None:
        """Forget what is pending."""
        if self.static or len(self.starts) != len(self.lengths):
            self.starts = self._starts[: len(self.lengths)]
        self.pending, self._index = 0, {}

    def advance(self, counts: list[int]) -> None:
        """Commit the first `counts[b]` pending tokens of row b."""
        self.set_lengths([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def shift(self, counts: Int[Tensor, " rows"]) -> None:
        """`advance` by counts that only the device knows. `lengths` is out of date until `set_lengths` is called."""
        assert self.static
        self.starts = self.starts + counts
        self.pending, self._index = 0, {}

    def keep(self, paths: list[list[int]]) -> None:
        """Commit the nodes of each row's path (ascending indices into the pending block), moved side by side.

        All layers of a device move in one copy, whose size depends on the paths and not on the context.
        """
        longest = max(map(len, paths))
        # Nodes that are already in their slots stay.
        first = min((i for path in paths for i, node in enumerate(path) if node != i), default=longest)
        if first < longest and len(paths) == 1:  # one row: plain indices are far cheaper
            start = self.lengths[0]
            source = torch.tensor([start + node for node in paths[0][first:]])
            for storage in self.storages:
                row = storage[:, :, 0]
                # [layers, 2, kv_heads, moved, head_dim]
                moved = row.index_select(3, source.to(row.device, non_blocking=True))
                row[..., start + first : start + longest, :] = moved
        elif first < longest:
            padded = torch.tensor([[*path, *range(len(path), longest)] for path in paths])
            self.move_nodes(padded.to(self.device, non_blocking=True), first)
        self.advance([len(path) for path in paths])

    def move_nodes(self, paths: Int[Tensor, "rows longest"], first: int = 1) -> None:
        """`keep` without committing: moves the nodes of the paths from their place `first` on."""
        count, longest = paths.shape
        source = self.starts[:, None] + paths[:, first:]
        goal = self.starts[:, None] + torch.arange(first, longest, device=self.device)
        rows = torch.arange(count, device=self.device)[:, None]
        for storage in self.storages:
            of, to, at = (index.to(storage.device) for index in (source, goal, rows))
            storage[:, :, at, :, to] = storage[:, :, at, :, of]  # [batch, moved, layers, 2, kv_heads, head_dim]

    def row(self, number: int) -> "Slots":
        """One row by itself, empty, in the same storage, in use or not. Its shapes are never static."""
        row = Slots(
            [storage[:, :, number : number + 1] for storage in self.storages], device=self.device, layers=self.parts
        )
        row.offsets = None if self.offsets is None else self.offsets[number : number + 1]
        return row

    def end_row(self, number: int) -> None:
        """Take a row out of use; the last one moves into its place."""
        *lengths, last = self.lengths
        if number < len(lengths):
            self.move(len(lengths), number, last + 1)  # a draft model's root comes after it, and is read next
            lengths[number] = last
        self.set_lengths(lengths)

    def kv(self, number: int, first: int, end: int) -> SlotContents:
        """Views of some slots of a row, in use or not."""
        return tuple(storage[:, :, number, :, first:end] for storage in self.storages)

    def copy_kv(self, number: int, first: int, end: int) -> SlotContents:
        """A copy of some slots of a row, in use or not."""
        return tuple(part.clone() for part in self.kv(number, first, end))

    def write(self, number: int, first: int, kv: SlotContents) -> None:
        """Fill the slots of a row, in use or not, from `first` on."""
        for storage, part in zip(self.storages, kv, strict=True):
            storage[:, :, number, :, first : first + part.shape[3]] = part

    def move(self, source: int, goal: int, held: int) -> None:
        """Copy the first slots of a row to another row; neither has to be in use."""
        self.write(goal, 0, self.kv(source, 0, held))
        if self.offsets is not None:
            self.offsets[goal] = self.offsets[source]

    def take_over(self, other: "Slots") -> None:
        """Copy the rows of smaller slots, including the slot after each row's length, as in `end_row`."""
        for row, length in enumerate(other.lengths):
            self.write(row, 0, other.kv(row, 0, min(length + 1, other.capacity)))
        if other.offsets is not None:
            self.offsets = torch.zeros_like(other.offsets) if self.offsets is None else self.offsets
            self.offsets[: other.batch] = other.offsets
        self.set_lengths(other.lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = self.append(layer, key, value)
        return attention(query, keys, values, mask)


@runtime_checkable  # the shape checks in tests use isinstance
class HoldsTarget(Protocol):
    """A cache with slots of the target."""

    target: Slots


class SlotLayer(CacheLayerMixin):
    """One target layer's view of the slots, with the interface that transformers expects."""

    is_sliding = False  # every position is cached; a sliding window is part of the mask
    is_compileable = False

    cache: HoldsTarget

    def __init__(self, cache: HoldsTarget, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the slots were allocated with the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.target.append(self.layer, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Add the keys of the indexer of sparse attention; returns all of them. [rows, tokens, size]"""
        return self.cache.target.append_part(self.layer, 2, indexer_key_states.unsqueeze(1)).squeeze(1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.target.num_keys(query_length), 0

    def get_seq_length(self) -> int:
        return max(self.cache.target.lengths)

    def get_max_length(self) -> int:
        return self.cache.target.capacity


class KVCache(Cache):
    """The slots of the target's and the head's layers, in one preallocated tensor on each device.

    The target's slot of position t belongs with the head's slot of index t: both hold every verified token, unless the
    drafter has yet to read some. The head's lengths are from its last draft, and it may have read more since.
    `recurrent` are the target's recurrent states, if it has any.
    """

    def __init__(
        self,
        target: Slots,
        head: Slots | None,
        recurrent: RecurrentStates | None = None,
        layers: LayerMaker | None = None,
    ) -> None:
        """`layers` makes the layers that the model sees; by default, each has only slots."""
        self.target, self.head, self.recurrent, self.make_layers = target, head, recurrent, layers
        slots: list[Any] = [SlotLayer(self, layer) for layer in range(len(target.layers))]
        super().__init__(layers=slots if layers is None else layers(self))

    @classmethod
    def allocate(
        cls,
        target_shape: Shape,
        head_shape: Shape | None,
        capacity: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        static: bool = False,
        layer_devices: Sequence[torch.device] | None = None,
        recurrent: RecurrentStates | None = None,
        layers: LayerMaker | None = None,
    ) -> "KVCache":
        """Slots for `batch` rows of `capacity` tokens each, a pending tree included. All rows are in use.

        The target's layers are on `layer_devices`, everything else, and by default they, on `device`.
        """
        device = torch.device(device)
        shapes, of_head = layer_shapes(target_shape), layer_shapes(head_shape or ())
        stacks = [storages_for(shapes, layer_devices or [device] * len(shapes), batch, capacity)]
        if of_head:
            stacks.append(storages_for(of_head, [device] * len(of_head), batch, capacity))
        allocated = allocate([storage_shapes for storage_shapes, _ in stacks], dtype, static)
        slots = [
            Slots(storages, batch, static, device, parts)
            for storages, (_, parts) in zip(allocated, stacks, strict=True)
        ]
        return cls(slots[0], slots[1] if head_shape else None, recurrent, layers)

    @property
    def slots(self) -> list[Slots]:
        return [self.target] if self.head is None else [self.target, self.head]

    @property
    def roots(self) -> Tensor:
        """The position of each row's root, once the drafter has read the verified tokens. [rows]"""
        return (self.target if self.head is None else self.head).starts

    def row(self, number: int) -> "KVCache":
        """One row by itself, empty, for prefill."""
        head = None if self.head is None else self.head.row(number)
        recurrent = None if self.recurrent is None else self.recurrent.row(number)
        return KVCache(self.target.row(number), head, recurrent, self.make_layers)

    def keep(self, paths: list[list[int]], tokens: list[list[int]]) -> None:
        """Commit each row's path through the tree of these tokens after a pass over it."""
        if self.recurrent is not None:
            self.recurrent.keep(paths, tokens)
        self.target.keep(paths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Set which rows are in use and how many tokens each holds."""
        for slots in self.slots:
            slots.set_lengths(lengths)

    def end_row(self, number: int) -> None:
        """Take a row out of use; the last one moves into its place."""
        last = len(self.target.lengths) - 1
        self.set_lengths(self.target.lengths)  # the head may have read more than its lengths say
        for slots in self.slots:
            slots.end_row(number)
        if self.recurrent is not None and number < last:
            self.recurrent.move(last, number)

    def move(self, source: int, goal: int, held: int) -> None:
        """Copy a row to another row; neither has to be in use."""
        for slots in self.slots:
            slots.move(source, goal, held)
        if self.recurrent is not None:
            self.recurrent.move(source, goal)

    def reset(self) -> None:
        """Forget what is pending."""
        for slots in self.slots:
            slots.reset()

    def make_room(self, capacity: int, limit: int) -> None:
        """Let each row hold `capacity` tokens.

        The cache grows by pages, at least to double its size but not beyond `limit`. Growing copies the held tokens;
        because the size doubles, each token is copied about once overall.
        """
        if capacity <= self.target.capacity:
            return
        wanted = max(capacity, min(2 * self.target.capacity, limit))
        wanted = min(-(-wanted // PAGE_TOKENS) * PAGE_TOKENS, max(limit, capacity))
        shapes = [
            [StorageShape((*old.shape[:4], wanted, old.shape[5]), old.device) for old in slots.storages]
            for slots in self.slots
        ]
        storages = allocate(shapes, self.target.storages[0].dtype, self.target.static)
        grown = []
        for old, larger in zip(self.slots, storages, strict=True):
            grown.append(Slots(larger, len(old.lengths), old.static, old.device, old.parts))
            grown[-1].take_over(old)
        self.target, self.head = grown[0], grown[1] if self.head is not None else None
