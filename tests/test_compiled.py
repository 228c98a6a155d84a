"""Laws of compiled layers: they compute what the layers do, once for a shape, and leave no trace in the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from inference.compiled import CompiledLayers


class Doubled(nn.Module):
    def forward(self, number: Tensor) -> Tensor:
        return 2 * number


def test_layers_are_compiled_within_the_function_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another forward stands in place of the layer's own, as accelerate has it, and behind an error."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: lambda number: forward(number) + 0.5)
    layers = [Doubled(), Doubled()]
    vars(layers[1])["forward"] = instead = lambda number: 3 * number
    compiled = CompiledLayers([*layers, layers[0]])  # as the layers of an early exit come twice
    both = compiled.within(lambda number: [float(layer(number)) for layer in layers])
    assert both(torch.tensor(1.0)) == [2.5, 3.5]
    with pytest.raises(TypeError):
        compiled.within(lambda: layers[0]())()
    assert "forward" not in vars(layers[0])
    assert vars(layers[1])["forward"] is instead
    assert CompiledLayers([]).within(instead) is instead


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_layers_write_the_same_text_and_are_compiled_once(backend: str) -> None:
    """Of a target and its head; `eager` traces layers as the compiler does, and runs their operations as they are."""
    script = Path(__file__).with_name("compiled_steps.py")
    done = subprocess.run([sys.executable, script, backend], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["compiled"] == told["plain"]
    first, last = told["graphs"]
    assert first == last > 10  # no length and no way of sampling made another one; ten layers did
    assert told["left"] == []
    assert "recompile_limit" not in done.stderr
