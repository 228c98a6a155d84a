"""Run documented commands under `accelerate launch`, with CPU processes as ranks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import quiet_environment

ROOT = Path(__file__).resolve().parents[2]
LAUNCHES = ROOT / "recipes/launch"

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is an extra: pip install -e .[deepspeed]"
)


def launch(config: str, ranks: int, script: str, *arguments: object) -> subprocess.Popen[str]:
    """Launch a script with recipes/launch/CONFIG.yaml; without a GPU, the ranks are CPU processes over gloo."""
    return start_launch(config, ranks, str(ROOT / script), *arguments)


def launch_module(config: str, ranks: int, module: str, *arguments: object) -> subprocess.Popen[str]:
    return start_launch(config, ranks, "-m", module, *arguments)


def start_launch(config: str, ranks: int, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCHES / f"{config}.yaml")]
    command += ["--num_processes", str(ranks), "--main_process_port", "0", *map(str, arguments)]
    environment = {**quiet_environment(ROOT), "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=900)  # DeepSpeed compiles an operator at its first use on a machine
    assert process.returncode == 0, output
    return output
