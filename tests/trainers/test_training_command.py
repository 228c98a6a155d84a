"""Laws of the training command, run as a process: it makes everything, and continues however it was stopped."""

import json
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bad_inputs import assert_message
from launches import ROOT, finish
from safetensors.torch import load_file
from tiny_run import build_run, contents, logged_step, quiet_environment

from headstart.heads.target_config import TargetOrigin


def start(recipe: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "trainers/eagle.py"), str(recipe), *overrides]
    environment = {**quiet_environment(ROOT), "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        command, cwd=recipe.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


EVALUATED = "train.eval_prompts=1"
LONGER = "train.steps=60", "train.checkpoint_every=5"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    finish(start(build_run(folder), *LONGER, EVALUATED))
    return folder


def copy_stages(finished: Path, run_dir: Path) -> None:
    for stage in ("prompts", "responses", "features"):
        shutil.copytree(finished / "run" / stage, run_dir / stage)


def test_one_command_makes_everything_and_running_it_again_changes_nothing(tmp_path, monkeypatch, capfd):
    recipe = build_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["eagle.py", str(recipe), EVALUATED, "train.checkpoint_every=3"])
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


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_in_the_same_head(finished: Path, tmp_path: Path) -> None:
    killed = tmp_path / "run"
    copy_stages(finished, killed)
    last, metrics = random.SystemRandom().randint(1, 45), killed / "metrics.jsonl"  # the law holds for every step
    process = start(finished / "recipe.yaml", *LONGER, f"run_dir={killed}")
    while process.poll() is None and logged_step(metrics) < last:
        time.sleep(0.001)
    time.sleep(random.SystemRandom().uniform(0, 0.1))  # every fifth step is logged
    process.kill()
    output, _ = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0), output  # 0: on a busy machine it may end before it is killed
    left = sorted(path.name for path in killed.glob("*/step-*"))
    finish(start(finished / "recipe.yaml", *LONGER, f"run_dir={killed}"))
    expected = (finished / "run/head/model.safetensors").read_bytes()
    assert (killed / "head/model.safetensors").read_bytes() == expected, f"killed after step {last} of 60, at {left}"
    assert not list(killed.glob("*/*.partial"))


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
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_after_the_current_step_and_the_same_command_continues(finished, tmp_path, number, code):
    stopped = tmp_path / "run"
    copy_stages(finished, stopped)
    options = *LONGER, f"run_dir={stopped}", "train.checkpoint_every=60"
    process = start(finished / "recipe.yaml", *options)
    while process.poll() is None and logged_step(stopped / "metrics.jsonl") < 10:
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    [left] = (stopped / "checkpoints").glob("step-*")
    assert f"{number.name}: saved after step {left.name.removeprefix('step-')} and stopped" in output
    assert "Traceback" not in output
    finish(start(finished / "recipe.yaml", *options))
    expected = (finished / "run/head/model.safetensors").read_bytes()
    assert (stopped / "head/model.safetensors").read_bytes() == expected
