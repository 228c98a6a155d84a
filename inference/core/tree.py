"""Trees of draft tokens as plain data, one per row of a batch, and the attention masks that they need."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from headstart.inference.core.cache import Slots

HOST_MASK_NODES_MAX = 64  # of all rows together; up to these the host is faster
BLOCK_TOKENS_MAX = 128  # tokens of a row in a step; prompts are longer, and their attention needs masks


@dataclass(frozen=True)
class Tree:
    """Tokens and parents. Node 0 is the root, the last token that is certain; parents precede their children.

    Rows with fewer nodes than others are padded with nodes whose parent is -1, like the root's. Nothing reaches them.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    deepest: int | None = None  # upper bound on the depth, if one is known
    levels: int | None = None  # sequential draft steps, if fewer than the depth
    log_chances: Float[Tensor, "batch drafts"] | None = None  # log P(the target accepts the node), without the root

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and nodes."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @classmethod
    def root_only(cls, roots: Int[Tensor, "batch 1"]) -> "Tree":
        return cls(roots, torch.full_like(roots, -1))

    @classmethod
    def of_rows(cls, tokens: Sequence[list[int]], parents: Sequence[list[int]], device: torch.device) -> "Tree":
        """Trees with different numbers of nodes."""
        both = torch.stack([padded_rows(tokens), padded_rows(parents, -1)]).to(device, non_blocking=True)
        return cls(both[0], both[1])

    def first(self, count: int) -> "Tree":
        """The root and the first `count` draft tokens."""
        chances = None if self.log_chances is None else self.log_chances[:, :count]
        nodes = slice(count + 1)
        return replace(self, tokens=self.tokens[:, nodes], parents=self.parents[:, nodes], log_chances=chances)

    def to(self, device: torch.device | str) -> "Tree":
        chances = None if self.log_chances is None else self.log_chances.to(device)
        return replace(self, tokens=self.tokens.to(device), parents=self.parents.to(device), log_chances=chances)

    @cached_property
    def ancestors(self) -> Bool[Tensor, "batch nodes nodes"]:
        """ancestors[b, i, j]: may node i attend to node j? A node attends to itself and its ancestors."""
        return ancestor_mask(self.parents, self.deepest)

    @cached_property
    def depths(self) -> Int[Tensor, "batch nodes"]:
        """Edges from the root."""
        return torch.zeros_like(self.parents) if self.shape[1] == 1 else self.ancestors.sum(-1) - 1


def ancestor_mask(parents: Int[Tensor, "batch nodes"], deepest: int | None = None) -> Bool[Tensor, "batch nodes nodes"]:
    """mask[b, i, j]: is j node i or one of its ancestors? The root's parent is -1; no node is deeper than `deepest`."""
    if parents.shape[-1] == 1:
        return torch.ones(len(parents), 1, 1, dtype=torch.bool, device=parents.device)
    if parents.device.type == "cpu" and parents.numel() <= HOST_MASK_NODES_MAX:
        return walked_mask(parents)
    return squared_mask(parents, deepest)


def walked_mask(parents: Int[Tensor, "batch nodes"]) -> Bool[Tensor, "batch nodes nodes"]:
    """The mask node by node on the host. Parents precede their children, so their rows are final when they are read."""
    mask = numpy.zeros((*parents.shape, parents.shape[-1]), dtype=bool)
    for row, above in zip(mask, parents.tolist(), strict=True):
        for node, parent in enumerate(above):
            if parent >= 0:
                row[node] = row[parent]
            row[node, node] = True
    return torch.from_numpy(mask)


