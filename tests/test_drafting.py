"""Laws of the head's drafter. A wrong draft is still decoded losslessly, so only these tests see a wrong tree."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.eagle3 import Eagle3Head
from heads.vocab import DraftVocab
from inference.cache import KVCache
from inference.drafters import Verified
from inference.drafters.head import Growth, HeadDrafter
from inference.sampling import Sampling, choice_scores
from inference.target import TargetModel
from inference.tree import Tree
from recipes.schema import DecodeSection

TEXT = [5, 6, 7, 11, 3, 80, 41, 2, 9, 60, 33, 14]  # the last one is the root
MakeHead = Callable[..., Eagle3Head]
GROWTHS = [Growth.chain(4), Growth(1, 5, 5), Growth(3, 4, 50), Growth(4, 3, 7)]
growths = pytest.mark.parametrize("growth", GROWTHS, ids=str)


@dataclass(frozen=True)
class Naive:
    """The drafter's definition: each path's next token scored by one pass of the head over the text and the path."""

    head: Eagle3Head
    taps: Tensor  # [1, seq - 1, tapped], of all tokens but the root
    text: list[int]
    sampling: Sampling

    def scores(self, path: tuple[int, ...]) -> Tensor:
        """Log of the estimated chance of each draft token behind a path below the root. [draft_vocab]"""
        features, tokens = self.head.project(self.taps), self.text[1:]
        for token in (*path, None):
            seq = features.shape[1]
            hidden = self.head(features, torch.tensor([tokens]), torch.arange(seq))[:, -1:]
            features = torch.cat([features, self.head.feedback(hidden)], dim=1)
            if token is not None:
                tokens = [*tokens, token]
        position = torch.tensor([len(self.text) + len(path)])
        noisy = choice_scores(self.head.logits(hidden[0]), position, self.sampling, self.head.vocab.ids)
        return noisy.log_softmax(-1)[0]

    def tree(self, growth: Growth) -> dict[tuple[int, ...], float]:
        """Paths and scores of the nodes that a dynamic tree keeps (arXiv 2406.16858, section 4)."""
        pool: dict[tuple[int, ...], float] = {}
        frontier: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(growth.depth):
            level = {}
            for path, total in frontier.items():
                top = self.scores(path).topk(growth.width)
                for score, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                    level[(*path, int(self.head.vocab.ids[index]))] = total + score
            pool |= level
            frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: growth.width])
        return dict(sorted(pool.items(), key=lambda item: -item[1])[: growth.nodes])


def paths(tree: Tree) -> set[tuple[int, ...]]:
    """The tokens from below the root down to each node but the root."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        found.append((*found[parent], token))
    assert len(set(found)) == len(found)
    return {path for path in found if path}


def read_taps(target: TargetModel) -> Tensor:
    return target.forward(torch.tensor([TEXT[:-1]])).taps


def verified(taps: Tensor, start: int, end: int, sampling: Sampling, room: int = 99) -> Verified:
    """Positions start..end - 1 of TEXT have become certain, and the token behind them is the next root."""
    return Verified(taps[0, start:end], torch.tensor(TEXT[start + 1 : end + 1]), start, room, sampling)


def new_cache(target: TargetModel, drafter: HeadDrafter) -> KVCache:
    return target.new_cache(len(TEXT) + drafter.max_nodes, drafter.cache_shape)


@growths
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize("vocab_size", [97, 20])
def test_a_drafted_tree_is_the_naive_one(
    target: TargetModel,
    make_head: MakeHead,
    growth: Growth,
    temperature: float,
    shape: dict[str, Any],
    vocab_size: int,
) -> None:
    vocab = DraftVocab.most_frequent(torch.randint(9, (97,)), vocab_size)
    head, sampling, taps = make_head(vocab=vocab, **shape), Sampling(temperature, 3), read_taps(target)
    drafter = HeadDrafter(head, growth)
    tree = drafter.draft(verified(taps, 0, len(TEXT) - 1, sampling), new_cache(target, drafter))
    assert tree.tokens[0] == TEXT[-1]
    assert len(tree) <= drafter.max_nodes
    assert paths(tree) == set(Naive(head, taps, TEXT, sampling).tree(growth))


