"""Laws of target.adapter: the target is its base with the LoRA merged in as peft does it, and counts as another."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from server_run import running
from tiny_run import build_run, build_target, contents, tiny_recipe
from transformers import AutoModelForCausalLM

from headstart import SpeculativeModel
from headstart.data_pipelines.features.store import existing_store
from headstart.heads import target_config
from headstart.heads.files import HeadFiles
from headstart.heads.target_config import folder_of, locate_target, made_once
from headstart.inference.doctor.findings import other_target
from headstart.inference.serve.command import load
from headstart.inference.serve.options import serve_options
from headstart.inference.targets.loading import merge_adapter
from headstart.recipes import Recipe
from headstart.trainers import train as run


def write_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """A random LoRA adapter of a model, strong enough to change its texts."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], **settings})
    config.init_lora_weights = False
    with torch.random.fork_rng():
        torch.manual_seed(4)
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run, whose recipe does not name the adapter of its target beside it."""
    folder = tmp_path_factory.mktemp("run")
    build_run(folder)
    write_adapter(folder / "target", folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def adapted(run_folder: Path) -> Recipe:
    return tiny_recipe(run_folder, f"target.adapter={run_folder / 'adapter'}", "train.steps=2", "train.warmup_steps=0")


@pytest.fixture(scope="module", autouse=True)
def _merged_in_this_process() -> Iterator[None]:
    """A process of its own takes seconds to import; a slow test has one."""

    def merge(folder: Path, field: str, module: str, paths: list[Path], making: str) -> Path:
        if not folder.is_dir():
            merge_adapter(paths[0], paths[1], folder)
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_config, "made_once", merge)
        yield


def test_texts_of_a_target_with_an_adapter_are_those_of_pefts_merged_model_alone_and_served(run_folder: Path) -> None:
    base, adapter = run_folder / "target", run_folder / "adapter"
    own: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(own, adapter).merge_and_unload()
    prompt = torch.tensor([[60, 61, 62, 70]])
    expected = merged.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    fields: list[tuple[dict[str, Any], bool]] = [({"adapter": adapter}, True), ({}, False)]
    for named, is_same in fields:
        model = SpeculativeModel.from_folders(base, dtype="float32", **named)
        text: Any = model.generate(prompt, max_new_tokens=8)
        assert (text[0].tolist() == expected) == is_same
    command = ["--target", str(base), "--adapter", str(adapter), "--dtype", "float32", "--always-draft"]
    options = serve_options(None, command)
    with running(load(options, ThreadPoolExecutor(1)), options.settings) as server:
        body = {"prompt": prompt[0].tolist(), "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        (answer,) = server.http.post("/v1/completions", json=body).json()["choices"]
        assert answer["token_ids"] == expected[prompt.shape[1] :]


@pytest.mark.slow
def test_an_adapter_is_merged_alike_in_a_process_of_its_own(run_folder: Path) -> None:
    target, adapter = run_folder / "target", run_folder / "adapter"
    merge_adapter(target, adapter, run_folder / "here")
    paths = [target, adapter, run_folder / "there"]
    made_once(run_folder / "there", "target.adapter", "loading", paths, "merging")
    assert contents(run_folder / "there") == contents(run_folder / "here")


def test_a_store_and_a_head_name_the_adapter_and_are_refused_or_named_without_it(run_folder, adapted) -> None:
    bare = folder_of(adapted.target.model_copy(update={"adapter": None}))
    run(adapted)
    store = tiny_recipe(run_folder, f"data.store={adapted.features_dir}")
    with pytest.raises(ValueError, match=rf"was made with other weights .*with the LoRA adapter {run_folder}/adapter"):
        existing_store(store, adapted.features_dir, (0,))
    (finding,) = other_target(HeadFiles.read(adapted.head_dir), bare)
    assert f"with the LoRA adapter {run_folder}/adapter" in finding.right
    assert not list(other_target(HeadFiles.read(adapted.head_dir), folder_of(adapted.target)))


def test_a_dry_run_reads_sizes_without_merging(run_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(target_config, "made_once", lambda *arguments: pytest.fail("merged"))
    target, adapter = run_folder / "target", run_folder / "adapter"
    assert locate_target(str(target), files=["config.json"], adapter=adapter) == target
    run(tiny_recipe(run_folder, f"target.adapter={adapter}", "train.dry_run=true", f"run_dir={tmp_path}"))


def pickled(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


def of_another_kind(adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))


BROKEN = [
    (lambda adapter: shutil.rmtree(adapter), "has no adapter_config.json"),
    (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors; .*copy it again"),
    (pickled, "adapter_model.bin, a pickle, which can run code"),
    (of_another_kind, "peft_type 'IA3'; LORA is allowed"),
]


@pytest.mark.parametrize(("damage", "named"), BROKEN)
def test_files_that_are_no_adapter_are_named(run_folder, tmp_path, damage, named) -> None:
    adapter = Path(shutil.copytree(run_folder / "adapter", tmp_path / "adapter"))
    damage(adapter)
    with pytest.raises(ValueError, match=rf"target.adapter: {adapter} given, .*{named}"):
        locate_target(str(run_folder / "target"), adapter=adapter)


def test_an_adapter_of_another_size_of_other_modules_or_with_missing_tensors_is_named(run_folder, tmp_path) -> None:
    base, wide = run_folder / "target", build_target(tmp_path / "wide", hidden_size=48)
    larger = write_adapter(wide, tmp_path / "larger")
    partial = Path(shutil.copytree(run_folder / "adapter", tmp_path / "partial"))
    tensors = load_file(partial / "adapter_model.safetensors")
    tensors.pop(lost := next(iter(tensors)))
    save_file(tensors, partial / "adapter_model.safetensors")
    other = Path(shutil.copytree(run_folder / "adapter", tmp_path / "other"))
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["Wqkv"]}))
    for adapter, named in ((larger, "size mismatch"), (partial, lost), (other, "Wqkv")):
        with pytest.raises(ValueError, match=f"{adapter} given for {base}.*{named}"):
            merge_adapter(base, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
