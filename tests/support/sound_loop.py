"""What holds between two steps of any decode loop; `shared_fixtures.py` asserts it after every step of every test."""

import torch
from torch.testing import assert_close

from headstart.inference.core.request import Sequence
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.engine.prefixes import BLOCK, PrefixIndex


def assert_sound(loop: DecodeLoop) -> None:
    """Each request is in one place, and text, slots, hidden states and prefixes agree on what was read of it."""
    batch, rows, partial = loop.batch, loop.batch.rows, loop.batch.partial
    numbers = [*loop.waiting, *(row.number for row in batch.members), *loop.ended]
    assert len(numbers) == len({*numbers})
    assert {*numbers} <= {*loop.generations}
    assert len(batch.members) <= batch.max_rows
    if batch.prefixes is not None:
        assert_sound_prefixes(batch.prefixes)
        # What may be read in one pass is decided by the one, and read after the other.
        for request in loop.waiting.values():
            found = batch.prefixes._prefix(batch.prefixes._usable(request.prompt[:-1]))
            assert batch.prefixes.known_tokens(request.prompt) == (0 if found is None else found.tokens)
    if not batch.is_open:
        assert not batch.members
        return
    target, head = batch.cache.target, batch.cache.head
    assert target.lengths == target.starts.tolist() == [len(row.text) - 1 for row in rows]  # without a step in flight
    assert target.pending == 0
    assert head is None or len(head.lengths) == len(rows)
    for row in rows:
        assert not row.ended
        assert row.left > 0
        assert row.text == row.request.prompt + row.generation.tokens
        assert_unread(loop, row, len(row.text) - 1)
        # A drafter without slots never falls behind, nor does a row that wants no drafts, once it has made a step.
        never_behind = head is None or not row.request.speculative
        assert not (never_behind and row.generation.stats.steps and row.unread.is_behind)
    if partial is not None:
        assert len(rows) <= partial.place < batch.max_rows
        assert partial.row.text == partial.row.request.prompt
        assert partial.cached < len(partial.row.text)
        assert_unread(loop, partial.row, partial.cached)


def assert_unread(loop: DecodeLoop, row: Sequence, held: int) -> None:
    """The hidden states that a row keeps are those of all positions from where it says up to the last one held."""
    unread = row.unread
    assert 0 <= unread.start < max(held, 1)  # the drafter reads the last position with its next draft
    assert unread.start + unread.count == held
    if loop.batch.prefixes is not None:
        assert row.kept_from + sum(map(len, row.kept)) == held
        assert row.kept_from % BLOCK == 0 or row.kept_from == row.generation.cached_tokens


def assert_sound_prefixes(index: PrefixIndex) -> None:
    """The budget holds, no block outlives the one before it, and two ways to ask for a prefix agree."""
    assert index.num_bytes == sum(cached.num_bytes for _, cached in index.blocks.values()) <= index.memory
    parents = {0: True} | {number: cached.head is not None for number, cached in index.blocks.values()}
    for (parent, tokens), (_, cached) in index.blocks.items():
        assert len(tokens) == BLOCK or (len(tokens) < BLOCK and cached.states is not None)
        assert len(cached.taps) == (len(tokens) if cached.head is None and index.keeps_all_taps else 1)
        # One that the drafter has read follows one that it has read, or one that was dropped.
        assert cached.head is None or parents.get(parent, True)


def assert_drafter_has_read(loop: DecodeLoop) -> None:
    """The drafter's slots hold what it computes from each row's text alone, up to where the row says it has read."""
    batch = loop.batch
    places = [*enumerate(batch.rows)]
    if batch.partial is not None:
        places.append((batch.partial.place, batch.partial.row))
    for place, row in places:
        start, slots = row.unread.start, batch.cache.head
        if slots is None or not row.request.speculative or not start:
            continue
        text = torch.tensor([row.text[: start + 2]])
        taps = loop.target.passes.forward(text[:, : start + 1]).taps
        taps = taps if batch.tap_columns is None else taps[..., batch.tap_columns]
        fresh = loop.target.passes.new_cache(start + 2, batch.drafter.cache_shape)
        fresh.set_lengths([0])
        batch.drafter.prefill(taps, text, fresh.row(0))
        assert fresh.head is not None
        assert_close(slots.copy_kv(place, 0, start), fresh.head.copy_kv(0, 0, start), atol=1e-3, rtol=1e-3)
