"""The law of equal bits: a token's logits are a function of the tokens before it, whatever else a pass computes."""

from functools import partial
from typing import Any

import pytest
import torch
from families import FAMILIES, OTHERS, STATEFUL, make_family
from matrix import slow_unless
from torch import Tensor, nn

from headstart.inference.doctor import command
from headstart.inference.doctor.bits import SameBits, Text, compare, in_lines
from headstart.inference.kernels import products
from headstart.inference.kernels.fast_layers import pack_weights
from headstart.inference.targets.model import TargetModel

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
    return [*compare(Text.random(target, 20, 5), widths, (3,))]


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


def test_the_operation_that_differs_is_named_with_its_layer_and_the_number_of_tokens() -> None:
    target = target_of(make_family("llama"), torch.float32)
    target.model.model.layers[1].mlp.act_fn = ByCount()
    found = {each.situation: each for each in compared(target, 2, 5)}
    lines = [each for each in in_lines([*found.values()]) if "ByCount" in each]
    assert [each.partition(":")[0] for each in lines] == ["ByCount (model.layers.1.mlp.act_fn)"]
    assert "ByCount" in {difference.operation for difference in found["chain of 5"].differences}
    assert "ByCount" not in {difference.operation for difference in found["chain of 2"].differences}


def test_the_command_prints_each_pass_and_the_operations_that_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_of(make_family("llama"), torch.float32)
    monkeypatch.setattr(command.TargetModel, "load", lambda section, taps: target)
    target.model.model.layers[1].mlp.act_fn = ByCount()
    few = partial(compare, widths=(5,), batches=(3,))
    for compute, code, said in (
        (few, 1, "ByCount (model.layers.1.mlp.act_fn): in passes over "),
        (lambda text: [], 0, "same bits"),
    ):
        monkeypatch.setattr(command, "compare", compute)
        with pytest.raises(SystemExit) as end:
            command.main(["--bits", "any/target", "--dtype", "float32"])
        printed = capsys.readouterr().out
        assert end.value.code == code
        assert said in printed
        assert ("chain of 5" in printed) == bool(code)
