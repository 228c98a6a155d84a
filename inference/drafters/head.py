"""Drafting with a trained head: a dynamic tree, grown level by level (EAGLE-2, arXiv 2406.16858)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from heads.base import DraftHead
from inference.cache import KVCache
from inference.drafters import Verified
from inference.sampling import Sampling, choice_scores
from inference.tree import Tree
from recipes.schema import DecodeSection


@dataclass(frozen=True)
class Growth:
    """The size of a tree: levels, nodes expanded on each level and children of each, drafted nodes kept in all."""

    depth: int
    width: int
    nodes: int

    @classmethod
    def from_recipe(cls, section: DecodeSection) -> "Growth":
        if section.growth == "chain":
            return cls.chain(section.depth)
        return cls(section.depth, section.width, section.nodes)

    @classmethod
    def chain(cls, depth: int) -> "Growth":
        return cls(depth, 1, depth)


@dataclass
class Pool:
    """Every node drafted so far, in the order of its drafting; the root is not in it."""

    scores: list[Tensor]  # per level: log of the estimated chance that the node is accepted
    tokens: list[Tensor]
    parents: list[Tensor]  # node numbers, the root being 0 and the pool's first node 1

    def best(self, root: Tensor, count: int) -> Tree:
        """The `count` nodes of the highest score below the root."""
        scores, tokens, parents = torch.cat(self.scores), torch.cat(self.tokens), torch.cat(self.parents)
        # A child never scores above its parent, and a stable sort settles ties in the parent's favour.
        chosen = torch.sort(scores, descending=True, stable=True).indices[:count].sort().values
        number = torch.zeros(len(scores) + 1, dtype=torch.long, device=scores.device)
        number[chosen + 1] = torch.arange(1, len(chosen) + 1, device=scores.device)
        above = torch.cat([torch.full_like(root, -1), number[parents[chosen]]])
        return Tree(torch.cat([root, tokens[chosen]]), above)


class HeadDrafter:
    """Reads the target's features of what was verified, then unrolls the head on its own features."""

    def __init__(self, head: DraftHead, growth: Growth) -> None:
        """Raises ValueError for a tree wider than the head's vocabulary."""
        if growth.width > len(head.vocab.ids):
            raise ValueError(f"decode.width: {growth.width} given, 1 to the head's {len(head.vocab.ids)} is allowed")
        self.head, self.growth = head, growth
        self.ids = head.vocab.ids.to(head.embedding.device)
        self.eye = torch.eye(growth.width, dtype=torch.bool, device=self.ids.device)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.head.cache_shape

    @property
    def max_nodes(self) -> int:
        return max(self.growth.nodes + 1, self.growth.width * self.growth.depth)

    @torch.inference_mode()
    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        root = verified.next_tokens[-1:]
        hidden = self.read(verified, cache)  # [1, 1, feature]
        depth, width = min(self.growth.depth, verified.room), self.growth.width
        position = verified.start + len(verified.next_tokens)  # of the root, the token at the verified length
        if depth < 1:
            return Tree(root, torch.full_like(root, -1))

        top = self.scores(hidden, position + 1, verified.sampling).topk(width)
        pool = Pool([top.values[0]], [self.ids[top.indices[0]]], [torch.zeros_like(top.indices[0])])
        features, tokens, total = self.head.feedback(hidden).expand(1, width, -1), pool.tokens[0], pool.scores[0]
        numbers = torch.arange(1, width + 1, device=self.ids.device)  # of the frontier's nodes
        visible, drafted = self.eye, width
        for level in range(1, depth):
            hidden = self.expand(features, tokens, visible, position + level - 1, cache)
            top = self.scores(hidden, position + level + 1, verified.sampling).topk(width)  # [width, width]
            totals = (total.unsqueeze(1) + top.values).flatten()
            pool.scores.append(totals)
            pool.tokens.append(self.ids[top.indices.flatten()])
            pool.parents.append(numbers.repeat_interleave(width))
            total, best = totals.topk(width)
            parents = best // width
            tokens, numbers = pool.tokens[-1][best], drafted + 1 + best
            features = self.head.feedback(hidden)[:, parents]
            visible = torch.cat([visible[parents], self.eye], dim=1)
            drafted += width * width
        return pool.best(root, self.growth.nodes)

    def read(self, verified: Verified, cache: KVCache) -> Float[Tensor, "1 1 feature"]:
        """Take in the verified positions, in place of what was drafted there; returns the last one's hidden state."""
        assert cache.head is not None
        cache.head.rewind(verified.start)
        count, device = len(verified.next_tokens), self.ids.device
        positions = torch.arange(verified.start, verified.start + count, device=device)
        mask = None
        if verified.start and count > 1:
            seen = torch.zeros(count, verified.start, dtype=verified.taps.dtype, device=device)
            future = torch.full((count, count), torch.finfo(seen.dtype).min, dtype=seen.dtype, device=device).triu(1)
            mask = torch.cat([seen, future], dim=1)
        features = self.head.project(verified.taps.unsqueeze(0))
        hidden = self.head(features, verified.next_tokens.unsqueeze(0), positions, mask, cache.head)
        cache.head.advance(count)
        return hidden[:, -1:]

    def expand(self, features: Tensor, tokens: Tensor, visible: Tensor, position: int, cache: KVCache) -> Tensor:
        """One level of the tree through the head; each node sees the verified tokens and its own ancestors."""
        assert cache.head is not None
        width, pending = visible.shape
        verified = cache.head.length + width - pending
        mask = torch.zeros(width, verified + pending, dtype=features.dtype, device=features.device)
        mask[:, verified:].masked_fill_(~visible, torch.finfo(features.dtype).min)
        positions = torch.full((width,), position, device=features.device)
        hidden = self.head(features, tokens.unsqueeze(0), positions, mask, cache.head)
        cache.head.advance(width)
        return hidden

    def scores(self, hidden: Tensor, position: int, sampling: Sampling) -> Float[Tensor, "rows draft_vocab"]:
        """Log of the estimated chance that the target chooses each token for `position`, given its noise there."""
        logits = self.head.logits(hidden[0])
        positions = torch.full((len(logits),), position, device=logits.device)
        return torch.log_softmax(choice_scores(logits, positions, sampling, self.ids).float(), dim=-1)
