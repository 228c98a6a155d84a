"""Laws of the GPU's kernels for small operations, in Triton's interpreter: `make check-kernels` runs them."""

import importlib
import os
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from families import make_family
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from headstart.inference.core.cache import Slots
from headstart.inference.core.drafter import NoDrafter
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import Chunk, PendingTokens, Tree, block_mask, keys_of
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.kernels import join_linears, kernels_on_gpu
from headstart.inference.targets import attention
from headstart.inference.targets.attention import FUSED, fuse_head, head_attention
from headstart.inference.targets.check import fuse_where_right
from headstart.inference.targets.cuda_graph import StaticStep
from headstart.inference.targets.model import TargetModel

KERNELS = ("normalise", "gate", "rotate", "attend", "join_parts")
ALL = set(FUSED)
DTYPES = st.sampled_from([torch.float32, torch.float16])
CLOSE: Any = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 4e-3, "atol": 4e-3}}
NORMS: list[Any] = [LlamaRMSNorm, Gemma3RMSNorm]  # by what they add to their weights
few = settings(max_examples=30, deadline=None)


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    if os.environ.get("TRITON_INTERPRET") != "1":  # before torch imports Triton
        pytest.skip("make check-kernels runs it")
    module: Any = importlib.import_module("headstart.inference.kernels.gpu.attention")
    module.BLOCK, module.PARTS_MAX = 16, 3  # so small that a short text has several
    return kernels_on_gpu("fused")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


@few
@given(tokens=st.integers(1, 9), size=st.integers(2, 70), kind=st.sampled_from(NORMS), dtype=DTYPES)
def test_a_norm_is_transformers_own(gpu: ModuleType, tokens: int, size: int, kind: Any, dtype: torch.dtype) -> None:
    norm, inputs = kind(size, eps=1e-5).to(dtype), 3 * numbers(2, tokens, size, dtype=dtype)
    norm.weight.data = numbers(size, dtype=dtype)
    form, more = (norm.weight.detach(), 1e-5, float(NORMS.index(kind))), numbers(*inputs.shape, dtype=dtype)
    assert_close(gpu.norm(inputs, *form), norm(inputs).detach(), **CLOSE[dtype])
    summed, found = gpu.add_and_norm(inputs, more, *form)
    assert torch.equal(summed, inputs + more)
    assert_close(found, norm(inputs + more).detach(), **CLOSE[dtype])


@few
@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from(["silu", "gelu_pytorch_tanh"]), DTYPES)
def test_a_gate_is_the_activation_of_one_half_times_the_other(gpu, tokens, size, name, dtype) -> None:
    opened, values = 3 * numbers(tokens, size, dtype=dtype), numbers(tokens, size, dtype=dtype)
    found = gpu.gated(torch.cat([opened, values], dim=-1), name != "silu")
    assert_close(found, ACT2FN[name](opened) * values, **CLOSE[dtype])


