"""A harvest on the workers of a Ray cluster: each holds a target and makes the shards assigned to it.

Ray starts the workers and notices when one is lost; its shards then go to another. Workers write to the run's folder,
which all machines share; the driver (`harvest_on_ray`) receives only counts.
"""

import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from accelerate import PartialState
from ray.exceptions import RayActorError, RayTaskError

from headstart.common.process import running_code
from headstart.common.progress import Progress
from headstart.common.remote import pull
from headstart.common.run_lock import only_run_in
from headstart.data_pipelines.harvest_stages import Harvest, harvest_of
from headstart.data_pipelines.prompts.prompts import prompts_stage
from headstart.data_pipelines.prompts.responses import read_texts, responses_path
from headstart.data_pipelines.stages.shard_work import (
    ShardPrompts,
    forget_parts,
    locks_of,
    refuse_parts_at_work,
    start_processes,
)
from headstart.data_pipelines.stages.stage import Json, Stage, differences
from headstart.data_pipelines.together import PAGE, Facts, folder_fact
from headstart.recipes import Recipe

COMMAND = "harvest --on ray"
WORKER_LOCK_SUFFIX = ".worker"
JOIN_CHECK_SECONDS = 1.0  # how often the driver looks for new machines
BATCHES_PER_TASK = 8  # batches of responses; the last batch of a task is not full
TASKS_PER_WORKER_MIN = 4  # if there are enough shards, so that workers finish at about the same time
TASK_LOSSES_MAX = 10  # worker losses on one task before giving up on it


def harvest_on_ray(recipe: Recipe, state: PartialState) -> Stage:
    """Run the missing stages on all workers of a cluster; returns the last stage.

    Raises ValueError for a second driver, for a worker with other code or without the run's folder, and with the
    message of a worker that failed.
    """
    folder = recipe.data_folder
    with only_run_in(folder, COMMAND) as owner, harvest_of(recipe, state) as stages:
        refuse_parts_at_work(folder, allowed_suffix=WORKER_LOCK_SUFFIX)
        with Workers(recipe, owner.token) as workers:
            for _ in workers.carry_out([Task("begin")]):
                pull(folder)
                prompts = prompts_stage(recipe)
            while (done := stages.finish(prompts)) is None:
                make_shards(workers, stages, stages.missing())
        forget_parts(folder)
    return done