def squared_mask(parents: Int[Tensor, "batch nodes"], deepest: int | None = None) -> Bool[Tensor, "batch nodes nodes"]:
    """The mask by squaring: one step up, then two, then four, in log2(depth) small products without a host sync."""
    nodes = parents.shape[-1]
    columns = torch.arange(nodes, device=parents.device)
    reach = ((parents.unsqueeze(-1) == columns) | (columns[:, None] == columns)).float()
    for _ in range((min(deepest or nodes, nodes) - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    return reach > 0


def first_path(tree: Tree) -> Tree:
    """The chain that begins at each row's root and follows the first child of each node."""
    chains = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        chain, last = tokens[:1], 0
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node and parent == last:
                chain.append(token)
                last = node
        chains.append(chain)
    path = Tree.of_rows(chains, [[*range(-1, len(chain) - 1)] for chain in chains], tree.tokens.device)
    levels = tree.deepest if tree.levels is None else tree.levels
    return replace(path, deepest=max(path.shape[1] - 1, 1), levels=levels)


def padded_rows(rows: Sequence[Sequence[int | float]], padding: int = 0) -> Shaped[Tensor, "rows longest"]:
    """Rows of numbers as one right-padded tensor."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])


def take(values: Shaped[Tensor, "batch nodes size"], index: Int[Tensor, "batch chosen"]) -> Tensor:
    """The values at some nodes of each row. [batch, chosen, size]"""
    if len(values) == 1:
        return values.index_select(1, index[0])
    return values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


@dataclass(frozen=True)
class PendingTokens:
    """A block of tokens to be written to the slots, after each row's held and pending tokens."""

    visible: Bool[Tensor, "rows block pending"]  # which pending tokens each attends to; one row may stand for all
    depths: Int[Tensor, "rows pending"] | None = None  # positions relative to the first of these, for sliding windows


class Chunk(NamedTuple):
    """Chunked attention (Llama 4): a token attends to the tokens of its own chunk of this many positions."""

    size: int


Window = int | Chunk  # a sliding window's positions, its own included, or a chunk


def first_visible(positions: Int[Tensor, "rows block"], window: Window) -> Int[Tensor, "rows block"]:
    """The first position that the token at each position attends to."""
    if isinstance(window, Chunk):
        return positions // window.size * window.size
    return positions - window + 1


def causal_block(count: int, device: torch.device) -> PendingTokens:
    """Tokens that attend to themselves and all earlier ones."""
    offsets = torch.arange(count, device=device)
    return PendingTokens((offsets <= offsets[:, None]).unsqueeze(0), offsets.unsqueeze(0))


def block_mask(
    slots: Slots, block: PendingTokens, dtype: torch.dtype, window: Window | None = None, carries_keys: bool = False
) -> Float[Tensor, "rows 1 block keys"]:
    """Additive mask of a block: it attends to its row's held tokens and to the `visible` pending ones.

    A `window` limits both. With `carries_keys`, a small block gets a stand-in that carries its `VisibleKeys`.
    """
    if carries_keys and block.visible.shape[1] <= BLOCK_TOKENS_MAX:
        return VisibleKeys.of(slots, block, window).as_mask(dtype)
    if not slots.even:
        return additive(ragged_keys(slots, block, window), dtype)
    if window is None:
        return functional.pad(additive(block.visible, dtype), (slots.lengths[0], 0))
    return additive(even_window(slots, block, window), dtype)


def additive(allowed: Bool[Tensor, "rows block keys"], dtype: torch.dtype) -> Float[Tensor, "rows 1 block keys"]:
    """0 where allowed, the lowest finite number elsewhere."""
    # (0 or 1, minus 1) times the largest number, in place: this runs on every level of a tree.
    return allowed.to(dtype).sub_(1).mul_(torch.finfo(dtype).max).unsqueeze(1)


def even_window(slots: Slots, block: PendingTokens, window: Window) -> Bool[Tensor, "rows block keys"]:
    """The visible keys if every row holds the same number of tokens, so that offsets are plain numbers."""
    assert block.depths is not None
    depths, held = block.depths, slots.lengths[0]
    positions = torch.cat([torch.arange(held, device=depths.device).expand(len(depths), -1), held + depths], dim=-1)
    firsts = first_visible(held + depths[:, -block.visible.shape[1] :], window)
    in_window = positions.unsqueeze(1) >= firsts.unsqueeze(-1)  # [rows, block, keys]
    return functional.pad(block.visible, (held, 0), value=True) & in_window


def ragged_keys(slots: Slots, block: PendingTokens, window: Window | None) -> Bool[Tensor, "rows block keys"]:
    """The visible keys if rows hold different numbers of tokens, or if shapes must not depend on these."""
    size, pending = block.visible.shape[1:]
    keys = torch.arange(slots.num_keys(size), device=slots.starts.device)
    offset = keys - slots.starts[:, None]  # [rows, keys]; 0 is the first pending token, held tokens are negative
    index = offset.clamp(0, pending - 1)
    visible = block.visible.expand(len(offset), -1, -1)
    drafted = visible.gather(2, index.unsqueeze(1).expand(-1, size, -1)) & (offset < pending).unsqueeze(1)
    allowed = (offset < 0).unsqueeze(1) | drafted
    if window is not None:
        assert block.depths is not None
        depths = block.depths.expand(len(offset), -1)
        starts = slots.starts[:, None]
        positions = starts + torch.where(offset < 0, offset, depths.gather(1, index))
        allowed &= positions.unsqueeze(1) >= first_visible(starts + depths[:, -size:], window).unsqueeze(-1)
    return allowed


def size_bucket(nodes: int) -> int:
    """The next power of two: few tree sizes, so few graphs."""
    return 1 << (nodes - 1).bit_length()


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that a block attends to, for kernels without a mask over all keys: held tokens and some pending ones."""

    starts: Int[Tensor, " rows"]  # tokens that the slots hold
    visible: Bool[Tensor, "_ block pending"]  # one row may stand for all
    firsts: Int[Tensor, "rows block"] | None  # the first position that each token attends to; None for 0

    @classmethod
    def of(cls, slots: Slots, block: PendingTokens, window: Window | None = None) -> "VisibleKeys":
        if window is None:
            return cls(slots.starts, block.visible.contiguous(), None)
        assert block.depths is not None
        positions = slots.starts.unsqueeze(1) + block.depths  # of the pending tokens
        firsts = first_visible(positions[:, -block.visible.shape[1] :], window)
        visible = block.visible & (positions.unsqueeze(1) >= firsts.unsqueeze(-1))
        return cls(slots.starts, visible.contiguous(), firsts.contiguous())

    def as_mask(self, dtype: torch.dtype) -> Float[Tensor, "rows 1 block 1"]:
        """A stand-in for a mask, which carries these keys to `keys_of`."""
        rows, size = len(self.starts), self.visible.shape[1]
        mask = torch.empty(1, 1, 1, 1, dtype=dtype, device=self.starts.device).expand(rows, 1, size, 1)  # never read
        vars(mask)["keys"] = self
        return mask


def keys_of(mask: object) -> "VisibleKeys | Places | None":
    """The keys that a mask, or a stand-in for one, carries for kernels of ours; None for other masks."""
    return vars(mask).get("keys") if isinstance(mask, Tensor) else None


@dataclass(frozen=True)
class Places:
    """Where the keys of each token of a block lie: by position up to the row's start, then along a path."""

    starts: Int[Tensor, " rows"]  # tokens that the slots hold
    depths: Int[Tensor, "rows block"]  # positions relative to the start; one row may stand for all
    firsts: Int[Tensor, "rows block"]  # the first position that each token attends to
    paths: Int[Tensor, "rows block pending"]  # the pending token at each position from the start on; one row may too

    @classmethod
    def of(cls, slots: Slots, block: PendingTokens, window: Window | None) -> "Places":
        visible = block.visible
        depths = visible.sum(-1) - 1 if block.depths is None else block.depths[:, -visible.shape[1] :]
        positions = slots.starts.unsqueeze(1) + depths
        firsts = torch.zeros_like(positions) if window is None else first_visible(positions, window).clamp(min=0)
        paths = visible.byte().argsort(dim=-1, descending=True, stable=True)
        return cls(slots.starts, depths.contiguous(), firsts.contiguous(), paths.contiguous())
