"""Times the parts of a decode step before the first request, and keeps the times on disk for later runs."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
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
from headstart.inference.drafters.costs import CostTable, MeasuredCosts
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.targets.cuda_graph import StaticStep
from headstart.inference.targets.loading import processor_name
from headstart.inference.targets.model import TargetModel

FILE_LAYOUT = 5  # a file of another layout is measured anew
SIZES = (1, 2, 4, 6, 8, 12, 16, 32, 64)  # nodes of a row's tree, root included; costs of others are interpolated
FIRST_SIZES = (8, 6, 16, 4, 12, 32, 2)  # sizes between the least and the most, the most informative first
CONTEXT = 128  # positions, fewer where the target has fewer
TIMED_LEVELS = 3  # levels drafted to find the time of one
ACCEPTED_NODES = 4  # the length of the accepted path
TIMED_RUNS = 5
SECONDS_ON_CPU, SECONDS_ON_GPU = 4.0, 20.0  # of timing, then the rest is interpolated; capturing a graph takes long
NEEDED_WORKS = 4  # the first pieces of work, without which nothing is known
FREE_SHARE = 0.7  # of the wall time that this thread must run; otherwise the machine is busy, and nothing is kept
MOST_REPEATS = 64  # draft tokens that are added to a head's tree, at most

Work = tuple[str, int]  # a part of a step, and its size
Source = DraftHead | ModelDrafter | Lookup  # what drafts


@dataclass(frozen=True)
class CostFile:
    """The content of a file: the measured costs and what they depend on."""

    key: dict[str, Any]
    measured: MeasuredCosts


class KnownTables(dict[str, CostTable]):
    """The cost tables of a target, by digests of their keys."""


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
        found: list[MeasuredCosts] = []

        def read_or_measure(measure: Callable[[], tuple[MeasuredCosts, bool]]) -> None:
            if (measured := read_costs(digest, key)) is None:
                measured, may_keep = measure()
                if may_keep:
                    write_costs(digest, CostFile(key, measured))
            found.append(measured)

        # Some ranks may have a file that others lack.
        target.ranks.carry_out(partial(measure_costs, target, source, width, nodes, batch), read_or_measure)
        measured = target.ranks.agreed(found[0] if found else None)
        assert measured is not None
        most = nodes + MOST_REPEATS
        tables[digest] = CostTable(measured, width, most, target.may_capture, not target.ranks.in_step)
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


def read_costs(digest: str, key: dict[str, Any]) -> MeasuredCosts | None:
    """The costs that an earlier run of the same kind wrote; None without a file that can be read."""
    with suppress(OSError, RuntimeError, ValueError):  # no home folder is a RuntimeError, a broken file a ValueError
        stored = TypeAdapter(CostFile).validate_json(cost_path(digest).read_bytes())
        if stored.key == key:
            return stored.measured
    return None


def write_costs(digest: str, content: CostFile) -> None:
    """Keep costs for later runs, if the cache folder can be written."""
    with suppress(OSError, RuntimeError):
        path = cost_path(digest)
        partial_file = path.with_suffix(f".{os.getpid()}")  # several ranks may write the same costs
        write_text(partial_file, json.dumps(asdict(content), indent=1) + "\n")
        partial_file.replace(path)


def cost_path(digest: str) -> Path:
    return user_cache("costs") / f"{digest}.json"


@torch.inference_mode()
def measure_costs(
    target: TargetModel, source: Source, width: int, nodes: int, batch: int
) -> tuple[MeasuredCosts, bool]:
    """The costs of steps whose levels expand `width` nodes, with up to `nodes` draft tokens, and of up to `batch` rows.

    Also returns whether the machine had no other work, so that they may be kept.
    """
    most = min(size_bucket(nodes + 1), SIZES[-1])
    spare = most + width * TIMED_LEVELS
    context = max(min(CONTEXT, target.max_positions - spare), 2)  # no step is decoded beyond the target's positions
    benches = {count: Bench(target, source, width, context, count, spare) for count in {1, batch}}
    one, rows = benches[1], benches[batch]
    levels = min(TIMED_LEVELS, source.max_levels or TIMED_LEVELS) if isinstance(source, DraftHead) else TIMED_LEVELS
    between = [size for size in FIRST_SIZES if size < most and (size == size_bucket(size) or not target.may_capture)]
    larger = [size for size in SIZES if batch * size > most and size <= nodes + 1] if batch > 1 else []
    works: dict[Work, Callable[[], object]] = {
        ("target", 1): partial(one.verify, 1),
        ("levels", 1): one.drafting(1),
        ("target", most): partial(one.verify, most),
        ("levels", levels): one.drafting(levels),
        **{("target", size): partial(one.verify, size) for size in between},
        **{("target", batch * size): partial(rows.verify, size) for size in larger},
    }
    wall, own = time.perf_counter(), time.thread_time()
    times = time_works(works, target)
    had_machine = time.thread_time() - own > FREE_SHARE * (time.perf_counter() - wall)
    return measured_from(times), had_machine or target.device.type != "cpu"


class Bench:
    """A cache of zeros, filled to one context length; the time of a step does not depend on the values."""

    def __init__(self, target: TargetModel, source: Source, width: int, context: int, batch: int, spare: int) -> None:
        self.target, self.source, self.width, self.context, self.batch = target, source, width, context, batch
        self.sampling = BatchSampling([Sampling()] * batch, target.device)
        self.cache = target.passes.new_cache(context + spare, source.cache_shape, batch, target.may_capture)
        self.cache.set_lengths([context] * batch)
        self.step = StaticStep(target, NoDrafter(ACCEPTED_NODES), self.cache) if target.may_capture else None

    def verify(self, nodes: int) -> None:
        """A target step as decoding runs it."""
        device, cache = self.target.device, self.cache.target
        held, tokens = cache.lengths, torch.zeros(self.batch, nodes, dtype=torch.long, device=device)
        parents = torch.arange(nodes, device=device).expand(self.batch, -1) - 1
        if self.target.passes.verifies_trees:
            parents = parents.clamp(max=0)
        tree = Tree(tokens, parents)
        if self.step is None:
            logits = self.target.passes.tree(tree, self.cache).logits
            accept(tree, self.sampling.choose(logits, cache.starts.unsqueeze(1) + tree.depths + 1))
            # As if a sibling had been rejected.
            cache.keep([[0, *range(2, min(nodes, ACCEPTED_NODES + 1))]] * self.batch)
        else:
            output = self.step.verify(tree, self.sampling)
            accept(output.tree, output.choices)
        cache.set_lengths(held)

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
            sampling=self.sampling,
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


def time_works(works: Mapping[Work, Callable[[], object]], target: TargetModel) -> dict[Work, float]:
    """Seconds of each piece of work, the least of a few runs.

    They take turns, so that a slow moment of the machine affects all of them, and each starts with the processor's
    caches in the state of a decode step. Works that were not timed within the time limit are left out. Ranks that
    compute every pass together follow the clock of one.
    """
    times: dict[Work, float] = {}
    device, agreed = target.device, target.ranks.agreed
    began, enough = time.perf_counter(), SECONDS_ON_CPU if device.type == "cpu" else SECONDS_ON_GPU
    for turn in range(TIMED_RUNS):
        for name, work in works.items():
            if len(times) >= NEEDED_WORKS and agreed(time.perf_counter() - began > enough):
                return times
            seconds = seconds_of(work, device)
            is_slow = agreed(seconds > enough / len(works))
            if is_slow and not times:
                print("measuring what a decode step costs on this machine, once", file=sys.stderr, flush=True)
            if turn == 0 and not (is_slow and device.type == "cpu"):
                seconds = seconds_of(work, device)  # the first run also allocates, compiles or captures
            times[name] = min(seconds, times.get(name, seconds))
    return times


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measured_from(times: Mapping[Work, float]) -> MeasuredCosts:
    """The costs by the seconds of the timed pieces of work: a target's pass by its tokens, drafting by its levels."""
    sizes = sorted(size for part, size in times if part == "target")
    # Disturbances only make a measurement longer, so no pass can take longer than a larger one did.
    least = numpy.minimum.accumulate([times["target", size] for size in reversed(sizes)])[::-1]
    levels = max(size for part, size in times if part == "levels")
    first, further = times["levels", 1], times["levels", levels] - times["levels", 1]
    return MeasuredCosts(tuple(sizes), tuple(least.tolist()), first, max(further, 0.0) / max(levels - 1, 1))
