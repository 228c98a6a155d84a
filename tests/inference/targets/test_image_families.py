"""Laws of decoding after images in every family: with drafts, in a batch and sampled, the text is the model's own."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from matrix import slow_unless
from scripted import second_wrong

from headstart.inference.core.cache import Slots
from headstart.targets import SAME, FamilyTable

TRIED = {name: each.images for name, each in FamilyTable.packaged().families.items() if each.images is not None}
# Positions in three rows or four, features added in later layers, image tokens that see each other, tiles, patches of
# several images in one tensor, images as tokens, states that cannot be cut back, attention in chunks.
FAST = [
    "emu3",
    "gemma4",
    "git",
    "glm4v",
    "granite4_vision",
    "hunyuan_vl",
    "idefics3",
    "lfm2_vl",
    "llama4",
    "llava_next",
]
FAST += ["minicpmv4_7", "mllama", "molmo2"]
REFUSED = {
    "git": "after images differ from its own forward",  # no placeholders: the cache holds more than the text's tokens
    "mllama": "with images end in RuntimeError",  # each token takes a row of the mask of its attention to the images
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("image_families")


@pytest.mark.parametrize("name", slow_unless(FAST, sorted(TRIED)))
def test_the_text_after_images_is_that_of_the_model_s_own_generate(name: str, script: ModuleType) -> None:
    found = script.with_images(name)
    if name in REFUSED:
        assert found.startswith("refused: images: ")
        assert REFUSED[name] in found
    else:
        assert found == SAME


def test_every_family_that_is_not_refused_decodes_after_images() -> None:
    assert {name for name, images in TRIED.items() if images != SAME} == {*REFUSED}
    assert len(TRIED) > 60


def test_another_text_after_images_is_found(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "generate_batch", second_wrong(script.generate_batch))
    assert script.with_images("llava") == "differs: greedy batch (two images), T = 1 batch (two images)"


def test_a_family_whose_positions_are_wrong_after_images_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slots, "positions", lambda slots, depths: slots.starts.unsqueeze(1) + depths)
    assert "passes after images differ from its own forward" in script.with_images("glm4v")


def test_a_text_in_a_cache_of_its_own_is_the_same_after_the_model_s_generate(script: ModuleType) -> None:
    """Its positions counted on from what `generate` leaves in the model: an error, after three prompts."""
    model = script.make_target("qwen4_exp", sees=True)
    target, (prompt, images) = script.TargetModel(model, ()), script.prompt_with_images("qwen4_exp", model, 1, seed=1)
    request = script.Request([9, 10, 11, 12, 13], 8)
    wanted = script.generate_batch(target, [request])[0].tokens
    script.own_text_after_images(model, prompt, images)
    assert script.generate_batch(target, [request])[0].tokens == wanted
    target.generate([request.prompt] * 3, 2)
    assert script.generate_batch(target, [request])[0].tokens == wanted
