"""What a decode step costs on this machine, measured once per context length and batch size."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy
import torch
from numpy.typing import NDArray

from headstart.heads.base import DraftHead
from headstart.inference.cache import KVCache
from headstart.inference.cuda_graph import StaticStep, size_bucket
from headstart.inference.drafter import PLAIN, VerifiedOnHost
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.sampling import BatchSampling, Sampling
from headstart.inference.target.model import TargetModel
from headstart.inference.tree import Tree
from headstart.inference.verify import accept

NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # tree sizes that are timed, root included; others are interpolated
LEVELS = 3  # levels drafted to find the time of one
KEPT = 4  # nodes on the accepted path
REPEATS = 7


@dataclass(frozen=True)
class StepCosts:
    """Seconds at one context length and batch size."""

    target: tuple[float, ...]  # a step with NODES nodes: the pass, a choice at each node, and keeping a path
    first_level: float  # drafting one level: the head's pass over the newly verified positions
    level: float  # each further level

    def verify(self, most: int) -> NDArray[numpy.float64]:
        """A target step with 1, 2, ... `most` draft tokens; extrapolated beyond the largest size that was timed."""
        nodes = numpy.arange(2, most + 2)
        found = numpy.interp(nodes, NODES, self.target)
        slope = (self.target[-1] - self.target[-2]) / (NODES[-1] - NODES[-2])
        return found + slope * numpy.maximum(nodes - NODES[-1], 0)


Measured = dict[tuple[int, int, bool], StepCosts]  # by context length, batch size, and whether all rows are greedy


class MeasuredCosts(dict[tuple[Hashable, int], Measured]):
    """Step costs of a target with several heads, by the head's shape and the width of its trees."""


class CostTable:
    """Step costs of a target and a head. They are measured on first use and kept with the target."""

    def __init__(self, target: TargetModel, head: DraftHead, width: int) -> None:
        """`width` is the number of nodes that a level expands."""
        self.target, self.head, self.width = target, head, width
        # Costs depend on a head's shape, not on its weights.
        self.known = target.kept(MeasuredCosts).setdefault((head.shape, width), {})

    def now(self, verified: VerifiedOnHost, nodes: int) -> StepCosts:
        """The costs for these rows; their longest context (at least 128) and their number round up to powers of two."""
        context, batch = max(128, size_bucket(max(verified.starts) + nodes)), size_bucket(len(verified.starts))
        key = context, batch, verified.sampling.all_greedy
        if key not in self.known:
            self.known[key] = self.measure(context * 3 // 4, batch, verified.sampling.samplings[0])
        return self.known[key]

    @torch.inference_mode()
    def measure(self, context: int, batch: int, sampling: Sampling) -> StepCosts:
        """Time steps on a cache of zeros; the contents of the slots do not change how long a step takes."""
        # Nothing is decoded beyond the target's positions, and penalties would need a history.
        spare = NODES[-1] + self.width * LEVELS
        context = max(min(context, self.target.max_positions - spare), 2)
        plain = replace(sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        rows = BatchSampling([plain] * batch, self.target.device)
        static = self.target.device.type == "cuda"
        cache = self.target.new_cache(context + spare, self.head.cache_shape, batch, static)
        cache.set_lengths([context] * batch)
        step = StaticStep(self.target, PLAIN, cache) if static and rows.rule == "seeded" else None
        levels = min(LEVELS, self.head.max_levels or LEVELS)
        drafts = [self.drafting(count, context, cache, rows) for count in (1, levels)]
        verifies = [partial(self.verify, nodes, rows, cache, step) for nodes in NODES]
        one, several, *target = self.seconds([*drafts, *verifies])
        return StepCosts(tuple(target), one, max(several - one, 0) / max(levels - 1, 1))

    def verify(self, nodes: int, sampling: BatchSampling, cache: KVCache, step: StaticStep | None) -> None:
        """A target step as decoding runs it: captured with a power of two of nodes, or not captured."""
        nodes = nodes if step is None else size_bucket(nodes)
        batch, device = len(sampling.samplings), self.target.device
        tokens = torch.zeros(batch, nodes, dtype=torch.long, device=device)
        tree = Tree(tokens, torch.arange(-1, nodes - 1, device=device).repeat(batch, 1))
        held = cache.target.lengths
        if step is None:
            choices = sampling.choose(self.target.forward_tree(tree, cache).logits, tree.depths)
        else:
            choices = step.replay(step.choose, sampling, tree.tokens, tree.parents)[2]
        accept(tree, choices)
        cache.target.keep([[0, *range(2, min(nodes, KEPT + 1))]] * batch)  # as if a sibling had been rejected
        cache.target.set_lengths(held)

    def drafting(self, levels: int, context: int, cache: KVCache, sampling: BatchSampling) -> Callable[[], object]:
        """A function that drafts this many levels after two newly verified positions."""
        batch, device = len(sampling.samplings), self.target.device
        drafter = HeadDrafter(self.head, Dynamic(levels, self.width, self.width * levels))
        tapped = self.target.config.hidden_size * len(self.head.taps)
        verified = VerifiedOnHost(
            taps=torch.zeros(batch, 2, tapped, dtype=self.target.dtype, device=device),
            next_tokens=torch.zeros(batch, 2, dtype=torch.long, device=device),
            roots=torch.zeros(batch, 1, dtype=torch.long, device=device),
            starts=[context - 2] * batch,
            counts=[2] * batch,
            drafted=[0] * batch,
            remaining=[levels] * batch,
            sampling=sampling,
            history=None,
            texts=[[]] * batch,
        )
        return partial(drafter.draft, verified, cache)

    def seconds(self, works: Sequence[Callable[[], object]]) -> list[float]:
        """Median seconds of each piece of work. They take turns, so that a slow moment of the machine affects all of
        them and each finds the processor's caches as a decode step would. The first round is a warm-up."""
        rounds: list[list[float]] = []
        for _ in range(1 + REPEATS):
            times = []
            for work in works:
                started = time.perf_counter()
                work()
                if self.target.device.type == "cuda":
                    torch.cuda.synchronize(self.target.device)
                times.append(time.perf_counter() - started)
            rounds.append(times)
        return [median(times) for times in zip(*rounds[1:], strict=True)]
