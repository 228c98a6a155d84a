"""Laws of the head's drafter. Decoding stays lossless with wrong drafts, so only these tests see a wrong tree."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scripted import LOPSIDED, paths
from torch import Tensor

from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.vocab import DraftVocab
from headstart.inference.batch import start_history
from headstart.inference.cache import KVCache, Move
from headstart.inference.drafter import VerifiedOnHost
from headstart.inference.drafters.cost_aware import growth_from_recipe
from headstart.inference.drafters.growth import Dynamic, Fixed, Growth
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.request import Request
from headstart.inference.sampling import BatchSampling, History, Sampling
from headstart.inference.target.model import TargetModel
from headstart.recipes.schema import DecodeSection

TEXT = [5, 6, 7, 11, 3, 80, 41, 2, 9, 60, 33, 14]  # the last one is the root
OTHER_TEXTS = [[1, 2, 3], [50, *range(20, 36)]]
# These reward repetition, so a token that is missing from the history changes the tree.
PENALTIES = Sampling(0.8, repetition_penalty=0.8, frequency_penalty=-2.0, presence_penalty=-2.0, seed=3)
MakeHead = Callable[..., Eagle3Head]
GROWTHS: list[Growth] = [Dynamic.chain(4), Dynamic(1, 5, 5), Dynamic(3, 4, 50), Dynamic(4, 3, 7), LOPSIDED]
growths = pytest.mark.parametrize("growth", GROWTHS, ids=["chain", "one level", "whole pool", "dynamic", "fixed"])


@dataclass(frozen=True)
class Naive:
    """The reference: one pass of the head over the text and a path scores the tokens that may follow the path."""

    head: Eagle3Head
    target: TargetModel
    text: list[int]
    sampling: Sampling

    def scores(self, path: tuple[int, ...]) -> Tensor:
        """Log of the estimated chance of each token after a path, which starts below the root. [draft_vocab]"""
        features, tokens = self.head.project(read_taps(self.target, self.text)), self.text[1:]
        for token in (*path, None):
            seq = features.shape[1]
            fed = torch.tensor([tokens])
            hidden = self.head(features, fed, torch.arange(seq))[:, -1:]
            features = torch.cat([features, self.head.feedback(hidden, features[:, -1:], fed[:, -1:])], dim=1)
            if token is not None:
                tokens = [*tokens, token]
        history = History.start([self.text[:2]], 97, "cpu")  # the prompt is two tokens
        history.counts[0, 0] = torch.tensor([*self.text[2:], *path]).bincount(minlength=97)
        position, ids = torch.tensor([[len(self.text) + len(path)]]), self.head.vocab.ids
        scores = BatchSampling([self.sampling], "cpu").scores(self.head.logits(hidden), position, history, ids)
        return (scores * (self.sampling.temperature or 1)).log_softmax(-1)[0, 0]

    def children(self, path: tuple[int, ...], count: int) -> dict[tuple[int, ...], float]:
        """The `count` likeliest children with their log chances, without those that sampling excludes."""
        top = self.scores(path).topk(count)
        found = zip(top.values.tolist(), self.head.vocab.ids[top.indices].tolist(), strict=True)
        return {(*path, token): score for score, token in found if score > -math.inf}

    def tree(self, growth: Growth, remaining: int = 99) -> set[tuple[int, ...]]:
        return self.fixed(growth, remaining) if isinstance(growth, Fixed) else self.dynamic(growth, remaining)

    def dynamic(self, growth: Growth, remaining: int) -> set[tuple[int, ...]]:
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
    return target.forward(torch.tensor([text[:-1]])).taps


def verified(
    target: TargetModel,
    sampling: Sampling | list[Sampling],
    *spans: tuple[int, int],
    texts: list[list[int]] | None = None,
    remaining: list[int] | None = None,
) -> VerifiedOnHost:
    """In row b, positions start to end - 1 of text b are newly verified, and the token after them is the root.

    Prompts are two tokens long; penalties count the rest as output.
    """
    texts = texts or [TEXT]
    samplings = sampling if isinstance(sampling, list) else [sampling] * len(texts)
    longest = max(end - start for start, end in spans)
    taps = torch.zeros(len(texts), longest, 96)
    tokens = torch.randint(97, (len(texts), longest))  # what pads a row must not matter
    for row, (text, (start, end)) in enumerate(zip(texts, spans, strict=True)):
        taps[row, : end - start] = read_taps(target, text)[0, start:end]
        tokens[row, : end - start] = torch.tensor(text[start + 1 : end + 1])
    prefixes = [text[: end + 1] for text, (_, end) in zip(texts, spans, strict=True)]
    requests = [Request(text[:2], 5, own) for text, own in zip(texts, samplings, strict=True)]
    return VerifiedOnHost(
        taps=taps,
        next_tokens=tokens,
        roots=torch.tensor([[text[-1]] for text in prefixes]),
        starts=[start for start, _ in spans],
        counts=[end - start for start, end in spans],
        drafted=[0] * len(texts),
        remaining=remaining or [99] * len(texts),
        sampling=BatchSampling(samplings, "cpu"),
        history=start_history(requests, [text[2:-1] for text in prefixes], target),
        texts=prefixes,
    )


def new_cache(target: TargetModel, drafter: HeadDrafter, batch: int = 1, static: bool = False) -> KVCache:
    """A cache with random numbers in every slot, so reading a slot that should be hidden changes the tree."""
    cache = target.new_cache(20 + drafter.max_nodes, drafter.cache_shape, batch, static)
    for slots in cache.slots:
        slots.storage.normal_()
    return cache


@growths
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_p=0.8, seed=1), PENALTIES],
    ids=["greedy", "T=1", "top-p", "penalties"],
)
@pytest.mark.parametrize(
    ("shape", "vocab_size"),
    [({}, 97), ({"fc_norm": True, "norm_output": True}, 20)],
    ids=["eagle3", "eagle3.1 of 20 tokens"],
)
def test_a_drafted_tree_equals_the_naive_one(
    target: TargetModel,
    make_head: MakeHead,
    growth: Growth,
    sampling: Sampling,
    shape: dict[str, Any],
    vocab_size: int,
) -> None:
    vocab = DraftVocab.most_frequent(torch.randint(9, (97,)), vocab_size)
    head = make_head(vocab=vocab, **shape)
    drafter = HeadDrafter(head, growth)
    tree = drafter.draft(verified(target, sampling, (0, len(TEXT) - 1)), new_cache(target, drafter))
    assert tree.tokens[0, 0] == TEXT[-1]
    assert tree.shape[1] <= drafter.max_nodes
    assert paths(tree) == [Naive(head, target, TEXT, sampling).tree(growth)]


@growths
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_each_row_of_a_batch_gets_the_tree_that_it_gets_alone(
    target: TargetModel, head: Eagle3Head, growth: Growth, static: bool
) -> None:
    """Rows differ in length, in sampling and in how many draft tokens remain. The last row can use none."""
    drafter, texts = HeadDrafter(head, growth), [TEXT, *OTHER_TEXTS, [7, 8]]
    samplings, remaining = [Sampling(), PENALTIES, Sampling(1.0, seed=9), Sampling()], [99, 2, 1, 0]
    cache = new_cache(target, drafter, len(texts), static)
    spans = [(0, len(text) - 1) for text in texts]
    tree = drafter.draft(verified(target, samplings, *spans, texts=texts, remaining=remaining), cache)
    assert paths(tree) == [
        Naive(head, target, text, sampling).tree(growth, left)
        for text, sampling, left in zip(texts, samplings, remaining, strict=True)
    ]


@growths
def test_a_tree_does_not_depend_on_how_the_text_became_certain(
    target: TargetModel, make_head: MakeHead, growth: Growth
) -> None:
    """t: 0 1 2 3 4 | 5 | 6 7 8 | 9 10      what was drafted after 4, 5 and 8 leaves no trace

    A second row advances at another pace: 0 1 | 2 3 4 5 6 7 | 8 | 9 .. 15
    """
    head, sampling, other_text = make_head(norm_output=True), Sampling(1.0, seed=3), OTHER_TEXTS[1]
    drafter = HeadDrafter(head, growth)
    at_once = drafter.draft(verified(target, sampling, (0, 11)), new_cache(target, drafter))
    alone, together = new_cache(target, drafter), new_cache(target, drafter, 2)
    spans, other_spans = itertools.pairwise([0, 5, 6, 9, 11]), itertools.pairwise([0, 2, 8, 9, 16])
    for span, other_span in zip(spans, other_spans, strict=True):
        in_steps = drafter.draft(verified(target, sampling, span), alone)
        in_batch = drafter.draft(verified(target, sampling, span, other_span, texts=[TEXT, other_text]), together)
    assert torch.equal(in_steps.tokens, at_once.tokens)
    assert torch.equal(in_steps.parents, at_once.parents)
    assert paths(in_batch) == [*paths(at_once), Naive(head, target, other_text, sampling).tree(growth)]


@pytest.mark.parametrize("remaining", [-1, 0, 1, 2])
def test_no_tree_is_deeper_than_the_remaining_draft_tokens(
    target: TargetModel, head: Eagle3Head, remaining: int
) -> None:
    """The newly verified tokens are read even so, as the next step needs them."""
    drafter, sampling = HeadDrafter(head, Dynamic(4, 3, 30)), Sampling()
    cache = new_cache(target, drafter)
    tree = drafter.draft(verified(target, sampling, (0, 7), remaining=[remaining]), cache)
    assert int(tree.depths.max()) == max(remaining, 0)
    after = drafter.draft(verified(target, sampling, (7, 11)), cache)
    assert paths(after) == [Naive(head, target, TEXT, sampling).tree(drafter.growth)]


def test_prefill_reads_all_of_a_prompt_but_its_last_position(target: TargetModel, head: Eagle3Head) -> None:
    """`prefill` and then the first step draft as one step over the whole text does, in any row."""
    drafter, sampling = HeadDrafter(head, Dynamic(3, 4, 8)), Sampling(1.0, seed=3)
    for row in (0, 1):
        cache = new_cache(target, drafter, 2)
        drafter.prefill(read_taps(target, TEXT), torch.tensor([TEXT]), cache.row(row))
        assert cache.head is not None
        cache.head.set_lengths([11, 11])
        if row == 1:
            cache.head.end_row([Move(1, 0)])
        else:
            cache.head.set_lengths([11])
        last = drafter.draft(verified(target, sampling, (10, 11)), cache)
        assert paths(last) == [Naive(head, target, TEXT, sampling).tree(drafter.growth)]
    row_cache = new_cache(target, drafter).row(0)
    drafter.prefill(read_taps(target, [1, 2]), torch.tensor([[1, 2]]), row_cache)  # a prompt of one token


def test_only_tokens_of_the_draft_vocabulary_are_drafted(target: TargetModel, make_head: MakeHead) -> None:
    vocab = DraftVocab.most_frequent(torch.randint(9, (97,)), 12)
    drafter = HeadDrafter(make_head(vocab=vocab), Dynamic(3, 4, 30))
    tree = drafter.draft(verified(target, Sampling(), (0, 11)), new_cache(target, drafter))
    assert set(tree.tokens[0, 1:].tolist()) <= set(vocab.ids.tolist())


def test_the_drafter_uses_the_targets_gumbel_noise(target: TargetModel, head: Eagle3Head) -> None:
    """At T > 0 the Gumbel noise of a position helps to rank its drafts: equal seeds draft alike, others do not."""
    drafter = HeadDrafter(head, Dynamic(3, 4, 8))
    trees = [
        drafter.draft(verified(target, Sampling(1.0, seed=seed), (0, 11)), new_cache(target, drafter))
        for seed in (1, 1, 2)
    ]
    assert paths(trees[0]) == paths(trees[1]) != paths(trees[2])


def test_tokens_that_sampling_excludes_are_not_drafted(target: TargetModel, head: Eagle3Head) -> None:
    """With top-k 2 a node has at most two children, and a token with bias -inf is never drafted."""
    drafter = HeadDrafter(head, Dynamic(3, 4, 30))
    free = drafter.draft(verified(target, Sampling(1.0, seed=1), (0, 11)), new_cache(target, drafter))
    banned = int(free.tokens[0, 1])
    sampling = Sampling(1.0, seed=1, top_k=2, logit_bias=((banned, -math.inf),))
    tree = drafter.draft(verified(target, sampling, (0, 11)), new_cache(target, drafter))
    assert banned not in {token for path in paths(tree)[0] for token in path}
    assert torch.tensor([parent for parent in tree.parents[0].tolist() if parent >= 0]).bincount().max() == 2


def test_a_tree_wider_than_the_heads_vocabulary_is_refused(make_head: MakeHead) -> None:
    head = make_head(vocab=DraftVocab.most_frequent(torch.arange(97), 6))
    assert HeadDrafter(head, Dynamic(3, 6, 8)).max_nodes == 18
    with pytest.raises(ValueError, match=r"decode\.width: 7 given, 1 to the head's 6 is allowed"):
        HeadDrafter(head, Dynamic(3, 7, 8))
    with pytest.raises(ValueError, match=r"decode\.width: 7 given, 1 to the head's 6 is allowed"):
        HeadDrafter(head, Fixed(tuple((number,) for number in range(7))))


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ({"growth": "chain", "depth": 7, "width": 4, "nodes": 60}, Dynamic(7, 1, 7)),
        ({"growth": "dynamic", "depth": 7, "width": 4, "nodes": 60}, Dynamic(7, 4, 60)),
        ({"growth": "chain", "depth": 2, "acceptance": "rejection"}, Fixed(((0,), (0, 0)))),
        ({"growth": "fixed", "paths": [[0], [1], [0, 0]]}, Fixed(((0,), (1,), (0, 0)))),
    ],
    ids=["chain", "dynamic", "chain for rejection", "fixed"],
)
def test_a_recipe_chooses_how_trees_grow(
    target: TargetModel, head: Eagle3Head, section: dict[str, Any], wanted: Growth
) -> None:
    assert growth_from_recipe(DecodeSection(**section), target, head) == wanted
