"""A harvest on a Ray cluster of three node processes on this machine, whose workers, nodes and driver are killed.

    python benchmarks/ray_kills.py recipes/tiny.yaml data.num_prompts=320 data.shard_samples=8 data.generate_batch=3

Deletes RUN_DIR/ray_kills and works there. 20 times a random worker, or all processes of a node but the first, is
killed (SIGKILL), and the node added again; then, in another run, the driver. Both must leave what a harvest without Ray
leaves, bit for bit. At the end: the rate with two workers of one core each beside one.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from headstart.common.run_lock import only_run_in
from headstart.data_pipelines.on_ray import Task, Workers
from headstart.data_pipelines.prompts.responses import responses_path
from headstart.data_pipelines.stages.shard_work import prompt_shards
from headstart.recipes import Recipe, run_command

KILLS = 20
NODES = 3
PHASES = ("prompts", "responses", "features")


def main() -> None:
    run_command(__doc__, run)


def run(recipe: Recipe) -> None:
    folder = recipe.run_dir / "ray_kills"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    plain, killed, restarted = folder / "plain", folder / "killed", folder / "restarted"
    assert start(plain).wait() == 0
    with cluster(NODES) as nodes:
        kill_workers_and_nodes(killed, nodes)
        report("20 kills of workers and nodes", killed, plain)
        kill_driver(restarted)
        report("a killed driver", restarted, plain)
    rates = {places: rate(recipe, folder / f"rate{places}", places) for places in (1, 2)}
    print(f"tokens/s: {rates[1]:.1f} with one worker, {rates[2]:.1f} with two, {rates[2] / rates[1]:.2f} x")


def start(run_dir: Path, *options: str) -> "subprocess.Popen[bytes]":
    """Start a harvest, with the arguments of this script, into another folder."""
    arguments = [*sys.argv[1:], f"run_dir={run_dir}", *options]
    return subprocess.Popen([sys.executable, "-m", "headstart.cli", "harvest", *arguments])


@contextmanager
def cluster(nodes: int, cores: int = 1) -> Iterator[Cluster]:
    """A cluster of node processes with so many cores each, to which harvests connect."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": cores, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            found.add_node(num_cpus=cores)
        os.environ["RAY_ADDRESS"] = found.address
        yield found
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        found.shutdown()


def workers_of(nodes: Cluster) -> list[psutil.Process]:
    """The processes that harvest, on all nodes."""
    own = [process for node in nodes.list_all_nodes() for process in processes_of(node)]
    return [process for process in own if named(process).startswith("ray::Worker")]


def processes_of(node: "ray._private.node.Node") -> list[psutil.Process]:
    try:
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]
    except psutil.Error:
        return []


def named(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def phase_of(run_dir: Path) -> str | None:
    """What workers do at this moment, as far as files tell."""
    if list((run_dir / "parts").glob("prompts.worker/*.lock")):
        return "prompts"
    if list((run_dir / "features").glob("*.partial")):
        return "features"
    return "responses" if list((run_dir / "parts").glob("*.worker/*.lock")) else None


def is_in(run_dir: Path, phase: str) -> bool:
    return phase_of(run_dir) == phase


def has_shards(run_dir: Path, count: int) -> bool:
    return len(list(run_dir.glob("responses/*.jsonl"))) >= count


def kill_workers_and_nodes(run_dir: Path, nodes: Cluster) -> None:
    """Kill in all phases in turn, at random moments of each; a harvest that ends too early loses its shards again."""
    rng, kills = random.Random(0), Counter[str]()
    driver = start(run_dir, "--on", "ray")
    while kills.total() < KILLS:
        if driver.poll() is not None:
            assert driver.returncode == 0
            lose_work(run_dir)
            driver = start(run_dir, "--on", "ray")
        wanted = PHASES[kills.total() % len(PHASES)] if kills["prompts"] < 3 else rng.choice(PHASES[1:])
        if wanted == "prompts" and (run_dir / "prompts/train.jsonl").exists():
            end(driver)
            while workers_of(nodes):
                time.sleep(0.1)
            shutil.rmtree(run_dir)
            driver = start(run_dir, "--on", "ray")
        if not wait_for(partial(is_in, run_dir, wanted), driver):
            continue
        time.sleep(rng.uniform(0, 0.3 if wanted == "responses" else 0.02))
        phase, others = phase_of(run_dir), list(nodes.worker_nodes)
        if phase is None:
            continue
        if rng.random() < 0.5 and workers_of(nodes):
            what, victims = "a worker", [rng.choice(workers_of(nodes))]
            kill(victims)
        else:
            node = rng.choice(others)
            what = "a node"
            kill(processes_of(node)[1:])
            nodes.remove_node(node, allow_graceful=False)
            nodes.add_node(num_cpus=1)
        kills[phase] += 1
        print(f"killed {what} during {phase}: {kills.total()} of {KILLS}", flush=True)
    assert driver.wait() == 0
    print(f"kills by phase: {dict(kills)}")


def wait_for(happened: Callable[[], bool], driver: "subprocess.Popen[bytes]") -> bool:
    """Wait until something has happened; False if the driver ends before that."""
    while driver.poll() is None:
        if happened():
            return True
        time.sleep(0.002)
    return False


def lose_work(run_dir: Path) -> None:
    """Take back the ends of responses and features, with all shards of features and half of the responses."""
    shutil.rmtree(run_dir / "features")
    for path in sorted((run_dir / "responses").glob("*.jsonl"))[::2]:
        path.unlink()
    (run_dir / "responses/stage.json").unlink()


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def end(driver: "subprocess.Popen[bytes]") -> None:
    driver.kill()
    driver.wait()


def kill_driver(run_dir: Path) -> None:
    """Kill the driver three times, each time after more shards, and start it again at once."""
    for shards in (1, 4, 10):
        driver = start(run_dir, "--on", "ray")
        assert wait_for(partial(has_shards, run_dir, shards), driver)
        end(driver)
        print(f"killed the driver after {shards} shards", flush=True)
    assert start(run_dir, "--on", "ray").wait() == 0


def report(what: str, found: Path, expected: Path) -> None:
    files = {path.relative_to(expected) for path in expected.rglob("*") if path.is_file()}
    others = {path.relative_to(found) for path in found.rglob("*") if path.is_file()}
    same = [name for name in files & others if (found / name).read_bytes() == (expected / name).read_bytes()]
    verdict = "bit for bit" if len(same) == len(files) == len(others) else "DIFFERENT"
    print(
        f"{what}: {len(same)} of {len(files | others)} files equal those of a harvest without Ray: {verdict}",
        flush=True,
    )


def rate(recipe: Recipe, run_dir: Path, places: int) -> float:
    """Tokens per second of so many workers, once each has its target."""
    recipe = recipe.model_copy(update={"run_dir": run_dir})
    with cluster(1, places), only_run_in(run_dir, "measuring") as owner, Workers(recipe, owner.token) as workers:
        while len(workers.names) < places:  # the others are still starting
            list(workers.carry_out([Task("the prompts", "begin")] * places))
        shards = prompt_shards(recipe)
        each = [Task(shard.name, "make", (shard.name,)) for shard in shards]
        list(workers.carry_out(each[:places]))  # one each, for which they load the target
        started = time.perf_counter()
        tokens = sum(made for _, made in workers.carry_out(each[places:]))
        seconds = time.perf_counter() - started
        assert all(responses_path(recipe, shard).exists() for shard in shards)
    return tokens / seconds


if __name__ == "__main__":
    main()
