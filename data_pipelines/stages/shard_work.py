"""The work of a harvest: its shards, the ranks or parts that share them, the decode batch, and the progress.

Parts are independent processes that share only a run's folder and their code.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch
from accelerate import PartialState
from rich.filesize import decimal

from headstart.common.files import read_json, read_jsonl, remove, write_text
from headstart.common.process import refuse_separate_processes, running_code, user_cache
from headstart.common.progress import Progress
from headstart.common.remote import pull, url_of
from headstart.common.run_lock import Owner, only_run_in
from headstart.data_pipelines.stages.stage import Json, Stage, differences
from headstart.inference.core.cache_memory import free_memory
from headstart.inference.engine.budget import CHECKED_STEP_BYTES_MIN, StepMemory
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

RANK_TIMEOUT = timedelta(hours=6)  # a rank waits this long for other ranks, whose texts may be much longer
DECODE_MEMORY_SHARE = 0.9  # of the free memory, for caches and logits of the texts; prefill needs the rest
PARTS = "parts"  # the folder with the locks of parts, next to the stages, until the harvest is complete
CODE = "code.json"


@dataclass(frozen=True)
class ShardPrompts:
    """The prompts of one shard, the unit in which work is shared between ranks and resumed."""

    split: str
    index: int
    rows: list[Json]

    @property
    def name(self) -> str:
        return f"{self.split}-{self.index:05d}"

    @property
    def responses_file(self) -> str:
        return f"{self.name}.jsonl"

    @property
    def features_file(self) -> str:
        return f"{self.name}.safetensors"


def start_processes() -> PartialState:
    """Start the ranks of `accelerate launch`; without a GPU they run on the CPU."""
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=RANK_TIMEOUT)
    refuse_separate_processes(state.num_processes)
    return state


def prompt_shards(recipe: Recipe) -> list[ShardPrompts]:
    """The prompts of both splits by shard; the division depends on sample ids alone, not on the number of ranks."""
    shards, size = [], recipe.data.shard_samples
    for split, limit in (("train", None), ("heldout", recipe.data.heldout_samples)):
        rows = list(read_jsonl(recipe.prompts_dir / f"{split}.jsonl"))[:limit]
        shards += [ShardPrompts(split, i // size, rows[i : i + size]) for i in range(0, len(rows), size)]
    return shards


def idle_cores(state: PartialState) -> str | None:
    """A hint for the user if the launch leaves CPU cores idle, else None."""
    threads, cores = torch.get_num_threads(), (os.cpu_count() or 1) // state.num_processes
    if state.device.type != "cpu" or threads >= cores:
        return None
    return (
        f"using {threads} of {cores} CPU cores; accelerate launch --num_cpu_threads_per_process {cores} uses all "
        "(faster if nothing else is running)"
    )


def run_stage(stage: Stage, state: PartialState, make: Callable[[], None], finish: Callable[[], None]) -> None:
    """Unless the stage is complete, let every rank make its share of it and the main rank finish it."""
    if stage.is_complete():
        return
    if state.is_main_process:
        stage.claim()
    state.wait_for_everyone()
    make()
    state.wait_for_everyone()
    if state.is_main_process:
        pull(stage.folder)  # what other machines made
        finish()
    state.wait_for_everyone()
    pull(stage.folder)


class ShardProgress(Progress):
    """The progress of this rank's shards and its tokens per second, shown on the main rank only."""

    def __init__(self, work: Sequence[ShardPrompts], state: PartialState, label: str, together: int = 1) -> None:
        """`together` is how many samples are worked on at a time."""
        total, active = sum(len(shard.rows) for shard in work), state.is_main_process
        super().__init__(label, total, "samples", active=active, together=together)
        self.started, self.tokens = time.perf_counter(), 0

    def add(self, samples: int, tokens: int) -> None:
        self.tokens += tokens
        speed = self.tokens / max(time.perf_counter() - self.started, 1e-9)
        self.advance(samples, f"{speed:,.0f} tokens/s")


def texts_together(recipe: Recipe, target: TargetModel, length: int, nodes: int = 1) -> int:
    """How many texts of up to `length` tokens, with draft trees of `nodes` nodes, decode together.

    At least 1; decoding raises if even one does not fit. All ranks must call this.
    """
    wanted, limits = recipe.data.generate_batch, []
    for device in dict.fromkeys(target.passes.layout.devices):
        free = max(free_memory(device), CHECKED_STEP_BYTES_MIN)
        needed = StepMemory.on(device, target).needed(1, nodes, length)
        limits.append((int(DECODE_MEMORY_SHARE * free) // needed, free, needed, device))
    most, free, needed, device = min(limits, key=lambda limit: limit[0])
    batch = target.ranks.least(max(min(wanted, most), 1))
    if batch < wanted and target.ranks.rank == 0:
        print(
            f"data.generate_batch: {wanted} given, {batch} decode together, as {device} has {decimal(free)} "
            f"free and a text of {length} tokens needs {decimal(needed)}"
        )
    return batch


@contextmanager
def entrance(folder: Path, command: str, wait: bool = False) -> Iterator[None]:
    """Hold a run's folder for a moment, in turn with other parts; another command is refused, or waited for."""
    with only_run_in(folder / PARTS, command, wait=True), only_run_in(folder, command, wait):
        yield


def locks_of(folder: Path) -> Path:
    """The folder with the locks of a run's parts and shards, each a folder of its name.

    A lock in an object store would outlive a killed part, so the locks of such a run are local.
    """
    url = url_of(folder)
    return (folder if url is None else user_cache("parts") / quote(url, safe="")) / PARTS


def parts_at_work(folder: Path) -> dict[str, str]:
    """The owners of the parts at work in a run's folder, by lock; only the holder of the folder may call this."""
    owners = {}
    for lock in sorted(path for path in locks_of(folder).glob("*") if path.is_dir()):
        try:
            with only_run_in(lock, "a look"):
                pass
        except ValueError:
            owner = Owner.read(lock)
            owners[lock.name] = lock.name if owner is None else owner.describe()
        else:
            with suppress(OSError):
                lock.rmdir()  # left by a part that was killed
    return owners


def refuse_parts_at_work(folder: Path, allowed_suffix: str | None = None) -> None:
    """Raise ValueError naming the parts at work in a run's folder, except locks that end in `allowed_suffix`."""
    owners = parts_at_work(folder)
    if others := [owners[lock] for lock in owners if allowed_suffix is None or not lock.endswith(allowed_suffix)]:
        problem = f"{folder} is in use by parts of a harvest; only parts of the same division may run at the same time"
        lines = "\n  ".join([f"{problem}:", *others])
        raise ValueError(f"{lines}\nwait for them, or stop them (SIGTERM keeps their results)")


def refuse_other_code(folder: Path) -> None:
    """Record the code of a run's first part; raises ValueError, naming the differences, if other code runs another."""
    path, code = folder / PARTS / CODE, running_code()
    if not path.is_file():
        write_text(path, json.dumps(code, indent=1))
    elif different := differences(read_json(path, "remove it"), code, "{} in other parts of this run, {} here"):
        lines = "\n  ".join(["the parts of a run must be made by the same code:", *different])
        removal = shlex.join(["rm", str(path)])
        remedy = f"install the same version, or continue with this one ({removal}) if its output is the same"
        raise ValueError(f"{lines}\n{remedy}")


def forget_parts(folder: Path) -> None:
    """Remove the files of parts that have ended; only the holder of the folder may call this."""
    remove(folder / PARTS / CODE)
    with suppress(OSError):  # the lock of the part that calls this is removed by itself
        locks_of(folder).rmdir()
