"""Laws of `headstart targets`: it says of a model what loading it finds, and its table has every model type."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import make_family
from gguf_files import write_gguf
from tiny_run import build_target
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headstart.heads.target_config import locate_target
from headstart.inference.targets.loading import load_weights, refuse_encoder
from headstart.target_description import MODEL_TYPES
from headstart.targets import METHODS, Family, FamilyTable, main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("hybrid")
    make_family("qwen3_next").to(torch.bfloat16).config.save_pretrained(found)
    return found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return str(stop.value.code)


@pytest.mark.parametrize("given", ["folder", "config.json"])
def test_a_folder_without_weights_is_described(given: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, str(folder if given == "folder" else folder / given)).splitlines()
    assert lines[0].split() == ["model", "type", "qwen3_next"]
    assert f"decodes by    chains: {METHODS['chains']}" in lines


def test_a_model_type_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "gemma3_text")
    assert f"decodes by    trees: {METHODS['trees']}" in found
    assert "vLLM 0.33.0 refuses EAGLE-3 heads for this family" in found


def test_no_export_is_told_where_no_head_can_be_trained(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = FamilyTable("5", "today", {"qwen3_next": Family("chains", harvest="no: it has no final norm")})
    monkeypatch.setattr(FamilyTable, "packaged", lambda: table)
    found = printed(capsys, str(folder))
    assert "heads         cannot be trained for it: it has no final norm" in found
    assert "exports" not in found


def test_a_model_type_that_transformers_lacks_is_tried_when_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama99", "auto_map": {"AutoConfig": "own.Config"}}')
    found = printed(capsys, str(tmp_path))
    assert "decodes by    not tried" in found
    assert "target.trust_remote_code=true" in found


def test_an_unknown_name_is_refused_with_what_is_allowed_and_the_nearest(tmp_path: Path) -> None:
    said = refusal("qwen3_nxt")
    assert "NAME: 'qwen3_nxt' given, a folder with config.json, that file, a GGUF file, a hub name (org/name)" in said
    assert said.endswith("did you mean qwen3_next?")
    assert "a folder with config.json" in refusal(str(tmp_path))


def test_without_a_name_every_model_type_of_the_table_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys).splitlines()
    listed = [name for line in lines if line.startswith("  ") for name in line.strip(" ,").split(", ")]
    assert sorted(listed) == sorted(FamilyTable.packaged().families)
    assert max(map(len, lines)) <= 120


def test_the_table_has_every_model_type_of_its_transformers() -> None:
    table = FamilyTable.packaged()
    assert {family.method for family in table.families.values()} <= set(METHODS)
    if table.transformers == transformers.__version__:
        assert set(table.families) == MODEL_TYPES
    assert all(table.of(name).method == "not tried" for name in MODEL_TYPES - set(table.families))


def test_the_page_shows_the_packaged_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("target_page")
    written = (ROOT / "docs/targets.md").read_text().partition(page.MARK)[2]
    assert written == page.tables(FamilyTable.packaged())


def test_the_family_of_a_gguf_file_was_named_after_minutes_of_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    model: Any = AutoModelForCausalLM.from_pretrained(build_target(tmp_path / "target"), dtype=torch.bfloat16)
    (tmp_path / "folder").mkdir()
    file = write_gguf(model, tmp_path / "folder" / "model.gguf")
    assert printed(capsys, str(file)).split()[:3] == ["model", "type", "llama"]
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]
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
