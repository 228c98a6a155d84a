"""Laws of the drafters of heads. Decoding stays lossless with wrong drafts, so only these tests see a wrong tree."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from drafting import GROWTHS, OTHER_TEXTS, PENALTIES, TEXT, Naive, draft, new_cache, read_taps, verified
from families import make_family
from scripted import SetCosts, paths
from shared_fixtures import HeadFactory
from torch.testing import assert_close

from headstart.heads.base import DraftHead
from headstart.heads.kinds.block_attention import Reach
from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.layers import rotary_table
from headstart.heads.vocab import DraftVocab
from headstart.inference.calibrate import score_text
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.drafters.costs import CostAware
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import ByChance, Dynamic, Fixed, Pool
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema_heads import BlockSection

# Kind, shape, and tokens of the draft vocabulary; the target has 97.
HEADS: dict[str, tuple[str, dict[str, Any], int]] = {
    "eagle3": ("eagle3", {}, 97),
    "eagle3.1 of 20 tokens": ("eagle3", {"fc_norm": True, "norm_output": True}, 20),
    "DSpark": ("block", {"markov_rank": 6}, 97),
    "gated, windows": ("block", {"markov_rank": 6, "markov_gate": True, "reaches": (Reach(3, True), Reach())}, 20),
    "DFlash": ("block", {"sample_from_anchor": False, "block_size": 5}, 97),
    "JetSpec": ("block", {"reaches": (Reach(causal=True),) * 3, "block_size": 6}, 97),
}
TWO_HEADS = ("eagle3", "DSpark")
growths = pytest.mark.parametrize("growth", GROWTHS, ids=["chain", "one level", "whole pool", "dynamic", "fixed"])


@pytest.fixture
def drafting_head(request: pytest.FixtureRequest, make_head: HeadFactory) -> DraftHead:
    kind, shape, vocab_size = HEADS[request.param]
    return make_head(kind, vocab=DraftVocab.most_frequent(torch.randint(9, (97,)), vocab_size), **shape)


heads, two_heads = (pytest.mark.parametrize("drafting_head", names, indirect=True) for names in (HEADS, TWO_HEADS))


@pytest.mark.each_value
@growths
@heads
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_p=0.8, seed=1), PENALTIES])
def test_a_drafted_tree_equals_the_naive_one(target, drafting_head, growth, sampling) -> None:
    """With a block head too, the children of a node follow from the node's own token, not from its siblings."""
    drafter = head_drafter(drafting_head, growth)
    tree = draft(drafter, verified(target, sampling, (0, len(TEXT) - 1)), new_cache(target, drafter))
    assert tree.tokens[0, 0] == TEXT[-1]
    assert tree.shape[1] <= drafter.max_nodes
    assert paths(tree) == [Naive(drafting_head, target, TEXT, sampling).tree(growth)]


@pytest.mark.each_value
@growths
@heads
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_each_row_of_a_batch_gets_the_tree_that_it_gets_alone(target, drafting_head, growth, static) -> None:
    """Rows differ in length, in sampling and in how many draft tokens remain. The last row can use none."""
    drafter, texts = head_drafter(drafting_head, growth), [TEXT, *OTHER_TEXTS, [7, 8]]
    samplings, remaining = [Sampling(), PENALTIES, Sampling(1.0, seed=9), Sampling()], [99, 2, 1, 0]
    cache = new_cache(target, drafter, len(texts), static)
    spans = [(0, len(text) - 1) for text in texts]
    tree = draft(drafter, verified(target, samplings, *spans, texts=texts, remaining=remaining), cache)
    rows = zip(texts, samplings, remaining, strict=True)
    naive = ((Naive(drafting_head, target, text, sampling), left) for text, sampling, left in rows)
    assert paths(tree) == [each.tree(growth, left) for each, left in naive]


