"""Laws of an export: a head that its engine would not serve as trained is refused, and no folder is half written."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import assert_message, assert_raises
from exported import (
    EVERY_HEAD,
    LIMITED,
    exported,
    files_in_memory,
    pretended_converter,
    read_config,
    read_tensors,
    recipe_of,
    same_bits,
)
from seeing_target import build_seeing_target
from tiny_run import contents

from headstart.common.files import write_jsonl
from headstart.heads.base import DraftHead
from headstart.heads.formats.card import acceptance_lengths
from headstart.heads.formats.export import checked_engines, export
from headstart.heads.formats.layouts import FORMATS
from headstart.heads.formats.lint import lint
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, new_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.recipes import Recipe
from headstart.recipes.schema import ExportSection
from headstart.recipes.schema_heads import Eagle3Section
from headstart.trainers import train as run

MakeHead = Callable[..., Any]
NOT_EAGLE3 = {"speculators": "EAGLE-3 of the target's width"}
ONLY_VLLM = dict.fromkeys(("sglang", "tensorrt_llm", "gguf"), "only vllm can serve") | NOT_EAGLE3
NO_BLOCK = dict.fromkeys(("tensorrt_llm", "gguf"), "only vllm, sglang can serve")
NO_EAGLE1 = NO_BLOCK | NOT_EAGLE3
SKIPS_FC = "skips fc if its input is as wide as the head"
HEADS = EVERY_HEAD | {
    "one tap": {"taps": (3,)},
    "eagle1 bias": {"kind": "eagle1", "fc_bias": True},
    "last tap": {"norm_before_residual": True, "taps": (2, 3, 7)},
}
REFUSED = {  # head -> format -> what the refusal names
    "eagle1": NO_EAGLE1,
    "eagle1 bias": NO_EAGLE1 | {"vllm": "vLLM silently drops this tensor"},
    "one tap": dict.fromkeys(("sglang", "tensorrt_llm", "speculators"), SKIPS_FC) | {"gguf": "builds fc for 3"},
    "narrow": NOT_EAGLE3,
    # SGLang has no norm before the residual and cannot capture the output of the last layer.
    "last tap": {"sglang": "norm_before_residual.*hidden_states 0 to 6 are allowed", "tensorrt_llm": "only vLLM has"},
    "3.1": {"gguf": "fc_norm: .*llama.cpp has no such norm.*norm_output"},
    "five taps": {"gguf": "builds fc for 3 hidden states"},
    "peagle": ONLY_VLLM,
    "peagle limited": ONLY_VLLM,
    "medusa": ONLY_VLLM,
    "medusa layers": ONLY_VLLM,
    "medusa limited": ONLY_VLLM | {"vllm": "vLLM refuses heads that score only some"},
    "dspark": NO_BLOCK,
    "dspark limited": NO_BLOCK,
    "dflash": NO_BLOCK,
    "jetspec": NO_BLOCK | {"sglang": "markov_rank", "speculators": "causal within the block"},
}


@pytest.fixture(autouse=True)
def converter(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    return pretended_converter(tmp_path_factory.mktemp("bin"), monkeypatch)


def test_a_gguf_export_is_what_the_converter_writes_or_nothing(head, export_as, target_folder, tmp_path, converter):
    folder = export_as(head, "gguf", "whole", dtype="bfloat16")
    given = (folder / "head.gguf").read_text().split()
    assert given[1:5] == ["--target-model-dir", str(target_folder), "--outtype", "bf16"]
    assert "--spec-type draft-eagle3" in (folder / "README.md").read_text()
    converter.write_text("#!/bin/sh\necho the pre-tokenizer was not recognized >&2\nexit 1\n")
    assert_raises(lambda: export_as(head, "gguf"), "ended with: ...the pre-tokenizer was not recognized")
    converter.unlink()
    assert_raises(lambda: export_as(head, "gguf"), "is not on the PATH | make check-llamacpp fetches it")
    assert not [*tmp_path.glob("export/*")]


@pytest.mark.parametrize("kind", HEADS)
def test_every_format_serves_a_head_as_trained_or_is_refused(make_head: MakeHead, frozen: Any, kind: str) -> None:
    head = make_head(**HEADS[kind])
    for name in FORMATS:
        reason = REFUSED.get(kind, {}).get(name)
        refused = pytest.raises(ValueError, match=f"(?s)export.format: '{name}' given.*{reason}")
        with refused if reason else nullcontext():
            checked_engines(ExportSection.model_validate({"format": name}), files_in_memory(head, name), frozen)


@pytest.mark.parametrize("name", FORMATS)
def test_every_export_passes_lint_and_never_replaces_a_folder(head, make_head, export_as, target_folder, name):
    folder = export_as(head, name)
    assert lint(folder, str(target_folder)) == []
    more = {"gguf": {"head.gguf", "custom_generate"}, "speculators": set()}.get(name, {"custom_generate"})
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"} | more
    before = contents(folder)
    assert_raises(lambda: export_as(make_head(seed=2), name), f"exists already | remove this one (rm -r {folder}")
    assert contents(folder) == before


def test_one_export_serves_three_engines_and_loads_in_headstart(make_head, export_as, target_folder, frozen):
    head = make_head(vocab=LIMITED, taps=(1, 3, 6))
    folder = export_as(head, "vllm")
    assert lint(folder, str(target_folder), ["vllm", "sglang", "tensorrt_llm"]) == []
    for name in ("native", "vllm", "sglang", "tensorrt_llm"):
        files = files_in_memory(head, name)
        assert {**read_config(folder), "headstart": files.config["headstart"]} == files.config
        assert same_bits(files.tensors, read_tensors(folder))
    assert same_bits(load_head_for(folder, frozen).state_dict(), head.state_dict())


@pytest.mark.parametrize("kind", ["eagle3", "limited", "eagle1"])
def test_projections_in_float8_are_read_as_they_were_written(make_head, export_as, target_folder, frozen, kind):
    head = make_head(**HEADS[kind])
    folder = export_as(head, "vllm", dtype="float8")
    stored, found = read_tensors(folder), load_head_for(folder, frozen).served_tensors()
    narrow = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    projections = {f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {name.split(".")[-2] for name in narrow} == projections | {"fc"}
    for name, tensor in head.served_tensors().items():
        if name not in narrow:
            assert torch.equal(found[name], tensor)
            continue
        assert torch.equal(found[name], stored[name].float() * stored[f"{name}_scale"])
        assert (found[name] - tensor).abs().max() <= tensor.abs().max() / 16  # half a step of three bits
    assert lint(folder, str(target_folder), ["vllm"]) == []
    assert [each.where for each in lint(folder, str(target_folder), ["sglang"])] == ["quantization_config"]
    config = read_config(folder)
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    assert config["headstart"]["engines"] == ["vllm"]


@pytest.mark.parametrize(
    ("kind", "name"), [("eagle3", "sglang"), ("medusa", "vllm"), ("dspark", "vllm"), ("eagle3", "native")]
)
def test_float8_is_refused_where_no_engine_is_known_to_read_it(make_head, export_as, tmp_path, kind, name):
    with pytest.raises(ValueError, match=f"(?s)(?=.*'{name}')(?=.*'float8').*export.dtype=bfloat16"):
        export_as(make_head(**HEADS[kind]), name, dtype="float8")
    assert not [*tmp_path.glob("export/*")]


@pytest.mark.parametrize(
    ("shape", "facts"),
    [
        ({"norm_before_residual": True, "taps": (2, 3, 7)}, "norm_before_residual: only vLLM has it"),
        # vLLM creates a head for each draft token that it is asked for; an extra head would have no weights.
        ({"kind": "medusa", "num_heads": 2}, '"method": "medusa" | "num_speculative_tokens": 2'),
    ],
)
def test_the_card_of_a_head_that_only_one_engine_can_serve_names_only_that_engine(make_head, export_as, shape, facts):
    folder = export_as(make_head(**shape), "vllm")
    assert read_config(folder)["headstart"]["engines"] == ["vllm"]
    assert_message((folder / "README.md").read_text(), f"vllm serve | {facts}")
    assert "sglang.launch_server" not in (folder / "README.md").read_text()


def test_the_card_told_of_the_recipe_at_export_and_not_of_the_training(make_recipe: Callable[..., Recipe]) -> None:
    run(make_recipe("run", "train.steps=1", "train.unroll=2", "train.warmup_steps=0"))
    other = "train.steps=9", "train.batch_size=7", "data.num_prompts=5", "export.format=vllm"
    text = (export(make_recipe("run", *other)) / "README.md").read_text()
    assert_message(text, "1 steps of 3 sequences | unrolled to depth 2 | prompts: 12 from")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_speculators_format_holds_a_copy_of_the_targets_embedding(make_model, make_head, tmp_path, tied):
    model = make_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "target", max_shard_size="20KB")
    folder = exported(make_head(vocab=LIMITED), tmp_path, tmp_path / "target", "speculators")
    config, tensors = read_config(folder), read_tensors(folder)
    assert torch.equal(tensors["embed_tokens.weight"], model.get_input_embeddings().state_dict()["weight"])
    verifier = {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert not any(name.startswith("midlayer") for name in tensors)


def test_weights_keep_their_dtype_or_get_the_one_that_the_recipe_asks_for(head, target_folder, tmp_path):
    save_head(head, tmp_path / "as drawn")
    in_half = FrozenTarget.from_folder(target_folder, torch.bfloat16)
    save_head(load_head_for(tmp_path / "as drawn", in_half), tmp_path / "head")
    kept = export(recipe_of(tmp_path, target_folder))
    assert same_bits(read_tensors(kept), read_tensors(tmp_path / "head"))
    half = export(recipe_of(tmp_path, target_folder, dtype="float16", format="sglang"))
    assert read_config(half)["torch_dtype"] == "float16"
    assert {tensor.dtype for tensor in read_tensors(half).values()} == {torch.float16}


def test_the_card_shows_what_training_logged_for_the_exported_weights(head, export_as, target_folder, tmp_path):
    text = (export_as(head, "native") / "README.md").read_text()
    assert "Not measured." in text
    assert "held-out figures: none found" in text
    by_depth = {f"heldout/accuracy_{depth}": depth / 10 for depth in range(4)}
    rows = [{"step": step, "heldout/loss_0": 3.0 / step, "heldout/tau": 2.0 + step, **by_depth} for step in (5, 10)]
    write_jsonl(tmp_path / "metrics.jsonl", [{**row, "train/tokens": 1000 * row["step"]} for row in rows])
    recipe = recipe_of(tmp_path, target_folder)
    assert acceptance_lengths(recipe) == {"0": 12.0}  # of step 10, the last one
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/exported.json").write_text(json.dumps({"step": 5}))
    train = recipe.train.model_copy(update={"start_from": Path("earlier/head")})
    text = (export(recipe.model_copy(update={"train": train})) / "README.md").read_text()
    assert_message(
        text,
        "after step 5: loss 0.600, accuracy by depth 0.000 0.100 0.200 0.300 | - 5,000 tokens read up to that step"
        " | acceptance length after that step, on 8 held-out prompts: 7.00 at temperature 0 | - context: 256 tokens"
        " | trained on texts of at most 2,048 tokens | - warm start: from the head in `earlier/head`",
    )
    other = recipe_of(tmp_path / "other", target_folder)
    decode = other.decode.model_copy(update={"head": tmp_path / "head"})
    text = (export(other.model_copy(update={"decode": decode})) / "README.md").read_text()
    assert "the head comes from" in text
    assert "held-out" not in text


def test_the_card_says_what_a_head_reads_at_images(head: DraftHead, target_folder: Path, tmp_path: Path) -> None:
    frozen = FrozenTarget.from_folder(build_seeing_target(tmp_path / "target"), torch.float32)
    vocab = DraftVocab.full(frozen.config.vocab_size)
    seeing = new_head(Eagle3Section(kind="eagle3"), frozen, vocab, 0)
    for each, target in ((head, target_folder), (seeing, tmp_path / "target")):
        text = (exported(each, tmp_path / each.target.model_type, target, "native") / "README.md").read_text()
        assert ("reads the embedding of the placeholder token" in text) == (each is seeing)


SERVED = ["vllm serve", "sglang.launch_server", "trtllm-serve", "SpeculativeModel.from_folders", "custom_generate="]
COMMANDS = {
    "native": SERVED,
    "vllm": SERVED,
    "speculators": ["vllm serve", "Eagle3DraftModel.from_pretrained", "headstart convert"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_card_gives_the_command_of_each_engine(head, target_folder, tmp_path, name):
    save_head(head, tmp_path / "head")
    values = recipe_of(tmp_path, target_folder, format=name).model_dump(mode="json")
    folder = export(Recipe.model_validate({**values, "target": values["target"] | {"revision": "v2"}}))
    text = (folder / "README.md").read_text()
    known = {command for commands in COMMANDS.values() for command in commands}
    assert {command for command in known if command in text} == set(COMMANDS[name])
    assert f"`hf upload ORG/NAME {folder}`" in text
    assert text.count(str(folder)) == len(COMMANDS[name]) + 1
    if name == "vllm":
        options = f'{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": 3}}'
        assert f"vllm serve {target_folder} --revision v2 --speculative-config '{options}'" in text
        assert "eagle3_layers_to_capture: [1, 2, 3]" in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_became_infinite_in_the_number_format_of_an_export(name, make_head, export_as, tmp_path):
    head = make_head()
    head.fc.weight.data[0, 0] = 1e5
    assert_raises(lambda: export_as(head, name, dtype="float16"), "fc.weight holds NaN or infinity in float16")
    assert not (tmp_path / "export").exists()


def test_a_card_for_a_gguf_file_named_it_as_base_model_and_to_engines(head, target_folder, tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setattr("headstart.heads.target_config.unpacked_folder", lambda given, field: target_folder)
    save_head(head, tmp_path / "head")
    for given in (file, tmp_path):  # a recipe refused the folder with the file, which --target takes
        text = (export(recipe_of(tmp_path, given)) / "README.md").read_text()
        shutil.rmtree(tmp_path / "export")
        assert "base_model" not in text
        assert f"vllm serve {target_folder}" in text
        assert f"SpeculativeModel.from_folders({json.dumps(str(given))}" in text


@pytest.mark.parametrize(("kind", "shape"), [("eagle3", {"norm_before_fc": True}), ("peagle", {}), ("eagle1", {})])
def test_only_heads_that_one_file_drafts_with_get_its_code(head, make_head, export_as, kind, shape):
    plain = export_as(head, "native", "plain")
    code = (plain / "custom_generate/generate.py").read_text()
    assert code == (Path(__file__).resolve().parents[2] / "examples/one_file.py").read_text()
    assert "custom_generate=" in (plain / "README.md").read_text()
    other = export_as(make_head(kind=kind, **shape), "native", "other")
    assert not (other / "custom_generate").exists()
    assert "custom_generate" not in (other / "README.md").read_text()
