"""Laws of benchmarks/widen.py: a wide target and its head compute what the small ones compute."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headstart.heads.kinds.checkpoint import load_head_for
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

ROOT = Path(__file__).resolve().parents[2]
SMALL, HEAD = ROOT / "assets/demo_target", ROOT / "assets/demo_head"
#             more of everything, with two query heads for each key head instead of one
SIZES = {"hidden_size": 240, "intermediate_size": 400, "head_dim": 64, "num_attention_heads": 10}
SIZES |= {"num_key_value_heads": 5, "num_hidden_layers": 17}
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("widen")


@pytest.fixture(scope="module")
def wide(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    script.widen(SMALL, folder, SIZES, torch.float32)
    script.widen_head(HEAD, SMALL, folder, torch.float32)
    return folder


def load(folder: Path, taps: tuple[int, ...]) -> TargetModel:
    return TargetModel.load(TargetSection(path=str(folder), dtype="float32", device="cpu"), taps, packed=False)


def test_a_wide_pair_has_the_logits_texts_and_accepted_drafts_of_the_small_pair(wide: Path) -> None:
    found = []
    for folder, place in ((SMALL, HEAD), (wide, wide / "head")):
        taps = tuple(json.loads((place / "config.json").read_text())["headstart"]["taps"])
        target = load(folder, taps)
        head = load_head_for(place, target.frozen).requires_grad_(False)
        logits = target.passes.forward(torch.tensor([PROMPT])).logits[0]
        drafter = head_drafter(head, Dynamic(3, 2, 6))
        texts = [generate(target, PROMPT, 8, Sampling(temperature), drafter) for temperature in (0.0, 1.0)]
        found.append((logits, [(text.tokens, text.stats.accepted_at_depth) for text in texts]))
    (small_logits, small_texts), (wide_logits, wide_texts) = found
    assert float((small_logits - wide_logits).abs().max()) < 1e-4 * float(small_logits.abs().max())
    assert small_texts == wide_texts
    assert sum(small_texts[0][1]) > 1


def test_a_wide_target_has_the_large_ones_sizes_and_no_idle_layer(wide: Path) -> None:
    model = load(wide, ()).model
    assert {name: getattr(model.config, name) for name in SIZES} == SIZES
    layers = [[weight for weight in layer.parameters() if weight.ndim == 2] for layer in model.model.layers]
    assert all(float((weight == 0).float().mean()) < 0.9 for layer in layers for weight in layer[:3])


def test_sizes_that_do_not_fit_are_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none may be smaller"):
        script.widen(SMALL, tmp_path, SIZES | {"hidden_size": 64})
    with pytest.raises(ValueError, match="head_dim must be a multiple"):
        script.widen(SMALL, tmp_path, SIZES | {"head_dim": 48})
