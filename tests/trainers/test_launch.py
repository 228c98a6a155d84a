"""Laws of launches: training is the same on any number of ranks and under any kind of parallelism."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin
from launches import LAUNCHES, finish, launch, needs_deepspeed
from rank_steps import CLIP_NORM
from safetensors.torch import load_file
from tiny_run import contents, logged_step
from torch import Tensor
from torch.testing import assert_close

from headstart.recipes.command_line import Share, harvest_arguments
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.parallel.launch import refuse_deepspeed, refuse_muon

CONFIGS = [
    pytest.param(name, ranks, marks=[needs_deepspeed] if "zero" in name else [])
    for name in ("ddp", "fsdp2", "zero2", "zero3")
    for ranks in (1, 2)
]


@pytest.mark.parametrize(
    ("config_name", "kind"),
    [("one", "NO"), ("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("zero2", "DEEPSPEED"), ("zero3", "DEEPSPEED")],
)
def test_a_launch_file_chooses_the_parallelism_and_nothing_that_a_recipe_sets(config_name: str, kind: str) -> None:
    # It raises ValueError for keys that accelerate ignores.
    config = load_config_from_file(str(LAUNCHES / f"{config_name}.yaml"))
    assert config.distributed_type == kind
    assert config.num_processes == (1 if config_name == "one" else -1)  # -1: accelerate asks for --num_processes
    assert config.mixed_precision == "no"
    assert config.fsdp_config.get("fsdp_version") == (2 if config_name == "fsdp2" else None)
    assert config.deepspeed_config.get("zero_stage") == {"zero2": 2, "zero3": 3}.get(config_name)
    assert not config.deepspeed_config.keys() & {"gradient_clipping", "gradient_accumulation_steps"}


def test_the_slurm_script_starts_one_launcher_on_each_machine(tmp_path: Path) -> None:
    stubs = {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "accelerate": 'echo "$@"',
    }
    slurm = {"JOB_NODELIST": "node[7-8]", "JOB_ID": "123456", "NNODES": "2", "GPUS_ON_NODE": "8"}
    script = [LAUNCHES / "slurm.sh", "ddp", "trainers/eagle.py", "recipes/tiny.yaml", "head.taps=[1, 2]"]
    printed = run_with_stubs(tmp_path, stubs, script, {f"SLURM_{name}": value for name, value in slurm.items()})
    shared = "launch --config_file recipes/launch/ddp.yaml --num_machines 2 --machine_rank {} --num_processes 16"
    rest = "--main_process_ip node7 --main_process_port 23456 trainers/eagle.py recipes/tiny.yaml head.taps=[1, 2]"
    assert printed.splitlines() == [f"{shared.format(rank)} {rest}" for rank in (0, 1)]


def run_with_stubs(folder: Path, stubs: dict[str, str], command: Sequence[object], variables: dict[str, str]) -> str:
    for name, body in stubs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=True).stdout


OVERRIDES = "recipes/tiny.yaml", "head.taps=[1, 2]"


@pytest.mark.parametrize("launcher", ["a SLURM array", "an Indexed Job"])
def test_each_job_makes_the_part_of_its_number(launcher: str, tmp_path: Path) -> None:
    stubs = {"srun": '"$@"', "headstart": 'printf "%s|" "$@"'}
    if launcher == "a SLURM array":
        command, variables = [LAUNCHES / "slurm_array.sh", "64", *OVERRIDES], {"SLURM_ARRAY_TASK_ID": "3"}
    else:
        job = yaml.safe_load((LAUNCHES / "harvest_job.yaml").read_text())["spec"]
        [container] = job["template"]["spec"]["containers"]
        program, name, *arguments = container["args"]
        assert arguments[0].startswith("recipes/")
        assert job["completions"] == job["parallelism"] == 64
        command = [*container["command"], program, name, *OVERRIDES]
        variables = {"JOB_COMPLETION_INDEX": "2"}
    typed = run_with_stubs(tmp_path, stubs, command, variables).split("|")[:-1]
    assert typed == ["harvest", *OVERRIDES, "--part", "3/64"]
    assert harvest_arguments("", typed[1:])[1] == Share(3, 64)


def test_muon_is_refused_where_ranks_hold_slices_and_untested_deepspeed_settings_everywhere() -> None:
    refuse_muon(TrainSection(steps=1), "FSDP2")
    with pytest.raises(ValueError, match=r"train\.optimizer: muon given, only adamw is allowed; FSDP2 slices"):
        refuse_muon(TrainSection(steps=1, optimizer="muon"), "FSDP2")
    refuse_deepspeed(DeepSpeedPlugin(zero_stage=3))
    asked: list[dict[str, Any]] = [{"zero_stage": 1}, {"zero_stage": 3, "offload_optimizer_device": "cpu"}]
    for settings in asked:
        with pytest.raises(ValueError, match=r"DeepSpeed for stage \d, offloading to .*zero2\.yaml or zero3\.yaml"):
            refuse_deepspeed(DeepSpeedPlugin(**settings))


@pytest.fixture(scope="module")
def one_process(harvested: Path) -> dict[str, Tensor]:
    found = steps_of(harvested, "one", 1, harvested / "one.safetensors")
    norms = [float(found[f"norm.{step}"]) for step in range(4)]
    assert min(norms) < CLIP_NORM < max(norms)  # some gradients are clipped, others are not
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], most: float = 1e-5) -> None:
    """Equal to 1e-5 of each tensor's largest entry: ranks add up in another order, and float32 has 7 digits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max() / tensor.abs().max())
        assert error < most, f"{name}: {error:.1e}"


