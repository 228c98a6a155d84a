"""Laws of a harvest on Ray: whatever is killed, the store is that of a run without Ray, and each mistake is named."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from accelerate import PartialState
from bad_inputs import Says, assert_raises, assert_refused
from tiny_run import build_run, contents, quiet_environment, tiny_recipe, write_prompts

from headstart.common.process import running_code
from headstart.common.run_lock import only_run_in
from headstart.data_pipelines.harvest import harvest, run
from headstart.data_pipelines.stages.shard_work import locks_of

ray = pytest.importorskip("ray", reason="Ray is an extra: pip install -e '.[ray]'")

from headstart.data_pipelines import on_ray  # noqa: E402
from headstart.data_pipelines.on_ray import TASK_LOSSES_MAX, Task, Workers, harvest_on_ray  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TASKS = [Task("make", (str(number),)) for number in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_run(tmp_path).parent


class PretendedRay:
    """Workers that answer at once, unless they are `lost`, which is called with the names of each call's task."""

    def __init__(self, lost: Callable[..., bool], places: int = 2) -> None:
        self.lost, self.places, self.started = lost, places, 0

    def remote(self, kind: type) -> Any:
        def start(*arguments: object) -> Any:
            self.started += 1
            name = f"process {self.started} on a"
            about = {**running_code(), "the run's folder": "the same folder"}

            def answering(call: Callable[..., Any]) -> SimpleNamespace:
                return SimpleNamespace(remote=lambda *names: (call, names))

            return type("Handle", (), {"about": answering(lambda: (name, about)), "make": answering(int)})()

        return SimpleNamespace(options=lambda **needs: SimpleNamespace(remote=start))

    def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return calls[:1], calls[1:]

    def get(self, call: Any) -> Any:
        if self.lost(*call[1]):
            raise on_ray.RayActorError
        return call[0](*call[1])

    def kill(self, worker: object) -> None: ...

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self.places}}]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.places}


@pytest.fixture
def workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Workers]:
    def pretend(lost: Callable[..., bool] = lambda *names: False, places: int = 2) -> Workers:
        monkeypatch.setattr(on_ray, "ray", PretendedRay(lost, places))
        return Workers(tiny_recipe(folder), "token")

    return pretend


def test_what_a_lost_worker_was_doing_is_done_once_by_another(workers, capsys):
    rng = random.Random(1)
    done = list(workers(lambda *names: rng.random() < 0.4).carry_out(TASKS))
    assert sorted(done, key=lambda each: each[1]) == [(task, number) for number, task in enumerate(TASKS)]
    said = capsys.readouterr().out.splitlines()
    assert len(said) > 2
    assert all(line.startswith("lost ") for line in said)
    assert any("another worker continues with" in line for line in said)


def test_no_more_workers_are_started_than_there_are_places_or_tasks(workers: Callable[..., Workers]) -> None:
    many = workers(places=2)
    assert len(list(many.carry_out(TASKS))) == 6
    assert len(many.names) == 2
    few = workers(places=50)
    assert len(list(few.carry_out(TASKS[:3]))) == 3
    assert len(few.names) == 3


def test_shards_that_cost_every_worker_its_life_and_workers_that_never_start_end_the_run(workers):
    deadly = workers(lambda *names: names == ("4",))
    said = Says(f"{TASK_LOSSES_MAX} workers failed on 4", "on a", "correct the cause", "run the same command again")
    assert_raises(lambda: list(deadly.carry_out(TASKS)), said)
    assert_raises(lambda: list(workers(lambda *names: not names).carry_out(TASKS)), f"{TASK_LOSSES_MAX} workers failed")


@pytest.mark.parametrize(("fact", "value"), [("commit of headstart", "abc"), ("the run's folder", "another folder")])
def test_a_worker_that_differs_from_the_driver_is_refused_by_name(workers, fact, value):
    facts = {**running_code(), "the run's folder": "the same folder", fact: value}
    said = Says("process 7 on b", f"{fact}: '{value}' there", "install the same", "run_dir that all of them share")
    assert_raises(lambda: workers()._welcome("process 7 on b", facts), said)


def test_without_ray_the_command_says_how_to_get_it(folder, monkeypatch, typed):
    monkeypatch.setattr("headstart.data_pipelines.harvest.find_spec", lambda name: None)
    outcome = typed("harvest", str(folder / "recipe.yaml"), "--on", "ray")
    assert_refused(outcome, Says("--on", "ray given", "not installed", "pip install -e '.[ray]'"))


def test_two_drivers_a_driver_beside_a_part_and_a_draft_head_are_refused(folder: Path) -> None:
    recipe, drafted = tiny_recipe(folder), tiny_recipe(folder, f"data.draft_head={folder / 'head'}")
    said = Says("data.draft_head", "head given", "two targets", "leave it out")
    assert_raises(lambda: run(drafted, None, "ray"), said)
    with only_run_in(recipe.run_dir, "harvest --on ray"):
        assert_raises(lambda: run(recipe, None, "ray"), "in use by harvest --on ray as process | wait for it")
    with only_run_in(locks_of(recipe.run_dir) / "2-of-3", "harvest --part 2/3"):
        assert_raises(lambda: run(recipe, None, "ray"), "harvest --part 2/3 as process | wait for them")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(quiet_environment(ROOT))
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        found.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = found.address
    yield found
    found.shutdown()
    os.environ.clear()
    os.environ.update(before)


def start_driver(folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "headstart.cli", "harvest", str(folder / "recipe.yaml"), "--on", "ray"]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, env=os.environ, stdout=log, stderr=log)


def wait_for(happened: Callable[[], object], driver: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)


def raylet_of(node: Any) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def workers_of(cluster: Any) -> list[psutil.Process]:
    children = [process for node in cluster.list_all_nodes() for process in raylet_of(node).children()]
    return [process for process in children if process.name().startswith("ray::RayWorker")]


@pytest.mark.slow
def test_killed_workers_nodes_and_drivers_change_nothing(folder: Path, cluster: Any) -> None:
    values = yaml.safe_load((folder / "recipe.yaml").read_text())
    values["data"] |= {"num_prompts": 80, "response_tokens": 90, "shard_samples": 2}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    write_prompts(folder / "prompts.jsonl", count=80, first=0)
    harvest(tiny_recipe(folder, f"run_dir={folder / 'undivided'}"))
    driver = start_driver(folder)
    wait_for(lambda: list(folder.glob("run/responses/*.journal")), driver)
    driver.send_signal(signal.SIGSTOP)  # it gives out no more work, so that it cannot end before it is killed
    node = random.choice(list(cluster.worker_nodes))
    for process in raylet_of(node).children(recursive=True):
        process.kill()
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    for process in workers_of(cluster):
        process.kill()
    driver.send_signal(signal.SIGCONT)
    wait_for(lambda: "lost process" in (folder / "log").read_text(), driver)
    driver.kill()
    driver.wait()
    assert start_driver(folder).wait(300) == 0, (folder / "log").read_text()
    assert contents(folder / "run") == contents(folder / "undivided")


@pytest.mark.slow
def test_bad_data_ends_the_run_with_its_message(folder: Path, cluster: Any) -> None:
    recipe = tiny_recipe(folder)
    recipe.responses_dir.mkdir(parents=True)
    (recipe.responses_dir / "train-00001.jsonl.journal").write_text('damaged\n{"id": 1}\n')
    said = Says("train-00001.jsonl.journal", "line 1 is not JSON", "", "fix or remove the line")
    assert_raises(lambda: harvest_on_ray(recipe, PartialState()), said)