@pytest.mark.each_value
@growths
@heads
def test_a_tree_does_not_depend_on_how_the_text_became_certain(target, drafting_head, growth) -> None:
    """t: 0 1 2 3 4 | 5 | 6 7 8 | 9 10      what was drafted after 4, 5 and 8 leaves no trace

    A second row advances at another pace: 0 1 | 2 3 4 5 6 7 | 8 | 9 .. 15
    """
    sampling, other_text, drafter = Sampling(1.0, seed=3), OTHER_TEXTS[1], head_drafter(drafting_head, growth)
    at_once = draft(drafter, verified(target, sampling, (0, 11)), new_cache(target, drafter))
    alone, together = new_cache(target, drafter), new_cache(target, drafter, 2)
    spans, other_spans = itertools.pairwise([0, 5, 6, 9, 11]), itertools.pairwise([0, 2, 8, 9, 16])
    for span, other_span in zip(spans, other_spans, strict=True):
        in_steps = draft(drafter, verified(target, sampling, span), alone)
        in_batch = draft(drafter, verified(target, sampling, span, other_span, texts=[TEXT, other_text]), together)
    assert torch.equal(in_steps.tokens, at_once.tokens)
    assert torch.equal(in_steps.parents, at_once.parents)
    assert paths(in_batch) == [*paths(at_once), Naive(drafting_head, target, other_text, sampling).tree(growth)]


@two_heads
def test_no_tree_is_deeper_than_the_remaining_draft_tokens(target: TargetModel, drafting_head: DraftHead) -> None:
    """The newly verified tokens are read even so, as the next step needs them."""
    drafter, sampling = head_drafter(drafting_head, Dynamic(4, 3, 30)), Sampling()
    wanted = [Naive(drafting_head, target, TEXT, sampling).tree(drafter.growth)]
    for remaining in (-1, 0, 2):
        cache = new_cache(target, drafter)
        tree = draft(drafter, verified(target, sampling, (0, 7), remaining=[remaining]), cache)
        assert int(tree.depths.max()) == max(remaining, 0)
        assert paths(draft(drafter, verified(target, sampling, (7, 11)), cache)) == wanted


@two_heads
def test_prefill_reads_all_of_a_prompt_but_its_last_position(target: TargetModel, drafting_head: DraftHead) -> None:
    """`prefill`, also in two pieces, and then the first step draft as one step over the full text, in any row."""
    drafter, sampling = head_drafter(drafting_head, Dynamic(3, 4, 8)), Sampling(1.0, seed=3)
    wanted, taps = [Naive(drafting_head, target, TEXT, sampling).tree(drafter.growth)], read_taps(target, TEXT)
    for pieces, row in ((1, 0), (1, 1), (2, 0)):
        cache: Any = new_cache(target, drafter, 2)
        view = cache.row(row)
        if pieces == 1:
            drafter.prefill(taps, torch.tensor([TEXT]), view)
        else:
            drafter.prefill(taps[:, :8], torch.tensor([TEXT[:9]]), view)
            view.head.set_lengths([7])
            drafter.prefill(taps[:, 7:], torch.tensor([TEXT[7:]]), view)
        cache.head.set_lengths([11, 11])
        if row == 1:
            cache.head.end_row(0)
        else:
            cache.head.set_lengths([11])
        assert paths(draft(drafter, verified(target, sampling, (10, 11)), cache)) == wanted
    drafter.prefill(taps[:, :2], torch.tensor([[1, 2]]), new_cache(target, drafter).row(0))  # of one token


def test_a_tree_wider_than_the_heads_vocabulary_is_refused(make_head: HeadFactory) -> None:
    head = make_head(vocab=DraftVocab.most_frequent(torch.arange(97), 6))
    assert HeadDrafter(head, Dynamic(3, 6, 8)).max_nodes == 18
    for growth in (Dynamic(3, 7, 8), Fixed(tuple((number,) for number in range(7)))):
        with pytest.raises(ValueError, match=r"decode\.width: 7 given, 1 to the head's 6 is allowed; lower it"):
            HeadDrafter(head, growth)


