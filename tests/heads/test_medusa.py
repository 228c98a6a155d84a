"""Laws of Medusa heads: new ones give the target's logits, drafts follow the definition, no text changes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import assert_raises
from exported import logits
from scripted import paths as paths_of
from tiny_run import build_run, tiny_recipe
from torch import Tensor
from torch.testing import assert_close

from headstart.heads.base import LevelHead
from headstart.heads.calibration import search_tree
from headstart.heads.formats.layouts import files_in_format
from headstart.heads.formats.subject import ServedTarget
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import head_from_files, load_head_for, new_head, save_head
from headstart.heads.kinds.medusa import MedusaHead
from headstart.heads.vocab import DraftVocab
from headstart.inference.calibrate import MAX_RANKS, Tally, fit_calibration, tally_texts, write_texts
from headstart.inference.core.cache import KVCache
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.build import growth_from_recipe
from headstart.inference.drafters.growth import Dynamic, Fixed, Growth, GrowthPolicy
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.engine.loop import generate, generate_batch
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.generate.options import DRAFTS
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection
from headstart.recipes.schema_heads import MedusaSection

MakeHead = Callable[..., Any]
LIMITED = DraftVocab(torch.arange(0, 97, 3), 97)
PROMPT = [5, 6, 7, 8]
TWO_HEADS = "head={kind: medusa, medusa_heads: 2}", "train.unroll=2", "decode.growth=searched", "decode.nodes=6"


@pytest.fixture(scope="module")
def reader(deep_target: TargetModel) -> TargetModel:
    return TargetModel(deep_target.model, (deep_target.config.num_layers,))


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("size", [None, 30])
def test_new_heads_give_the_targets_own_logits(frozen, reader, size, rank):
    """Blocks of zeros are the identity, so each head computes the target's logits from its last hidden state."""
    vocab = DraftVocab.full(97) if size is None else DraftVocab(torch.arange(size) * 3, 97)
    section = MedusaSection(kind="medusa", medusa_heads=3, lm_head_rank=rank)
    head, tokens = new_head(section, frozen, vocab, seed=0), torch.randint(97, (2, 9))
    assert isinstance(head, LevelHead)
    output, features = reader.passes.forward(tokens), head.project(reader.passes.forward(tokens).taps)
    for level in range(3):
        hidden = head(features, tokens, torch.arange(9), level=level)
        assert_close(head.logits(hidden, level), output.logits[..., vocab.ids], atol=1e-4, rtol=1e-4)


def test_new_heads_of_a_target_with_softcapped_logits_give_its_own_logits(frozen: FrozenTarget) -> None:
    """As in Gemma 2; heads without the cap once agreed with the target on nothing but the likeliest token."""
    capped = replace(frozen, config=replace(frozen.config, final_logit_softcap=5.0), softcap=5.0)
    head: Any = new_head(MedusaSection(kind="medusa", medusa_heads=1), capped, DraftVocab.full(97), seed=0)
    last_hidden = torch.randn(1, 4, 32)
    hidden = head(head.project(last_hidden), torch.zeros(1, 4, dtype=torch.long), torch.arange(4))
    assert_close(head.logits(hidden), capped.logits(last_hidden))


def guesses(head: MedusaHead, feature: Tensor, level: int) -> list[int]:
    hidden, weights = feature, head.state_dict()
    for number in range(head.shape.num_layers):
        block, bias = (weights[f"blocks.{level}.layers.{number}.{name}"] for name in ("weight", "bias"))
        added = block @ hidden + bias
        hidden = hidden + added * torch.sigmoid(added)
    ranked = (weights[f"lm_heads.{level}.weight"] @ hidden).argsort(descending=True)
    return head.vocab.ids[ranked].tolist()


class Recording(HeadDrafter):
    def __init__(self, head: LevelHead, growth: GrowthPolicy) -> None:
        super().__init__(head, growth)
        self.seen: list[tuple[list[int], Tree]] = []

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        tree = super().draft(verified, cache)
        self.seen.append(([*verified.rows[0].text], tree))
        return tree


def test_a_drafted_tree_follows_the_papers_definition(reader: TargetModel, make_head: MakeHead) -> None:
    """Every level's head reads the hidden state of the last token that the target has read.

    root - 0 - 0 - 0
         - 1 - 0
    """
    paths = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))
    head = make_head("medusa", num_layers=2, vocab=LIMITED)
    drafter = Recording(head, Fixed(paths))
    generate(reader, PROMPT, 12, drafter=drafter)
    assert len(drafter.seen) > 5
    for text, tree in drafter.seen[:-4]:  # near the end of the text the trees are cut short
        feature = head.project(reader.passes.forward(torch.tensor([text[:-1]])).taps)[0, -1]
        ranked = [guesses(head, feature, level) for level in range(3)]
        wanted = {tuple(ranked[level][rank] for level, rank in enumerate(path)) for path in paths}
        assert paths_of(tree) == [wanted]


SEARCHED = Fixed(search_tree([[0.5, 0.3, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.05]], 9).paths)


@pytest.mark.each_value
@pytest.mark.parametrize("static", [False, True], ids=["changing", "static"])
@pytest.mark.parametrize("growth", [Dynamic.chain(3), Dynamic(3, 3, 7), SEARCHED], ids=["chain", "dynamic", "searched"])
def test_heads_change_no_text(reader: TargetModel, make_head: MakeHead, growth: GrowthPolicy, static: bool) -> None:
    samplings = Sampling(), Sampling(0.9, seed=4), Sampling(1.0, top_p=0.8, repetition_penalty=1.2, seed=5)
    requests = [Request(PROMPT[:size], 8, own) for size, own in zip((4, 2, 3), samplings, strict=True)]
    drafter = HeadDrafter(make_head("medusa"), growth)
    for batch in (requests, requests[:2]):  # with penalties and without; only the latter may be captured in a graph
        wanted = [found.tokens for found in generate_batch(reader, batch)]
        found = generate_batch(reader, batch, drafter, static=static)
        assert [generation.tokens for generation in found] == wanted
        assert sum(generation.stats.drafted for generation in found) > 0


