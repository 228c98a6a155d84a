"""Recipe fields that no other test sets reach the code that they are for."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from tiny_run import tiny_recipe

from headstart.data_pipelines.features.shards import FeatureStore
from headstart.inference.report.command import report
from headstart.inference.targets.attention import GROUPED
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.trainers import run
from headstart.trainers.loop import SampleOrder
from headstart.trainers.tracking import Tracker


def test_the_target_is_loaded_with_the_recipes_attention(harvested: Path) -> None:
    loaded = [
        TargetModel.load(tiny_recipe(harvested, *overrides).target, ())
        for overrides in ((), ("target.attention=eager",), ("target.attention=sdpa",))
    ]
    assert [target.model.config._attn_implementation for target in loaded] == [GROUPED, "eager", "sdpa"]


def test_the_report_uses_as_many_cpu_threads_as_the_recipe_says(
    harvested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    small = "report.num_prompts=1", "report.temperatures=[0]", "report.baselines=[plain]"
    folders = f"run_dir={tmp_path}", f"data.folder={harvested / 'run'}"
    report(tiny_recipe(harvested, *folders, *small, "report.threads=3"))
    assert counts == [3]


def test_metrics_go_to_a_wandb_project_that_the_environment_may_name(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {}

    def init(**given: Any) -> SimpleNamespace:
        settings.update(given)
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_PROJECT", "drafts")
    with Tracker(make_recipe("run", "log.wandb=offline"), 0, True):
        pass
    assert (settings["project"], settings["mode"]) == ("drafts", "offline")


def test_training_announces_each_sample_once_an_epoch_in_its_order(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of 5, 5 and 2 samples: an epoch is 4 steps of 3 samples."""
    announced: list[int] = []

    def expect(store: FeatureStore, batches: Sequence[Sequence[int]], limit: int | None = None) -> None:
        announced.extend(chain(*batches) if len(store) == 12 else [])  # the held-out store has 4 samples

    monkeypatch.setattr(FeatureStore, "expect", expect)
    recipe = make_recipe("run", "train.steps=4")
    run(recipe)
    store = FeatureStore(recipe.features_dir, "train")
    assert sorted(announced) == list(range(12))
    order = SampleOrder(store.shard_sizes, recipe.seed)
    assert announced == [number for step in range(4) for number in order.of_step(step, recipe.train.batch_size)]
