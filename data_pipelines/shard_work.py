"""The work of a harvest in pieces that any number of ranks share, with progress in tokens."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from accelerate import PartialState
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from data_pipelines.stage import Json, Stage
from recipes import Recipe
from recipes.jsonl import read_jsonl

RANK_TIMEOUT = timedelta(hours=6)  # a rank waits so long for the others, whose texts may be much longer


@dataclass(frozen=True)
class Piece:
    """The prompts of one shard: the unit of work, of sharing between ranks and of resuming."""

    split: str
    index: int
    rows: list[Json]


def start_processes() -> PartialState:
    """The ranks as `accelerate launch` asked for them; without a GPU they are processes on the CPU."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=RANK_TIMEOUT)


def pieces(recipe: Recipe) -> list[Piece]:
    """All shards of both splits, by sample id alone, so that any number of ranks makes the same files."""
    found, size = [], recipe.data.shard_samples
    for split, limit in (("train", None), ("heldout", recipe.data.heldout_samples)):
        rows = list(read_jsonl(recipe.prompts_dir / f"{split}.jsonl"))[:limit]
        found += [Piece(split, i // size, rows[i : i + size]) for i in range(0, len(rows), size)]
    return found


def idle_cores(state: PartialState) -> str | None:
    """What to add to the command where the ranks leave cores of this machine idle; None where they do not."""
    threads, cores = torch.get_num_threads(), (os.cpu_count() or 1) // state.num_processes
    if state.device.type != "cpu" or threads >= cores:
        return None
    return (
        f"{threads} of {cores} cores at work: accelerate launch --num_cpu_threads_per_process {cores} uses all, which "
        "is faster where nothing else runs"
    )


def begin(stage: Stage, state: PartialState) -> None:
    """Claim a stage's folder, once for all ranks."""
    if state.is_main_process:
        stage.begin()
    state.wait_for_everyone()


class Meter:
    """A progress bar of samples that also tells the tokens per second of this rank."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task = progress, task
        self.started, self.tokens = time.perf_counter(), 0

    def skip(self, samples: int) -> None:
        """Samples that an earlier run has done."""
        self.progress.update(self.task, advance=samples)

    def add(self, samples: int, tokens: int) -> None:
        self.tokens += tokens
        speed = self.tokens / max(time.perf_counter() - self.started, 1e-9)
        self.progress.update(self.task, advance=samples, speed=f"{speed:,.0f} tokens/s")


@contextmanager
def metered(work: Sequence[Piece], state: PartialState, what: str) -> Iterator[Meter]:
    """A meter over the samples of this rank's share, shown on the main rank."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}")
    with Progress(*columns, TimeElapsedColumn(), TimeLeft(), disable=not state.is_main_process) as progress:
        task = progress.add_task(what, total=sum(len(piece.rows) for piece in work), speed="")
        yield Meter(progress, task)
