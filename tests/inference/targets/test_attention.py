"""The law of grouped attention: transformers' own sdpa, without a copy of the keys for each query head."""

from contextlib import nullcontext

import pytest
import torch
from families import FAMILIES, SOME_FAMILIES
from matrix import slow_unless
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import AttentionInterface

from headstart.inference.core.tree import Tree
from headstart.inference.kernels.attention import ordered_attention
from headstart.inference.kernels.products import library
from headstart.inference.targets.attention import (
    GROUPED,
    SDPA,
    grouped_attention,
    own_attention_of,
)
from headstart.inference.targets.model import TargetModel

needs_kernel = pytest.mark.skipif(library() is None, reason="no C++ compiler")
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


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (20, 12), (64, 64)])
@torch.inference_mode()
def test_a_token_attends_with_the_same_bits_whatever_else_the_pass_reads(
    dtype: torch.dtype, size: int, value_size: int
) -> None:
    """Alone or with others, next to other rows, with hidden slots in between and after, for masks of both kinds."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, 90, size), (2, 3, 90, size), (2, 3, 90, value_size))
    query, key, value = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    causal = torch.ones(90, 90, dtype=torch.bool).tril().expand(1, 1, -1, -1)
    found = ordered_attention(query, key, value, None, None)
    wanted = scaled_dot_product_attention(query.double(), key.double(), value.double(), causal, enable_gqa=True)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert_close(found.double(), wanted.transpose(1, 2), rtol=tolerance, atol=tolerance)
    added = torch.zeros(1, 1, 90, 90, dtype=dtype).masked_fill(~causal, torch.finfo(dtype).min)
    assert torch.equal(ordered_attention(query, key, value, causal, None), found)
    assert torch.equal(ordered_attention(query, key, value, added, None), found)
    spread = torch.arange(90) * 2 + (torch.arange(90) % 3 == 0)  # slots with hidden ones in between
    keys, values = key.new_ones(2, 3, 200, size), value.new_ones(2, 3, 200, value_size)
    keys[:, :, spread], values[:, :, spread] = key, value
    mask = torch.full((1, 1, 90, 200), torch.finfo(dtype).min, dtype=dtype)
    mask[..., spread] = added
    for token in (0, 1, 17, 89):
        one, row = query[1:, :, token : token + 1], mask[:, :, token : token + 1]
        assert torch.equal(ordered_attention(one, keys[1:], values[1:], row, None), found[1:, token : token + 1])


@needs_kernel
@torch.inference_mode()
def test_scores_are_capped_and_sinks_take_their_share() -> None:
    query, key, value = states(2, 5, 40)
    mask, sinks = torch.zeros(2, 1, 5, 40), torch.linspace(-1, 2, 9)
    scores = query @ key.repeat_interleave(3, 1).mT * 0.7
    scores = torch.cat([5 * torch.tanh(scores / 5), sinks.view(1, 9, 1, 1).expand(2, -1, 5, -1)], dim=-1)
    wanted = scores.softmax(-1)[..., :-1] @ value.repeat_interleave(3, 1)
    assert_close(ordered_attention(query, key, value, mask, 0.7, cap=5.0, sinks=sinks), wanted.transpose(1, 2))


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
