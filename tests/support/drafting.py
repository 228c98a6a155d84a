"""What tests of drafters share: the tree that a drafter must draw, computed node by node, and verified texts."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from scripted import LOPSIDED
from torch import Tensor

from headstart.data_pipelines.features.batches import Sample
from headstart.heads.base import DraftHead, LevelHead
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.block_attention import Blocks
from headstart.heads.kinds.peagle import PEagleHead
from headstart.inference.core.cache import KVCache
from headstart.inference.core.history import History
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import VerifiedOnHost, VerifiedRow
from headstart.inference.drafters.growth import Dynamic, Fixed, GrowthPolicy
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.engine.step import start_history
from headstart.inference.targets.model import TargetModel

TEXT = [5, 6, 7, 11, 3, 80, 41, 2, 9, 60, 33, 14]  # the last one is the root
OTHER_TEXTS = [[1, 2, 3], [50, *range(20, 36)]]
# These reward repetition, so a token that is missing from the history changes the tree.
PENALTIES = Sampling(0.8, repetition_penalty=0.8, frequency_penalty=-2.0, presence_penalty=-2.0, seed=3)
GROWTHS: list[GrowthPolicy] = [Dynamic.chain(4), Dynamic(1, 5, 5), Dynamic(3, 4, 50), Dynamic(4, 3, 7), LOPSIDED]


@dataclass(frozen=True)
class Naive:
    """The reference: one pass of the head over the text and a path scores the tokens that may follow the path."""

    head: DraftHead
    target: TargetModel
    text: list[int]
    sampling: Sampling

    def scores(self, path: tuple[int, ...]) -> Tensor:
        """Log of the estimated chance of each token after a path, which starts below the root. [draft_vocab]"""
        logits = self.logits(path)
        history = History.start([self.text[:2]], 97, "cpu")  # the prompt is two tokens
        history.counts[0, 0] = torch.tensor([*self.text[2:], *path]).bincount(minlength=97)
        position, ids = torch.tensor([[len(self.text) + len(path)]]), self.head.vocab.ids
        scores = BatchSampling([self.sampling], "cpu").scores(logits, position, history, ids)
        return (scores * (self.sampling.temperature or 1)).log_softmax(-1)[0, 0]

    def logits(self, path: tuple[int, ...]) -> Tensor:
        """The head's logits after a path. [1, 1, draft_vocab]"""
        features = self.head.project(read_taps(self.target, self.text))
        if isinstance(self.head, BlockHead):
            anchor = len(self.text) - 1
            padded = torch.cat([features, torch.full_like(features[:, :1], math.nan)], dim=1)  # the anchor's own
            states = self.head.text_states(padded, torch.tensor([self.text]), Blocks((0,), (anchor,), (0,)))
            before = torch.tensor([[path[-1] if path else self.text[-1]]])
            return self.head.logits(states[:, len(path) : len(path) + 1], before)
        assert isinstance(self.head, LevelHead)
        tokens = self.text[1:]
        for token in (*path, None):
            fed = torch.tensor([tokens])
            hidden = self.head(features, fed, torch.arange(features.shape[1]))[:, -1:]
            features = torch.cat([features, self.head.feedback(hidden, features[:, -1:])], dim=1)
            if token is not None:
                tokens = [*tokens, self.head.shape.mask_token_id if isinstance(self.head, PEagleHead) else token]
        return self.head.logits(hidden)

    def children(self, path: tuple[int, ...], count: int) -> dict[tuple[int, ...], float]:
        """The `count` likeliest children with their log chances, without those that sampling excludes."""
        top = self.scores(path).topk(count)
        found = zip(top.values.tolist(), self.head.vocab.ids[top.indices].tolist(), strict=True)
        return {(*path, token): score for score, token in found if score > -math.inf}

    def tree(self, growth: GrowthPolicy, remaining: int = 99) -> set[tuple[int, ...]]:
        return self.fixed(growth, remaining) if isinstance(growth, Fixed) else self.dynamic(growth, remaining)

    def dynamic(self, growth: GrowthPolicy, remaining: int) -> set[tuple[int, ...]]:
        """Paths of the nodes that a dynamic tree keeps (arXiv 2406.16858, section 4)."""
        pool: dict[tuple[int, ...], float] = {}
        frontier: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(min(growth.depth, remaining)):
            level: dict[tuple[int, ...], float] = {}
            for path, total in frontier.items():
                level |= {child: total + score for child, score in self.children(path, growth.width).items()}
            pool |= level
            frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: growth.width])
        return set(sorted(pool, key=lambda path: -pool[path])[: growth.nodes])

    def fixed(self, growth: Fixed, remaining: int) -> set[tuple[int, ...]]:
        """The nodes of a fixed tree as token paths; `growth.paths` gives them as child numbers."""
        tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for path in sorted(growth.paths, key=len):
            if len(path) <= remaining and path[:-1] in tokens:
                children = [*self.children(tokens[path[:-1]], path[-1] + 1)]
                if len(children) > path[-1]:
                    tokens[path] = children[path[-1]]
        return set(tokens.values()) - {()}


