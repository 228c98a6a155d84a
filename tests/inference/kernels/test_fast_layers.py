"""The laws of packed weights: the numbers stay the weights' own, and so does the text."""

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shared_fixtures import ModelFactory
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headstart.heads.kinds.checkpoint import load_head_for, new_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.request import Request
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.engine.loop import generate_batch
from headstart.inference.kernels import fast_layers, join_linears, offset_of, own_layers_of, products
from headstart.inference.kernels.fast_layers import JointLinear, PackedLinear, pack_weights, packed_linear
from headstart.inference.kernels.products import SCALE_INPUTS, EightBits, exact_weight, remember_eight_bits
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection
from headstart.recipes.schema_heads import BlockSection

Dtype = Literal["float32", "bfloat16"]

needs_kernel = pytest.mark.skipif(products.library() is None, reason="no C++ compiler")
DTYPES = [pytest.param(dtype, marks=needs_kernel) for dtype in ("float32", "bfloat16")]


@pytest.fixture
def folder(tmp_path: Path, make_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny target whose weights are bfloat16 numbers, as published ones are; it counts as large."""
    monkeypatch.setattr("headstart.inference.kernels.fast_model.CACHED_WEIGHT_BYTES", 0)
    make_model().bfloat16().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def linear_layer(bias: bool) -> nn.Linear:
    linear = nn.Linear(48, 80, bias=bias)
    linear.weight.data = linear.weight.data.bfloat16().float()
    return linear


# What llama.cpp's formats come to, by the form that names them.
FORMS = {
    "torch.int8, torch.float16 factors of 32": (torch.float16, False, 32),  # Q8_0, Q4_0
    "torch.int8, torch.float16 factors and offsets of 32": (torch.float16, True, 32),  # Q4_1
    "torch.int8, torch.float32 factors and offsets of 32": (torch.float32, True, 32),  # Q4_K, Q5_K
    "torch.int8, torch.float32 factors of 16": (torch.float32, False, 16),  # Q6_K
}


def in_eight_bits(outputs: int, size: int, form: str) -> EightBits:
    """A random weight in one of these forms."""
    dtype, with_offsets, shared = FORMS[form]
    numbers = torch.randint(-32, 32, (outputs, size), dtype=torch.int8)
    factors, offsets = (torch.rand(outputs, size // shared).mul(0.01).add(0.001).to(dtype) for _ in range(2))
    return EightBits(numbers, factors, offsets if with_offsets else None)


def layer_of(form: EightBits, bias: bool) -> nn.Linear:
    linear = nn.Linear(form.numbers.shape[1], form.numbers.shape[0], bias=bias)
    linear.weight.data = form.weight()
    remember_eight_bits(linear.weight, form)
    return linear


def packed(layer: nn.Module) -> PackedLinear:
    assert isinstance(layer, nn.Linear)
    return packed_linear(layer, exact=True)


def assert_product(own: PackedLinear, inputs: Tensor, wanted: Tensor, tolerance: float) -> None:
    alone = torch.cat([own(each) for each in inputs.split(1)])
    assert_close(alone, wanted, rtol=tolerance, atol=tolerance)
    for count in (2, 5, 12, 13, 15, 16, 17, 25, 31, 32, 33, len(inputs)):
        assert torch.equal(own(inputs[:count]), alone[:count])
    parts, wholes = (each.unflatten(0, (2, -1))[:, ::3] for each in (inputs, alone))
    assert torch.equal(own(parts), wholes)  # not contiguous


@needs_kernel
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["torch.float32", "torch.float16", "torch.bfloat16", *FORMS])
@pytest.mark.parametrize(("size", "outputs"), [(576, 64), (33, 5)])
@torch.inference_mode()
def test_a_product_is_the_float32_layer_with_a_token_s_bits_the_same_in_every_pass(size, outputs, form, bias) -> None:
    if form in FORMS:
        size -= size % FORMS[form][2]
        linear = layer_of(in_eight_bits(outputs, size, form), bias)
    else:
        linear = nn.Linear(size, outputs, bias=bias)
        linear.weight.data = linear.weight.data.to(getattr(torch, form.removeprefix("torch."))).float()
    if form == "torch.bfloat16":
        linear.weight.data[0, 0] = 2.0**-40  # no float16 number
    own, inputs = packed(linear), torch.randn(40, size)
    assert own.kernel.form == form
    assert_product(own, inputs, linear(inputs), 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_in_eight_bits_only_if_none_of_its_numbers_changes(form: str) -> None:
    exact = in_eight_bits(6, 96, form)
    exact.numbers[2], exact.factors[2] = 0, 0  # a row without weights
    weight, repeats = exact.weight(), exact.shared // SCALE_INPUTS
    none = torch.zeros_like(exact.factors)
    given = exact.factors, none if exact.offsets is None else exact.offsets
    factors, offsets = (each.float().repeat_interleave(repeats, dim=1) for each in given)
    found: Any = EightBits.of(weight, factors, offsets)
    assert found.form == form
    assert torch.equal(found.weight(), weight)
    assert torch.equal(found.numbers, exact.numbers)
    for row in (0, 5):
        other = weight.clone()
        other[row, 32] += 2.0**-20
        assert EightBits.of(other, factors, offsets) is None


@needs_kernel
def test_a_weight_that_was_changed_is_not_read_as_it_was() -> None:
    linear = layer_of(in_eight_bits(64, 96, next(iter(FORMS))), bias=False)
    assert isinstance(exact_weight(linear), EightBits)
    linear.weight.data[3, 5] += 1 / 3
    assert packed(linear).kernel.form == "torch.float32"


@needs_kernel
def test_without_a_compiler_or_where_it_fails_torch_s_products_are_used(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    for compiler, said in (("no-such-compiler", "install g++"), ("false", "does not compile")):
        monkeypatch.setenv("CXX", compiler)
        assert products.library.__wrapped__() is None
        assert said in capsys.readouterr().err


def test_each_clone_compiled_the_kernels_again_and_in_silence(monkeypatch, capsys, tmp_path) -> None:
    compiler, typed = tmp_path / "compiler", tmp_path / "typed"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {typed}\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    for sources in (products.SOURCES, [Path(shutil.copy(each, tmp_path)) for each in products.SOURCES]):
        monkeypatch.setattr(products, "SOURCES", sources)
        assert products.library.__wrapped__() is None
        assert "compiling headstart's kernels, once" in capsys.readouterr().err
    here, clone = typed.read_text().splitlines()
    assert here == clone


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "outputs"), [(576, 64), (32, 5), (33, 5)])
@torch.inference_mode()
def test_a_product_in_half_precision_is_the_layer_with_the_same_bits_in_every_pass(size, outputs, bias, dtype) -> None:
    """By tiles (AMX), where the processor has them and the size fills them."""
    linear = nn.Linear(size, outputs, bias=bias).to(dtype)
    own, inputs = packed(linear), torch.randn(70, size).to(dtype)
    assert_product(own, inputs, linear.float()(inputs.float()).to(dtype), 1e-2)


@needs_kernel
def test_a_layer_keeps_the_fewest_bits_in_which_it_is_exact() -> None:
    half, huge, finer, both = (linear_layer(True) for _ in range(4))
    huge.weight.data[0, 0] = 2.0**120  # too large for float16
    finer.weight.data[3, 5] = 1 + 2**-12
    both.weight.data[:2, 0] = torch.tensor([2.0**120, 1 + 2**-10])
    model = nn.Sequential(half, huge, finer, both)
    assert pack_weights(model, exact=True)
    forms = [layer.kernel.form for layer in model if isinstance(layer, PackedLinear)]
    assert forms == ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.float32"]


@needs_kernel
def test_a_bfloat16_checkpoint_was_converted_four_times_while_it_was_packed() -> None:
    linear = linear_layer(False)
    weight: Any = exact_weight(linear)
    assert weight.dtype == torch.bfloat16
    assert weight.untyped_storage().data_ptr() == linear.weight.untyped_storage().data_ptr()
    assert torch.equal(weight.float(), linear.weight)


@needs_kernel
@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="not Linux")
def test_the_file_of_a_packed_weight_stayed_in_memory_besides(tmp_path: Path) -> None:
    path, weight = tmp_path / "model.safetensors", torch.randn(1024, 1024).bfloat16()
    save_file({"weight": weight}, path)

    def resident() -> int:
        regions = Path("/proc/self/smaps").read_text().partition(str(path))[2]
        return int(regions.partition("Rss:")[2].split()[0])  # KiB

    with safe_open(path, "pt") as file:
        layer = nn.Linear(1024, 1024, bias=False, device="meta")
        layer.weight = nn.Parameter(file.get_tensor("weight"), requires_grad=False)
    read, model = layer.weight, nn.Sequential(layer)
    assert torch.equal(read, weight)
    assert resident() > 1900
    assert pack_weights(model, exact=True)
    assert resident() < 100
    assert torch.equal(read, weight)


@needs_kernel
@torch.inference_mode()
def test_siblings_of_which_each_has_another_16_bit_format_are_packed_one_by_one() -> None:
    model, inputs = Projections(torch.float32), torch.randn(1, 48)
    for name, number in (("q_proj", 2.0**120), ("k_proj", 1 + 2**-10)):
        model.get_parameter(f"{name}.weight").data[0, 0] = number
    wanted = [layer(inputs) for layer in model.children()]
    assert pack_weights(model, exact=True)
    assert {type(layer) for layer in model.children()} == {PackedLinear}
    assert_close([layer(inputs) for layer in model.children()], wanted, rtol=1e-4, atol=1e-4)


class Projections(nn.Module):
    """Siblings as in an attention layer, and a layer apart."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, size in (("q_proj", 96), ("k_proj", 32), ("v_proj", 32), ("o_proj", 48)):
            self.add_module(name, nn.Linear(48, size, bias=name != "o_proj").bfloat16().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_layers_that_read_the_same_input_are_computed_once_and_give_what_they_gave_alone(dtype: Dtype) -> None:
    model = Projections(getattr(torch, dtype))
    inputs, others = (torch.randn(rows, 3, 48).to(getattr(torch, dtype)) for rows in (2, 1))
    alone = {name: packed(layer) for name, layer in model.named_children()}
    assert pack_weights(model, exact=True)
    layers = dict(model.named_children())
    assert [type(layer) is JointLinear for layer in layers.values()] == [True, True, True, False]
    assert len({layers[name].product for name in ("q_proj", "k_proj", "v_proj")}) == 1
    # In any order, for one of them alone, twice for the same input, and after another input.
    calls = [(name, inputs) for name in ("k_proj", "q_proj", "v_proj", "o_proj")]
    calls += [*[("q_proj", others)] * 2, ("v_proj", inputs), ("k_proj", others), ("k_proj", inputs)]
    for name, given in calls:
        assert torch.equal(layers[name](given), alone[name](given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_text_is_the_same_and_the_layers_have_no_weights_of_their_own(folder: Path, dtype: Dtype) -> None:
    section = TargetSection(path=str(folder), dtype=dtype, device="cpu")
    packed, loaded = (TargetModel.load(section, (0,), packed=packed) for packed in (True, False))
    assert packed.fast_form.is_packed
    assert not loaded.fast_form.is_packed
    assert not [name for name, _ in packed.model.named_parameters() if "proj" in name]
    assert torch.equal(packed.frozen.lm_head, loaded.frozen.lm_head)  # heads share it
    requests = [Request([5, 6, 7], 12), Request([9, 4], 12)]
    texts = [[found.tokens for found in generate_batch(target, requests)] for target in (packed, loaded)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_baseline_runs_on_the_weights_that_transformers_loads(folder: Path, dtype: Dtype) -> None:
    packed = TargetModel.load(TargetSection(path=str(folder), dtype=dtype, device="cpu"), ())
    seen = []
    hook = packed.unpacked.model.register_forward_pre_hook(lambda *_: seen.append(1))
    packed.generate([[5, 6, 7]], 3)
    hook.remove()
    assert seen
    assert not packed.unpacked.fast_form.is_packed
    assert [name for name, _ in packed.unpacked.model.named_parameters() if "proj" in name]


@pytest.mark.parametrize("drafted", [24, 97])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drafting_few_levels_with_a_shared_lm_head_takes_longer_than_many(folder, dtype, drafted, tmp_path) -> None:
    """The lm_head that a block head shares with its target was not packed with the rest."""
    target = TargetModel.load(TargetSection(path=str(folder), dtype=dtype, device="cpu"), (0, 1))
    section = BlockSection(kind="block", num_layers=1, block_size=4, markov_rank=4, mask_token_id=96, taps=(0, 1))
    vocab = DraftVocab.most_frequent(torch.randint(9, (97,)), drafted)
    head = new_head(section, target.frozen, vocab, seed=0)
    save_head(head, tmp_path / "head")
    loaded: Any = load_head_for(tmp_path / "head", target.frozen)
    packed: Any = load_drafting_head(tmp_path / "head", target)
    assert loaded.lm_head is None
    assert packed.shared_lm_head is None
    assert type(packed.lm_head) is type(packed.fc) is not nn.Linear
    assert (packed.lm_head is target.model.get_output_embeddings()) == packed.vocab.is_full
    hidden = torch.randn(1, 3, target.config.hidden_size, dtype=target.dtype)
    with torch.inference_mode():
        assert_close(packed.slot_logits(hidden), loaded.slot_logits(hidden), rtol=0.02, atol=0.02)


def test_fused_layers_compute_what_transformers_own_do_and_give_way_to_them(make_model: ModelFactory) -> None:
    model, tokens = make_model(num_hidden_layers=2), torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        wanted = model(tokens).logits
        fast_layers.fuse_norms(model)
        join_linears(model)
        own = {name: vars(module).get("forward") for name, module in model.named_modules()}
        fused = [name for name, forward in own.items() if isinstance(forward, fast_layers.FusedForward)]
        assert len(fused) == 1 + 2 * (2 + 3 + 2)  # norms; projections to queries, keys and values; gate and up
        assert_close(model(tokens).logits, wanted, rtol=1e-4, atol=1e-4)
        with own_layers_of(model):
            assert not any("forward" in vars(module) for module in model.modules())
            assert_close(model(tokens).logits, wanted, rtol=1e-4, atol=1e-4)
    assert "forward" in vars(model.model.norm)


class ReadsWeight(nn.Module):
    """Multiplies with a layer's weight itself, as Mamba's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.called(inputs) @ self.read.weight.T


@needs_kernel
def test_a_packed_mamba_had_no_weight_where_its_own_code_reads_one() -> None:
    module, inputs = ReadsWeight().requires_grad_(False), torch.randn(3, 8)
    wanted = module(inputs)
    assert pack_weights(module, exact=True)
    torch.testing.assert_close(module(inputs), wanted)
    assert isinstance(module.called, PackedLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_of_gemma_was_not_known_in_bfloat16(dtype: torch.dtype) -> None:
    """1 + weight is rounded there, unless it is computed in float32, as Gemma does."""
    for kind, offset in ((LlamaRMSNorm, 0.0), (Gemma3RMSNorm, 1.0)):
        norm = kind(64).to(dtype)
        norm.weight.data = torch.linspace(-0.7, 0.9, 64).to(dtype)
        assert offset_of(norm) == offset
