"""What a step costs on this machine: measured once per context length and batch size."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy
import torch
from numpy.typing import NDArray

from heads.base import DraftHead
from inference.cache import KVCache
from inference.cuda_graph import StaticStep, size_bucket
from inference.drafter import PLAIN, Verified
from inference.drafters.growth import Dynamic
from inference.drafters.head import HeadDrafter
from inference.sampling import BatchSampling, Sampling
from inference.target.model import TargetModel
from inference.tree import Tree
from inference.verify import accept

NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # trees that are timed, the root included; between them costs are interpolated
LEVELS = 3  # drafted to time one of them
KEPT = 4  # nodes of the path that is kept
REPEATS = 7


@dataclass(frozen=True)
class StepCosts:
    """Seconds at one context length and batch size."""

    target: tuple[float, ...]  # of a target step of NODES nodes, of choosing a token at each and of keeping a path
    first_level: float  # of drafting one: the head's pass over newly verified positions
    level: float  # of each further level

    def verify(self, most: int) -> NDArray[numpy.float64]:
        """Of a target step with 1, 2, ... `most` nodes beside the root; beyond what was timed the slope goes on."""
        nodes = numpy.arange(2, most + 2)
        found = numpy.interp(nodes, NODES, self.target)
        slope = (self.target[-1] - self.target[-2]) / (NODES[-1] - NODES[-2])
        return found + slope * numpy.maximum(nodes - NODES[-1], 0)


class CostTable:
    """Step costs of a target and a head, measured when they are first asked for and kept with the target."""

    def __init__(self, target: TargetModel, head: DraftHead, width: int) -> None:
        """`width` is how many nodes a level expands."""
        self.target, self.head, self.width = target, head, width
        # Costs depend on a head's sizes and not on its weights.
        self.known: dict[tuple[int, int, bool], StepCosts] = target.step_costs.setdefault((head.shape, width), {})

    def now(self, verified: Verified, nodes: int) -> StepCosts:
        """Costs for such rows, at the next powers of two that the longest row (128 at least) and the batch fit."""
        context, batch = max(128, size_bucket(max(verified.starts) + nodes)), size_bucket(len(verified.starts))
        key = context, batch, verified.sampling.all_greedy
        if key not in self.known:
            self.known[key] = self.measure(context * 3 // 4, batch, verified.sampling.samplings[0])
        return self.known[key]

    @torch.inference_mode()
    def measure(self, context: int, batch: int, sampling: Sampling) -> StepCosts:
        """Time steps on a cache of zeros: what is in the slots does not change how long it takes."""
        # Nothing beyond the target's positions is ever decoded; and penalties would ask for a history.
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
        """As decoding does it: captured, and then of a size that is a power of two, or not."""
        nodes = nodes if step is None else size_bucket(nodes)
        batch, device = len(sampling.samplings), self.target.device
        tokens = torch.zeros(batch, nodes, dtype=torch.long, device=device)
        tree = Tree(tokens, torch.arange(-1, nodes - 1, device=device).repeat(batch, 1))
        held = cache.target.lengths
        if step is None:
            choices = sampling.choose(self.target.forward_tree(tree, cache).logits, tree.depths)
        else:
            choices = step.replay(step.verify, sampling, tree.tokens, tree.parents)[2]
        accept(tree, choices)
        cache.target.keep([[0, *range(2, min(nodes, KEPT + 1))]] * batch)  # as if a sibling had been refused
        cache.target.set_lengths(held)

    def drafting(self, levels: int, context: int, cache: KVCache, sampling: BatchSampling) -> Callable[[], object]:
        """Drafts so many levels behind two newly verified positions."""
        batch, device = len(sampling.samplings), self.target.device
        drafter = HeadDrafter(self.head, Dynamic(levels, self.width, self.width * levels))
        tapped = self.target.config.hidden_size * len(self.head.taps)
        asked = Verified(
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
        return partial(drafter.draft, asked, cache)

    def seconds(self, works: Sequence[Callable[[], object]]) -> list[float]:
        """Of each work. They take turns, so that a slow moment of the machine hits all alike, and each finds the caches
        as a decode step does; the first round warms up."""
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