@growths
def test_a_tree_does_not_depend_on_how_the_text_became_certain(
    target: TargetModel, make_head: MakeHead, growth: Growth
) -> None:
    """t: 0 1 2 3 4 | 5 | 6 7 8 | 9 10      whatever was drafted behind 4, 5 and 8 has left no trace"""
    head, sampling, taps = make_head(norm_output=True), Sampling(1.0, 3), read_taps(target)
    drafter = HeadDrafter(head, growth)
    at_once = drafter.draft(verified(taps, 0, 11, sampling), new_cache(target, drafter))
    cache = new_cache(target, drafter)
    for start, end in itertools.pairwise([0, 5, 6, 9, 11]):
        in_steps = drafter.draft(verified(taps, start, end, sampling), cache)
    assert torch.equal(in_steps.tokens, at_once.tokens)
    assert torch.equal(in_steps.parents, at_once.parents)


@pytest.mark.parametrize("room", [-1, 0, 1, 2])
def test_no_tree_is_deeper_than_there_is_room(target: TargetModel, head: Eagle3Head, room: int) -> None:
    """The verified tokens are read all the same, or the next step would miss them."""
    drafter, sampling, taps = HeadDrafter(head, Growth(4, 3, 30)), Sampling(), read_taps(target)
    cache = new_cache(target, drafter)
    tree = drafter.draft(verified(taps, 0, 7, sampling, room), cache)
    assert int(tree.depths.max()) == max(room, 0)
    after = drafter.draft(verified(taps, 7, 11, sampling), cache)
    assert paths(after) == set(Naive(head, taps, TEXT, sampling).tree(drafter.growth))


def test_only_tokens_of_the_draft_vocabulary_are_drafted(target: TargetModel, make_head: MakeHead) -> None:
    vocab = DraftVocab.most_frequent(torch.randint(9, (97,)), 12)
    drafter, taps = HeadDrafter(make_head(vocab=vocab), Growth(3, 4, 30)), read_taps(target)
    tree = drafter.draft(verified(taps, 0, 11, Sampling()), new_cache(target, drafter))
    assert set(tree.tokens[1:].tolist()) <= set(vocab.ids.tolist())


def test_the_drafter_looks_at_the_targets_noise(target: TargetModel, head: Eagle3Head) -> None:
    """Two seeds draft differently, one seed alike: at T > 0 the noise of a position decides with the head."""
    drafter, taps = HeadDrafter(head, Growth(3, 4, 8)), read_taps(target)
    trees = [
        drafter.draft(verified(taps, 0, 11, Sampling(1.0, seed)), new_cache(target, drafter)) for seed in (1, 1, 2)
    ]
    assert paths(trees[0]) == paths(trees[1]) != paths(trees[2])


def test_a_tree_wider_than_the_heads_vocabulary_is_refused(make_head: MakeHead) -> None:
    head = make_head(vocab=DraftVocab.most_frequent(torch.arange(97), 6))
    assert HeadDrafter(head, Growth(3, 6, 8)).max_nodes == 18
    with pytest.raises(ValueError, match=r"decode\.width: 7 given, 1 to the head's 6 is allowed"):
        HeadDrafter(head, Growth(3, 7, 8))


def test_a_recipes_chain_is_one_node_wide() -> None:
    assert Growth.from_recipe(DecodeSection(growth="chain", depth=7, width=4, nodes=60)) == Growth(7, 1, 7)
    assert Growth.from_recipe(DecodeSection(growth="dynamic", depth=7, width=4, nodes=60)) == Growth(7, 4, 60)
