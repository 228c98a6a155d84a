"""Trees that grow level by level from a head's scores, for all rows of a batch at once."""

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from headstart.common.errors import wrong_value
from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.cache_memory import Shape
from headstart.inference.core.constraint import LevelConstraint
from headstart.inference.core.history import History
from headstart.inference.core.sampling import BatchSampling
from headstart.inference.core.tree import PendingTokens, Tree, additive, block_mask, causal_block, take
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.growth import GrowthPolicy, Pool
from headstart.inference.drafters.repeats import Repeats
from headstart.inference.targets.attention import BY_BLOCK


@dataclass
class Frontier:
    """The nodes whose children a level drafts; on the first level, the root alone."""

    tokens: Int[Tensor, "batch frontier"]
    numbers: Int[Tensor, "batch frontier"]  # places of the nodes in the pool; the root is 0
    totals: Float[Tensor, "batch frontier"]  # log of the estimated chance that the target's path includes the node
    mask: Float[Tensor, "batch frontier keys"] | None  # additive, see `LevelMasks`; None: a chain, which sees all
    history: History | None  # tokens up to and including the node, where penalties need them
    constraint: LevelConstraint | None = None  # the tokens that may follow the nodes

    @classmethod
    def at_root(cls, verified: Verified) -> "Frontier":
        roots, history = verified.roots, verified.history
        if history is not None:
            history = history.extend(torch.zeros_like(roots), roots)
        return cls(
            roots,
            torch.zeros_like(roots),
            torch.zeros(roots.shape, device=roots.device),
            None,
            history,
            verified.constraint(),
        )


@dataclass(frozen=True)
class LevelMasks:
    """Additive masks of the levels of a tree. Each level's mask extends its parents' masks.

    Building them from scratch on every level would cost more than any part of a step except the target and the head.
    """

    held: int  # keys before the draft tokens; every node sees them
    siblings: Float[Tensor, "1 width width"]  # among the nodes of one level, each sees only itself

    def of(self, frontier: Frontier, pending: int) -> Float[Tensor, "batch frontier keys"]:
        """The mask of a frontier over the held keys and the draft tokens."""
        if frontier.mask is not None:
            return frontier.mask
        return self.siblings.new_zeros(*frontier.tokens.shape, self.held + pending)

    def of_children(self, frontier: Frontier, level: int, parents: Int[Tensor, "batch next"]) -> Tensor | None:
        """The mask of the next frontier, given each node's parent in this one. [batch, next, keys]"""
        rows, width = parents.shape
        if frontier.mask is None and width == 1:
            return None
        siblings = self.siblings if width == self.siblings.shape[-1] else self.siblings[:, :width, :width]
        above = take(self.of(frontier, level), parents)
        return torch.cat([above, siblings if rows == 1 else siblings.expand(rows, -1, -1)], dim=-1)


