"""Laws of unroll attention: with every kernel the merged form equals its definition, forward and backward."""

import itertools

import pytest
import torch
from saved_tensors import SavedForBackward
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headstart.heads.attention_kernels import CPU_FUSED, CUDA_FUSED, PORTABLE, CausalKernel, Documents, kernel_for
from headstart.heads.unroll_attention import unroll_attention

KERNELS = {"fused on CPU": CPU_FUSED, "portable": PORTABLE}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CausalKernel:
    """Each kernel that runs on a CPU; the portable one in blocks that do not divide the length."""
    chosen = KERNELS[request.param]
    monkeypatch.setattr("headstart.heads.unroll_attention.kernel_for", lambda query: chosen)
    monkeypatch.setattr("headstart.heads.attention_kernels.QUERY_BLOCK", 4)
    return chosen


def random_blocks(steps, seq=9, num_kv_heads=4, dtype=torch.float32):
    """Query, keys and values of step `steps`, [batch, heads, seq, head_dim], strided like a head's projections."""

    def draw(heads: int) -> Tensor:
        return torch.randn(2, seq, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_()

    keys, values = ([draw(num_kv_heads) for _ in range(steps + 1)] for _ in range(2))
    return draw(4), keys, values


def definition(query: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents | None = None) -> Tensor:
    """Position by position: softmax over step 0's keys up to t in its document, and key t of every later step."""
    groups, scale, outs = query.shape[1] // keys[0].shape[1], query.shape[-1] ** -0.5, []
    for row, t in itertools.product(range(query.shape[0]), range(query.shape[2])):
        first = 0 if documents is None else t - int(documents.places[row, t])
        seen, own = slice(first, t + 1), slice(t, t + 1)
        key, value = (
            torch.cat([blocks[0][row, :, seen], *(block[row, :, own] for block in blocks[1:])], dim=1)
            for blocks in (keys, values)
        )  # [kv_heads, keys, head_dim]
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
        weights = (key @ query[row, :, t].unsqueeze(-1) * scale).softmax(1)  # [heads, keys, 1]
        outs.append((weights * value).sum(1))
    return torch.stack(outs).unflatten(0, (len(query), -1)).transpose(1, 2)


TEXTS = [[5, 1, 20, 7], [16, 2, 11]]  # packed; the rest of a row is padding
CASES = [(0, 4, 33, None), (2, 4, 1, None), (2, 4, 2, None), (6, 1, 33, None)]
PACKED = [(1, 2, 33, TEXTS), (3, 1, 33, TEXTS), (0, 2, 33, [[33], [1, 32]]), (2, 4, 33, [[33], [1, 32]])]


@pytest.mark.parametrize(("steps", "num_kv_heads", "seq", "packed"), [*CASES, *PACKED], ids=str)
def test_merged_equals_its_definition_in_value_and_every_gradient(kernel, steps, num_kv_heads, seq, packed):
    query, keys, values = random_blocks(steps, seq=seq, num_kv_heads=num_kv_heads)
    documents = None if packed is None else Documents.in_rows(packed)
    weight = torch.randn_like(query)
    inputs = [query, *keys, *values]
    merged = unroll_attention(query, keys, values, documents)
    wanted = definition(query, keys, values, documents)
    torch.testing.assert_close(merged, wanted, atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad((out * weight).sum(), inputs) for out in (merged, wanted))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loud", ["causal", "own"])
def test_large_scores_on_one_side_do_not_overflow(kernel: CausalKernel, loud: str) -> None:
    """exp(score) overflows beyond 88, so everything must be computed relative to the joint log-sum-exp."""
    query, keys, values = random_blocks(2)
    with torch.no_grad():
        for block in keys[:1] if loud == "causal" else keys[1:]:
            block *= 200
    merged = unroll_attention(query, keys, values)
    torch.testing.assert_close(merged, definition(query, keys, values), atol=1e-4, rtol=1e-4)
    merged.sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in (query, *keys, *values) if tensor.grad is not None)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_bfloat16_stays_bfloat16_and_loses_no_more_than_its_definition(kernel: CausalKernel, num_kv_heads: int) -> None:
    """The log-sum-exps are float32; the output and every gradient have the dtype of the input."""
    query, keys, values = random_blocks(3, seq=33, num_kv_heads=num_kv_heads, dtype=torch.bfloat16)
    inputs = [query, *keys, *values]
    merged = unroll_attention(query, keys, values)
    gradients = torch.autograd.grad(merged.sum(), inputs)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    out = definition(exact[0], exact[1:5], exact[5:])
    wanted = torch.autograd.grad(out.sum(), exact)
    for mine, its in zip([merged, *gradients], [out, *wanted], strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.float(), its, atol=0.05, rtol=0.05)


