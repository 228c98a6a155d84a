"""Drafting with a trained head: trees grown level by level, for all rows of a batch at once."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from heads.cache import Slots
from heads.calibration import Calibration
from heads.vocab import DraftVocab
from inference.cache import KVCache
from inference.drafters import Verified
from inference.drafters.growth import Growth, Pool
from inference.drafters.proposals import SampledChildren
from inference.masks import Block, block_mask
from inference.sampling import BatchSampling, History
from inference.tree import Tree


@dataclass
class Frontier:
    """The nodes that a level expands; before the first level the root alone."""

    tokens: Int[Tensor, "batch frontier"]
    numbers: Int[Tensor, "batch frontier"]  # of the nodes in the pool, the root being 0
    totals: Float[Tensor, "batch frontier"]  # log of the estimated chance that the target gets there
    visible: Bool[Tensor, "batch frontier pending"]  # which drafted nodes each attends to
    history: History | None  # where penalties ask for it: what came before, the node included

    @classmethod
    def at_root(cls, verified: Verified) -> "Frontier":
        roots, history = verified.roots, verified.history
        if history is not None:
            history = history.extend(torch.zeros_like(roots), roots)
        nowhere = torch.zeros(*roots.shape, 0, dtype=torch.bool, device=roots.device)
        return cls(roots, torch.zeros_like(roots), torch.zeros(roots.shape, device=roots.device), nowhere, history)

    def below(self, parents: Int[Tensor, "batch next"], tokens: Tensor, numbers: Tensor, totals: Tensor) -> "Frontier":
        """Nodes of the next level, given the frontier's node that each hangs from."""
        history = None if self.history is None else self.history.extend(parents, tokens)
        themselves = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        return Frontier(tokens, numbers, totals, torch.cat([take(self.visible, parents), themselves], -1), history)


@runtime_checkable  # the shape checks of the tests look at instances
class Guesser(Protocol):
    """What drafting level by level needs of a head, or of a model in its place."""

    taps: tuple[int, ...]
    vocab: DraftVocab
    calibration: Calibration
    embedding: Tensor

    @property
    def cache_shape(self) -> tuple[int, int, int]: ...

    def project(self, taps: Tensor) -> Tensor: ...

    def __call__(self, *args: Any) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def feedback(self, hidden: Tensor) -> Tensor: ...


