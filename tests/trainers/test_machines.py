"""Laws of launches on several machines: two launches on this one, which share at most run_dir."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launches import LAUNCHES, ROOT, finish, needs_deepspeed
from object_store import BUCKET, ENVIRONMENT, moto_server
from safetensors.torch import load_file
from tiny_run import build_run, logged_step, quiet_environment
from torch.testing import assert_close

pytestmark = pytest.mark.slow

ZERO = ["zero2", "zero3"]
TRAINER = ROOT / "trainers/eagle.py"
LONG = "train.steps=100000", "train.checkpoint_every=50"


STARTED: list[subprocess.Popen[Any]] = []  # by the running test


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield build_run(tmp_path).parent
    while STARTED:
        end_all(STARTED.pop())


def start_process(command, cwd=None, log=subprocess.PIPE, **variables):
    environment = {**quiet_environment(ROOT), **variables}
    started = subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)
    STARTED.append(started)
    return started


def train_alone(folder: Path, *overrides: str, **variables: str) -> None:
    finish(start_process([sys.executable, str(TRAINER), str(folder / "recipe.yaml"), *overrides], **variables))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def launch_training(folder: Path, *by_machine: tuple[str, ...], config: str = "ddp") -> list[subprocess.Popen[str]]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCHES / f"{config}.yaml")]
    launch += ["--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1"]
    launch += ["--main_process_port", str(free_port())]
    machines = []
    for number, mine in enumerate(by_machine):
        home = folder / f"machine{number}"
        home.mkdir(exist_ok=True)
        command = [*launch, "--machine_rank", str(number), str(TRAINER), str(folder / "recipe.yaml"), *mine]
        own = {"HOME": str(home), "HEADSTART_CACHE": str(home / "cache"), "DS_ACCELERATOR": "cpu"}
        machines.append(start_process(command, home, **own))
    return machines


def train_together(folder: Path, run_dir: str, config: str) -> None:
    machines = launch_training(folder, (run_dir,), (run_dir,), config=config)
    printed = outputs(machines, seconds=900)
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(printed)


def outputs(machines: list[subprocess.Popen[str]], seconds: float = 300) -> list[str]:
    return [machine.communicate(timeout=seconds)[0] for machine in machines]


def end_all(machine: subprocess.Popen[Any]) -> None:
    for process in ranks_of(machine) if machine.poll() is None else []:
        process.kill()
    machine.kill()


def ranks_of(machine: subprocess.Popen[Any]) -> list[psutil.Process]:
    return psutil.Process(machine.pid).children(recursive=True)


def wait_for_steps(folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while logged_step(folder / "metrics.jsonl") < steps:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("config", ["ddp", "fsdp2", *(pytest.param(each, marks=needs_deepspeed) for each in ZERO)])
def test_two_machines_that_share_only_run_dir_train_what_one_trains(folder: Path, config: str) -> None:
    shared = f"run_dir={folder / 'shared'}"
    train_together(folder, shared, config)
    train_alone(folder, f"run_dir={folder / 'alone'}")
    found, expected = (load_file(folder / name / "head/model.safetensors") for name in ("shared", "alone"))
    assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert not (folder / "shared/in_use.lock").exists()


@pytest.mark.parametrize("config", ["ddp", "fsdp2", pytest.param("zero2", marks=needs_deepspeed)])
def test_two_machines_that_share_only_a_bucket_train_what_one_trains(folder, monkeypatch, config):
    """One of them goes on alone, and reads what the other harvested."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    url = f"run_dir=s3://{BUCKET}/run"
    with moto_server() as server:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": server}.items():
            monkeypatch.setenv(name, value)
        train_together(folder, url, config)
        own = {"HOME": str(folder / "machine1"), "HEADSTART_CACHE": str(folder / "machine1" / "cache")}
        for run_dir, variables in ((url, own), (f"run_dir={folder}/alone", {})):
            for steps in ("train.steps=8", "train.steps=12"):
                train_alone(folder, run_dir, steps, **variables)
        command = [sys.executable, "-m", "headstart.cli", "report", str(folder / "recipe.yaml"), url]
        own["HEADSTART_CACHE"] = str(folder / "third")
        finish(start_process([*command, "report.num_prompts=2"], **own))
    assert (folder / "third/stores/s3" / BUCKET / "run/report/report.json").is_file()
    found = load_file(folder / "machine1/cache/stores/s3" / BUCKET / "run/head/model.safetensors")
    assert_close(found, load_file(folder / "alone/head/model.safetensors"), rtol=1e-6, atol=1e-6)