def test_a_block_head_turns_by_the_yarn_of_its_target() -> None:
    section = BlockSection(kind="block", num_heads=4, num_kv_heads=2)
    head: Any = new_head(section, TargetModel(make_family("gpt_oss"), ()).frozen, DraftVocab.full(97), seed=1)
    assert head.target.rope.kind == "yarn"
    wanted = rotary_table(head.target.rope, head.shape.head_dim, len(head.rotary))
    assert torch.equal(head.rotary, wanted)


def test_calibration_scores_a_text_as_drafting_would(target: TargetModel, make_head: HeadFactory) -> None:
    """Row t of depth k is about the token at t + 2 + k, after a chain of the true tokens before it."""
    head, prompt = make_head("block", markov_rank=6), 2
    text = torch.tensor([TEXT])
    levels = list(score_text(target, head, text, Request([0] * prompt, 1), 3))
    for depth, found in enumerate(levels):
        for row in range(len(found.columns)):
            prefix, path = TEXT[: row + 2], TEXT[row + 2 : row + 2 + depth]
            wanted = Naive(head, target, prefix, Sampling()).logits(tuple(path))[0, 0]
            assert_close(found.without_noise[row], wanted, atol=1e-4, rtol=1e-4)
            assert int(found.columns[row]) == TEXT[row + 2 + depth]


@pytest.mark.parametrize(
    ("chances", "level", "nodes", "shape"),
    [
        ([0.99, 0.98, 0.97, 0.96, 0.01, 0.01, 0.01], 0.01, 400, (4, 7)),  # sure, and all is cheap
        ([0.99, 0.98, 0.97, 0.96, 0.01, 0.01, 0.01], 5.0, 400, (1, 3)),  # a level takes as long as five steps
        ([0.99, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01], 0.01, 2, (1, 1)),  # verifying is dear, and one token is likely
    ],
    ids=["deep", "shallow", "one token"],
)
def test_costs_and_earlier_chances_say_how_deep_to_draft_and_how_much_to_verify(chances, level, nodes, shape) -> None:
    """Captured steps plan their trees from earlier ones, as no step may wait for its own chances."""
    growth, full = CostAware(4, 3, 7, SetCosts(level, nodes)), (4, 7)
    parents = torch.tensor([[-1, 0, 1, 2, 3, 0, 0, 1]]).expand(2, -1)
    drawn = Tree(parents + 5, parents, 4, log_chances=torch.tensor([chances, chances]).log())
    planned = []
    for _ in range(1000):
        policy, size = growth.planned(1)
        planned.append((policy.depth, size))
        assert policy in growth.shapes()
        if planned[-1] == full:
            growth.observe(drawn)
    assert planned[0] == full  # to see what it brings
    assert Counter(planned).most_common(1)[0][0] == shape
    longer = growth._seconds(*full) - growth._seconds(*shape)
    assert planned.count(full) * longer <= 0.03 * len(planned) * growth._seconds(*shape)


def test_the_first_nodes_in_the_order_of_their_chances_are_the_best_smaller_tree() -> None:
    pool, totals, numbers = Pool(), torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.long)
    random = torch.Generator().manual_seed(0)
    for _level in range(3):
        scores = totals.repeat_interleave(3, 1) - torch.rand(2, totals.shape[1] * 3, generator=random)
        first = pool.add(scores, torch.arange(scores.shape[1]).expand(2, -1), numbers)
        totals, chosen = scores.topk(3, dim=1)
        numbers = first + chosen
    roots = torch.tensor([[40], [41]])
    ordered = ByChance(3, 3, 15).prune(pool, roots)
    for count in (0, 1, 4, 11, 15):
        assert paths(ordered.first(count)) == paths(Dynamic(3, 3, count).prune(pool, roots))
