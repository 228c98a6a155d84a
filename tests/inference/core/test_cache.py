"""Laws of the KV cache: it holds exactly what one forward over the kept tokens alone would have written."""

import math
import mmap
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import slow_unless
from scripted import DRAFTERS, Hidden, Texts, batch_trees, random_parents
from torch import Tensor

from headstart.common import process
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.request import Request
from headstart.inference.core.tree import Tree
from headstart.inference.engine.loop import generate, loop_of
from headstart.inference.targets.model import TargetModel

PROMPTS = [[5, 6, 7, 11, 3], [9, 9, 1], [*range(20, 31)]]
PROMPT = PROMPTS[0]


def random_tree(*sizes: int) -> Tree:
    """One row per size, each a random tree of that many nodes."""
    return batch_trees([(torch.randint(97, (nodes,)).tolist(), random_parents(nodes)) for nodes in sizes])


def path_to(tree: Tree, node: int, row: int = 0) -> list[int]:
    path = [node]
    while (parent := int(tree.parents[row, path[0]])) >= 0:
        path.insert(0, parent)
    return path


def cache_with_prompts(target: TargetModel, *prompts: list[int], filler: float = 0.0, **shape: Any) -> KVCache:
    """A cache with one prompt in each row, each read by itself. Unwritten slots hold `filler`."""
    cache = target.passes.new_cache(90, batch=len(prompts), **shape)
    cache.target.storages[0].fill_(filler)
    for row, prompt in enumerate(prompts):
        target.passes.forward(torch.tensor([prompt]), cache=cache.row(row))
    cache.target.set_lengths([len(prompt) for prompt in prompts])
    return cache


def held(slots: Slots, row: int = 0) -> Tensor:
    """Keys and values of the tokens that a row holds. [layers, kv, kv_heads, length, head_dim]"""
    return slots.storages[0][:, :, row, :, : slots.lengths[row]]


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_paths_kept_step_after_step_equal_one_forward_in_every_row(target: TargetModel, static: bool) -> None:
    """Rows differ in length, in the size of their trees and in how many nodes they keep."""
    cache = cache_with_prompts(target, *PROMPTS, static=static)
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(6):
        sizes = torch.randint(1, 9, (3,)).tolist()
        tree = random_tree(*sizes)
        target.passes.tree(tree, cache)
        paths = [path_to(tree, int(torch.randint(size, ())), row) for row, size in enumerate(sizes)]
        cache.target.keep(paths)
        for row, path in enumerate(paths):
            texts[row] += tree.tokens[row, path].tolist()
    assert cache.target.lengths == cache.target.starts.tolist() == [len(text) for text in texts]
    for row, text in enumerate(texts):
        scratch = cache_with_prompts(target, text)
        torch.testing.assert_close(held(cache.target, row), held(scratch.target), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("sizes", "static"), [((12,), False), ((12, 1, 7), True)], ids=str)
