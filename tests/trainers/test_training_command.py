"""Laws of the training command, run as a process: it makes everything, and continues however it was stopped."""

import json
import random
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import assert_message
from launches import ROOT, finish
from safetensors.torch import load_file
from test_machines import start_process
from tiny_run import build_run, contents, logged_step

from headstart.heads.target_config import TargetOrigin


def start(recipe: Path, *overrides: str) -> Any:
    command = [sys.executable, str(ROOT / "trainers/eagle.py"), str(recipe), *overrides]
    return start_process(command, recipe.parent, ACCELERATE_USE_CPU="true")


EVALUATED = "train.eval_prompts=1"
LONGER = "train.steps=60", "train.checkpoint_every=5"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    finish(start(build_run(folder), *LONGER, EVALUATED))
    return folder


def test_one_command_makes_everything_and_running_it_again_changes_nothing(tmp_path, monkeypatch, capfd):
    recipe = build_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["eagle.py", str(recipe), EVALUATED, "train.steps=2", "data.num_prompts=6"])
    runpy.run_path(str(ROOT / "trainers/eagle.py"), run_name="__main__")
    assert "head written to" in capfd.readouterr().out
    before = contents(tmp_path / "run")
    folders = {name.partition("/")[0] for name in before}
    assert folders == {"prompts", "responses", "features", "checkpoints", "metrics.jsonl", "head"}
    assert "head/config.json" in before
    assert load_file(tmp_path / "run/head/model.safetensors")["d2t"].shape == (80,)
    recorded = json.loads((tmp_path / "run/head/config.json").read_text())["headstart"]["target"]
    assert recorded == TargetOrigin.of(tmp_path / "target").to_config()
    assert not [name for name in before if "partial" in name]
    runpy.run_path(str(ROOT / "trainers/eagle.py"), run_name="__main__")
    assert contents(tmp_path / "run") == before
    assert "shards" not in capfd.readouterr().out  # no stage ran


@pytest.mark.parametrize(
    ("script", "head", "its_kinds", "other"),
    [("medusa", "kind: eagle3", "medusa", "eagle"), ("eagle", "kind: medusa, medusa_heads: 3", "eagle1", "medusa")],
)
def test_a_trainer_refuses_the_heads_of_another_and_names_it(tmp_path, monkeypatch, script, head, its_kinds, other):
    script, recipe = f"trainers/{script}.py", build_run(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, str(recipe), f"head={{{head}}}"])
    with pytest.raises(SystemExit) as refusal:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    start_it = f"accelerate launch trainers/{other}.py RECIPE"
    assert_message(str(refusal.value.code), f"head.kind: | given, {script} trains {its_kinds} | {start_it}")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_stopped_at_any_moment_continues_to_the_same_head(finished, tmp_path, number, code):
    """SIGTERM and SIGINT save after the current step. The law holds for every step; every fifth one is logged."""
    stopped, draw, is_kill = tmp_path / "run", random.SystemRandom(), number == signal.SIGKILL
    for stage in ("prompts", "responses", "features"):
        shutil.copytree(finished / "run" / stage, stopped / stage)
    last, every = (draw.randint(1, 45), 5) if is_kill else (10, 60)
    options = *LONGER, f"run_dir={stopped}", f"train.checkpoint_every={every}"
    process = start(finished / "recipe.yaml", *options)
    while process.poll() is None and logged_step(stopped / "metrics.jsonl") < last:
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.1) * is_kill)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    left = sorted(path.name for path in stopped.glob("*/step-*"))
    assert process.returncode == code or (is_kill and process.returncode == 0), output  # 0: it ended before
    if not is_kill:
        assert f"{number.name}: saved after step {left[0].removeprefix('step-')} and stopped" in output
        assert "Traceback" not in output
    finish(start(finished / "recipe.yaml", *options))
    expected = (finished / "run/head/model.safetensors").read_bytes()
    assert (stopped / "head/model.safetensors").read_bytes() == expected, f"stopped after step {last} of 60, at {left}"
    assert not list(stopped.glob("*/*.partial"))
