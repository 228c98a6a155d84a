"""Laws of an unroll step's attention: the merged form is the dense one, forward and backward."""

import itertools

import pytest
import torch
from torch import Tensor

from heads.unroll_attention import MergedAttention, dense_unroll_attention, unroll_attention

Blocks = tuple[Tensor, list[Tensor], list[Tensor]]


def random_blocks(
    steps: int, seq: int = 9, num_heads: int = 4, num_kv_heads: int = 4, dtype: torch.dtype = torch.float32
) -> Blocks:
    """Query, keys and values of step `steps`, strided as a head's projections are: [batch, heads, seq, head_dim]."""

    def draw(heads: int) -> Tensor:
        return torch.randn(2, seq, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_()

    keys, values = ([draw(num_kv_heads) for _ in range(steps + 1)] for _ in range(2))
    return draw(num_heads), keys, values


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    groups = query.shape[1] // keys[0].shape[1]
    keys, values = ([block.repeat_interleave(groups, dim=1) for block in blocks] for blocks in (keys, values))
    return dense_unroll_attention(query, keys[0], values[0], torch.stack(keys[1:]), torch.stack(values[1:]))


def by_hand(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Position by position: softmax over keys 0..t of step 0 and key t of every later step."""
    out, groups = torch.empty_like(query), query.shape[1] // keys[0].shape[1]
    for head, t in itertools.product(range(query.shape[1]), range(query.shape[2])):
        shared, seen, own = head // groups, slice(0, t + 1), slice(t, t + 1)
        key, value = (
            torch.cat([blocks[0][:, shared, seen], *(block[:, shared, own] for block in blocks[1:])], dim=1)
            for blocks in (keys, values)
        )  # [batch, keys, head_dim]
        scores = (key * query[:, head, own]).sum(-1) * query.shape[-1] ** -0.5
        out[:, head, t] = (scores.softmax(-1).unsqueeze(-1) * value).sum(1)
    return out


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("steps", [1, 3])
def test_both_forms_are_the_definition(steps: int, num_kv_heads: int) -> None:
    with torch.no_grad():
        blocks = random_blocks(steps, num_kv_heads=num_kv_heads)
        torch.testing.assert_close(dense(*blocks), by_hand(*blocks), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(unroll_attention(*blocks), by_hand(*blocks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("seq", [1, 2, 33])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_merged_equals_dense_in_value_and_every_gradient(steps: int, seq: int, num_kv_heads: int) -> None:
    query, keys, values = random_blocks(steps, seq, num_kv_heads=num_kv_heads)
    weight = torch.randn_like(query)
    inputs = [query, *keys, *values]
    merged, definition = unroll_attention(query, keys, values), dense(query, keys, values)
    torch.testing.assert_close(merged, definition, atol=1e-5, rtol=1e-5)
    merged_gradients = torch.autograd.grad((merged * weight).sum(), inputs)
    dense_gradients = torch.autograd.grad((definition * weight).sum(), inputs)
    for mine, its in zip(merged_gradients, dense_gradients, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-5)


def test_merged_gradients_are_those_of_finite_differences() -> None:
    query, keys, values = random_blocks(2, seq=4, num_heads=2, num_kv_heads=2, dtype=torch.float64)
    own_keys, own_values = (torch.stack(blocks[1:]).detach().requires_grad_() for blocks in (keys, values))
    assert torch.autograd.gradcheck(MergedAttention.apply, (query, keys[0], values[0], own_keys, own_values))


@pytest.mark.parametrize("loud", ["causal", "own"])
def test_one_side_far_above_the_other_is_no_trouble(loud: str) -> None:
    """exp(score) overflows beyond 88: everything must be relative to the joint log-sum-exp."""
    query, keys, values = random_blocks(2)
    with torch.no_grad():
        for block in keys[:1] if loud == "causal" else keys[1:]:
            block *= 200
    merged = unroll_attention(query, keys, values)
    torch.testing.assert_close(merged, dense(query, keys, values), atol=1e-4, rtol=1e-4)
    merged.sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in (query, *keys, *values) if tensor.grad is not None)


def test_a_later_step_sees_no_other_index_of_its_own_steps() -> None:
    """index   0 1 2 3 4       a change of key 2 in a later step is seen by query 2 alone,
    step 1          ^         one in step 0 by queries 2 3 4
    """
    with torch.no_grad():
        query, keys, values = random_blocks(2, seq=5)
        before = unroll_attention(query, keys, values)
        for step, seen_by in ((0, [2, 3, 4]), (1, [2]), (2, [2])):
            changed = [key.clone() for key in keys]
            changed[step][:, :, 2] += 1
            difference = (unroll_attention(query, changed, values) - before).abs().amax(dim=(0, 1, 3))
            assert difference.gt(1e-6).nonzero().flatten().tolist() == seen_by


def test_bfloat16_stays_bfloat16_and_loses_no_more_than_the_dense_form() -> None:
    """The log-sum-exps are float32; the output and every gradient come back in the type that went in."""
    query, keys, values = random_blocks(3, seq=33, dtype=torch.bfloat16)
    inputs = [query, *keys, *values]
    merged = unroll_attention(query, keys, values)
    gradients = torch.autograd.grad(merged.sum(), inputs)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    definition = dense(exact[0], exact[1:5], exact[5:])
    wanted = torch.autograd.grad(definition.sum(), exact)
    for mine, its in zip([merged, *gradients], [definition, *wanted], strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.float(), its, atol=0.05, rtol=0.05)
