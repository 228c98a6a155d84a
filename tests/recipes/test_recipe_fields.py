"""Recipe fields that no other test sets reach the code that they are for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from tiny_run import tiny_recipe

from headstart.inference.report import command
from headstart.trainers.tracking import Tracker


def test_the_report_uses_as_many_cpu_threads_as_the_recipe_says(harvested, tmp_path, monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(command, "measure", None)
    folders = f"run_dir={tmp_path}", f"data.folder={harvested / 'run'}"
    with pytest.raises(TypeError):
        command.report(tiny_recipe(harvested, *folders, "report.baselines=[plain]", "report.threads=3"))
    assert counts == [3]


def test_metrics_go_to_a_wandb_project_that_the_environment_may_name(make_recipe, monkeypatch):
    settings: dict[str, Any] = {}

    def init(**given: Any) -> SimpleNamespace:
        settings.update(given)
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_PROJECT", "drafts")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Tracker(make_recipe("run"), 0, True):
        pass
    assert (settings["project"], settings["mode"]) == ("drafts", "offline")