def steps_of(folder: Path, config_name: str, ranks: int, result: Path) -> dict[str, Tensor]:
    finish(launch(config_name, ranks, "tests/support/rank_steps.py", folder, result))
    return load_file(result)


@pytest.mark.slow
@pytest.mark.parametrize(("config_name", "ranks"), [*CONFIGS, pytest.param("fsdp2", 4, id="HSDP: two machines of two")])
def test_every_launch_takes_the_same_steps(harvested, one_process, tmp_path, monkeypatch, config_name, ranks):
    """Loss, gradient, gradient norm, weights and optimizer state agree, tensor by tensor."""
    if ranks == 4:  # each machine has all slices of the head
        monkeypatch.setenv("RANKS_OF_A_MACHINE", "2")
    assert_same(steps_of(harvested, config_name, ranks, tmp_path / "result.safetensors"), one_process)


@pytest.mark.slow
def test_a_block_head_takes_the_same_steps_under_every_launch(harvested: Path, tmp_path: Path) -> None:
    """The blocks that are drawn from a text do not depend on the rank that reads it."""
    values = yaml.safe_load((harvested / "recipe.yaml").read_text())
    values["head"] = {"kind": "block", "block_size": 3, "markov_rank": 6, "taps": [1, 2, 3]}
    values["train"] |= {"anchors": 3}
    folder = tmp_path / "block"
    shutil.copytree(harvested / "target", folder / "target")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    configs = ("one", 1), ("ddp", 2), ("fsdp2", 2)
    one, *others = (steps_of(folder, name, ranks, tmp_path / f"{name}.safetensors") for name, ranks in configs)
    for other in others:
        assert_same(other, one)


@pytest.mark.slow
@needs_deepspeed
def test_bfloat16_takes_the_same_steps_under_every_launch(harvested, one_process, tmp_path):
    """DeepSpeed allowed float32 only. Loss and gradient of the first step agree up to the rounding of bfloat16, and
    weights, gradients and optimizer state are in float32."""
    values = yaml.safe_load((harvested / "recipe.yaml").read_text())
    values["train"] |= {"precision": "bfloat16"}
    (tmp_path / "target").symlink_to(harvested / "target")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    names = "ddp", "fsdp2", "zero2", "zero3"
    found = {name: steps_of(tmp_path, name, 2, tmp_path / f"{name}.safetensors") for name in names}
    assert {tensor.dtype for each in found.values() for tensor in each.values()} == {torch.float32}
    first = {name: tensor for name, tensor in found["ddp"].items() if re.match(r"(loss|gradient)\.0\b", name)}
    assert all(not torch.equal(tensor, one_process[name]) for name, tensor in first.items())  # it is in effect
    for config_name in ("fsdp2", "zero2", "zero3"):
        assert_same({name: found[config_name][name] for name in first}, first, most=2**-7)


LONGER = "train.steps=40", "train.checkpoint_every=2", "train.eval_prompts=1"


def kill_after_step(process: subprocess.Popen[str], metrics: Path, step: int) -> None:
    """Kill the launcher and all its ranks with SIGKILL once the log holds `step` steps."""
    deadline = time.monotonic() + 900
    while process.poll() is None and logged_step(metrics) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached: the ranks are waiting for each other"
        time.sleep(0.05)
    if process.poll() is None:
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            each.kill()
    output, _ = process.communicate()
    assert metrics.exists(), output


@pytest.mark.slow
@needs_deepspeed
def test_a_run_continues_under_any_other_launch_and_ends_in_the_same_head(harvested: Path, tmp_path: Path) -> None:
    """Two ranks of one launch are killed, and two of the next continue from their checkpoints, four times over."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    shutil.copytree(harvested / "run", whole)
    finish(launch("one", 1, "trainers/eagle.py", harvested / "recipe.yaml", *LONGER, f"run_dir={whole}"))
    for stage in ("prompts", "responses"):  # the ranks harvest the features themselves
        shutil.copytree(harvested / "run" / stage, resumed / stage)
    arguments = [harvested / "recipe.yaml", *LONGER, f"run_dir={resumed}"]
    for number, config_name in enumerate(["zero3", "ddp", "fsdp2", "zero2"], start=1):
        before = newest(resumed)
        process = launch(config_name, 2, "trainers/eagle.py", *arguments)
        kill_after_step(process, resumed / "metrics.jsonl", step=8 * number)
        assert before < newest(resumed) < 40, config_name
    finish(launch("zero3", 2, "trainers/eagle.py", *arguments))
    assert contents(resumed / "features") == contents(whole / "features")
    one, many = (load_file(folder / "head/model.safetensors") for folder in (whole, resumed))
    assert_close(many, one, rtol=1e-3, atol=1e-4)
    config = [(folder / "head/config.json").read_text() for folder in (whole, resumed)]
    assert config[0] == config[1]
    files = [sorted(path.name for path in folder.glob("checkpoints/step-40/*")) for folder in (whole, resumed)]
    assert files[0] == files[1] == ["head.safetensors", "optimizers.safetensors", "state.json"]
    states = [load_file(folder / "checkpoints/step-40/optimizers.safetensors") for folder in (whole, resumed)]
    assert states[0].keys() == states[1].keys()


def newest(folder: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*[0-9]")), default=0)