def read_taps(target: TargetModel, text: list[int]) -> Tensor:
    """The target's taps at every token but the root."""
    return target.passes.forward(torch.tensor([text[:-1]])).taps


def verified(
    target: TargetModel, sampling: Any, *spans: tuple[int, int], texts: Any = (TEXT,), remaining: Any = None
) -> VerifiedOnHost:
    """In row b, positions start to end - 1 of text b are newly verified, and the token after them is the root.

    Prompts are two tokens long; penalties count the rest as output. `sampling` is one for all rows, or one for each.
    """
    samplings = sampling if isinstance(sampling, list) else [sampling] * len(texts)
    longest = max(end - start for start, end in spans)
    taps = torch.zeros(len(texts), longest, 96)
    tokens = torch.randint(97, (len(texts), longest))  # what pads a row must not matter
    for row, (text, (start, end)) in enumerate(zip(texts, spans, strict=True)):
        taps[row, : end - start] = read_taps(target, text)[0, start:end]
        tokens[row, : end - start] = torch.tensor(text[start + 1 : end + 1])
    prefixes = [text[: end + 1] for text, (_, end) in zip(texts, spans, strict=True)]
    requests = [Request(text[:2], 5, own) for text, own in zip(texts, samplings, strict=True)]
    left = remaining or [99] * len(texts)
    rows = [VerifiedRow(prefixes[row], start, end - start, left[row], row) for row, (start, end) in enumerate(spans)]
    roots, own = torch.tensor([[text[-1]] for text in prefixes]), BatchSampling(samplings, "cpu")
    history = start_history(requests, [text[2:-1] for text in prefixes], target)
    return VerifiedOnHost(taps=taps, next_tokens=tokens, roots=roots, sampling=own, history=history, rows=rows)


def new_cache(target: TargetModel, drafter: TreeDrafter, batch: int = 1, static: bool = False) -> KVCache:
    """A cache with random numbers in every slot, so reading a slot that should be hidden changes the tree."""
    cache = target.passes.new_cache(20 + drafter.max_nodes, drafter.cache_shape, batch, static)
    for slots in cache.slots:
        slots.storages[0].normal_()
    return cache


def draft(drafter: TreeDrafter, given: VerifiedOnHost, cache: KVCache) -> Tree:
    """Draft as in a step of the loop, where the target has read all tokens before the root."""
    cache.target.set_lengths([row.end for row in given.rows])
    return drafter.draft(given, cache)


def a_sample(length: int, written: range, seed: int) -> Sample:
    """Random features of the tiny target; the target wrote the tokens at `written`."""
    generator = torch.Generator().manual_seed(seed)
    loss_mask = torch.zeros(length, dtype=torch.bool)
    loss_mask[list(written)] = True
    return Sample(
        tokens=torch.randint(97, (length,), generator=generator),
        loss_mask=loss_mask,
        taps=torch.randn(length, 96, generator=generator),
        last_hidden=torch.randn(length, 32, generator=generator),
    )
