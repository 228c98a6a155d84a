"""Laws of compiled layers: they compute what the layers do, compile once per shape, and leave no trace in the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headstart.inference.targets.cuda_graph import CompiledLayers


class Doubled(nn.Module):
    def forward(self, number: Tensor) -> Tensor:
        return 2 * number


def test_layers_run_compiled_only_inside_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that replaces the layer's own, as accelerate's does, is restored, also after an error."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: lambda number: forward(number) + 0.5)
    layers = [Doubled(), Doubled()]
    vars(layers[1])["forward"] = replacement = lambda number: 3 * number
    compiled = CompiledLayers(layers)
    outputs = compiled.within(lambda number: [float(layer(number)) for layer in layers])
    assert outputs(torch.tensor(1.0)) == [2.5, 3.5]
    with pytest.raises(TypeError):
        compiled.within(lambda: layers[0]())()
    assert "forward" not in vars(layers[0])
    assert vars(layers[1])["forward"] is replacement
    assert CompiledLayers([]).within(replacement) is replacement


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_layers_write_the_same_text_and_compile_once(backend: str) -> None:
    """For the layers of a target and its head. Backend `eager` traces layers but does not change their operations."""
    script = Path(__file__).parents[2] / "support/compiled_steps.py"
    done = subprocess.run([sys.executable, script, backend], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["compiled"] == results["plain"]
    first, last = results["graphs"]
    assert first == last > 10  # ten layers and the head are compiled; other lengths and samplings compile nothing
    assert results["left"] == []
    assert "recompile_limit" not in done.stderr
