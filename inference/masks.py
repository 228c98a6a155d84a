"""Which keys a block of pending tokens may see: the additive masks that targets and heads take."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from inference.cache import Slots


@dataclass(frozen=True)
class Block:
    """Tokens about to be written behind what each row holds and behind its pending tokens."""

    visible: Bool[Tensor, "rows block pending"]  # of the pending tokens, these included; one row stands for all
    depths: Int[Tensor, "rows pending"] | None = None  # positions behind the first pending one; a window needs them


def block_mask(
    slots: Slots, block: Block, dtype: torch.dtype, window: int | None = None
) -> Float[Tensor, "rows 1 block keys"]:
    """All that a row holds and what is visible of its pending tokens, no farther back than `window` positions."""
    if not slots.even:
        return additive(ragged_keys(slots, block, window), dtype)
    if window is None:
        return functional.pad(additive(block.visible, dtype), (slots.lengths[0], 0))
    return additive(even_window(slots, block, window), dtype)


def additive(allowed: Bool[Tensor, "rows block keys"], dtype: torch.dtype) -> Float[Tensor, "rows 1 block keys"]:
    """0 where allowed, the lowest finite number elsewhere."""
    # (1 or 0, less 1) times the largest: in place, as this is asked for on every level.
    return allowed.to(dtype).sub_(1).mul_(torch.finfo(dtype).max).unsqueeze(1)


def even_window(slots: Slots, block: Block, window: int) -> Bool[Tensor, "rows block keys"]:
    """All rows hold equally much: offsets are plain numbers."""
    assert block.depths is not None
    rows, size, pending = block.visible.shape
    held = slots.lengths[0]
    allowed = torch.ones(rows, size, held + pending, dtype=torch.bool, device=block.visible.device)
    allowed[..., held:] = block.visible
    depths = block.depths
    positions = torch.arange(held, device=depths.device).expand(len(depths), -1)
    positions = torch.cat([positions, held + depths], dim=-1)  # [rows, keys]
    allowed &= positions.unsqueeze(1) > (held + depths[:, -size:] - window).unsqueeze(-1)
    return allowed


def ragged_keys(slots: Slots, block: Block, window: int | None) -> Bool[Tensor, "rows block keys"]:
    """Rows hold different numbers of tokens, or shapes must not depend on how many."""
    size, pending = block.visible.shape[1:]
    keys = torch.arange(slots.num_keys(size), device=slots.starts.device)
    behind = keys - slots.starts[:, None]  # [rows, keys], from 0 on a pending token
    index = behind.clamp(0, pending - 1)
    visible = block.visible.expand(len(behind), -1, -1)
    drafted = visible.gather(2, index.unsqueeze(1).expand(-1, size, -1)) & (behind < pending).unsqueeze(1)
    allowed = (behind < 0).unsqueeze(1) | drafted
    if window is not None:
        assert block.depths is not None
        depths = block.depths.expand(len(behind), -1)
        positions = torch.where(behind < 0, behind, depths.gather(1, index))  # relative to the first pending one
        allowed &= positions.unsqueeze(1) > (depths[:, -size:] - window).unsqueeze(-1)
    return allowed
