"""Laws of the cache: what is kept is what a forward over the kept tokens alone would have written, and nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from heads.cache import Slots
from heads.eagle3 import Eagle3Head
from inference.cache import KVCache
from inference.target import TargetModel
from inference.tree import Tree

PROMPT = [5, 6, 7, 11, 3]


def random_tree(nodes: int, vocab_size: int = 97) -> Tree:
    parents = [-1] + [int(torch.randint(node, ())) for node in range(1, nodes)]
    return Tree(torch.randint(vocab_size, (nodes,)), torch.tensor(parents))


def path_to(tree: Tree, node: int) -> list[int]:
    """From the root down to the node."""
    path = [node]
    while (parent := int(tree.parents[path[0]])) >= 0:
        path.insert(0, parent)
    return path


def prompted(target: TargetModel, tokens: list[int], capacity: int = 64) -> KVCache:
    """A cache that has taken in the tokens."""
    cache = target.new_cache(capacity)
    target.forward(torch.tensor([tokens]), cache=cache)
    cache.target.advance(len(tokens))
    return cache


def kept(slots: Slots) -> Tensor:
    """[layers, kv, batch, kv_heads, length, head_dim]"""
    return slots.storage[..., : slots.length, :]


def test_a_kept_path_equals_its_forward_from_scratch_in_every_layer(target: TargetModel) -> None:
    """0 - 1 - 3 - 6      keep 0 2 5 8: nodes move to 5 6 7 8, behind a prompt of 5,
    \\- 2 - 4        and are then what a forward over prompt, 0, 2, 5, 8 writes
        \\- 5 - 7
            \\- 8
    """
    tree = Tree(torch.randint(97, (9,)), torch.tensor([-1, 0, 0, 1, 2, 2, 3, 5, 5]))
    for path in ([0], [0, 1], [0, 2], [0, 1, 3, 6], [0, 2, 4], [0, 2, 5, 8]):
        cache = prompted(target, PROMPT)
        target.verify(tree, cache)
        cache.target.keep(path)
        assert cache.target.length == len(PROMPT) + len(path)
        scratch = prompted(target, PROMPT + tree.tokens[path].tolist())
        torch.testing.assert_close(kept(cache.target), kept(scratch.target), atol=1e-4, rtol=1e-4)


def test_many_kept_paths_in_a_row_equal_one_forward(target: TargetModel) -> None:
    cache, tokens = prompted(target, PROMPT, 128), list(PROMPT)
    for _ in range(6):
        tree = random_tree(7)
        target.verify(tree, cache)
        path = path_to(tree, int(torch.randint(7, ())))
        cache.target.keep(path)
        tokens += tree.tokens[path].tolist()
    torch.testing.assert_close(kept(cache.target), kept(prompted(target, tokens).target), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [1, 2, 12])
def test_every_node_has_the_logits_of_its_own_path(target: TargetModel, nodes: int, seed: int) -> None:
    """Logits, taps and last hidden state of a node in a tree are those of plain text: the prompt and its path."""
    torch.manual_seed(seed)
    tree = random_tree(nodes)
    output = target.verify(tree, prompted(target, PROMPT))
    for node in range(nodes):
        path = path_to(tree, node)
        plain = target.forward(torch.tensor([PROMPT + tree.tokens[path].tolist()]))
        torch.testing.assert_close(output.logits[0, node], plain.logits[0, -1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output.taps[0, node], plain.taps[0, -1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output.last_hidden[0, node], plain.last_hidden[0, -1], atol=1e-4, rtol=1e-4)


def test_a_text_in_blocks_equals_the_text_at_once(target: TargetModel) -> None:
    tokens = torch.randint(97, (2, 12))
    cache, parts = target.new_cache(12, batch=2), []
    for block in tokens.split([5, 1, 4, 2], dim=1):
        parts.append(target.forward(block, cache=cache).logits)
        cache.target.advance(block.shape[1])
    torch.testing.assert_close(torch.cat(parts, dim=1), target.forward(tokens).logits, atol=1e-4, rtol=1e-4)


def numbered_slots(layers: int = 3, batch: int = 2, capacity: int = 10, length: int = 2) -> Slots:
    """Every entry its own number; the last axis but one is the slot."""
    shape = layers, 2, batch, 2, capacity, 4
    slots = Slots(torch.arange(torch.Size(shape).numel()).float().reshape(shape))
    slots.advance(length)
    return slots


@pytest.mark.parametrize("path", [[0], [0, 1, 2], [1], [0, 2], [0, 1, 4, 6], [2, 3, 7], [7]])
def test_keep_moves_a_path_together_in_every_layer_and_touches_nothing_before(path: list[int]) -> None:
    """slots  v v 0 1 2 3 4 5 6 7     keep 0 1 4 6 ->   v v 0 1 4 6"""
    slots = numbered_slots()
    before = slots.storage.clone()
    slots.keep(path)
    assert slots.length == 2 + len(path)
    assert torch.equal(kept(slots), before[..., [0, 1, *(2 + node for node in path)], :])


@pytest.mark.parametrize("path", [[], [0], [0, 1], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_a_path_that_lies_where_it_belongs_is_not_moved(path: list[int]) -> None:
    slots = numbered_slots()
    writes = slots.storage._version  # torch counts every write to a tensor
    slots.keep(path)
    assert slots.storage._version == writes
    assert slots.length == 2 + len(path)


def test_what_is_not_taken_in_is_overwritten() -> None:
    slots = Slots(torch.zeros(1, 2, 1, 1, 8, 1))
    first, second = torch.full((1, 1, 3, 1), 1.0), torch.full((1, 1, 2, 1), 2.0)
    slots.append(0, first, first)
    slots.advance(1)
    keys, values = slots.append(0, second, -second)
    assert keys.flatten().tolist() == [1, 2, 2]
    assert values.flatten().tolist() == [1, -2, -2]
    slots.rewind(0)
    assert slots.append(0, second, second)[0].flatten().tolist() == [2, 2]


def test_overflow_is_an_error_that_says_by_how_much() -> None:
    slots = Slots(torch.zeros(1, 2, 1, 1, 8, 1))
    slots.advance(6)
    before = slots.storage.clone()
    block = torch.ones(1, 1, 3, 1)
    with pytest.raises(ValueError, match="9 tokens do not fit the cache's 8 slots"):
        slots.append(0, block, block)
    assert torch.equal(slots.storage, before)
    assert slots.length == 6


def test_a_target_overflows_like_its_slots(target: TargetModel) -> None:
    cache = prompted(target, PROMPT, capacity=8)
    with pytest.raises(ValueError, match="9 tokens do not fit the cache's 8 slots"):
        target.verify(random_tree(4), cache)


def test_target_and_head_share_one_allocation_and_no_slot(target: TargetModel, head: Eagle3Head) -> None:
    cache = target.new_cache(16, head.cache_shape)
    assert cache.head is not None
    start, end = cache.storage.data_ptr(), cache.storage.data_ptr() + cache.num_bytes
    assert start == cache.target.storage.data_ptr()
    assert cache.head.storage.data_ptr() + cache.head.storage.nbytes == end
    cache.storage.fill_(-1)
    cache.target.storage.fill_(3)
    assert (cache.head.storage == -1).all()
    cache.head.storage.fill_(4)
    assert (cache.target.storage == 3).all()


def test_padding_slots_hold_no_nan(target: TargetModel) -> None:
    """A fused kernel may multiply a masked slot by weight 0, and 0 x NaN is NaN."""
    assert torch.isfinite(target.new_cache(1000, (1, 2, 8)).storage).all()


def test_a_cache_beyond_the_sliding_window_is_refused_with_both() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    windowed = TargetModel(MistralForCausalLM(MistralConfig(sliding_window=16, **sizes)), ())
    assert windowed.new_cache(16).target.capacity == 16
    with pytest.raises(ValueError, match=r"a cache of 17 tokens .* sliding window of 16"):
        windowed.new_cache(17)
    endless = TargetModel(MistralForCausalLM(MistralConfig(sliding_window=None, **sizes)), ())
    assert endless.new_cache(17).target.capacity == 17