class TreeDrafter(ABC):
    """Grows a tree level by level: the children of a node are the tokens that a head scores highest after it."""

    head: Any  # a DraftHead, or a model with the methods of a LevelHead
    static_shapes = True

    def __init__(self, head: Any, growth: GrowthPolicy, repeats: Repeats | None = None) -> None:
        """`repeats` are added to the head's trees.

        Raises ValueError for a tree wider than the head's vocabulary, or deeper than it has levels.
        """
        if growth.width > len(head.vocab.ids):
            raise wrong_value("decode.width", growth.width, f"1 to the head's {len(head.vocab.ids)} is", "lower it")
        if head.max_levels is not None and growth.depth > head.max_levels:
            raise wrong_value("decode.depth", growth.depth, f"1 to the head's {head.max_levels} is", "lower it")
        self.head, self.growth, self.repeats = head, growth, repeats
        self.calibration = [head.calibration.at(level) for level in range(growth.depth)]
        self.ids = head.vocab.ids.to(head.embedding.device)
        self.columns = None if head.vocab.is_full else self.ids  # the target's tokens that the head scores
        # The additive masks [1, size, size] of a level's nodes and of a verified path are the same in every step.
        self.places, path = (torch.arange(size, device=self.ids.device) for size in (growth.width, growth.depth + 1))
        dtype = head.embedding.dtype
        self.siblings = additive((self.places == self.places[:, None]).unsqueeze(0), dtype).squeeze(1)
        self.causal = additive((path <= path[:, None]).unsqueeze(0), dtype).squeeze(1)
        self._parents: dict[int, Tensor] = {}

    def mask_of(self, slots: Slots, block: PendingTokens) -> Float[Tensor, "rows 1 block keys"]:
        """The mask of a block of the head's own tokens, or a stand-in where its attention needs none."""
        return block_mask(slots, block, self.head.embedding.dtype, carries_keys=vars(self.head).get(BY_BLOCK, False))

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    @property
    def cache_shape(self) -> Shape | None:
        return self.head.cache_shape

    @property
    def max_nodes(self) -> int:
        return max(self.most_verified, self.growth.width * self.growth.depth)

    @property
    def most_verified(self) -> int:
        """Upper bound on the nodes of a tree."""
        return self.growth.nodes + 1 + (self.repeats.most if self.repeats else 0)

    @property
    def depth(self) -> int:
        return max(self.growth.depth, self.repeats.depth if self.repeats else 0)

    def shapes(self) -> list["TreeDrafter"]:
        return [self._shaped(growth) for growth in self.growth.shapes()]

    @property
    def needs_host(self) -> bool:
        return self.repeats is not None

    def planned(self, rows: int) -> tuple["TreeDrafter", int | None]:
        growth, count = self.growth.planned(rows)
        return self._shaped(growth), count

    def _shaped(self, growth: GrowthPolicy) -> "TreeDrafter":
        if growth is self.growth and self.repeats is None:
            return self
        drafter = copy(self)
        drafter.growth, drafter.repeats = growth, None
        return drafter

    def extended(self, tree: Tree, verified: VerifiedOnHost) -> Tree:
        if self.repeats is None:
            return tree
        return self.repeats.extend(tree.to("cpu"), verified, self.growth).to(tree.tokens.device)

    def observe(self, tree: Tree) -> None:
        self.growth.observe(tree)

    @abstractmethod
    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Read the positions that the target has just read of a row, except the last; see `Drafter.prefill`."""

    @abstractmethod
    def read(self, verified: Verified, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Read the newly verified positions; returns features and hidden state at each row's last one.

        [batch, 1, feature] and [batch, 1, hidden]
        """

    @abstractmethod
    def expand(
        self, features: Tensor, frontier: Frontier, masks: LevelMasks, level: int, cache: KVCache
    ) -> Float[Tensor, "batch nodes hidden"]:
        """The hidden states of a level's nodes; one node stands for all if they have the same."""

    def level_logits(self, hidden: Tensor, frontier: Frontier, level: int) -> Float[Tensor, "batch nodes draft_vocab"]:
        """The scores of the children of a level's nodes; one node stands for all if they have the same."""
        return self.head.logits(hidden, level)

    def feedback(self, hidden: Tensor, features: Tensor, tokens: Tensor) -> Tensor:
        """The features of the next level, from this level's features and hidden states."""
        return self.head.feedback(hidden, features)

    @torch.inference_mode()
    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        levels = self.growth.levels(verified)
        features, hidden = self.read(verified, cache)  # [batch, 1, feature] and [batch, 1, hidden]
        if levels < 1:
            return Tree.root_only(verified.roots)
        frontier, masks, pool = Frontier.at_root(verified), self.level_masks(cache), Pool()
        for level in range(levels):
            if level:
                hidden = self.expand(features, frontier, masks, level, cache)
            logits, count = self.level_logits(hidden, frontier, level), self.growth.children(level)
            if frontier.constraint is not None:
                logits = frontier.constraint.masked(for_all_nodes(logits, frontier), self.columns)
            best = self.chances(level, logits, cache.target.starts, verified.sampling, frontier).topk(count, dim=-1)
            values, columns = for_all_nodes(best.values, frontier), for_all_nodes(best.indices, frontier)
            tokens = columns if self.columns is None else self.ids[columns]
            if frontier.constraint is not None and self.columns is not None:
                # The only token that may follow can be one that the head does not score.
                values, tokens = frontier.constraint.with_only_tokens(values, tokens)
            totals, tokens = (frontier.totals.unsqueeze(-1) + values).flatten(1), tokens.flatten(1)
            finished = verified.finished(level)
            if finished is not None:
                totals = totals.masked_fill(finished.unsqueeze(1), -torch.inf)
            first = pool.add(totals, tokens, frontier.numbers)
            if level + 1 == levels or not self.growth.continues(pool):
                break
            features = self.feedback(hidden, features, frontier.tokens)
            expanded = self.growth.frontier(level, totals)
            if expanded is None:
                chosen = self.places[: totals.shape[1]].expand_as(totals)  # [batch, frontier]
            else:
                chosen, totals = expanded
                tokens = tokens.gather(1, chosen)
            parents = self.parents_of(count).take(chosen)
            features = features if features.shape[1] == chosen.shape[1] == 1 else take(features, parents)
            history = None if frontier.history is None else frontier.history.extend(parents, tokens)
            mask = masks.of_children(frontier, level, parents)
            constraint = None if frontier.constraint is None else frontier.constraint.extend(parents, tokens)
            frontier = Frontier(tokens, first + chosen, totals, mask, history, constraint)
        tree = self.growth.prune(pool, verified.roots)
        return self.extended(tree, verified) if isinstance(verified, VerifiedOnHost) else tree

    def slots(self, cache: KVCache) -> Slots:
        """The slots in which the head keeps its keys and values."""
        assert cache.head is not None
        return cache.head

    def parents_of(self, count: int) -> Int[Tensor, " children"]:
        """The parent of each child on a level, by its place in the frontier, with `count` children per node."""
        if count not in self._parents:
            self._parents[count] = torch.arange(self.growth.width * count, device=self.ids.device) // count
        return self._parents[count]

    def level_masks(self, cache: KVCache) -> LevelMasks:
        """Masks that begin with the held keys if every row holds the same number of them, known on the host."""
        slots = cache.head
        return LevelMasks(slots.lengths[0] if slots is not None and slots.even else 0, self.siblings)

    def chances(
        self, level: int, logits: Tensor, roots: Tensor, sampling: BatchSampling, frontier: Frontier
    ) -> Float[Tensor, "batch frontier draft_vocab"]:
        """Log of the estimated chance that the target chooses each token, given its Gumbel noise at that position."""
        greedy, sampled, gumbel_weight = self.calibration[level]
        # All nodes of a level are at one position.
        positions = None if sampling.all_greedy else (roots + level + 1).unsqueeze(1)
        scores = sampling.scores(logits, positions, frontier.history, self.columns, gumbel_weight).float()
        if not sampling.all_greedy:
            temperatures = sampling.temperatures  # 0 in a greedy row
            scores = scores * ((temperatures == 0) * greedy + temperatures * sampled)[:, None, None]
        elif greedy != 1:
            scores = scores * greedy
        chances = torch.log_softmax(scores, dim=-1)
        if frontier.constraint is not None:  # the head may score none of the allowed tokens
            chances = chances.masked_fill(chances.isnan(), -torch.inf)
        return chances