def saved_bytes(seq: int, packed: bool) -> tuple[int, int]:
    """The bytes that a step's attention saves for its gradient, and the entries of the largest tensor it creates."""
    query, keys, values = random_blocks(2, seq, num_kv_heads=2)
    documents = Documents.in_rows([[seq // 4] * 4] * 2) if packed else None
    with Largest() as largest:
        with SavedForBackward(set()) as saved:
            out = unroll_attention(query, keys, values, documents)
        out.sum().backward()
    return saved.num_bytes, largest.numbers


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_memory_is_linear_in_the_length(kernel: CausalKernel, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is length x length, forward or backward; four times the length saves four times the bytes."""
    monkeypatch.setattr("headstart.heads.attention_kernels.QUERY_BLOCK", 32)
    short, long = saved_bytes(128, packed), saved_bytes(512, packed)
    assert [after / before for before, after in zip(short, long, strict=True)] == [4, 4]


@pytest.mark.parametrize("window", [{}, {"window": 5}], ids=["causal", "window"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_fused_gpu_kernel_gets_arguments_that_match_its_schema(packed: bool, window: dict[str, int]) -> None:
    """Checks shapes and dtypes only, which needs no GPU; the next test checks the numbers."""
    with FakeTensorMode():

        def states(num_heads: int) -> Tensor:
            return torch.empty(2, 32, num_heads, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

        starts = torch.empty(6, dtype=torch.int32, device="cuda")
        places = torch.empty(2, 32, dtype=torch.long, device="cuda")
        documents = Documents(((5, 20, 7), (16, 16)), places, starts) if packed else None
        query, key, value = states(4), states(2), states(2)
        out, logsumexp = CUDA_FUSED.forward(query, key, value, documents, **window)
        assert (out.shape, out.dtype) == (query.shape, query.dtype)
        assert (logsumexp.shape, logsumexp.dtype) == (query.shape[:3], torch.float32)
        gradients = CUDA_FUSED.backward(states(4), query, key, value, out, logsumexp, documents=documents, **window)
        assert [each.shape for each in gradients] == [each.shape for each in (query, key, value)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares two kernels of a GPU")
@pytest.mark.parametrize("packed", [None, [[70, 1, 57], [100]]], ids=["rows", "packed"])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_the_fused_kernel_equals_the_portable_one(dtype, num_kv_heads, packed, monkeypatch):
    blocks = random_blocks(3, seq=128, num_kv_heads=num_kv_heads, dtype=dtype)
    half = [each.detach().cuda().requires_grad_() for each in (blocks[0], *blocks[1], *blocks[2])]
    exact = [each.detach().float().requires_grad_() for each in half]
    documents = None if packed is None else Documents.in_rows(packed, "cuda")
    weight, found = torch.randn(half[0].shape, device="cuda"), []
    assert kernel_for(half[0]) is CUDA_FUSED
    assert kernel_for(exact[0]) is PORTABLE
    for query, *rest in (half, exact):
        out = unroll_attention(query, rest[:4], rest[4:], documents)
        found.append([out, *torch.autograd.grad((out * weight).sum(), [query, *rest])])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine.float(), its, atol=0.05, rtol=0.05)
