"""Laws of the data pipeline: stages are reused, resumed or refused; stored features are what the target computes."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import ROOT
from matrix import slow
from safetensors.torch import load_file, save_file
from tiny_run import build_run, build_target, contents, modified, tiny_recipe
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from headstart.common.files import read_jsonl, write_jsonl
from headstart.data_pipelines.features.shards import FeatureStore, stored_taps
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.harvest_stages import check_teacher_logits
from headstart.data_pipelines.prompts.prompts import make_prompts
from headstart.data_pipelines.prompts.responses import journal_of
from headstart.data_pipelines.stages.stage import Stage, prompt_identities
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import head_taps
from headstart.heads.target_config import TargetConfig
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import load_tokenizer
from headstart.recipes import Recipe

TAPS = (1, 2, 3)  # the default taps of a target with 4 layers


@pytest.fixture
def copied(harvested: Path, tmp_path: Path) -> Recipe:
    shutil.copytree(harvested / "run", tmp_path / "run")
    return tiny_recipe(harvested, f"run_dir={tmp_path / 'run'}")


@pytest.mark.parametrize("complete", [True, False])
def test_a_stage_made_from_other_inputs_is_refused_with_each_difference(tmp_path: Path, complete: bool) -> None:
    stage = Stage("responses", tmp_path, {"data.num_prompts": 8, "data.response_tokens": 16, "seed": 5})
    stage.claim()
    if complete:
        stage.finish({})
    other = Stage("responses", tmp_path, {"data.num_prompts": 9, "data.response_tokens": 16, "target.dtype": "float32"})
    with pytest.raises(ValueError, match="the responses in") as refusal:
        other.is_complete()
    lines = [line.strip() for line in str(refusal.value).splitlines()]
    assert lines[1:-1] == [
        "data.num_prompts: made with 8, the recipe says 9",
        "seed: made with 5, the recipe says None",
        "target.dtype: made with None, the recipe says 'float32'",
    ]
    assert str(tmp_path) in lines[-1]  # what to remove
    assert stage.is_complete() == complete  # the folder is unchanged


def update(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("change", "stage", "named"),
    [
        (lambda target: build_target(target, seed=1), "prompts", "the target's config and weights"),
        (lambda target: (target / "chat_template.jinja").write_text("<{{ messages }}>"), "prompts", "chat template"),
        (lambda target: update(target / "generation_config.json", eos_token_id=[0]), "responses", "config.json"),
    ],
)
def test_a_target_changed_in_place_is_noticed_and_the_remedy_works(harvested, copied, tmp_path, change, stage, named):
    run, target = copied.run_dir, shutil.copytree(harvested / "target", tmp_path / "target")
    for name in ("checkpoints", "head", "report"):
        (run / name).mkdir()
    recipe = tiny_recipe(harvested, f"run_dir={run}", f"target.path={target}")
    change(target)
    with pytest.raises(ValueError, match=f"the {stage} in") as refusal:
        harvest(recipe)
    assert f"{named}: the content has changed" in str(refusal.value)
    stages = ["prompts", "responses", "features"]
    folders = [*stages[stages.index(stage) :], "checkpoints", "head", "report"]
    remedy = str(refusal.value).rpartition(": ")[2]
    assert remedy == "rm -r " + " ".join(str(run / name) for name in folders)
    subprocess.run(shlex.split(remedy), check=True)
    assert not any((run / name).exists() for name in folders)
    if stage == "responses":  # else as much again is made
        harvest(recipe)


def test_a_target_moved_or_saved_offline_or_with_its_template_elsewhere_is_the_same(harvested, copied, tmp_path):
    target, before = shutil.copytree(harvested / "target", tmp_path / "renamed"), modified(copied.run_dir)
    harvest(tiny_recipe(harvested, f"run_dir={copied.run_dir}", f"target.path={target}"))
    assert modified(copied.run_dir) == before
    settings, template = target / "tokenizer_config.json", target / "chat_template.jinja"
    known = prompt_identities(target)
    update(settings, chat_template=template.read_text())
    template.unlink()
    assert prompt_identities(target) == known
    for local in (True, False):
        update(settings, is_local=local, local_files_only=local)
        assert prompt_identities(target) == known
    update(settings, unk_token="another")
    assert prompt_identities(target) != known


def test_changed_weights_are_noticed_for_given_responses_too(tmp_path: Path) -> None:
    build_run(tmp_path)
    for name in ("prompts", "heldout"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {number}"} for number in range(6)])
    recipe = tiny_recipe(tmp_path, "data.responses=given")
    harvest(recipe)
    build_target(tmp_path / "target", seed=1)
    shutil.rmtree(tmp_path / "run" / "prompts")
    with pytest.raises(ValueError, match=r"the features in (.|\n)*config and weights: the content has changed"):
        harvest(recipe)


def test_a_row_that_was_mended_needs_no_other_run_dir(harvested: Path, tmp_path: Path) -> None:
    good, path = (harvested / "prompts.jsonl").read_text(), tmp_path / "prompts.jsonl"
    path.write_text('{"text": 5}\n' + good)
    recipe = tiny_recipe(harvested, f"run_dir={tmp_path}", f"data.prompts={path}")
    with pytest.raises(ValueError, match="text is a number"):
        make_prompts(recipe)
    [report, _] = json.loads((recipe.prompts_dir / "rows.json").read_text())
    assert [row["line"] for row in report["left_out"]] == [1]
    path.write_text(good)
    assert make_prompts(recipe).facts()["train"] == 12


def reopen(stage_folder: Path) -> None:
    path = stage_folder / "stage.json"
    stage = json.loads(path.read_text())
    path.write_text(json.dumps({"inputs": stage["inputs"], "complete": False}, indent=1))


def kill_while_writing_responses(recipe: Recipe) -> None:
    reopen(recipe.responses_dir)
    path = recipe.responses_dir / "train-00001.jsonl"
    journal_of(path).write_text("".join(path.read_text().splitlines(keepends=True)[:3]) + '{"id": ')
    path.rename(path.with_name("train-00001.jsonl.partial"))
    (recipe.responses_dir / "heldout-00000.jsonl").unlink()
    shutil.rmtree(recipe.features_dir)


def kill_while_writing_features(recipe: Recipe) -> None:
    reopen(recipe.features_dir)
    (recipe.features_dir / "manifest.json").unlink()
    (recipe.features_dir / "train-00002.safetensors").unlink()
    (recipe.features_dir / "train-00001.safetensors").unlink()
    (recipe.features_dir / "train-00001.safetensors.partial").write_bytes(b"half a shard")


def lose_the_stage_file(recipe: Recipe) -> None:
    (recipe.features_dir / "stage.json").unlink()
    (recipe.features_dir / "heldout-00000.safetensors").unlink()


@pytest.mark.parametrize("kill", [kill_while_writing_responses, kill_while_writing_features, lose_the_stage_file])
def test_a_killed_harvest_resumes_to_the_same_bytes(harvested, copied, kill):
    kill(copied)
    survivors = modified(copied.features_dir) if copied.features_dir.exists() else {}
    harvest(copied)
    assert contents(copied.run_dir) == contents(harvested / "run")
    now = modified(copied.features_dir)
    assert all(now[name] == time for name, time in survivors.items() if name.endswith(".safetensors"))


def test_features_are_those_that_the_target_computes_for_each_sample_alone(harvested: Path, tmp_path: Path) -> None:
    """Responses and features come from padded batches; the padding changes nothing."""
    recipe = tiny_recipe(harvested, f"run_dir={tmp_path}", "data.prompt_tokens=40")  # which cuts fewer to one length
    harvest(recipe)
    model = AutoModelForCausalLM.from_pretrained(harvested / "target", dtype=torch.float32)
    frozen = FrozenTarget.from_folder(harvested / "target", torch.float32)
    seen = 0
    for split in ("train", "heldout"):
        store = FeatureStore(recipe.features_dir, split)
        lengths = {len(store[number].tokens) for number in range(len(store))}
        assert len(lengths) > 2  # otherwise the batches had no padding
        for sample in (store[number] for number in range(len(store))):
            with torch.no_grad():
                output = model(sample.tokens.unsqueeze(0), output_hidden_states=True)
                normed = model.model.norm(sample.last_hidden)
            taps = torch.cat([output.hidden_states[tap][0] for tap in TAPS], dim=-1)
            assert_close(sample.taps, taps, rtol=1e-4, atol=1e-4)
            assert_close(normed, output.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
            assert_close(frozen.logits(sample.last_hidden), output.logits[0], rtol=1e-4, atol=1e-4)
            seen += 1
    assert seen == recipe.data.num_prompts + recipe.data.heldout_samples


def test_the_loss_mask_is_exactly_the_response_whose_tokens_are_counted(harvested: Path) -> None:
    recipe = tiny_recipe(harvested)
    for split in ("train", "heldout"):
        paths = sorted(recipe.responses_dir.glob(f"{split}-*.jsonl"))
        rows = [row for path in paths for row in read_jsonl(path)]
        store = FeatureStore(recipe.features_dir, split)
        assert len(store) == len(rows)
        assert [row["id"] for row in rows] == list(range(len(rows)))
        for number, row in enumerate(rows):
            sample, prompt = store[number], len(row["prompt"])
            assert prompt
            assert sample.tokens.tolist() == row["prompt"] + row["response"]
            assert sample.loss_mask.tolist() == [place >= prompt for place in range(len(sample.tokens))]
        written = [token for row in rows for token in row["response"]]
        assert store.token_counts(300).tolist() == [written.count(token) for token in range(300)]


@pytest.mark.parametrize("head", ["head={kind: eagle1}", "head.taps=[1, 3]", "head.taps=[2, 4]"])
def test_one_store_serves_heads_with_different_taps(harvested: Path, tmp_path: Path, head: str) -> None:
    """The store holds taps 1, 2, 3 and the last state. eagle1 reads the last; others read some of 1, 2, 3."""
    before = modified(harvested)
    other = tiny_recipe(harvested, f"run_dir={tmp_path}", f"data.folder={harvested / 'run'}", head)
    assert harvest(other).folder == harvested / "run" / "features"
    assert modified(harvested) == before
    config = TargetConfig.from_folder(harvested / "target")
    taps = stored_taps(head_taps(other.head, config), config.num_layers)
    assert set(taps) < set(TAPS)
    whole, part = FeatureStore(other.features_dir, "train"), FeatureStore(other.features_dir, "train", taps)
    for number in range(len(whole)):
        states = whole[number].taps.unflatten(-1, (len(TAPS), -1))
        assert part[number].taps.equal(states[:, [TAPS.index(tap) for tap in taps]].flatten(1))
        assert part[number].last_hidden.equal(whole[number].last_hidden)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: save_file(load_file(path), path, {"made_from": "another run"}), "of another run.*'another run'"),
        (lambda path: os.truncate(path, path.stat().st_size - 7), "cannot be read"),
    ],
)
def test_a_resumed_harvest_refuses_a_bad_shard(copied: Recipe, damage: Callable[[Path], None], why: str) -> None:
    kill_while_writing_features(copied)
    damage(copied.features_dir / "train-00000.safetensors")
    with pytest.raises(ValueError, match=rf"train-00000\.safetensors.*{why}"):
        harvest(copied)


@pytest.mark.parametrize(
    ("line", "why"),
    [(b'{"prompt": "cut', "not JSON"), (b"[1, 2]", "list"), (b'"text"', "str"), (b'{"prompt": "\xff"}', "not JSON")],
)
def test_a_broken_line_in_our_own_files_is_refused_with_its_number(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n\n{"prompt": "too"}\n' + line + b'\n{"prompt": "never reached"}\n')
    with pytest.raises(ValueError, match=rf"prompts\.jsonl line 4 is .*{why}"):
        list(read_jsonl(path))


@pytest.mark.parametrize("count", [768, slow(8192)])
def test_the_demo_prompts_are_whole_and_none_is_held_out(count: int) -> None:
    demo = ROOT / "assets/demo_target"
    template = ChatTemplate(load_tokenizer(demo))
    rows = list(read_jsonl(demo / f"prompts_{count}.jsonl"))
    texts = template.tokenizer([row["text"] for row in rows if "text" in row], verbose=False)["input_ids"]
    prompts = [tuple(tokens) for tokens in texts + [row["tokens"] for row in rows if "tokens" in row]]
    held_out = {tuple(template.encode_text(row["prompt"])) for row in read_jsonl(demo / "heldout_prompts.jsonl")}
    assert [len(prompt) for prompt in prompts] == [64] * count
    assert held_out.isdisjoint(prompts)


def test_a_target_that_scales_the_logits_of_its_lm_head_is_refused(harvested: Path) -> None:
    recipe = tiny_recipe(harvested)
    target = TargetModel.load(recipe.target, taps=())
    check_teacher_logits(recipe, target, [1, 2, 3])
    target.model.lm_head.register_forward_hook(lambda module, args, logits: logits * 3 + 1)
    with pytest.raises(ValueError, match=r"target\.path: the logits of .* differ by"):
        check_teacher_logits(recipe, target, [1, 2, 3])