def for_all_nodes(values: Shaped[Tensor, "batch nodes size"], frontier: Frontier) -> Shaped[Tensor, "batch all size"]:
    """The values of every node, where one node may stand for all."""
    return values.expand(-1, frontier.tokens.shape[1], -1) if values.shape[1] == 1 else values


class HeadDrafter(TreeDrafter):
    """Reads the target's features of the newly verified positions, then unrolls the head on its own features."""

    @torch.inference_mode()
    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        count, slots = text.shape[1] - 2, row.head  # the last position is read with the next draft
        if not count or slots is None:
            return
        offsets = torch.arange(count, device=self.ids.device)
        mask = self.mask_of(slots, causal_block(count, self.ids.device)) if slots.lengths[0] else None
        features = self.head.project(taps[:, :count])
        self.head(features, text[:, 1 : count + 1], slots.starts[:, None] + offsets, mask, slots)

    def read(self, verified: Verified, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Run the head on the newly verified positions; its new keys replace the draft tokens' keys there.

        Returns the features and the head's hidden state at each row's last one. [batch, 1, feature], [batch, 1, hidden]
        """
        slots = cache.head
        if slots is None:  # without a cache, only the last position matters
            features, roots = self.head.project(verified.last(verified.taps)), verified.roots
            return features, self.head(features, roots, torch.zeros_like(roots))
        verified.rewind(slots)
        count, mask = verified.next_tokens.shape[1], None
        offsets = torch.arange(count, device=self.ids.device)
        if not slots.even or count > self.causal.shape[-1]:
            mask = self.mask_of(slots, causal_block(count, self.ids.device))
        elif count > 1:
            mask = functional.pad(self.causal[:, :count, :count], (slots.lengths[0], 0)).unsqueeze(1)
        positions = slots.starts[:, None] + offsets
        features = self.head.project(verified.taps)
        hidden = self.head(features, verified.next_tokens, positions, mask, slots)
        verified.advance(slots)
        return verified.last(features), verified.last(hidden)

    def expand(
        self, features: Tensor, frontier: Frontier, masks: LevelMasks, level: int, cache: KVCache
    ) -> Float[Tensor, "batch frontier hidden"]:
        """Run the head on a level. Each node sees the verified tokens, its ancestors and itself."""
        slots, positions = cache.head, (cache.roots + level - 1).unsqueeze(1).expand_as(frontier.tokens)
        if slots is None:
            return self.head(features, frontier.tokens, positions, level=level)
        mask = None
        if frontier.mask is not None and slots.even:
            mask = frontier.mask.unsqueeze(1)
        elif not slots.even:
            mask = self.mask_of(slots, PendingTokens(masks.of(frontier, level) == 0))
        hidden = self.head(features, frontier.tokens, positions, mask, slots, level)
        slots.hold(frontier.tokens.shape[1])
        return hidden
