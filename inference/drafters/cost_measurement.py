"""Times the parts of a decode step before the first request, and keeps the times on disk for later runs."""

import hashlib
import json
import math
import os
import sys
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch
from pydantic import TypeAdapter

from headstart.common.files import write_text
from headstart.common.process import user_cache
from headstart.heads.base import DraftHead
from headstart.inference.core.drafter import NoDrafter
from headstart.inference.core.recurrent import WINDOW
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import Tree, size_bucket
from headstart.inference.core.verify import VerifiedOnDevice, VerifiedOnHost, VerifiedRow, accept
from headstart.inference.drafters.costs import CORRECTION_STEPS, NODES, CostSurface, CostTable
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.targets.cuda_graph import StaticStep
from headstart.inference.targets.loading import processor_name
from headstart.inference.targets.model import TargetModel

FILE_LAYOUT = 4  # a file of another layout is measured anew
BUSY_RATIO = 0.5  # discard a measurement more than twice as slow as real steps
REMEMBERED_STEPS = 2  # of each batch size in a file: few, so that new ones outweigh them at once
SHORT_CONTEXT, LONG_CONTEXT = 128, 2048  # positions, fewer where the target has fewer
TIMED_LEVELS = 3  # levels drafted to find the time of one
ACCEPTED_NODES = 4  # the length of the accepted path
NOISE_POSITIONS = 2  # positions whose Gumbel noise a step draws: about the number of tokens that it writes
TIMED_RUNS = 5
SECONDS_ON_CPU, SECONDS_ON_GPU = (
    2.0,
    10.0,
)  # then nothing is timed again; capturing a graph takes longer than running it
PATIENCE_FACTOR = 2  # times these seconds, then the sizes that are not timed yet are interpolated
NEEDED_WORKS = 4  # the first pieces of work, without which nothing is known
FREE_SHARE = 0.8  # of the CPU seconds of all threads: a slow measurement that got them is kept
GREEDY, SAMPLED = Sampling(), Sampling(1.0)

Work = tuple[str, int]  # a part of a step, and its size


@dataclass(frozen=True)
class CostFile:
    """The content of a file: the measured costs, what they depend on, and the newest ratios of `CostTable`."""

    key: dict[str, Any]
    surface: CostSurface
    ratios: dict[int, list[tuple[float, float]]]


class KnownTables(dict[str, CostTable]):
    """The cost tables of a target, by digests of their keys."""


Source = DraftHead | ModelDrafter | Lookup  # what drafts


def cost_table(target: TargetModel, source: Source, width: int, nodes: int, batch: int = 1) -> CostTable:
    """The costs of a target whose drafts have levels that expand `width` nodes, and up to `nodes` draft tokens.

    They are measured, which takes seconds, unless an earlier run of the same kind left them on disk. `batch` is the
    number of rows that will be decoded together, if that is known.
    """
    if target.passes.layout.is_recurrent:
        nodes += WINDOW  # accepted tokens that a pass reads again
    key = cost_key(target, source, width, nodes, batch)
    digest = digest_of(key)[:24]
    tables = target.singleton(KnownTables)
    if digest not in tables:
        files: list[CostFile] = []

        def read_or_measure() -> None:
            stored = read_costs(digest, key)
            if stored is None:
                stored = CostFile(key, measure_costs(target, source, width, nodes, batch), {})
                if stored.surface.complete:  # else the next run may find the machine less busy
                    write_costs(digest, stored)
            files.append(stored)

        target.ranks.carry_out(read_or_measure, lambda run: run())  # some ranks may have a file that others lack
        stored = target.ranks.agreed(files[0])
        table = CostTable(stored.surface, width, target.may_capture, not target.ranks.in_step)
        table.ratios |= {size: deque(ratios, CORRECTION_STEPS) for size, ratios in stored.ratios.items()}
        weakref.finalize(table, write_ratios, digest, stored, table.ratios)
        tables[digest] = table
    return tables[digest]


