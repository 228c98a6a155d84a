"""The checks of every type that transformers registers, on a few of them: decoding text (`make check-targets`), and
decoding after images, where the text with drafts, in a batch and sampled is the model's own."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from matrix import slow_unless
from scripted import second_wrong

from headstart.inference.core.cache import Slots
from headstart.inference.targets.attention import GROUPED
from headstart.inference.targets.model import TargetModel
from headstart.targets import SAME, FamilyTable

TRIED = {name: each.images for name, each in FamilyTable.packaged().families.items() if each.images is not None}
# Positions in four rows, and the refused ones. test_images.py has positions in
# three rows, features added in later layers, image tokens that see each other, and states that cannot be cut back.
FAST = ["git", "hunyuan_vl", "mllama"]
REFUSED = {
    "git": "after images differ from its own forward",  # no placeholders: the cache holds more than the text's tokens
    "mllama": "with images end in RuntimeError",  # each token takes a row of the mask of its attention to the images
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("target_families")


@pytest.fixture
def images_script(script: ModuleType) -> ModuleType:
    return importlib.import_module("image_families")


def test_only_the_ways_of_decoding_that_write_another_text_are_named(script, monkeypatch) -> None:
    monkeypatch.setattr(script, "generate_batch", second_wrong(script.generate_batch))
    found = script.check("llama")
    assert found["outcome"].startswith("differs: greedy batch, T = 1 batch; largest margin")
    assert min(found["distinct, greedy"]) > 5
    assert min(found["tokens a step, greedy"]) > 1.5
    assert script.check("blip")["outcome"].startswith("not built: ")  # it needs images


@pytest.mark.parametrize(
    ("name", "why"),
    [
        # A wrapper whose image tower lists the attentions that it knows.
        ("deepseek_vl_hybrid", "yes"),
        ("hrm_text", "no: a 'hrm_text' model given, which has 1 decoder layers for the 8 of its config.json"),
        ("mllama", "no: head.taps: 1 given, but a 'mllama_text_model' model does not run layer 1 on text alone"),
    ],
)
def test_heads_can_be_trained_unless_taps_name_no_hidden_state(script: ModuleType, name: str, why: str) -> None:
    target = TargetModel(script.make_target(name), ())
    assert target.passes.verifies_drafts
    assert target.model.config._attn_implementation == GROUPED or why != "yes"
    assert script.harvests(target, [*range(3, 12)]).startswith(why)


@pytest.mark.parametrize("name", slow_unless(FAST, sorted(TRIED)))
def test_the_text_after_images_is_that_of_the_model_s_own_generate(name: str, images_script: ModuleType) -> None:
    found = images_script.with_images(name)
    if name in REFUSED:
        assert found.startswith("refused: images: ")
        assert REFUSED[name] in found
    else:
        assert found == SAME


def test_every_family_that_is_not_refused_decodes_after_images() -> None:
    assert {name for name, images in TRIED.items() if images != SAME} == {*REFUSED}
    assert len(TRIED) > 60


def test_another_text_and_wrong_positions_after_images_are_found(images_script, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(images_script, "generate_batch", second_wrong(images_script.generate_batch))
        found = images_script.with_images("llava")
    assert found == "differs: greedy batch (two images), T = 1 batch (two images)"
    monkeypatch.setattr(Slots, "positions", lambda slots, depths: slots.starts.unsqueeze(1) + depths)
    assert "passes after images differ from its own forward" in images_script.with_images("glm4v")


def test_a_text_in_a_cache_of_its_own_is_the_same_after_the_model_s_generate(images_script: ModuleType) -> None:
    """Its positions counted on from what `generate` leaves in the model: an error, after three prompts."""
    model = images_script.make_target("qwen4_exp", sees=True)
    target, request = TargetModel(model, ()), images_script.Request([9, 10, 11, 12, 13], 8)
    prompt, images = images_script.prompt_with_images("qwen4_exp", model, 1, seed=1)
    wanted = images_script.generate_batch(target, [request])[0].tokens
    images_script.own_text_after_images(model, prompt, images)
    assert images_script.generate_batch(target, [request])[0].tokens == wanted
    target.generate([request.prompt] * 3, 2)
    assert images_script.generate_batch(target, [request])[0].tokens == wanted
