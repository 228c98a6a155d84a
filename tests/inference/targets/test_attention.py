"""The law of grouped attention: transformers' own sdpa, without a copy of the keys for each query head."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families import FAMILIES, SOME_FAMILIES
from matrix import slow_unless
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import AttentionInterface

from headstart.inference.core.request import Request
from headstart.inference.core.tree import Tree
from headstart.inference.engine.loop import generate_batch
from headstart.inference.targets.attention import (
    GROUPED,
    PART_KEYS_MIN,
    SDPA,
    attention_by_parts,
    grouped_attention,
    own_attention_of,
    parts_of_keys,
)
from headstart.inference.targets.model import TargetModel

LOWEST = torch.finfo(torch.float32).min


class Layer(nn.Module):
    num_key_value_groups, is_causal = 3, True


def states(batch: int, seq: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seq)
    sizes = ((9, seq), (3, keys), (3, keys))
    query, key, value = (torch.randn(batch, *size, 16, generator=generator) for size in sizes)
    return query, key, value


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seq", [1, 7])
def test_grouped_attention_is_that_of_transformers(batch: int, seq: int) -> None:
    query, key, value = states(batch, seq, 40)
    mask = torch.where(torch.rand(batch, 1, seq, 40) < 0.3, LOWEST, 0.0)
    mask[..., 0] = 0
    for given in (mask, mask[:1], mask.bool().logical_not(), None):
        wanted, _ = AttentionInterface()[SDPA](Layer(), query, key, value, given, scaling=0.2)
        found, _ = grouped_attention(Layer(), query, key, value, given, scaling=0.2)
        assert_close(found, wanted)
        assert found.shape == (batch, seq, 9, 16)


def test_no_key_is_copied_for_each_query_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own sdpa hands torch 9 heads of keys, a copy three times as large as the cache."""
    seen: list[tuple[int, int]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.append((key.shape[1], key.data_ptr()))
        return attend(query, key, value, *args, **options)

    monkeypatch.setattr("headstart.inference.targets.attention.scaled_dot_product_attention", spy)
    query, key, value = states(1, 4, 30)
    grouped_attention(Layer(), query, key, value, torch.zeros(1, 1, 4, 30))
    assert seen == [(3, key.data_ptr())]


@pytest.mark.parametrize("name", slow_unless(SOME_FAMILIES, FAMILIES))
def test_a_tree_gets_the_logits_of_transformers_own_attention(name: str) -> None:
    tree = Tree(torch.tensor([[7, 3, 9, 4, 8]]), torch.tensor([[-1, 0, 0, 1, 3]]))
    found = []
    for attention in (nullcontext, own_attention_of):
        target = TargetModel(FAMILIES[name](), ())
        with attention(target.model):
            cache = target.passes.new_cache(32)
            cache.set_lengths([0])
            target.passes.forward(torch.tensor([[5, 6, 7, 11, 2]]), cache=cache)
            cache.set_lengths([5])
            found.append(target.passes.tree(tree, cache).logits)
    assert_close(*found, rtol=1e-4, atol=1e-4)


def test_the_baseline_runs_on_transformers_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` is what users compare with, so it must not run on our code."""
    target = TargetModel(FAMILIES["llama"](), ())
    assert target.model.config._attn_implementation == GROUPED
    seen = []
    target.model.register_forward_pre_hook(lambda model, args: seen.append(model.config._attn_implementation))
    target.generate([[5, 6, 7]], 3)
    assert seen == [SDPA] * 3
    assert target.model.config._attn_implementation == GROUPED


def test_a_large_batch_of_unlike_rows_reads_only_the_keys_that_each_group_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, num_keys = TargetModel(FAMILIES["llama"](), ()), 0
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        nonlocal num_keys
        num_keys += key.shape[0] * key.shape[2]
        return attend(query, key, *args, **options)

    monkeypatch.setattr("headstart.inference.targets.attention.scaled_dot_product_attention", spy)
    lengths = [60] * 16 + [1 + number % 9 for number in range(28)]
    requests = [Request([5 + number % 7] * length, 3 + number % 5) for number, length in enumerate(lengths)]
    alone = [generate_batch(target, [request])[0].tokens for request in requests]
    num_keys = 0
    assert [found.tokens for found in generate_batch(target, requests, max_batch=40)] == alone
    grouped, num_keys = num_keys, 0
    for name in ("MAX_GROUP_ROWS", "MAX_PADDING_KEYS"):
        monkeypatch.setattr(f"headstart.inference.core.cache.{name}", 10**6)
    assert [found.tokens for found in generate_batch(target, requests, max_batch=40)] == alone
    assert grouped < 0.7 * num_keys


@pytest.mark.parametrize("keys", [1024, 1501])
@pytest.mark.parametrize("parts", [2, 3])
def test_keys_shared_among_threads_give_the_same_attention(keys: int, parts: int) -> None:
    """Also where the parts overlap, and where a part is hidden from a query altogether."""
    query, key, value = states(1, 3, keys)
    mask = torch.zeros(1, 1, 9, keys)
    mask[:, :, 1, keys // parts :] = LOWEST
    mask[:, :, 2, : keys // parts] = LOWEST
    folded = query.reshape(1, 3, 9, 16)
    wanted = scaled_dot_product_attention(folded, key, value, mask, scale=0.3)
    assert_close(attention_by_parts(folded, key, value, mask, 0.3, parts), wanted)


def test_threads_share_the_keys_of_one_row_where_its_heads_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    query, key, value = states(1, 1, 4 * PART_KEYS_MIN)
    assert parts_of_keys(query[:, :3], key, value) == 4  # 8 would be too small
    assert parts_of_keys(query[:, :8], key, value) == 1
    assert parts_of_keys(query[:, :3], key[:, :, :PART_KEYS_MIN], value) == 1
    assert parts_of_keys(query[:, :3].expand(2, -1, -1, -1), key, value) == 1
