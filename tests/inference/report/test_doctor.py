"""The law of the doctor: it names each planted fault with its cost and finds nothing in a good head."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import edit_config, edit_tensors, exported, read_config, read_tensors
from matrix import slow, slow_unless
from safetensors.torch import save_file
from torch import Tensor

from headstart.inference.doctor import command as doctor
from headstart.inference.doctor.command import diagnose
from headstart.inference.doctor.findings import other_template
from headstart.recipes.other_commands import Options

ASSETS = Path(__file__).resolve().parents[3] / "assets"
TARGET, HEAD = ASSETS / "demo_target", ASSETS / "demo_head"
OPTIONS = Options(count=2, new_tokens=16, depth=2)

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Plant = Callable[[Config, Tensors], object]


@pytest.fixture(scope="module", autouse=True)
def replay_texts_once() -> Iterator[None]:
    """The demo target replays the prompts once for all tests, which examine different heads on the same texts."""
    load, replayed = cache(doctor.load_target), cache(doctor.replay)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "load_target", load)
        patch.setattr(doctor, "replay", lambda target, prompts, count: replayed(target, Prompts(prompts), count))
        yield


class Prompts(list[list[int]]):
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(str(self))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Copies the demo head without every seventh token of its vocabulary, so that it has a vocabulary map."""

    def copy(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(HEAD, folder)
        ids = torch.tensor([token for token in range(1024) if token % 7 != 3])

        def limit(tensors: Tensors) -> None:
            tensors["lm_head.weight"] = tensors["lm_head.weight"][ids]
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(1024), ids)}

        edit_tensors(folder, limit)
        edit_config(folder, lambda config: config.update(draft_vocab_size=len(ids)))
        return folder

    return copy


def plant(folder: Path, change: Plant) -> None:
    config, tensors = read_config(folder), read_tensors(folder)
    change(config, tensors)
    edit_config(folder, lambda written: (written.clear(), written.update(config)))
    save_file(tensors, folder / "model.safetensors")


def test_a_good_head_and_its_export_have_no_findings(copied, monkeypatch, typed) -> None:
    found = diagnose(copied("head"), str(TARGET), copied("export"), OPTIONS)
    assert (found.findings, found.errors) == ([], [])
    assert found.served == found.trained
    assert found.trained[0] > 0.3
    monkeypatch.setattr(doctor, "diagnose", lambda *options: found)
    ended = typed("doctor", HEAD, TARGET)
    assert ended.code == 0
    assert "nothing found" in ended.out


def name_taps(config: Config, tensors: Tensors) -> None:
    config["headstart"].pop("taps")
    config["eagle_aux_hidden_state_layer_ids"] = [3, 9, 14]


def write_ids(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def round_coarsely(config: Config, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.ndim == 2:
            step = 0.9 * tensor.std()
            tensors[name] = (tensor / step).round() * step


def overflow(config: Config, tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].half()
    tensors["fc.weight"][0, :4] = 1e6


def set_keys(**keys: Any) -> Plant:
    return lambda config, tensors: config.update(keys)


ROPE = {"rope_theta": 50.0, "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}
# The category of the finding, none if lint alone names it; what is changed in the export; where lint finds it.
FAULTS: dict[str, tuple[str | None, Plant, str | None]] = {
    "taps off by one": ("taps", name_taps, None),
    "d2t of ids": ("vocabulary map", write_ids, "tensor d2t"),
    "another rope": ("RoPE base", set_keys(**ROPE), None),
    "flag dropped": ("norm", set_keys(norm_output=False), None),
    "norm missing": (None, lambda config, tensors: tensors.pop("fc_norm.1.weight"), "tensor fc_norm.1.weight"),
    "rounded weights": ("dtype", round_coarsely, None),
    "weights overflow": (None, overflow, "tensor fc.weight"),
    "short context": (None, set_keys(max_position_embeddings=24), "max_position_embeddings"),
}
FAST = ("another rope", "rounded weights", "weights overflow")  # one of each kind; the command's test has wrong taps


@pytest.mark.parametrize("fault", slow_unless(FAST, FAULTS))
def test_a_fault_planted_in_an_export_is_named(copied: Callable[[str], Path], fault: str) -> None:
    category, change, place = FAULTS[fault]
    export = copied("export")
    plant(export, change)
    found = diagnose(copied("head"), str(TARGET), export, OPTIONS)
    assert [finding.category for finding in found.findings] == ([] if category is None else [category])
    assert place is None or any(place in error.where for error in found.errors), [str(error) for error in found.errors]


def test_a_chat_template_that_changed_since_the_harvest_is_named(tmp_path: Path) -> None:
    target, manifest = tmp_path / "target", tmp_path / "manifest.json"
    shutil.copytree(TARGET, target)
    digest = hashlib.sha256(b"None").hexdigest()  # of a missing template, as data_pipelines/prompts computes it
    manifest.write_text(json.dumps({"chat_template_sha256": digest}))
    assert [*other_template(manifest, target)] == []
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ messages }}"}))
    assert [finding.category for finding in other_template(manifest, target)] == ["template"]
    assert [*other_template(tmp_path / "none", target)] == []


@pytest.mark.parametrize(
    ("kind", "layout"), [("eagle3", "speculators"), slow(("eagle1", "vllm")), slow(("medusa", "vllm"))]
)
def test_exports_in_each_layout_draft_alike_without_findings(make_head, target_folder, tmp_path, kind, layout) -> None:
    shape = {"taps": (2, 3, 4)} if kind == "eagle3" else {}
    export = exported(make_head(kind, **shape), tmp_path, target_folder, layout)
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"tokens": [5, 7, 9]}\n')
    found = diagnose(tmp_path / "head", str(target_folder), export, Options(samples, new_tokens=24, depth=2))
    # A random head guesses nothing right, which is a finding of its own.
    assert [one for one in found.findings if one.category != "accuracy"] == [], [str(one) for one in found.findings]
    assert found.errors == []
    assert found.served == found.trained


def test_the_command_prints_a_table_and_its_exit_code_tells_if_anything_was_found(copied, typed) -> None:
    head, export = copied("head"), copied("export")
    plant(export, name_taps)
    few = ["--count", "2", "--new-tokens", "16", "--depth", "2"]
    ended = typed("doctor", head, TARGET, export, *few)
    assert ended.code == 1
    printed = ended.out
    assert "HEAD, as trained" in printed
    assert "EXPORT, as served" in printed
    assert "taps: EXPORT has [3, 9, 14]; right: HEAD was trained with [2, 8, 13]; cost: accuracy at depth 1" in printed
    assert "; fix: write the trained taps in the engine's own numbering" in printed
