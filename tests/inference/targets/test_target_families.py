"""The check of every type that transformers registers, on a few of them (`make check-targets`)."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from scripted import second_wrong

from headstart.inference.targets.attention import GROUPED
from headstart.inference.targets.model import TargetModel


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("target_families")


def test_only_the_ways_of_decoding_that_write_another_text_are_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "generate_batch", second_wrong(script.generate_batch))
    found = script.check("llama")
    assert found["outcome"].startswith("differs: greedy batch, T = 1 batch; largest margin")
    assert min(found["distinct, greedy"]) > 5
    assert min(found["tokens a step, greedy"]) > 1.5


def test_a_model_that_needs_images_is_not_built(script: ModuleType) -> None:
    assert script.check("blip")["outcome"].startswith("not built: ")


def test_a_wrapper_whose_image_tower_lists_the_attentions_that_it_knows_can_be_trained_for(script: ModuleType) -> None:
    target = TargetModel(script.make_target("deepseek_vl_hybrid"), ())
    assert target.model.config._attn_implementation == GROUPED
    assert script.harvests(target, [*range(3, 12)]) == "yes"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hrm_text", "a 'hrm_text' model given, which has 1 decoder layers for the 8 of its config.json"),
        ("mllama", "head.taps: 1 given, but a 'mllama_text_model' model does not run layer 1 on text alone"),
    ],
)
def test_taps_that_name_no_hidden_state_are_refused_by_name(script: ModuleType, name: str, why: str) -> None:
    target = TargetModel(script.make_target(name), ())
    assert target.passes.verifies_drafts
    assert script.harvests(target, [*range(3, 12)]).startswith(f"no: {why}")
