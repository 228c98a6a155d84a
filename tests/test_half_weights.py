"""The laws of half weights: the numbers stay the weights' own, and so does the text."""

from pathlib import Path

import pytest
import torch
from conftest import ModelFactory
from torch import nn
from torch.testing import assert_close

from headstart.inference.decode import generate_batch
from headstart.inference.half_weights import HalfLinear, can_pack, use_half_weights
from headstart.inference.request import Request
from headstart.inference.target.model import TargetModel
from headstart.recipes.schema import TargetSection
from headstart.trainers.medusa2 import with_own_weights

pytestmark = pytest.mark.skipif(not can_pack(), reason="torch has no FBGEMM for this processor")


@pytest.fixture
def half_folder(tmp_path: Path, make_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny target whose weights are bfloat16 numbers, as published ones are; it counts as large."""
    monkeypatch.setattr("headstart.inference.half_weights.SMALL_BYTES", 0)
    make_model().bfloat16().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def linear_layer(bias: bool) -> nn.Linear:
    linear = nn.Linear(48, 80, bias=bias)
    linear.weight.data = linear.weight.data.bfloat16().float()
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@torch.inference_mode()
def test_a_half_linear_is_the_float32_layer(rows: int, bias: bool) -> None:
    linear = linear_layer(bias)
    inputs = torch.randn(2, rows, 48)
    assert_close(HalfLinear(linear)(inputs), linear(inputs), rtol=1e-5, atol=1e-5)


def test_a_layer_with_a_weight_that_is_no_half_number_stays_in_float32() -> None:
    exact, finer, huge = (linear_layer(True) for _ in range(3))
    finer.weight.data[3, 5] = 1 + 2**-12
    huge.weight.data[0, 0] = 1e6
    model = nn.Sequential(exact, finer, huge)
    assert use_half_weights(model, exact=True)
    assert [type(layer) for layer in model] == [HalfLinear, nn.Linear, nn.Linear]


def test_the_text_is_the_same_and_the_layers_have_no_float32_weights(half_folder: Path) -> None:
    section = TargetSection(path=str(half_folder), dtype="float32", device="cpu")
    half, full = (TargetModel.load(each, (0,)) for each in (section, with_own_weights(section)))
    assert half.has_half_weights
    assert not full.has_half_weights
    assert not [name for name, _ in half.model.named_parameters() if "proj" in name]
    assert torch.equal(half.frozen.lm_head, full.frozen.lm_head)  # heads share it
    requests = [Request([5, 6, 7], 24), Request([9, 4], 24)]
    texts = [[found.tokens for found in generate_batch(target, requests)] for target in (half, full)]
    assert texts[0] == texts[1]


def test_bfloat16_keeps_its_own_weights(half_folder: Path) -> None:
    target = TargetModel.load(TargetSection(path=str(half_folder), dtype="bfloat16", device="cpu"), ())
    assert not target.has_half_weights
