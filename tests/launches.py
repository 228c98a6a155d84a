"""Commands under `accelerate launch`, as the documentation gives them, on ranks that are processes of the CPU."""

import subprocess
import sys
from pathlib import Path

from tiny_run import quiet_environment

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES = ROOT / "recipes/launch"


def launch(way: str, ranks: int, script: str, *arguments: object) -> subprocess.Popen[str]:
    """The documented command; where there is no GPU, the same file means processes over gloo."""
    return start_launch(way, ranks, str(ROOT / script), *arguments)


def launch_module(way: str, ranks: int, module: str, *arguments: object) -> subprocess.Popen[str]:
    return start_launch(way, ranks, "-m", module, *arguments)


def start_launch(way: str, ranks: int, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCHES / f"{way}.yaml")]
    command += ["--num_processes", str(ranks), "--main_process_port", "0", *map(str, arguments)]
    environment = {**quiet_environment(ROOT), "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=900)  # the first DeepSpeed of a machine compiles an operator
    assert process.returncode == 0, output
    return output
