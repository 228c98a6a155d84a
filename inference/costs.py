"""What a step costs on this machine: measured once per context length and batch size."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy
import torch
from numpy.typing import NDArray

from heads.base import DraftHead
from inference.cache import KVCache
from inference.drafters import Verified
from inference.drafters.growth import Dynamic
from inference.drafters.head import HeadDrafter
from inference.sampling import BatchSampling
from inference.target import TargetModel
from inference.tree import Tree

NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # trees that are timed, the root included; between them costs are interpolated
LEVELS = 3  # drafted to time one of them
REPEATS = 7


@dataclass(frozen=True)
class StepCosts:
    """Seconds at one context length and batch size."""

    target: tuple[float, ...]  # of a target step of NODES nodes, and of choosing a token at each
    read: float  # of drafting a first level: the head's pass over newly verified positions
    level: float  # of each further level

    def verify(self, most: int) -> NDArray[numpy.float64]:
        """Of a target step with 1, 2, ... `most` nodes beside the root; beyond what was timed the slope goes on."""
        nodes = numpy.arange(2, most + 2)
        found = numpy.interp(nodes, NODES, self.target)
        slope = (self.target[-1] - self.target[-2]) / (NODES[-1] - NODES[-2])
        return found + slope * numpy.maximum(nodes - NODES[-1], 0)


class CostTable:
    """Step costs of a target and a head, measured when they are first asked for."""

    def __init__(self, target: TargetModel, head: DraftHead, width: int) -> None:
        """`width` is how many nodes a level expands."""
        self.target, self.head, self.width = target, head, width
        self.known: dict[tuple[int, int, bool], StepCosts] = {}

    def now(self, verified: Verified, nodes: int) -> StepCosts:
        """Costs for these rows, at the next power of two, 128 at least, that the longest fits."""
        longest, batch = max(verified.starts) + nodes, len(verified.starts)
        key = max(128, 1 << longest.bit_length()), batch, verified.sampling.all_greedy
        if key not in self.known:
            self.known[key] = self.measure(key[0] * 3 // 4, verified)
        return self.known[key]

    @torch.inference_mode()
    def measure(self, context: int, verified: Verified) -> StepCosts:
        """Time steps on a cache of zeros: what is in the slots does not change how long it takes."""
        batch, sampling = len(verified.starts), verified.sampling
        cache = self.target.new_cache(context + NODES[-1] + self.width * LEVELS, self.head.cache_shape, batch)
        cache.target.set_lengths([context] * batch)
        likely = self.draft_seconds(1, context, cache, verified), self.draft_seconds(LEVELS, context, cache, verified)
        target = tuple(self.seconds(partial(self.verify, nodes, sampling, cache)) for nodes in NODES)
        return StepCosts(target, likely[0], max(likely[1] - likely[0], 0) / (LEVELS - 1))

    def verify(self, nodes: int, sampling: BatchSampling, cache: KVCache) -> None:
        batch, device = len(sampling.samplings), self.target.device
        tokens = torch.zeros(batch, nodes, dtype=torch.long, device=device)
        tree = Tree(tokens, torch.arange(-1, nodes - 1, device=device).expand(batch, -1))
        output = self.target.verify(tree, cache)
        sampling.scores(output.logits, tree.depths).argmax(-1)

    def draft_seconds(self, levels: int, context: int, cache: KVCache, verified: Verified) -> float:
        """Of drafting so many levels behind two newly verified positions."""
        batch, device = len(verified.starts), self.target.device
        drafter = HeadDrafter(self.head, Dynamic(levels, self.width, self.width * levels))
        tapped = self.target.config.hidden_size * len(self.head.taps)
        asked = Verified(
            taps=torch.zeros(batch, 2, tapped, dtype=self.target.dtype, device=device),
            next_tokens=torch.zeros(batch, 2, dtype=torch.long, device=device),
            roots=torch.zeros(batch, 1, dtype=torch.long, device=device),
            starts=[context - 2] * batch,
            counts=[2] * batch,
            drafted=[0] * batch,
            rooms=[levels] * batch,
            sampling=verified.sampling,
            history=None,
            texts=verified.texts,
        )
        return self.seconds(lambda: drafter.draft(asked, cache))

    def seconds(self, work: Callable[[], object]) -> float:
        """The fastest of a few runs: what others on the machine take is not this work's cost."""
        times = []
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            work()
            if self.target.device.type == "cuda":
                torch.cuda.synchronize(self.target.device)
            times.append(time.perf_counter() - started)
        return min(times[1:])