def test_every_node_has_the_logits_of_its_own_path(target: TargetModel, sizes: tuple[int, ...], static: bool) -> None:
    """And the taps and the last hidden state. Unwritten slots hold large numbers here, which must not matter."""
    prompts, tree = PROMPTS[: len(sizes)], random_tree(*sizes)
    output = target.passes.tree(tree, cache_with_prompts(target, *prompts, static=static, filler=1e3))
    for row, (prompt, nodes) in enumerate(zip(prompts, sizes, strict=True)):
        for node in range(nodes):
            text = prompt + tree.tokens[row, path_to(tree, node, row)].tolist()
            plain = target.passes.forward(torch.tensor([text]))
            for name in ("logits", "taps", "last_hidden"):
                in_tree, in_text = getattr(output, name)[row, node], getattr(plain, name)[0, -1]
                torch.testing.assert_close(in_tree, in_text, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_block_is_written_after_each_rows_own_length_and_pending_tokens(static: bool) -> None:
    """row 0  v v v 1 1 2 .     row 1  v 1 1 2 . . .     and a third row, not in use"""
    slots = Slots([torch.zeros(1, 2, 3, 1, 7, 1)], 3, static)
    slots.set_lengths([3, 1])
    for value, count in ((1.0, 2), (2.0, 1)):
        block = torch.full((2, 1, count, 1), value)
        keys, values = slots.append(0, block, -block)
        slots.hold(count)
    wanted = torch.tensor([[0, 0, 0, 1, 1, 2, 0], [0, 1, 1, 2, 0, 0, 0], [0] * 7]).float()
    assert torch.equal(slots.storages[0][0, 0, :, 0, :, 0], wanted)
    assert torch.equal(slots.storages[0][0, 1, :, 0, :, 0], -wanted)
    width = 7 if static else 6
    assert torch.equal(keys[:, 0, :, 0], wanted[:2, :width])
    assert torch.equal(values[:, 0, :, 0], -wanted[:2, :width])
    slots.advance([1, 2])
    assert (slots.lengths, slots.starts.tolist(), slots.pending) == ([4, 3], [4, 3], 0)
    before = slots.storages[0].clone()
    with pytest.raises(ValueError, match="8 tokens do not fit the cache's 7 slots"):
        slots.append(0, *[torch.ones(2, 1, 4, 1)] * 2)
    assert torch.equal(slots.storages[0], before)
    assert slots.lengths == [4, 3]


def test_a_grown_cache_keeps_its_content(target: TargetModel, head: Eagle3Head) -> None:
    cache = target.passes.new_cache(16, head.cache_shape, batch=3)
    for slots in cache.slots:
        slots.storages[0].normal_()
        slots.set_lengths([7, 3])
    cache.target.keep([[0, 2], [0]])
    before = [[held(slots, row).clone() for row in (0, 1)] for slots in cache.slots]
    cache.make_room(17, 1000)
    for slots, old in zip(cache.slots, before, strict=True):
        assert slots.capacity >= 17
        assert slots.storages[0].shape[2] == 3
        assert [torch.equal(held(slots, row), old[row]) for row in (0, 1)] == [True, True]
        assert torch.isfinite(slots.storages[0]).all()
    assert cache.target.lengths == cache.target.starts.tolist() == [9, 4]
    # To at least double the size in whole pages, but not beyond the limit.
    for needed, limit, wanted in ((600, 9_999, 768), (769, 9_999, 1_536), (1_537, 2_000, 2_000)):
        cache.make_room(needed, limit)
        assert [slots.capacity for slots in cache.slots] == [wanted] * 2


def test_a_row_that_moves_has_all_that_its_head_read_since_the_last_draft(
    target: TargetModel, head: Eagle3Head
) -> None:
    cache = target.passes.new_cache(16, head.cache_shape, batch=2)
    assert cache.head is not None
    cache.head.set_lengths([3, 2])
    cache.target.set_lengths([7, 9])
    cache.head.storages[0].normal_()
    read = cache.head.copy_kv(1, 0, 9)
    cache.end_row(0)
    assert torch.equal(cache.head.copy_kv(0, 0, 9)[0], read[0])
    assert cache.head.lengths == cache.target.lengths == [9]


def test_a_cache_is_no_larger_than_its_requests_can_fill_and_no_step_copies_it(target: TargetModel) -> None:
    """Its capacity is that of the longest request: prompt, new tokens and one tree. Pages do not round it up."""
    requests = [Request([1] * 10, 20), Request([1], 5)]
    whole = [request.prompt + generate(target, request.prompt, request.max_new_tokens).tokens for request in requests]
    loop, addresses = loop_of(target, requests, Hidden(*whole), static=False), set()
    for _ in loop.run():
        (storage,) = loop.batch.cache.target.storages
        addresses.add(storage.data_ptr())
        assert loop.batch.cache.target.capacity == loop.batch.limit == 10 + 20 + Hidden.max_nodes
        assert storage.nbytes == loop.batch.limit * 2 * 256  # two rows
    assert len(addresses) == 1


@pytest.mark.parametrize(("batch", "static"), [(2, False), (1, True), (2, True)])
def test_unwritten_slots_hold_no_nan(target: TargetModel, batch: int, static: bool) -> None:
    """A fused kernel may multiply a masked slot by weight 0, and 0 x NaN is NaN."""
    cache = target.passes.new_cache(1000, (1, 2, 8), batch, static)
    cache.make_room(3000, 3000)
    assert all((slots.storages[0] == 0).all() for slots in cache.slots)


@pytest.mark.parametrize("name", slow_unless(("half right head and repeats", "truth hidden in a tree"), DRAFTERS))
def test_a_single_row_reads_no_slot_that_it_has_not_written(target, make_head, monkeypatch, name) -> None:
    """Its cache is not cleared, so old memory, even NaN, must reach neither the text nor the drafts."""
    text = PROMPT + generate(target, PROMPT, 20).tokens

    def decode_with(filler: float) -> tuple[list[int], list[int]]:
        drafter = DRAFTERS[name](Texts(target, [text], make_head))
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", partial(torch.full, fill_value=filler))
            found = generate(target, PROMPT, 20, drafter=drafter)
        return found.tokens, found.stats.accepted_at_depth

    for module in ("core.cache", "engine.batch"):
        monkeypatch.setattr(f"headstart.inference.{module}.PAGE_TOKENS", 4)
    clean, dirty = decode_with(0.0), decode_with(math.nan)
    assert clean[0] == text[len(PROMPT) :]
    assert dirty == clean


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux maps memory without reserving it")
def test_a_long_row_makes_no_other_row_take_up_memory() -> None:
    """Sixteen rows of 4,096 slots would be 1.1 GiB; a row of 4,000 tokens and fifteen of 50 take up about 90 MiB."""
    mebibyte, lengths = 2**20, [4_000, *[50] * 15]
    before = resident_bytes()
    cache = KVCache.allocate((16, 4, 32), (1, 4, 32), 4_096, 16)  # 16 KiB and 1 KiB per token
    assert resident_bytes() - before < 4 * mebibyte
    for row, length in enumerate(lengths):
        for slots in cache.slots:
            slots.storages[0][:, :, row, :, :length] = 1.0
    del slots  # it holds the memory that the cache leaves when it grows
    assert 70 * mebibyte < resident_bytes() - before < 110 * mebibyte
    cache.set_lengths(lengths)
    cache.make_room(6_000, 8_192)
    assert 70 * mebibyte < resident_bytes() - before < 110 * mebibyte
    assert bool((cache.target.storages[0][:, :, 1:, :, :50] == 1).all())


PAGES = 62_000  # pages of all blocks together
COUNT = """
import resource, runpy, sys

if sys.argv[2] == "kept":
    assert runpy.run_path(sys.argv[1])["keep_freed_memory"]()
sizes = [2**20 * number for number in range(8, 24)]  # bytes; 62 thousand pages of 4 KiB
def use():
    blocks = [bytearray(b"1") * size for size in sizes]
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be configured")
def test_freed_memory_is_reused_and_not_returned_to_the_system() -> None:
    """Allocate the same blocks ten times: by default, their pages come from the system each time."""
    command = [sys.executable, "-c", COUNT, process.__file__]
    kept, default = (int(subprocess.check_output([*command, mode])) for mode in ("kept", "default"))
    assert kept < PAGES / 2 < 5 * PAGES < default
