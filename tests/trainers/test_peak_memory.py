"""The law of the plan: a run on a CPU takes the memory that its own plan says, one target included."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import quiet_environment

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "num_hidden_layers": 16}
LONGEST, BATCH = 256, 4
PROGRAM = """
import resource, sys
from pathlib import Path
import psutil
from headstart.data_pipelines.harvest import open_harvest
from headstart.heads.target_config import TargetConfig
from headstart.recipes import load_recipe
from headstart.trainers import train as run
from headstart.trainers.memory import RunMemory
from headstart.trainers.stages import TrainingRun
recipe = load_recipe(Path(sys.argv[1]), sys.argv[2:])
machine = TrainingRun.start(recipe, recipe.head.script).machine
planned = RunMemory.of(recipe, TargetConfig.from_folder(Path(recipe.target.path)), machine)
small = [*sys.argv[2:], f"run_dir={recipe.run_dir}-small", "target.path=assets/demo_target"]
run(load_recipe(Path(sys.argv[1]), small))
before = psutil.Process().memory_info().rss  # with all libraries
run(recipe)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(*(f"{need.what} {need.size / 2**20:.0f}" for need in planned.needs), sep=", ")
print(planned.total, peak - before)
"""


@pytest.mark.slow
def test_a_run_takes_the_memory_of_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    importlib.import_module("widen").widen(ROOT / "assets/demo_target", tmp_path / "target", SIZES, torch.float32)
    rows = torch.randint(1, 1024, (BATCH + 1, LONGEST)).tolist()
    lines = [json.dumps({"tokens": row, "loss_mask": [0] * 8 + [1] * (LONGEST - 8)}) for row in rows]
    for name, some in (("train", lines[:BATCH]), ("heldout", lines[BATCH:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some))
    overrides = {
        "run_dir": tmp_path / "run", "target.path": tmp_path / "target", "data.prompts": tmp_path / "train.jsonl",
        "data.heldout_prompts": tmp_path / "heldout.jsonl", "data.responses": "given", "data.online": "[auto]",
        "data.num_prompts": BATCH, "data.heldout_samples": 1, "data.prompt_tokens": LONGEST - 16,
        "data.response_tokens": 16, "train.steps": 2, "train.batch_size": BATCH, "train.optimizer": "adamw",
        "train.eval_prompts": 1, "decode.max_new_tokens": 8,
    }  # fmt: skip
    given = [f"{name}={value}" for name, value in overrides.items()]
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "recipes/tiny.yaml"), *given]
    # Weights that are packed for kernels may be smaller, and freed memory goes back to the system at once.
    environment = {**quiet_environment(ROOT), "CXX": "none", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    planned, taken = map(int, done.stdout.splitlines()[-1].split())
    assert taken == pytest.approx(planned, rel=0.1), done.stdout
