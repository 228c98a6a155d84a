"""Laws of compiled layers: they compute what the layers do, once for a shape, and leave no trace in the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
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
