"""Laws of the dry run: sizes that cannot work are refused before the first step, and nothing is written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bad_inputs import assert_message, assert_raises
from rich.filesize import decimal
from tiny_run import modified, tiny_recipe

from headstart.data_pipelines.features.shards import FeatureStore
from headstart.heads.formats.config_rules import REFUSED
from headstart.heads.target_config import TargetConfig
from headstart.recipes import Recipe
from headstart.trainers import train as run
from headstart.trainers.memory import Machine, RunMemory
from headstart.trainers.plan import data_rows, refuse_sizes


def test_too_many_ranks_and_missing_samples_are_refused(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe("run")
    refuse_sizes(recipe, 3, 12, 4)
    with pytest.raises(ValueError, match=r"train\.batch_size: 3 given, 4 or more is allowed; raise it for 4 ranks"):
        refuse_sizes(recipe, 4, 12, 4)
    assert_raises(lambda: refuse_sizes(recipe, 1, 0, 4), "no samples to train on")
    with pytest.raises(ValueError, match=r"data\.heldout_prompts: .* given, which yields no held-out sample"):
        refuse_sizes(recipe, 1, 12, 0)


def test_a_dry_run_prints_the_plan_and_writes_nothing(make_recipe, harvested, capsys):
    recipe = make_recipe("run", "train.dry_run=true", "train.accumulate=3")
    before = modified(recipe.run_dir)
    run(recipe)
    said = " ".join(capsys.readouterr().out.split())
    assert modified(recipe.run_dir) == before
    tokens = FeatureStore(recipe.features_dir, "train").num_tokens
    assert_message(
        said,
        f"parameters of the head 17,024 fc 3,072 | tokens per epoch {tokens} 12 samples, as harvested"
        " | steps per epoch 4.0 train.batch_size 3 | 1 samples of 36 tokens, unroll 3, float32"
        " | frozen, with the final norm, in float32",
    )
    assert "float32 and float32" not in said
    run(tiny_recipe(harvested, f"run_dir={recipe.run_dir / 'new'}", "train.dry_run=true"))
    said = " ".join(capsys.readouterr().out.split())
    assert "tokens per epoch at most 432 12 samples, not harvested yet" in said
    assert not (recipe.run_dir / "new").exists()


@pytest.mark.parametrize(
    ("option", "count", "origin"),
    [
        ("train.dry_run=true", 1, "by default"),  # a message once said "given" of a format that nobody gave
        ("train.eval_prompts=0", 1, "by default"),
        ("export.format=vllm", 1, "given"),
        ("export.format=native", 0, ""),
        ("head={kind: eagle1}", 0, ""),
    ],
)
def test_engines_that_refuse_a_family_were_named_too_late(make_recipe, monkeypatch, capsys, option, count, origin):
    monkeypatch.setitem(REFUSED, "vllm", ("vLLM 0.33.0", frozenset({"llama"})))
    steps = "train.eval_prompts=0" if option == "train.eval_prompts=0" else "train.dry_run=true"
    run(make_recipe("run", "train.steps=1", steps, option))
    said = capsys.readouterr().out
    line = f"export.format: 'vllm' {origin}, but vLLM 0.33.0 starts no EAGLE-3 head for targets of type 'llama'"
    assert said.count(line) == count
    assert option != "train.eval_prompts=0" or said.index(line) < said.index("parameters on taps")


@pytest.mark.parametrize(
    ("options", "samples", "needs_disk"),
    [
        (("data.folder=/nothing", "data.num_prompts=40"), 14, True),
        (("data.folder=/nothing", "data.num_prompts=40", "data.responses=given"), 40, True),
        (("data.folder=/nothing", "data.online=[auto]"), 12, False),
        (("data.online=[auto]",), 12, False),
        (("data.folder=/nothing", "data.dtype=int8"), 12, True),  # before the harvest, 8-bit features had no plan
        (("data.folder=/nothing", "data.dtype=float8"), 12, True),
    ],
)
def test_a_plan_counts_rows_and_the_disk_of_their_features(make_recipe, harvested, options, samples, needs_disk):
    counted, disk = planned(make_recipe("run", *options))
    assert counted == f"{samples} samples, not harvested yet; lengths are unknown"
    assert (disk != "at most 0 bytes") == needs_disk


def planned(recipe: Recipe) -> tuple[str, str]:
    """How many samples a plan counts, and the disk space of their features."""
    target = TargetConfig.from_folder(Path(recipe.target.path))
    rows = data_rows(RunMemory.of(recipe, target, Machine(1, torch.device("cpu"), 10**9)))
    return rows[0][2], rows[3][1]


def test_the_store_that_the_recipe_names_is_measured(make_recipe: Callable[..., Recipe], harvested: Path) -> None:
    store = harvested / "run" / "features"
    named = planned(tiny_recipe(harvested, "run_dir=/nowhere", f"data.store={store}"))
    size = decimal(sum(path.stat().st_size for path in store.glob("*.safetensors")))
    assert named == planned(make_recipe("run")) == ("12 samples, as harvested", size)
