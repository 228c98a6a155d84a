"""Laws of the GPU's products of few tokens, in Triton's interpreter: `make check-kernels` runs them."""

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from families import make_family
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from headstart.inference.kernels import join_linears
from headstart.inference.kernels.fast_layers import linear_layers, whole_of
from headstart.inference.targets.check import multiply_where_faster
from headstart.inference.targets.model import TargetModel

CLOSE: dict[torch.dtype, Any] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-2},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-1},
}


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    if os.environ.get("TRITON_INTERPRET") != "1":  # before torch imports Triton
        pytest.skip("make check-kernels runs it")
    module: Any = importlib.import_module("headstart.inference.kernels.gpu.few_rows")
    return module


@pytest.fixture
def few_trials(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOR_ONE", "FOR_SEVERAL", "MEASURED"):
        monkeypatch.setattr(gpu, name, getattr(gpu, name)[-1:] if name != "MEASURED" else (1, 8))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 8),
    outputs=st.integers(1, 70),
    size=st.sampled_from([1, 7, 256, 600, 2100]),
    dtype=st.sampled_from([*CLOSE]),
    has_bias=st.booleans(),
    processors=st.sampled_from([1, 40]),
    choice=st.integers(0, 2),
)
def test_a_product_of_few_tokens_is_torchs(
    gpu: ModuleType,
    tokens: int,
    outputs: int,
    size: int,
    dtype: torch.dtype,
    has_bias: bool,
    processors: int,
    choice: int,
) -> None:
    if dtype == torch.bfloat16:  # of which Triton's interpreter multiplies no matrices
        tokens = 1
    inputs, weight = numbers(1, tokens, size, dtype=dtype), numbers(outputs, size, dtype=dtype)
    bias = numbers(outputs, dtype=dtype) if has_bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "processors_of", lambda device: processors)  # many share the inputs of few outputs
        found = gpu.product(inputs, weight, bias, (gpu.FOR_ONE if tokens == 1 else gpu.FOR_SEVERAL)[choice])
    assert_close(found, functional.linear(inputs, weight, bias), **CLOSE[dtype])


def pretended(gpu: ModuleType, gain: Callable[[int, Any], float]) -> Any:
    """Trials in which our tiles take this share of torch's time for so many tokens."""

    def seconds(work: Any) -> float:
        multiply, tokens = work.args[0], len(work.keywords["inputs"])
        return 1.0 if multiply is functional.linear else gain(tokens, multiply.keywords["tile"])

    return gpu.Trials(seconds)


def test_the_fastest_tile_is_chosen_for_each_number_of_tokens_and_torch_where_it_is_as_fast(gpu: ModuleType) -> None:
    best = {1: gpu.FOR_ONE[1], 2: gpu.FOR_SEVERAL[2], 8: gpu.FOR_SEVERAL[0]}
    trials = pretended(gpu, lambda tokens, tile: 0.9 if tile == best.get(tokens) else 0.98)
    layer = nn.Linear(30, 20)
    assert gpu.choose_products(nn.Sequential(layer), trials) == ([layer], "1 of 1 shapes")
    chosen = {1: best[1], 2: best[2], **dict.fromkeys((5, 6, 7, 8), best[8])}
    assert vars(layer)["forward"].chosen == chosen
    assert trials.times["20 x 30, 4 tokens"] == (1e6, 1e6)
    assert trials.times["20 x 30, 8 tokens"] == (1e6, 9e5)


def test_more_tokens_and_training_run_the_layers_own_code(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen, product = nn.Linear(30, 20), list[int](), gpu.product
    gpu.choose_products(nn.Sequential(layer), pretended(gpu, lambda *_: 0.5))

    def multiply(inputs: Tensor, *rest: Any) -> Tensor:
        seen.append(len(inputs))
        return product(inputs, *rest)

    monkeypatch.setattr(gpu, "product", multiply)
    layer(numbers(3, 30)).sum().backward()
    with torch.no_grad():
        for tokens in (1, 3, 8, 9):
            inputs = numbers(tokens, 30)
            assert_close(layer(inputs), functional.linear(inputs, layer.weight, layer.bias), **CLOSE[torch.float32])
    assert seen == [1, 3, 8]


def test_a_measurement_ends_when_its_time_is_up(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SECONDS_MAX", -1)
    trials = pretended(gpu, lambda *_: 0.5)
    assert gpu.choose_products(nn.Sequential(nn.Linear(4, 4)), trials) == ([], "0 of 1 shapes")


@pytest.mark.usefixtures("few_trials")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_layer_of_a_target_multiplies_as_it_is_joined(gpu: ModuleType, family: str) -> None:
    target = TargetModel(make_family(family), ())
    join_linears(target.model)
    assert multiply_where_faster(target.passes, pretended(gpu, lambda *_: 0.5)) == "5 of 5 shapes"
    for *_, linear in linear_layers(target.model):
        assert type(vars(whole_of(linear) or linear)["forward"]) is gpu.FewRows


@pytest.mark.usefixtures("few_trials")
def test_a_product_that_is_wrong_or_fails_is_left_out_with_a_reason(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu.product
    target = TargetModel(make_family("llama"), ())

    def found(wrong: Callable[..., Any]) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "product", wrong)
            line = multiply_where_faster(target.passes, pretended(gpu, lambda *_: 0.5))
        assert not any("forward" in vars(linear) for *_, linear in linear_layers(target.model))
        return line

    assert found(lambda *given, tile: right(*given, tile) * 1.1).endswith("0 of 5 shapes; other numbers")
    assert "ZeroDivisionError" in found(lambda *given, tile: 1 // 0)
    # Right in the trials, where the tile is named, and wrong in the layers.
    in_layers = found(lambda *given, **named: right(*given, **named) * (1 if named else 1.1))
    assert in_layers.startswith("none, as the first part of a prompt differs")