def test_machines_without_a_shared_folder_are_refused_by_name_within_a_minute(folder: Path) -> None:
    """Each went its own way: one resumed at step 20, the other at 0, and a wrong checkpoint was saved."""
    machines = launch_training(folder, (f"run_dir={folder / 'a'}",), (f"run_dir={folder / 'b'}",))
    printed = outputs(machines, seconds=60)
    assert all(machine.returncode for machine in machines)
    for output in printed:
        assert "the ranks are not on the same run" in output
        assert f"run_dir: the same folder on rank 0 ({socket.gethostname()}), {folder / 'b'}" in output
        assert "a run_dir that all of them share" in output
    assert not (folder / "a").exists()
    assert not (folder / "b").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_within_a_minute(folder: Path, victim: int) -> None:
    shared = f"run_dir={folder / 'shared'}"
    machines = launch_training(folder, (shared, *LONG), (shared, *LONG))
    wait_for_steps(folder / "shared", 60)
    ranks_of(machines[victim])[0].send_signal(signal.SIGKILL)
    printed = outputs(machines, seconds=60)
    assert all(machine.returncode for machine in machines)
    assert f"rank {1 - victim} lost the connection to another rank" in printed[1 - victim]
    assert "start the same command again" in printed[1 - victim]


def test_under_torchrun_the_others_go_on_when_a_machine_is_lost(folder: Path) -> None:
    """Fewer ranks continue from the newest checkpoint, without a command of the user's."""
    port, shared = free_port(), folder / "shared"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1"]
    command += ["--max_restarts", "3", "--rdzv_backend", "c10d", "--rdzv_id", "one"]
    command += ["--rdzv_endpoint", f"127.0.0.1:{port}", str(TRAINER), str(folder / "recipe.yaml")]
    command += [f"run_dir={shared}", "train.steps=300", "train.checkpoint_every=20"]
    machines = []
    for number in range(2):
        home = folder / f"machine{number}"
        home.mkdir()
        with (folder / f"log{number}").open("w") as log:
            machines.append(start_process(command, home, log, HOME=str(home)))
        time.sleep(3)  # the first one is the meeting point
    wait_for_steps(shared, 60)
    end_all(machines[1])
    assert machines[0].wait(150) == 0
    printed = (folder / "log0").read_text()
    assert "resuming after step" in printed
    assert "head written to" in printed
    assert logged_step(shared / "metrics.jsonl") == 300


def test_sigterm_to_accelerate_launch_saves_and_the_same_command_waits_for_the_checkpoint(folder: Path) -> None:
    log, arguments = folder / "log", [str(folder / "recipe.yaml"), *LONG, "train.checkpoint_every=100000"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu", str(TRAINER)]
    with log.open("w") as file:
        launcher = start_process([*command, *arguments], log=file)
    wait_for_steps(folder / "run", 20)
    [trainer] = ranks_of(launcher)
    trainer.suspend()  # a trainer that takes long to save
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == -signal.SIGTERM  # which a shell shows as 143
    again = start_process([sys.executable, str(TRAINER), *arguments])
    assert again.stdout is not None
    for said in ("which is ending", "resuming after step"):
        while said not in (line := again.stdout.readline()):
            assert line, "the command ended"
        os.kill(trainer.pid, signal.SIGCONT)
    assert "SIGTERM: saved after step" in log.read_text()