@pytest.mark.parametrize("kind", ["medusa", "block"])
def test_a_depth_that_nobody_chose_is_no_deeper_than_the_head(kind, make_head, target_folder, tmp_path):
    head = make_head(kind, **({"block_size": 3} if kind == "block" else {}))
    assert head.max_levels == 3
    save_head(head, tmp_path / "head")
    load = partial(SpeculativeModel.from_folders, target_folder, tmp_path / "head", device="cpu")
    for section in (None, DecodeSection(growth="chain")) if kind == "medusa" else (None,):
        drafter = load(section).drafter
        assert drafter is not None
        assert drafter.depth == 3
    of_chat_and_serve = DRAFTS.model_copy(update={"max_batch": 2})
    assert Growth.from_section(of_chat_and_serve, head.max_levels).depth == 3
    assert_raises(lambda: load(DecodeSection(depth=5)), "decode.depth: 5 given, 1 to the head's 3 is allowed")


def test_a_recipe_without_a_depth_fits_any_number_of_heads(tmp_path: Path) -> None:
    path = build_run(tmp_path)
    path.write_text(path.read_text().replace("  depth: 2\n", "", 1))
    assert tiny_recipe(tmp_path, *TWO_HEADS).decode.depth > 2  # for two heads


def all_trees(levels: int, ranks: int, nodes: int) -> set[frozenset[tuple[int, ...]]]:
    """Every tree of this many nodes that contains the parent and the earlier siblings of each node."""
    paths = [path for depth in range(1, levels + 1) for path in product(range(ranks), repeat=depth)]

    def closed(tree: frozenset[tuple[int, ...]]) -> bool:
        whole = tree | {()}
        return all(p[:-1] in whole and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in tree) for p in tree)

    return {tree for tree in map(frozenset, combinations(paths, nodes)) if closed(tree)}


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_the_searched_tree_is_the_best_of_all_trees(nodes: int) -> None:
    accuracies = torch.rand(3, 2).sort(descending=True).values * 0.6

    def length(tree: frozenset[tuple[int, ...]]) -> float:
        return sum(float(torch.stack([accuracies[i, rank] for i, rank in enumerate(path)]).prod()) for path in tree)

    best = max(length(tree) for tree in all_trees(3, 2, nodes))
    searched = search_tree(accuracies, 9)
    assert length(frozenset(searched.paths[:nodes])) == pytest.approx(best, rel=1e-6)
    assert sum(searched.chances[:nodes]) == pytest.approx(best, rel=1e-6)
    Fixed(searched.best(nodes))  # raises if a node's parent is missing
    assert_raises(lambda: searched.best(99), "decode.nodes: 99 given, 1 to 9 is allowed, the size of the head's tree")


def test_the_tally_counts_the_rank_of_the_targets_choice_given_a_correct_prefix(reader, make_head):
    head = make_head("medusa", vocab=LIMITED)
    tally = Tally.empty(torch.ones(3, 1), MAX_RANKS)
    tally_texts(tally, reader, head, write_texts(reader, head, [Request(PROMPT, 20)], 3))
    hits, tried = torch.zeros(3, MAX_RANKS), torch.zeros(3)
    text = PROMPT + generate(reader, PROMPT, 20).tokens
    features = head.project(reader.passes.forward(torch.tensor([text])).taps)[0]
    for t in range(len(PROMPT) - 2, len(text) - 2):
        for level in range(min(3, len(text) - 2 - t)):
            ranked = guesses(head, features[t], level)[:MAX_RANKS]
            tried[level] += 1
            if text[t + 2 + level] not in ranked:
                break
            hits[level, ranked.index(text[t + 2 + level])] += 1
    assert torch.equal(tally.hits.float(), hits)
    assert torch.equal(tally.tried.float(), tried)


def test_searched_growth_uses_the_tree_that_calibration_found(reader, make_head, target_folder, frozen, tmp_path):
    head, section = make_head("medusa"), DecodeSection(growth="searched", depth=3, nodes=10)
    assert_raises(lambda: growth_from_recipe(section, reader, head), "fit one with headstart calibrate RECIPE")
    head.calibration = fit_calibration(reader, head, [Request(PROMPT, 8)], 3)
    save_head(head, tmp_path / "head")
    loaded = load_head_for(tmp_path / "head", frozen)
    found, wanted = loaded.calibration.tree, head.calibration.tree
    assert found is not None
    assert found.paths == wanted.paths
    assert found.chances == pytest.approx(wanted.chances, abs=1e-5)
    assert growth_from_recipe(section, reader, loaded).nodes == 10


def test_exports_of_low_rank_heads_hold_full_lm_heads(make_head: MakeHead, frozen: FrozenTarget) -> None:
    head = make_head("medusa", lm_head_rank=4)
    config, tensors = files_in_format("vllm", head, ServedTarget("target", [], 3))
    whole = head_from_files(Path("vllm"), config, tensors, frozen)
    assert whole.shape == replace(head.shape, lm_head_rank=None)
    assert_close(logits(whole), logits(head), atol=1e-4, rtol=1e-4)