def cost_key(target: TargetModel, source: Source, width: int, nodes: int, batch: int) -> dict[str, Any]:
    """Everything that the costs depend on. A head's or draft model's weights are not part of it, only its shape."""
    if isinstance(source, DraftHead):
        shape = [source.kind, repr(source.shape), str(source.embedding.dtype), len(source.vocab.ids)]
    else:
        shape = ["lookup"] if isinstance(source, Lookup) else ["model", config_of(source.model)]
    return {
        "layout": FILE_LAYOUT,
        "processor": processor_name(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "target": digest_of(config_of(target)),
        "dtype": str(target.dtype),
        "attention": target.model.config._attn_implementation,
        "packed_weights": target.fast_form.packed_as(target.model),
        "waiting": os.environ.get("GOMP_SPINCOUNT"),
        "compiled": target.fast_form.compiler is not None,
        "ranks": f"{type(target.ranks).__name__} {target.ranks.count}",
        "head": digest_of(shape),
        "width": width,
        "nodes": nodes,
        "batch": batch,
    }


def config_of(model: TargetModel) -> dict[str, Any]:
    return {name: value for name, value in model.model.config.to_dict().items() if name != "_name_or_path"}


def digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def read_costs(digest: str, key: dict[str, Any]) -> CostFile | None:
    """The costs that an earlier run of the same kind wrote; None without a file that can be read."""
    with suppress(OSError, RuntimeError, ValueError):  # no home folder is a RuntimeError, a broken file a ValueError
        stored = TypeAdapter(CostFile).validate_json(cost_path(digest).read_bytes())
        if stored.key == key:
            return stored
    return None


def write_costs(digest: str, content: CostFile) -> None:
    """Keep costs for later runs, if the cache folder can be written."""
    with suppress(OSError, RuntimeError):
        path = cost_path(digest)
        partial_file = path.with_suffix(f".{os.getpid()}")  # several ranks may write the same costs
        write_text(partial_file, json.dumps(asdict(content), indent=1) + "\n")
        partial_file.replace(path)


def write_ratios(digest: str, stored: CostFile, ratios: Mapping[int, deque[tuple[float, float]]]) -> None:
    """Add the newest ratios to the file, or remove it if steps took far less time than was measured.

    Then the machine was busy during the measurement, which says little about how costs grow with a tree.
    """
    newest = {batch: list(values)[-REMEMBERED_STEPS:] for batch, values in ratios.items()}
    if newest == stored.ratios or not stored.surface.complete:
        return
    if median(of_target for values in newest.values() for _, of_target in values) < math.log(BUSY_RATIO):
        with suppress(OSError, RuntimeError):
            cost_path(digest).unlink(missing_ok=True)
    else:
        write_costs(digest, CostFile(stored.key, stored.surface, newest))


def cost_path(digest: str) -> Path:
    return user_cache("costs") / f"{digest}.json"


@torch.inference_mode()
def measure_costs(target: TargetModel, source: Source, width: int, nodes: int, batch: int) -> CostSurface:
    """The costs of steps whose levels expand `width` nodes, with up to `nodes` draft tokens, and of about `batch` rows.

    The number of target passes depends on the time they take: ranks that must run the same passes call `carry_out`.
    """
    most = min(size_bucket(nodes + 1), NODES[-1])
    spare = most + width * TIMED_LEVELS
    # No step is decoded beyond the target's positions.
    short, long = (max(min(context, target.max_positions - spare), 2) for context in (SHORT_CONTEXT, LONG_CONTEXT))
    near, far = (Bench(target, source, width, context, 1, spare) for context in (short, long))
    levels = min(TIMED_LEVELS, source.max_levels or TIMED_LEVELS) if isinstance(source, DraftHead) else TIMED_LEVELS
    works: dict[Work, Callable[[], object]] = {
        ("target", 1): partial(near.verify, 1, GREEDY),
        ("first", short): near.drafting(1),
        ("target", most): partial(near.verify, most, GREEDY),
        ("levels", short): near.drafting(levels),
        ("far", 1): partial(far.verify, 1, GREEDY),
        ("far", most): partial(far.verify, most, GREEDY),
        ("sampled", 1): partial(near.verify, 1, SAMPLED),
        ("sampled", most): partial(near.verify, most, SAMPLED),
        ("first", long): far.drafting(1),
        ("levels", long): far.drafting(levels),
        **{("target", size): partial(near.verify, size, GREEDY) for size in sizes_between(most, target.may_capture)},
    }
    if batch > 1:
        many = Bench(target, source, width, short, batch, spare)
        sizes = [size for size in NODES if batch * size > most and size <= nodes + 1]
        works |= {("batch", size): partial(many.verify, size, GREEDY) for size in sizes}
    began, used = time.perf_counter(), time.process_time()
    times = time_works(works, target.device)
    share = (time.process_time() - used) / (time.perf_counter() - began)
    had_machine = target.device.type == "cpu" and share > FREE_SHARE * torch.get_num_threads()
    surface = surface_from(times, short, long, most, batch, levels)
    return replace(surface, complete=had_machine or len(times) == len(works))


def sizes_between(most: int, captured: bool) -> list[int]:
    """Sizes of a tree between 1 and `most`, the most informative first; graphs are only captured for powers of two."""
    return [size for size in (8, 6, 16, 4, 12, 32, 2) if size < most and (not captured or size == size_bucket(size))]


class Bench:
    """A cache of zeros, filled to one context length; the time of a step does not depend on the values."""

    def __init__(self, target: TargetModel, source: Source, width: int, context: int, batch: int, spare: int) -> None:
        self.target, self.source, self.width, self.context, self.batch = target, source, width, context, batch
        self.rows = {sampling: BatchSampling([sampling] * batch, target.device) for sampling in (GREEDY, SAMPLED)}
        self.cache = target.passes.new_cache(context + spare, source.cache_shape, batch, target.may_capture)
        self.cache.set_lengths([context] * batch)
        self.step = StaticStep(target, NoDrafter(ACCEPTED_NODES), self.cache) if target.may_capture else None

    def verify(self, nodes: int, sampling: Sampling) -> None:
        """A target step as decoding runs it."""
        device, held = self.target.device, self.cache.target.lengths
        rows = self.rows[sampling]
        tokens = torch.zeros(self.batch, nodes, dtype=torch.long, device=device)
        parents = torch.arange(nodes, device=device).expand(self.batch, -1) - 1
        if self.target.passes.verifies_trees:
            parents = parents.clamp(max=0)
        tree = Tree(tokens, parents)
        if self.step is None:
            starts = self.cache.target.starts
            drawn = min(nodes, NOISE_POSITIONS)
            rows = rows.with_gumbel(starts + 1, drawn, self.target.config.vocab_size)
            logits = self.target.passes.tree(tree, self.cache).logits
            # A chain is deeper than the noise drawn here; its last nodes share the noise of one position.
            accept(tree, rows.choose(logits, starts.unsqueeze(1) + tree.depths.clamp(max=drawn - 1) + 1))
            # As if a sibling had been rejected.
            self.cache.target.keep([[0, *range(2, min(nodes, ACCEPTED_NODES + 1))]] * self.batch)
        else:
            output = self.step.verify(tree, rows)
            accept(output.tree, output.choices)
        self.cache.target.set_lengths(held)

    def drafting(self, levels: int) -> Callable[[], object]:
        """A function that drafts this many levels after two newly verified positions."""
        device = self.target.device
        growth = Dynamic(levels, self.width, self.width * levels)
        drafter = drafter_of(self.source, growth)
        tapped = self.target.config.hidden_size * len(self.source.taps)
        verified = VerifiedOnHost(
            taps=torch.zeros(self.batch, 2, tapped, dtype=self.target.dtype, device=device),
            next_tokens=torch.zeros(self.batch, 2, dtype=torch.long, device=device),
            roots=torch.zeros(self.batch, 1, dtype=torch.long, device=device),
            sampling=self.rows[GREEDY],
            history=None,
            rows=[VerifiedRow([0] * (self.context + 1), self.context - 2, 2, levels)] * self.batch,
        )
        if self.step is None or isinstance(drafter, Lookup):
            return partial(drafter.draft, verified, self.cache)
        step, another = StaticStep(self.target, drafter, self.cache), copy(drafter)
        given = VerifiedOnDevice.of(verified)

        def draft() -> object:
            if self.cache.head is not None:
                verified.rewind(self.cache.head)
            return step.draft(another, given)  # without the target, as it is not the step's own

        return draft


def drafter_of(source: Source, growth: Dynamic) -> TreeDrafter | Lookup:
    """The same head or model, drafting trees of this growth; lookup stays as it is."""
    if isinstance(source, DraftHead):
        return head_drafter(source, growth)
    return source if isinstance(source, Lookup) else ModelDrafter(source.model, growth, source.target)


def time_works(works: Mapping[Work, Callable[[], object]], device: torch.device) -> dict[Work, float]:
    """Seconds of each piece of work, the least of a few runs.

    They take turns, so that a slow moment of the machine affects all of them, and each starts with the processor's
    caches in the state of a decode step. Works that were not timed within the time limit are left out.
    """
    times: dict[Work, list[float]] = defaultdict(list)
    began, enough = time.perf_counter(), SECONDS_ON_CPU if device.type == "cpu" else SECONDS_ON_GPU
    for turn in range(TIMED_RUNS):
        for number, (name, work) in enumerate(works.items()):
            spent = time.perf_counter() - began
            if (spent > enough * PATIENCE_FACTOR and number >= NEEDED_WORKS) or (spent > enough and turn):
                return {name: min(seconds) for name, seconds in times.items()}
            seconds = seconds_of(work, device)
            is_slow = seconds > enough / len(works)
            if not turn and number == 0 and is_slow:
                print("measuring what a decode step costs on this machine, once", file=sys.stderr, flush=True)
            if not turn and not (is_slow and device.type == "cpu"):
                seconds = seconds_of(work, device)  # the first run also allocates, compiles or captures
            times[name].append(seconds)
    return {name: min(seconds) for name, seconds in times.items()}


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def surface_from(times: Mapping[Work, float], short: int, long: int, most: int, batch: int, levels: int) -> CostSurface:
    """The costs as functions, from the seconds of the timed pieces of work."""
    ends = (1, most)
    # Of one row, with one node and with the most.
    per_position = [slope(times["target", size], times.get(("far", size)), long - short) for size in ends]
    per_position[1] = max(per_position)
    sampled = [slope(times["target", size], times.get(("sampled", size)), 1) for size in ends]
    sampled[1] = max(sampled)
    sizes = sorted(size for part, size in times if part == "target")
    attention = {size: short * float(numpy.interp(size, ends, per_position)) for _, size in times}  # of one row
    points = {size: times["target", size] - attention[size] for size in sizes}
    for part, size in times:
        if part == "batch":
            points[batch * size] = times[part, size] - batch * attention[size]
    tokens = sorted(points)
    # Disturbances only make a measurement longer, so no pass can take longer than a larger one did.
    least = [max(points[size], times["target", 1] / 10) for size in tokens]
    seconds = numpy.minimum.accumulate(least[::-1])[::-1]
    first = slope(times["first", short], times.get(("first", long)), long - short)
    level = further_level(times, short, levels)
    far_level = further_level(times, long, levels) if ("levels", long) in times else None
    further = slope(level, far_level, long - short)
    return CostSurface(
        tokens=tuple(tokens),
        target=tuple(seconds.tolist()),
        most=most,
        position=(per_position[0], per_position[1]),
        sampled=(sampled[0], sampled[1]),
        first_level=(max(times["first", short] - short * first, times["first", short] / 10), first),
        level=(max(level - short * further, 0.0), further),
    )


def slope(near: float, far: float | None, distance: int) -> float:
    """The rise per step of the distance, at least 0; 0 without a second time."""
    return 0.0 if far is None or distance == 0 else max(far - near, 0.0) / distance


def further_level(times: Mapping[Work, float], context: int, levels: int) -> float:
    """The time of each level after the first."""
    return max(times["levels", context] - times["first", context], 0.0) / max(levels - 1, 1)