@few
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 5), st.sampled_from([2, 6, 8]), st.sampled_from([1, 2]), st.sampled_from([1, 3])),
    pending=st.integers(0, 2),
    own_rows=st.booleans(),
    kind=st.sampled_from([None, *NORMS]),
    dtype=DTYPES,
)
def test_a_block_is_normed_rotated_and_stored_as_by_torch(gpu, lengths, sizes, pending, own_rows, kind, dtype) -> None:
    rows, (block, size, key_heads, group) = len(lengths), sizes
    heads = key_heads * group
    joint = numbers(rows, block, (heads + 2 * key_heads) * size, dtype=dtype)
    angles = numbers(rows if own_rows else 1, block, size // 2).repeat(1, 1, 2)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = [(kind or LlamaRMSNorm)(size, eps=1e-5).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data = numbers(size, dtype=dtype)
    start = numbers(2, 2, rows, key_heads, 20, size, dtype=dtype)
    wanted, found = (Slots([start.clone()], rows) for _ in range(2))
    for slots in (wanted, found):
        slots.set_lengths(lengths)
        slots.hold(pending)
    parts = joint.split([heads * size, key_heads * size, key_heads * size], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, size)) for part in parts)
    if kind:
        query, key = norms[0](query).detach(), norms[1](key).detach()
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rotary)
    keys, values = wanted.append(1, key, value.transpose(1, 2))
    held = found.with_block(found.layers[1], block)
    weights = (*(norm.weight.detach() for norm in norms), 1e-5, float(NORMS.index(kind))) if kind else None
    rotated = gpu.rotate_and_store(joint, rotary, weights, (held[0], held[1]), found.starts, pending)
    assert_close(rotated, query, **CLOSE[dtype])
    assert_close(held[0], keys, **CLOSE[dtype])
    assert torch.equal(held[1], values)


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=2),
    sizes=st.tuples(st.integers(1, 9), st.sampled_from([6, 16]), st.sampled_from([1, 2]), st.sampled_from([1, 3])),
    window=st.sampled_from([None, 2, 40, Chunk(16)]),
    static=st.booleans(),
    dtype=DTYPES,
)
def test_attention_to_parts_is_masked_attention(gpu, lengths, sizes, window, static, dtype) -> None:
    rows, (nodes, size, key_heads, group) = len(lengths), sizes
    parents = torch.tensor([[(7 * node) // 11 - 1 for node in range(nodes)]] * rows).clamp(min=0)
    parents[:, 0] = -1
    tree = Tree(parents, parents)
    block = PendingTokens(tree.ancestors, tree.depths)
    slots = Slots([numbers(1, 2, rows, key_heads, 90, size, dtype=dtype)], rows, static)
    slots.set_lengths(lengths)
    query, *new = numbers(3, rows, key_heads, nodes, size, dtype=dtype)
    query = numbers(rows, key_heads * group, nodes, size, dtype=dtype)
    mask, carrier = (block_mask(slots, block, dtype, window, carries) for carries in (False, True))
    keys, values = slots.append(0, *new)
    attend = kernels_on_gpu("attention").attention
    found, seen = attend(query, keys, values, keys_of(carrier), 0.3), mask[..., : keys.shape[2]] == 0
    wanted = attention.attention_with_caps(query.float(), keys.float(), values.float(), seen, 0.3, None, None)
    assert_close(found, wanted.to(dtype), **CLOSE[dtype])


def joined_target(model: PreTrainedModel) -> TargetModel:
    join_linears(model)
    return TargetModel(model, ())


def fused_types(model: nn.Module) -> Counter[str]:
    names = (type(each).__name__ for each in model.modules() if "forward" in vars(each))
    return Counter(name for name in names if name != "Linear")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
def test_targets_of_the_usual_form_compute_their_own_logits_by_kernels(gpu: ModuleType, family: str) -> None:
    target = joined_target(make_family(family))
    others = {attention.SUMS} if family == "gemma3" else set()  # whose layers have two more norms
    assert fuse_where_right(target.passes) == (ALL - others, {})
    layers = target.config.num_layers
    kinds = {name.removesuffix("MLP") for name in fused_types(target.model) if name.endswith("MLP")}
    assert [fused_types(target.model)[f"{kind}Attention"] for kind in kinds] == [layers]


@pytest.mark.parametrize("family", ["glm4", "gemma2", "olmo2"])
def test_other_rotary_embeddings_norms_and_caps_are_left_to_their_own_code(gpu: ModuleType, family: str) -> None:
    target = joined_target(make_family(family))
    fused, left_out = fuse_where_right(target.passes)
    assert attention.ROTARY not in fused
    assert not left_out


@pytest.mark.parametrize("kernel", ["norm", "gated", "rotate_and_store"])
def test_a_kernel_that_is_wrong_or_fails_is_left_out_with_a_reason(gpu, monkeypatch, kernel) -> None:
    target, right = joined_target(make_family("llama")), getattr(gpu, kernel)
    for wrong in (lambda *given, **more: right(*given, **more) * 1.1, lambda *given, **more: 1 // 0):
        with monkeypatch.context() as patch:
            patch.setattr(gpu, kernel, wrong)
            fused, left_out = fuse_where_right(target.passes)
        assert [*left_out] == [kind for kind in FUSED if kind not in fused]
        assert len(left_out) == 1
    assert fused_types(target.model)


def test_texts_by_kernels_are_those_of_the_modules_own_code(gpu, make_model, make_head) -> None:
    def texts(fuse: bool) -> list[list[int]]:
        head = make_head()
        target = TargetModel(make_model(), head.taps)
        join_linears(target.model)
        join_linears(head)
        if fuse:
            fuse_head(head, fuse_where_right(target.passes)[0])
            fused = [vars(each)["forward"].compute for each in head.modules() if "forward" in vars(each)]
            assert [getattr(each, "func", None) for each in fused].count(head_attention) == 1
        requests = [Request([5, 6, 7], 6, Sampling()), Request([9] * 11, 6, Sampling(0.8, seed=3))]
        return [text.tokens for text in generate_batch(target, requests, head_drafter(head, Dynamic(2, 2, 4)))]

    assert texts(fuse=True) == texts(fuse=False)


class Launches(TorchDispatchMode):
    """Counts the operations that a GPU would launch a kernel for, and those of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.is_ours = Counter[str](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and not self.is_ours and not name.startswith(("empty", "new_empty", "detach")):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("nodes", "most"), [(1, 400), (8, 420)])  # of a tree, the accepted path is moved, too
def test_a_step_of_32_layers_launches_few_kernels(gpu, make_model, monkeypatch, nodes, most) -> None:
    monkeypatch.setattr(attention, "can_attend", lambda *given: False)  # which has no kernel on a GPU

    def launches(layers: int) -> int:
        target, seen = joined_target(make_model(num_hidden_layers=layers)), Launches()
        assert fuse_where_right(target.passes)[0] == ALL
        step = StaticStep(target, NoDrafter(nodes - 1), target.passes.new_cache(100, static=True))
        tokens = torch.arange(nodes).unsqueeze(0)

        def run() -> None:
            step.cache.target.set_lengths([20])
            step.verify(Tree(tokens, tokens - 1), BatchSampling([Sampling()], target.device))

        def counted(name: str, kernel: Any) -> Any:
            class Counted:
                def __getitem__(self, grid: Any) -> Any:
                    def launch(*given: Any, **more: Any) -> None:
                        seen.seen[name] += 1
                        seen.is_ours = True  # the interpreter's own operations
                        kernel[grid](*given, **more)
                        seen.is_ours = False

                    return launch

            return Counted()

        run()
        with monkeypatch.context() as patch, seen:
            for name in KERNELS:
                module = gpu if name in vars(gpu) else kernels_on_gpu("attention")
                patch.setattr(module, name, counted(name, getattr(module, name)))
            run()
        assert {*KERNELS} <= {*seen.seen}
        return seen.seen.total()

    two, three = launches(2), launches(3)
    assert two + 30 * (three - two) <= most


def test_a_card_whose_early_starts_fail_starts_its_kernels_as_usual(gpu, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    trials = kernels_on_gpu("few_rows").Trials(seconds=lambda work: 1.0)  # the interpreter knows no early start
    assert gpu.start_early_if_faster(torch.device("cpu"), torch.float32, trials).startswith("0 of 1")
    assert gpu.STARTED == {"EARLY": False}