class HeadDrafter:
    """Reads the target's features of what was verified, then unrolls the head on its own features."""

    def __init__(self, head: Guesser, growth: Growth) -> None:
        """Raises ValueError for a tree wider than the head's vocabulary."""
        if growth.width > len(head.vocab.ids):
            raise ValueError(f"decode.width: {growth.width} given, 1 to the head's {len(head.vocab.ids)} is allowed")
        self.head, self.growth = head, growth
        self.ids = head.vocab.ids.to(head.embedding.device)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    @property
    def cache_shape(self) -> tuple[int, int, int] | None:
        return self.head.cache_shape

    @property
    def max_nodes(self) -> int:
        return max(self.growth.nodes + 1, self.growth.width * self.growth.depth)

    @property
    def depth(self) -> int:
        return self.growth.depth

    @property
    def static_shapes(self) -> bool:
        return self.growth.static_shapes

    @torch.inference_mode()
    def begin(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        assert row.head is not None
        count = text.shape[1] - 2  # the last position is read with the first draft
        if count:
            positions = torch.arange(count, device=self.ids.device)
            features = self.head.project(taps[:, :count])
            self.head(features, text[:, 1 : count + 1], positions, None, row.head)

    @torch.inference_mode()
    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        slots = self.slots(cache)
        levels = self.growth.levels(verified)
        hidden = self.read(verified, slots)  # [batch, 1, feature]
        if levels < 1:
            return Tree.root_only(verified.roots)
        frontier, pool, features = Frontier.at_root(verified), Pool.empty(), hidden
        samples = SampledChildren(self.growth, self.head.vocab) if verified.sampling.rule == "rejection" else None
        for level in range(levels):
            if level:
                hidden = self.expand(features, frontier, level, slots)
            positions = (slots.starts + (level + 1)).unsqueeze(1).expand_as(frontier.tokens)
            logits, count = self.head.logits(hidden), self.growth.children(level)
            if samples is not None:
                values, columns = samples.draw(level, logits, positions, verified.sampling, frontier.history)
            else:
                chances = self.chances(level, logits, positions, verified.sampling, frontier.history)
                values, columns = chances.topk(count, dim=-1)  # [batch, frontier, count]
            totals = (frontier.totals.unsqueeze(-1) + values).flatten(1)
            late = self.late(verified, level)
            if late is not None:
                totals = totals.masked_fill(late.unsqueeze(1), -torch.inf)
            first = len(pool) + 1
            pool.add(totals, self.ids[columns].flatten(1), frontier.numbers.repeat_interleave(count, dim=1))
            if level + 1 == levels or not self.growth.goes_on(pool):
                break
            chosen = self.growth.frontier(level, totals)  # [batch, frontier]
            parents = chosen // count
            features = take(self.head.feedback(hidden), parents)
            frontier = frontier.below(
                parents, pool.tokens[-1].gather(1, chosen), first + chosen, totals.gather(1, chosen)
            )
        tree = self.growth.prune(pool, verified.roots)
        return tree if samples is None else samples.label(tree, verified.rooms)

    def slots(self, cache: KVCache) -> Slots:
        """Where it keeps keys and values."""
        assert cache.head is not None
        return cache.head

    def read(self, verified: Verified, slots: Slots) -> Float[Tensor, "batch 1 feature"]:
        """Take in the verified positions, in place of what was drafted there; returns each row's last hidden state."""
        if verified.on_device is None:
            slots.set_lengths(verified.starts)
        offsets = torch.arange(verified.next_tokens.shape[1], device=self.ids.device)
        mask = block_mask(slots, Block((offsets <= offsets[:, None]).unsqueeze(0)), verified.taps.dtype)
        positions = slots.starts[:, None] + offsets
        hidden = self.head(self.head.project(verified.taps), verified.next_tokens, positions, mask, slots)
        if verified.on_device is not None:
            counts = verified.on_device.counts
            slots.shift(counts)
            return take(hidden, counts.unsqueeze(1) - 1)
        slots.advance(verified.counts)
        if len(hidden) == 1:
            return hidden[:, verified.counts[0] - 1 : verified.counts[0]]
        return take(hidden, torch.tensor(verified.counts, device=self.ids.device).unsqueeze(1) - 1)

    def late(self, verified: Verified, level: int) -> Bool[Tensor, " batch"] | None:
        """The rows that have no use for children on this level; None if all have."""
        if verified.on_device is not None:
            return verified.on_device.rooms <= level
        if min(verified.rooms) > level:
            return None
        return torch.tensor([room <= level for room in verified.rooms], device=self.ids.device)

    def expand(
        self, features: Tensor, frontier: Frontier, level: int, slots: Slots
    ) -> Float[Tensor, "batch frontier feature"]:
        """One level through the head; each node sees the verified tokens, its ancestors and itself."""
        mask = block_mask(slots, Block(frontier.visible), features.dtype)
        positions = (slots.starts + (level - 1)).unsqueeze(1).expand_as(frontier.tokens)
        hidden = self.head(features, frontier.tokens, positions, mask, slots)
        slots.hold(frontier.tokens.shape[1])
        return hidden

    def chances(
        self, level: int, logits: Tensor, positions: Tensor, sampling: BatchSampling, history: History | None
    ) -> Float[Tensor, "batch frontier draft_vocab"]:
        """Log of the estimated chance that the target chooses each token, given its noise at that position."""
        scores = sampling.scores(logits, positions, history, self.ids).float()
        greedy, sampled = self.head.calibration.at(level)
        if greedy != sampled:  # between two tensors: a captured step may not bring numbers from the host
            scores = torch.where(sampling.greedy[:, None, None], scores * greedy, scores * sampled)
        elif greedy != 1:
            scores = scores * greedy
        return torch.log_softmax(scores, dim=-1)


def take(states: Shaped[Tensor, "batch nodes size"], index: Int[Tensor, "batch chosen"]) -> Tensor:
    """Some nodes of each row."""
    return states.gather(1, index.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