def make_shards(workers: "Workers", stages: Harvest, missing: list[ShardPrompts]) -> None:
    """Let the workers make the missing shards, and show the progress."""
    samples = sum(len(shard.rows) for shard in missing)
    full = math.ceil(BATCHES_PER_TASK * stages.recipe.data.generate_batch / stages.recipe.data.shard_samples)
    size = max(1, min(full, len(missing) // (TASKS_PER_WORKER_MIN * workers.capacity())))  # shards in a task
    groups = [missing[start : start + size] for start in range(0, len(missing), size)]
    tasks = {Task("make", tuple(shard.name for shard in group)): group for group in groups}
    total, started, tokens = sum(len(shard.rows) for shard in stages.shards), time.perf_counter(), 0
    with Progress("responses and features", total, "samples", done=total - samples) as progress:
        workers.say = progress.say
        for task, made in workers.carry_out(list(tasks)):
            tokens += made
            speed = tokens / (time.perf_counter() - started)
            progress.advance(sum(len(shard.rows) for shard in tasks[task]), f"{speed:,.0f} tokens/s, {workers.count()}")


@dataclass(frozen=True)
class Task:
    """A call of a worker's method."""

    method: str
    names: tuple[str, ...] = ()  # of shards

    @property
    def label(self) -> str:
        """Its result, for messages."""
        return " to ".join(dict.fromkeys((self.names[0], self.names[-1]))) if self.names else "the prompts"


class RayWorker:
    """One process of the cluster, with a target; it runs the same code as a part of a harvest."""

    def __init__(self, recipe: Json, token: str, current: str) -> None:
        self.values, self.token, self.current = recipe, token, current
        self.held = ExitStack()  # until the process ends

    def about(self) -> tuple[str, Facts]:
        """The worker's name, and the facts that it must share with the driver."""
        if os.path.isdir(self.current):  # relative paths of the recipe start there
            os.chdir(self.current)
        folder = folder_fact(self.recipe.data_folder, self.token)
        return f"process {os.getpid()} on {socket.gethostname()}", {**running_code(), "the run's folder": folder}

    @cached_property
    def recipe(self) -> Recipe:
        return Recipe.model_validate(self.values)

    @cached_property
    def stages(self) -> Harvest:
        """Created once, with the target, for all shards."""
        return self.held.enter_context(harvest_of(self.recipe, start_processes()))

    def begin(self) -> None:
        with only_run_in(locks_of(self.recipe.data_folder) / f"prompts{WORKER_LOCK_SUFFIX}", COMMAND, wait=True):
            self.stages.begin()

    def make(self, *names: str) -> int:
        """Make responses and features of these shards; returns the number of their tokens.

        Waits until a worker that Ray reports lost, or whose driver has died, has really exited.
        """
        pull(self.recipe.data_folder)  # what other machines made, if it is in a store
        shards = [shard for shard in self.stages.shards if shard.name in names]
        with ExitStack() as held:
            for shard in shards:
                lock = locks_of(self.recipe.data_folder) / f"{shard.name}{WORKER_LOCK_SUFFIX}"
                held.enter_context(only_run_in(lock, COMMAND, wait=True))
            self.stages.make(shards)
        texts = [text for shard in shards for text in read_texts(responses_path(self.recipe, shard))]
        return sum(len(text.tokens) for text in texts)


class Workers:
    """A context manager that connects to a cluster, or starts one here, and runs workers on all of it."""

    def __init__(self, recipe: Recipe, token: str) -> None:
        self.arguments = recipe.model_dump(mode="json"), token, os.getcwd()
        self.whole_machine = recipe.target.split == "layers"
        self.say: Callable[[str], object] = lambda line: print(line, flush=True)
        self.names: dict[Any, str] = {}  # of the workers that have answered, by handle
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[Any, Task | None]] = {}  # the call that a worker carries out; None: `about`
        self.lost_starts = 0

    def __enter__(self) -> "Workers":
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        self.say(f"Ray: {len([node for node in ray.nodes() if node['Alive']])} nodes with {self.capacity()} workers")
        return self

    def __exit__(self, *exc: object) -> None:
        ray.shutdown()

    def needs(self) -> dict[str, int]:
        """The resources of a worker: a GPU, or all GPUs of a machine for a target split over them, or a CPU core."""
        gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
        if not any(gpus):
            return {"num_cpus": 1}
        return {"num_gpus": min(filter(None, gpus)) if self.whole_machine else 1}

    def capacity(self) -> int:
        """The number of workers that the cluster can run at present."""
        ((resource, count),) = self.needs().items()
        available = ray.cluster_resources().get({"num_cpus": "CPU", "num_gpus": "GPU"}[resource], 0)
        return max(1, int(available) // count)

    def count(self) -> str:
        return "1 worker" if len(self.names) == 1 else f"{len(self.names)} workers"

    def carry_out(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Yield each task with its result when it is done; the task of a lost worker is given to another worker.

        Raises the error of a task that fails, and ValueError if a worker differs from the driver.
        """
        waiting, left, losses = deque(tasks), len(tasks), dict.fromkeys(tasks, 0)
        while left:
            for _ in range(len(self.idle) + len(self.busy), min(self.capacity(), left)):
                worker: Any = ray.remote(RayWorker).options(**self.needs()).remote(*self.arguments)
                self.busy[worker.about.remote()] = worker, None
            while waiting and self.idle:
                worker, task = self.idle.pop(), waiting.popleft()
                self.busy[getattr(worker, task.method).remote(*task.names)] = worker, task
            for call in ray.wait(list(self.busy), timeout=JOIN_CHECK_SECONDS)[0]:
                worker, done = self.busy.pop(call)
                try:
                    result = ray.get(call)
                except RayActorError as error:
                    self._note_loss(worker, done, error, losses)
                    if done is not None:
                        waiting.appendleft(done)
                    continue
                except RayTaskError as error:
                    is_message = isinstance(error.cause, ValueError | OSError)  # else ours, with the worker's traceback
                    raise (error.cause if is_message else error) from None
                self.idle.append(worker)
                if done is None:
                    self.names[worker] = self._welcome(*result)
                else:
                    left -= 1
                    yield done, result

    def _welcome(self, name: str, facts: Facts) -> str:
        expected = {**running_code(), "the run's folder": "the same folder"}
        if different := differences(facts, expected, "{} there, {} here"):
            lines = "\n  ".join([f"a worker of the Ray cluster differs from this driver ({name}):", *different])
            advice = f"install the same on all machines, and give a run_dir that all of them share ({PAGE})"
            raise ValueError(f"{lines}\n{advice}")
        self.lost_starts = 0
        return name

    def _note_loss(self, worker: Any, task: Task | None, error: Exception, losses: dict[Task, int]) -> None:
        """Say in one line which worker was lost; raises ValueError if too many were lost on the same task."""
        ray.kill(worker)  # Ray may have lost sight of it only for a while
        self.lost_starts += task is None
        if task is not None:
            losses[task] += 1
        name, label = self.names.pop(worker, "while starting"), "no task" if task is None else task.label
        if max(self.lost_starts, *losses.values()) >= TASK_LOSSES_MAX:
            raise ValueError(
                f"{TASK_LOSSES_MAX} workers failed on {label}; last error ({name}): {error}\n"
                "correct the cause, which the workers' logs in Ray's session folder may show, and run the same command "
                "again"
            )
        self.say(f"lost {name}" + ("" if task is None else f"; another worker continues with {task.label}"))
