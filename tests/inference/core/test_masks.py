"""The law of masks: a pending token sees its row's cached tokens and the visible pending ones, within its window.

keys     cached | pending | unused       two rows with 3 and 1 cached tokens and 2 pending ones each:
row 0    0 0 0    v q                    q is the query, v the other pending token, 0 are cached keys;
row 1    0        v q       - -          with static shapes every row extends to the capacity
"""

import pytest
import torch
from torch import Tensor

from headstart.inference.core.cache import Slots
from headstart.inference.core.tree import PendingTokens, block_mask

CAPACITY = 14
LOWEST = torch.finfo(torch.float32).min


def slots_of(lengths: list[int], pending: int = 0, static: bool = False) -> Slots:
    slots = Slots([torch.zeros(1, 2, len(lengths), 1, CAPACITY, 1)], len(lengths), static)
    slots.set_lengths(lengths)
    slots.hold(pending)
    return slots


def by_definition(
    lengths: list[int], visible: Tensor, depths: Tensor | None, keys: int, window: int | None
) -> list[list[list[bool]]]:
    size, pending = visible.shape[1:]
    rows = []
    for row, held in enumerate(lengths):
        seen, deep = visible[row % len(visible)], None if depths is None else depths[row % len(depths)]
        queries = []
        for query in range(size):
            allowed = []
            for key in range(keys):
                index = key - held  # among the pending tokens
                may = index < 0 or (index < pending and bool(seen[query, index]))
                if may and window is not None:
                    assert deep is not None
                    position = key if index < 0 else held + int(deep[index])
                    may = held + int(deep[pending - size + query]) - position < window
                allowed.append(may)
            queries.append(allowed)
        rows.append(queries)
    return rows


LENGTHS = {"alone": [5], "even": [4, 4, 4], "ragged": [6, 0, 3], "nothing held": [0, 0]}
# The number of earlier pending tokens, and the size of the block after them.
BLOCKS = {"one": (0, 1), "tree": (0, 6), "a level": (4, 3), "two levels on": (5, 2)}


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_mask_matches_its_definition(lengths: str, block: str, window: int | None, static: bool) -> None:
    """For random visibility, one per row or one for all rows; each token of the block sees itself."""
    held, (earlier, size) = LENGTHS[lengths], BLOCKS[block]
    slots = slots_of(held, earlier, static)
    for rows in {1, len(held)}:
        visible = torch.rand(rows, size, earlier + size) < 0.5
        visible[:, :, earlier:] |= torch.eye(size, dtype=torch.bool)
        depths = torch.randint(5, (rows, earlier + size))
        wanted = by_definition(held, visible, depths, slots.num_keys(size), window)
        found = block_mask(slots, PendingTokens(visible, depths), torch.float32, window)
        assert found.dtype == torch.float32
        assert found.shape[1:] == (1, size, CAPACITY if static else max(held) + earlier + size)
        assert (found.expand(len(held), -1, -1, -1)[:, 0] == 0).tolist() == wanted
        assert set(found.unique().tolist()) <= {0.0, LOWEST}
        if window is None:
            assert torch.equal(block_mask(slots, PendingTokens(visible), torch.float32), found)  # without depths
