"""Laws of the GPU's kernels with sums of one order, in Triton's interpreter: `make check-kernels` runs them."""

import importlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from families import make_family

from headstart.inference.core.cache import Slots
from headstart.inference.core.tree import PendingTokens, Places, Tree, block_mask, causal_block
from headstart.inference.kernels import fast_model, matmul
from headstart.inference.targets import attention, check
from headstart.inference.targets.model import TargetModel

PARENTS = [[-1, 0, 0, 1, 2, 2, 5], [-1, 0, 1, 1, 1, 4, 5]]


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """The kernels, with blocks so small that a short text has several."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # before torch imports Triton
        pytest.skip("make check-kernels runs it")
    module: Any = importlib.import_module("headstart.inference.kernels.gpu.attention")
    ordered = matmul.kernels_on_gpu("ordered")
    before = module.BLOCK, module.SPLIT, ordered.BLOCK
    module.BLOCK, module.SPLIT, ordered.BLOCK = 8, 2, 8
    yield module
    module.BLOCK, module.SPLIT, ordered.BLOCK = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_of_one_token_has_the_bits_that_it_has_among_others(gpu: ModuleType, dtype: torch.dtype) -> None:
    ordered = matmul.kernels_on_gpu("ordered")
    inputs, weight = torch.randn(1, 20, 30, dtype=dtype), torch.randn(1, 40, 30, dtype=dtype)
    found = ordered.matmul(inputs, weight.mT)
    wanted = (inputs.float() @ weight.mT.float()).to(dtype)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    for rows in ([0], [19], [3, 17], [*range(9)]):
        assert torch.equal(ordered.matmul(inputs[:, rows], weight.mT), found[:, rows])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lengths", [[20, 37], [30, 30], [5, 0]], ids=str)
def test_attention_by_position_is_masked_attention(gpu: ModuleType, window: int | None, lengths: list[int]) -> None:
    parents = torch.tensor(PARENTS)
    tree = Tree(parents, parents)
    block = PendingTokens(tree.ancestors, tree.depths)
    slots = Slots([torch.randn(1, 2, 2, 2, 50, 12)], 2)
    slots.set_lengths(lengths)
    mask, places = block_mask(slots, block, torch.float32, window), Places.of(slots, block, window)
    query, key, value = torch.randn(2, 6, 7, 12), torch.randn(2, 2, 7, 12), torch.randn(2, 2, 7, 12)
    keys, values = slots.append(0, key, value)
    found = gpu.attention(query, keys, values, places, None)
    wanted = attention.attention_with_caps(query, keys, values, mask[..., : keys.shape[2]] == 0, None, None, None)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_wrong_path_would_be_seen(gpu: ModuleType) -> None:
    slots, block = Slots([torch.randn(1, 2, 1, 1, 30, 8)]), causal_block(4, torch.device("cpu"))
    slots.set_lengths([9])
    keys, values = slots.append(0, *torch.randn(2, 1, 1, 4, 8))
    places, query = Places.of(slots, block, None), torch.randn(1, 1, 4, 8)
    right = gpu.attention(query, keys, values, places, None)
    wrong = Places(places.starts, places.depths, places.firsts, places.paths.flip(-1))
    assert not torch.equal(gpu.attention(query, keys, values, wrong, None), right)


def test_a_target_on_these_kernels_gives_a_token_the_same_bits_in_every_pass(gpu, monkeypatch) -> None:
    monkeypatch.setattr(check, "EXACT_TOKENS", 18)
    target = TargetModel(make_family("llama"), ())
    target.passes.by_position = True
    monkeypatch.setattr(matmul, "ordered_matmul", matmul.matmul_on_gpu)
    fast_model.order_products(target.model)
    assert target.difference_in_bits is None
