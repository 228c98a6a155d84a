"""Laws of products of few tokens and of choices without logits, in Triton's interpreter: `make check-kernels`."""

import importlib
import os
from collections.abc import Callable
from functools import partial
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

from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.kernels import join_linears, kernels_on_gpu
from headstart.inference.kernels.fast_layers import linear_layers, whole_of
from headstart.inference.targets import model
from headstart.inference.targets.check import choose_where_faster, difference
from headstart.inference.targets.model import TargetModel

CLOSE: dict[torch.dtype, Any] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 4e-3, "atol": 4e-2},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-1},
}


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """The kernels for products, which multiply matrices of float32, too: the interpreter does not of bfloat16."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # before torch imports Triton
        pytest.skip("make check-kernels runs it")
    module: Any = importlib.import_module("headstart.inference.kernels.gpu.few_rows")
    module.MATRIX_DTYPES = module.DTYPES
    return module


@pytest.fixture
def few_trials(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_head = kernels_on_gpu("lm_head")
    for module, name, values in (
        (gpu, "FOR_ONE", gpu.FOR_ONE[-1:]),
        (gpu, "FOR_SEVERAL", gpu.FOR_SEVERAL[-1:]),
        (gpu, "MEASURED", (1, 8)),
        (lm_head, "TILES", lm_head.TILES[:1]),
        (lm_head, "NODES", (1, 16)),
    ):
        monkeypatch.setattr(module, name, values)


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
def test_a_product_of_few_tokens_is_torchs(gpu, tokens, outputs, size, dtype, has_bias, processors, choice) -> None:
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
        ours = work.args[0]
        if ours in (None, functional.linear):
            return 1.0
        return 0.5 if isinstance(ours, gpu.Tile) else gain(len(work.keywords["inputs"]), ours.keywords["tile"])

    return gpu.Trials(seconds)


def test_the_fastest_tile_is_chosen_for_each_number_of_tokens_and_torch_where_it_is_as_fast(gpu, monkeypatch) -> None:
    best = {1: gpu.FOR_ONE[1], 2: gpu.FOR_SEVERAL[2], 8: gpu.FOR_SEVERAL[0]}
    trials = pretended(gpu, lambda tokens, tile: 0.9 if tile == best.get(tokens) else 0.98)
    layer = nn.Linear(30, 20)
    assert gpu.choose_products(nn.Sequential(layer), trials) == "1 of 1 shapes"
    chosen = {1: best[1], 2: best[2], **dict.fromkeys((5, 6, 7, 8), best[8])}
    assert vars(layer)["forward"].compute.args[1] == chosen
    assert trials.times["20 x 30, 4 tokens"] == (1e6, 1e6)
    assert trials.times["20 x 30, 8 tokens"] == (1e6, 9e5)
    monkeypatch.setattr(gpu, "MATRIX_DTYPES", ())
    gpu.choose_products(nn.Sequential(layer), trials)
    assert vars(layer)["forward"].compute.args[1] == {1: best[1]}


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
    assert gpu.choose_products(nn.Sequential(nn.Linear(4, 4)), trials) == "0 of 1 shapes"


@pytest.mark.usefixtures("few_trials")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_layer_of_a_target_multiplies_as_it_is_joined(gpu: ModuleType, family: str) -> None:
    target = TargetModel(make_family(family), ())
    join_linears(target.model)
    assert gpu.choose_products(target.model, pretended(gpu, lambda *_: 0.5)) == "5 of 5 shapes"
    for *_, linear in linear_layers(target.model):
        assert vars(whole_of(linear) or linear)["forward"].compute.func is gpu.few_rows
    assert difference(target.passes) is None


@pytest.mark.usefixtures("few_trials")
def test_a_product_that_is_wrong_or_fails_is_left_out_with_a_reason(gpu, monkeypatch) -> None:
    right, layer = gpu.product, nn.Linear(30, 20)
    for wrong, why in ((lambda *of, tile: right(*of, tile) * 1.1, "other numbers"), (lambda *_, tile: 1 // 0, "Z")):
        monkeypatch.setattr(gpu, "product", wrong)
        found = gpu.choose_products(nn.Sequential(layer), pretended(gpu, lambda *_: 0.5))
        assert found.startswith(f"0 of 1 shapes; {why}")
        assert "forward" not in vars(layer)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 4),
    nodes=st.sampled_from([1, 3, 9]),
    vocab=st.sampled_from([1, 60, 129, 300]),
    size=st.sampled_from([5, 140]),
    temperatures=st.lists(st.sampled_from([0.0, 1.0, 0.3, 2.0]), min_size=4, max_size=4),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    choice=st.integers(0, 1),
)
def test_a_choice_without_logits_is_the_samplings_own_and_the_first_of_equal_ones(
    gpu, rows, nodes, vocab, size, temperatures, has_bias, dtype, choice
) -> None:
    lm_head, kernels = nn.Linear(size, vocab, bias=has_bias), kernels_on_gpu("lm_head")
    for parameter in lm_head.parameters():  # whole numbers: sums are exact, and many are equal
        parameter.data = torch.randint(-1, 2, parameter.shape).to(dtype)
    hidden, positions = torch.randint(-1, 2, (rows, nodes, size)).to(dtype), torch.randint(3, 6, (rows, nodes))
    sampling = BatchSampling([Sampling(each, seed=row) for row, each in enumerate(temperatures[:rows])], "cpu")
    sampling = sampling.with_gumbel(torch.full((rows,), 3), 3, vocab)
    tile = gpu.FOR_ONE[-1] if rows * nodes == 1 else kernels.TILES[choice]
    found = kernels.choose(hidden, lm_head, sampling, positions, tile)
    assert torch.equal(found, sampling.choose(lm_head(hidden).detach(), positions))


@pytest.mark.usefixtures("few_trials")
def test_captured_steps_without_logits_write_the_same_texts(gpu, make_model, make_head, monkeypatch, capsys) -> None:
    forms = set[tuple[int, bool]]()
    requests = [Request([5, 6, 7], 6, Sampling()), Request([9] * 11, 6, Sampling(0.8, seed=3))]
    others = [Request([5, 6], 3, Sampling(0.8, top_p=0.9)), Request([5, 6], 3, logprobs=True)]
    monkeypatch.setattr(gpu, "Trials", partial(gpu.Trials, pretended(gpu, lambda *_: 2.0).seconds))
    monkeypatch.setattr(model, "fuse_where_right", lambda passes: (set(), {}))

    def texts(fuse: bool) -> list[list[int]]:
        head = make_head()
        target = TargetModel(make_model(), head.taps)
        if fuse:
            join_linears(target.model)
            target.fuse_small_operations()
            lm_head = target.fast_form.lm_head
            choose = lm_head.choose

            def recorded(run: Any, sampling: BatchSampling, positions: Tensor) -> Any:
                forms.add((positions.numel(), sampling.all_greedy))
                return choose(run, sampling, positions)

            monkeypatch.setattr(lm_head, "choose", recorded)
        batches = [requests, requests[:1], *([each] for each in others)]
        drafter = head_drafter(head, Dynamic(2, 2, 4))
        return [text.tokens for batch in batches for text in generate_batch(target, batch, drafter, 2, True)]

    assert texts(fuse=True) == texts(fuse=False)
    assert {is_greedy for _, is_greedy in forms} == {True, False}
    said = capsys.readouterr().err
    assert "products of up to 8 tokens: 0 of 5 shapes\n" in said
    assert "choices without logits: 4 of 6 forms\n" in said


@pytest.mark.usefixtures("few_trials")
def test_choices_are_left_to_torch_where_the_model_changes_logits_or_our_kernel_is_wrong(gpu, monkeypatch) -> None:
    trials, kernels = partial(pretended, gpu, lambda *_: 0.5), kernels_on_gpu("lm_head")
    for family in ("gemma2", "granite"):
        passes = TargetModel(make_family(family), ()).passes
        assert choose_where_faster(passes, trials()) == (None, "none, as the model changes the logits of its lm_head")
    right, passes = kernels.choose, TargetModel(make_family("llama"), ()).passes
    for wrong, why in ((lambda *given: (right(*given) + 1) % 9, "other numbers"), (lambda *_: 1 // 0, "ZeroDivision")):
        monkeypatch.setattr(kernels, "choose", wrong)
        found, line = choose_where_faster(passes, trials())
        assert found is None
        assert line.startswith(f"0 of 6 forms; {why}")
