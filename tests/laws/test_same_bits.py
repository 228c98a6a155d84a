"""The law of equal bits: a token's logits are a function of the tokens before it, whatever else a pass computes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, OTHERS, STATEFUL, make_family
from matrix import slow_unless
from scripted import finish
from tiny_run import build_target
from torch import Tensor, nn
from transformers.activations import ACT2FN

from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.doctor import command
from headstart.inference.doctor.bits import SameBits, TracedText, compare, in_lines
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import DecodeLoop, generate_batch
from headstart.inference.kernels import products
from headstart.inference.kernels.fast_layers import pack_weights
from headstart.inference.kernels.matmul import order_products
from headstart.inference.targets import check
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

ASSETS = Path(__file__).parents[2] / "assets"

# As those of real models: torch computes the end of a tensor by other code than whole vectors.
SIZES = {"intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
RECURRENT = ("qwen3_next", "falcon_h1")  # the scan of a chain is another one than a token's
NAMES = [name for name in (*FAMILIES, *STATEFUL, *OTHERS) if name not in RECURRENT]


def target_of(model: Any, dtype: torch.dtype) -> TargetModel:
    """A target whose weights are packed, as large ones are; they are bfloat16 numbers, as published ones are."""
    model = model.bfloat16().to(dtype)
    model.config.dtype = dtype
    pack_weights(model, exact=True)
    return TargetModel(model, ())


def compared(target: TargetModel, *widths: int) -> list[SameBits]:
    return [*compare(TracedText.random(target, 20, 5), widths, (3,))]


@pytest.mark.skipif(products.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", slow_unless(("llama",), NAMES))
def test_a_token_has_the_same_bits_in_every_pass(family: str, dtype: torch.dtype) -> None:
    make = FAMILIES.get(family) or partial(make_family, family)
    found = compared(target_of(make(**SIZES), dtype), 2, 5)
    assert not [*in_lines(found)]
    assert all(each.equal == each.positions for each in found)


class ByCount(nn.Module):
    """An activation whose result depends on the number of tokens from 5 on."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + 2.0**-20 * (inputs.shape[-2] >= 5))


@pytest.fixture(scope="module")
def differing() -> list[SameBits]:
    target = target_of(make_family("llama"), torch.float32)
    target.model.model.layers[1].mlp.act_fn = ByCount()
    return compared(target, 2, 5)


def test_the_operation_that_differs_is_named_with_its_layer_and_the_number_of_tokens(differing) -> None:
    found = {each.situation: each for each in differing}
    lines = [each for each in in_lines([*found.values()]) if "ByCount" in each]
    assert [each.partition(":")[0] for each in lines] == ["ByCount (model.layers.1.mlp.act_fn)"]
    assert "ByCount" in {difference.operation for difference in found["chain of 5"].differences}
    assert "ByCount" not in {difference.operation for difference in found["chain of 2"].differences}


def test_the_command_prints_each_pass_and_the_operations_that_differ(monkeypatch, typed, differing) -> None:
    target = target_of(make_family("llama"), torch.float32)
    monkeypatch.setattr(command.TargetModel, "load", lambda section, taps: target)
    monkeypatch.setattr(command, "PROMPT_TOKENS", 9)
    named = "ByCount (model.layers.1.mlp.act_fn): in passes over "
    for compute, code, said in ((lambda text: differing, 1, named), (lambda text: [], 0, "same bits")):
        monkeypatch.setattr(command, "compare", compute)
        ended = typed("doctor", "--bits", "any/target", "--dtype", "float32")
        assert ended.code == code
        assert said in ended.out
        assert ("chain of 5" in ended.out) == bool(code)


@pytest.mark.parametrize("dtype", slow_unless(["bfloat16"], ["float32", "bfloat16"]))
def test_a_trained_target_writes_the_same_texts_with_drafts_in_batches_and_from_chunks(dtype: str) -> None:
    """Near-ties are common in a trained model's texts: in bfloat16 one bit of a logit often decides a token."""
    section = {"path": str(ASSETS / "demo_target"), "dtype": dtype, "device": "cpu", "compile": False}
    target = TargetModel.load(TargetSection.model_validate(section), (2, 8, 13))
    head = load_drafting_head(ASSETS / "demo_head", target)
    # Beginnings of unlike lengths that the target has written itself, so that texts go on like its training data.
    starts = [Request([5 + 11 * number, 7 + number], 5 + number, Sampling(1.0, seed=number)) for number in range(3)]
    begun = [each.prompt + text.tokens for each, text in zip(starts, generate_batch(target, starts), strict=True)]
    requests = [Request(prompt, 6, Sampling(float(at % 2), seed=3)) for at, prompt in enumerate(begun)]
    wanted = [generate_batch(target, [each])[0].tokens for each in requests]
    drafter = head_drafter(head, Dynamic(3, 4, 12))
    loop = DecodeLoop(target, drafter, max_batch=3, prefill_chunk=4)
    for each in requests:
        loop.submit(each)
    finish(loop)
    alone = [generate_batch(target, [each], drafter)[0] for each in requests]
    for found in (alone, generate_batch(target, requests, max_batch=16), loop.generations.values()):
        assert [each.tokens for each in found] == wanted


@pytest.mark.skipif(products.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("width", [1536, 37])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "sigmoid"])
def test_an_activation_s_bits_depended_on_each_thread_s_share_of_a_large_prompt(name: str, width: int) -> None:
    module, inputs, threads = nn.Sequential(ACT2FN[name]), 3 * torch.randn(100, width), torch.get_num_threads()
    order_products(module)
    try:
        torch.set_num_threads(5)  # whose shares do not end at whole vectors
        with torch.inference_mode():
            assert torch.equal(module(inputs), torch.cat([module(each) for each in inputs.split(1)]))
    finally:
        torch.set_num_threads(threads)


def test_a_target_that_must_be_exact_is_refused_with_the_operation_that_differs(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(check, "EXACT_TOKENS", 16)
    build_target(tmp_path, num_layers=2)
    section = {"path": str(tmp_path), "dtype": "float32", "device": "cpu", "exact": True}
    target = TargetModel.load(TargetSection.model_validate(section), ())
    assert target.difference_in_bits is None
    assert target.unpacked is not target or products.library() is None  # torch's kernels, for baselines: not refused
    monkeypatch.setattr(type(target.model.model.layers[0].mlp.act_fn), "forward", ByCount.forward)
    refused = r"^target\.exact: true with .* SiLU\w* \(model\.layers\.0\.mlp\.act_fn\), in a prompt, by up to \S+ diff"
    with pytest.raises(ValueError, match=refused):
        TargetModel.load(TargetSection.model_validate(section), ())
