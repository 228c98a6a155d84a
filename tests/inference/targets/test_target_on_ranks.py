"""Laws of targets that ranks hold together: split by tensor parallelism, they give what one process gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from launches import finish, launch, launch_module
from tiny_run import assert_same_sample, tiny_recipe
from transformers import GPT2Config, LlamaConfig

from headstart.data_pipelines.features.features import tap
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.features.store import verify
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import draft_vocab, new_head, save_head
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.ranks import refuse_split
from headstart.recipes.schema import TargetSection
from headstart.trainers.parallel.launch import refuse_lone_decoding

TENSOR = "target.split=tensor"


def assert_same_harvest(found: Path, expected: Path) -> None:
    names = sorted(path.name for path in (expected / "responses").glob("*.jsonl"))
    assert {path.name for path in (found / "responses").iterdir()} == {*names, "stage.json"}
    for name in names:
        assert (found / "responses" / name).read_text() == (expected / "responses" / name).read_text()
    assert not verify(found / "features")
    for split in ("train", "heldout"):
        mine, its = (FeatureStore(folder / "features", split) for folder in (found, expected))
        assert len(mine) == len(its)
        for number in range(len(its)):
            assert_same_sample(mine[number], its[number])


@pytest.mark.slow
def test_ranks_that_share_a_target_harvest_what_one_process_harvests(harvested: Path, tmp_path: Path) -> None:
    """Responses too, although the number of decode steps differs from rank to rank."""
    finish(launch_module("ddp", 2, "data_pipelines.harvest", harvested / "recipe.yaml", TENSOR, f"run_dir={tmp_path}"))
    assert_same_harvest(tmp_path, harvested / "run")


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["dynamic", "cost_aware"])
def test_drafting_with_a_head_for_a_shared_target_leaves_its_text_the_same(harvested, tmp_path, growth) -> None:
    """Where growth weighs step times, those of rank 0 decide: by clocks of their own, ranks would wait for ever."""
    recipe = tiny_recipe(harvested)
    frozen = FrozenTarget.from_folder(harvested / "target", torch.float32)
    vocab = draft_vocab(recipe.head, FeatureStore(recipe.features_dir, "train").token_counts(300))
    save_head(new_head(recipe.head, frozen, vocab, 0), tmp_path / "head")
    more = TENSOR, f"data.draft_head={tmp_path / 'head'}", f"decode.growth={growth}", f"run_dir={tmp_path}"
    finish(launch_module("ddp", 2, "data_pipelines.harvest", harvested / "recipe.yaml", *more))
    assert_same_harvest(tmp_path, harvested / "run")


@pytest.mark.slow
def test_every_family_has_the_same_states_and_text_on_ranks_as_alone(tmp_path: Path) -> None:
    """Each rank holds half of the weights. Families without a tensor-parallel plan in transformers are refused."""
    models = {name: make() for name, make in FAMILIES.items() if name != "int8"}
    for name, model in models.items():
        model.save_pretrained(tmp_path / "models" / name)
    result = tmp_path / "errors.json"
    finish(launch("ddp", 2, "tests/support/families_on_ranks.py", tmp_path / "models", result))
    planless = {name for name, model in models.items() if model.config.base_model_tp_plan is None}
    assert len(planless) < len(models) / 2
    errors, shares = json.loads(result.read_text()).values()
    assert shares == [[pytest.approx(0.5, abs=0.02)] * 2] * 2
    assert errors.keys() == models.keys()
    for name, error in errors.items():
        if name in planless:
            assert "refused: target.split: tensor given, transformers has no plan" in error
        else:
            assert isinstance(error, float), f"{name}: {error}"
            assert error < 1e-5, name


def test_one_process_loads_a_target_meant_for_ranks_whole(target_folder: Path) -> None:
    section = TargetSection(path=str(target_folder), dtype="float32", device="cpu")
    sections = section.model_copy(update={"split": "tensor"}), section
    shared, alone = (TargetModel.load(each, (1,)) for each in sections)
    found = list[Any]()
    shared.ranks.carry_out(lambda texts: tap(shared, texts), lambda ask: found.append(ask([[5, 6, 7]])))
    assert found[0].taps.equal(tap(alone, [[5, 6, 7]]).taps)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 2, 4), (4, 4, 3), (6, 3, 2)])
def test_attention_heads_that_ranks_cannot_share_evenly_are_refused(heads: int, kv_heads: int, ranks: int) -> None:
    config = LlamaConfig(hidden_size=heads * 8, num_attention_heads=heads, num_key_value_heads=kv_heads)
    refuse_split(config, 1)
    with pytest.raises(ValueError, match=rf"target\.split: tensor given, {ranks} ranks cannot share {heads} attention"):
        refuse_split(config, ranks)


def test_a_family_without_a_plan_and_decoding_on_the_main_rank_alone_are_refused(make_recipe) -> None:
    with pytest.raises(ValueError, match=r"no plan for a 'gpt2' model; choose layers"):
        refuse_split(GPT2Config(), 2)
    recipe = make_recipe("run", "target.split=tensor", "train.eval_prompts=2")
    refuse_lone_decoding(recipe, 1)
    refuse_lone_decoding(make_recipe("run", "target.split=tensor"), 2)
    message = r"train\.eval_prompts: 2 given, only 0 with target\.split tensor on 2 ranks is allowed"
    with pytest.raises(ValueError, match=message):
        refuse_lone_decoding(recipe, 2)
