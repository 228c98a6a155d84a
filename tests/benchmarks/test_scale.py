"""The law of benchmarks/scale.py: its arithmetic gives the speeds that one H100 showed."""

import importlib
from pathlib import Path

import pytest
from transformers import AutoConfig


def test_the_planned_speeds_are_those_that_an_h100_showed(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/gpu.md: plain decoding of one row and of 64, hidden states, and a training step of 8 x 2,048 tokens."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    scale = importlib.import_module("scale")
    cost = scale.cost_of("llama3_8b")
    assert 1 / cost.responses(1, 1, 600) == pytest.approx(118.3, rel=0.05)
    assert 1 / cost.responses(1, 64, 400) == pytest.approx(4255, rel=0.05)
    assert 1 / cost.features(1) == pytest.approx(41_529, rel=0.05)
    assert cost.steps(8 * 2048) == pytest.approx(0.483, rel=0.05)
    monkeypatch.setitem(scale.TARGETS, "qwen3_5_35b", AutoConfig.for_model("qwen3_5_moe"))
    cost = scale.cost_of("qwen3_5_35b")  # a token meets only the experts that are chosen for it
    assert 2e9 < cost.forward / 2 < 3e9 < 34e9 < cost.weights / 2 < 36e9  # 35B-A3B, embedding included
