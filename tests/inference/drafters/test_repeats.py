"""Laws of repeats beside a head's trees: they add to what the head drafts, and never change the text."""

from dataclasses import replace

import pytest
import torch
from scripted import SetCosts, paths
from shared_fixtures import HeadFactory
from test_drafters import verified_text

from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Accepted, VerifiedOnHost
from headstart.inference.drafters.costs import CostAware, Situation
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.repeats import PRIOR_TOKENS, REPEAT_DEPTH, REPEAT_RATES, Repeats
from headstart.inference.engine.loop import generate, generate_batch
from headstart.inference.targets.model import TargetModel

PHRASE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
LOOP = Sampling(logit_bias=((9, 50.0),))  # writes token 9 forever


class Everything(Dynamic):
    """Finds each repeat worth its verification."""

    def is_worth(self, drafted: int, chance: float) -> bool:
        return True


def beside(text: list[int], tree: Tree, growth: Dynamic | None = None, most: int = 6, remaining: int = 99) -> Tree:
    return Repeats(most).extend(tree, verified_text(text, remaining), growth or Everything(3, 3, 8))


def drawn(parents: list[int], tokens: list[int]) -> Tree:
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), deepest=2)


def after(verified: VerifiedOnHost, tokens: list[int], choices: list[int]) -> VerifiedOnHost:
    """The same text after a step that verified these nodes, all of them drafted but the first."""
    accepted = Accepted([0], choices[:1], len(tokens) - 1, choices, tokens)
    return replace(verified, rows=[replace(verified.rows[0], accepted=accepted)])


def test_the_tree_holds_what_the_head_drafted_and_what_followed_the_same_words() -> None:
    text = [*PHRASE, 1, 2, *PHRASE[:3]]
    found = beside(text, drawn([-1, 0, 0, 1], [13, 14, 50, 51]), most=3)
    # Token 14 is both; the repeat goes on behind it, by three tokens that the head has not thought of.
    assert paths(found)[0] == {(14,), (50,), (14, 51), (14, 15), (14, 15, 16), (14, 15, 16, 17)}
    assert found.tokens.shape[1] == len(paths(found)[0]) + 1
    assert (found.deepest, found.levels) == (4, 2)


def test_without_a_repeat_the_tree_stays_as_it_is() -> None:
    tree = drawn([-1, 0], [5, 7])
    assert beside([1, 2, 3, 4, 5], tree) is tree
    assert beside([*PHRASE, 1, *PHRASE[:3]], tree, most=0) is tree


def test_no_repeat_is_longer_than_a_row_can_use() -> None:
    found = beside([*PHRASE, 1, *PHRASE[:3]], drawn([-1, -1], [13, 50]), remaining=2)
    assert paths(found)[0] == {(14,), (14, 15)}
    assert max(map(len, paths(beside([9] * 40, drawn([-1], [9]), most=40))[0])) == REPEAT_DEPTH


def test_repeats_end_where_their_chance_is_not_worth_it() -> None:
    """Policies without costs verify tokens down to a chance of 0.15; two matching tokens promise a half of the next."""
    found = beside([*PHRASE, 1, *PHRASE[1:3]], drawn([-1], [13]), Dynamic(3, 3, 8))
    assert REPEAT_RATES[2] == 0.5
    assert paths(found)[0] == {(14,), (14, 15)}


def test_a_text_that_does_not_repeat_its_repeats_gets_fewer() -> None:
    repeats, growth, text = Repeats(6), Dynamic(3, 3, 8), [*PHRASE, 1, *PHRASE[:3]]
    counts = []
    for wrong in range(60, 90):
        counts.append(len(paths(repeats.extend(drawn([-1], [13]), verified_text(text, 99), growth))[0]))
        text += [wrong, *PHRASE[:3]]  # the phrase begins again and never goes on
    assert counts[0] > counts[10] >= counts[-1] == 0
    other = [*PHRASE, 1, *PHRASE[:3]]
    assert len(paths(repeats.extend(drawn([-1], [13]), verified_text(other, 99, key=1), growth))[0]) == counts[0]
    assert [*repeats.rows] == [1]  # of texts that have ended nothing is kept


def test_what_was_right_is_counted_as_far_as_the_text_tells() -> None:
    repeats, text = Repeats(6), [*PHRASE, 1, *PHRASE[:3]]
    repeats.extend(drawn([-1], [13]), verified_text(text, 99), Everything(3, 3, 8))
    row = repeats.rows[0]
    text += [14, 15, 99]  # two of the repeat, then another token
    repeats.extend(drawn([-1], [99]), verified_text(text, 99), Everything(3, 3, 8))
    assert row.tried[3] == PRIOR_TOKENS + 3
    assert row.right[3] == pytest.approx(PRIOR_TOKENS * REPEAT_RATES[3] + 2)


def test_sampled_rows_draft_repeats_no_deeper_than_the_head() -> None:
    """Noise is drawn for the head's levels only."""
    text = [*PHRASE, 1, *PHRASE[:3]]
    verified = replace(verified_text(text, 99), sampling=BatchSampling([Sampling(1.0)], "cpu"))
    found = Repeats(6).extend(drawn([-1], [13]), verified, Everything(3, 3, 8))
    assert max(map(len, paths(found)[0])) == 3


def test_a_loop_is_written_in_long_steps_from_the_first_repeat_on(target: TargetModel, make_head: HeadFactory) -> None:
    wanted = generate(target, [5, 6, 7, 11], 40, LOOP).tokens
    alone = generate(target, [5, 6, 7, 11], 40, LOOP, HeadDrafter(make_head(), Dynamic(3, 3, 8)))
    found = generate(target, [5, 6, 7, 11], 40, LOOP, HeadDrafter(make_head(), Dynamic(3, 3, 8), Repeats(8)))
    assert found.tokens == alone.tokens == wanted == [9] * 40
    assert found.stats.steps <= alone.stats.steps / 2


def test_rows_that_repeat_and_rows_that_do_not_share_a_batch(target: TargetModel, make_head: HeadFactory) -> None:
    requests = [
        Request([5, 6, 7, 11], 20, LOOP),
        Request([*PHRASE, 1, *PHRASE[:4]], 16),
        Request([3, 4] * 9, 14, Sampling(1.0, seed=4)),
        Request([8, 2], 20, Sampling(0.7, seed=5, logit_bias=((9, 9.0),))),
    ]
    plain = [generate_batch(target, [each])[0].tokens for each in requests]
    found = generate_batch(target, requests, HeadDrafter(make_head(), Dynamic(3, 3, 8), Repeats(8)), max_batch=3)
    assert [each.tokens for each in found] == plain


def test_what_the_target_chose_after_a_token_is_drafted_after_it_again() -> None:
    """Also after a rejected draft token, and in another text: 7 was rejected, and the target would go on with 8."""
    repeats, chances = Repeats(6), torch.tensor([[0.5, 0.125]]).log()
    first = after(verified_text([1, 2, 3], 99), [2, 7, 9], [3, 8, 4])
    assert repeats.extend(drawn([-1], [3]), first, Dynamic(3, 3, 8)).shape == (1, 1)
    tree = replace(drawn([-1, 0, 1], [5, 7, 50]), log_chances=chances)
    found = repeats.extend(tree, verified_text([4, 5], 99, key=1), Dynamic(3, 3, 8))
    # Node 7 has a chance of 0.5, of which its child 50 has a quarter; 8 gets a quarter of the rest, below the limit.
    assert found is tree
    found = repeats.extend(tree, verified_text([4, 5], 99, key=1), Everything(3, 3, 8))
    assert paths(found)[0] == {(7,), (7, 50), (7, 8)}
    for _ in range(2):  # the same choice again makes it likelier: a half of the rest
        repeats.extend(drawn([-1], [3]), replace(first, rows=[replace(first.rows[0], key=2)]), Dynamic(3, 3, 8))
    found = repeats.extend(tree, verified_text([4, 5], 99, key=1), Dynamic(3, 3, 8))
    assert paths(found)[0] == {(7,), (7, 50), (7, 8)}


def test_a_follower_that_the_repeat_has_too_is_one_node() -> None:
    repeats, text = Repeats(6), [*PHRASE, 1, *PHRASE[:3]]
    known = after(verified_text(text, 99), [13, 14], [14, 15])
    found = repeats.extend(drawn([-1], [13]), known, Everything(3, 3, 8))
    assert paths(found)[0] == {tuple(range(14, last + 1)) for last in range(14, 20)}


def test_costs_decide_how_many_repeats_are_verified() -> None:
    """A draft token is worth it if it brings more tokens per second than the rest of the step."""
    growth, costs = CostAware(3, 3, 8, SetCosts()), SetCosts()
    growth.now = costs.now(Situation(64, 1, greedy=True))
    seconds = growth.now.verify(5)
    growth.rate = 0.5 / float(seconds[4] - seconds[3])
    assert not growth.is_worth(4, 0.49)
    assert growth.is_worth(4, 0.51)


def test_the_cost_table_learns_from_all_nodes_that_were_verified(target: TargetModel, make_head: HeadFactory) -> None:
    growth, seen = CostAware(3, 3, 8, SetCosts()), []
    growth.costs.observe = lambda drafted, seconds: seen.append(drafted.nodes - 1)  # type: ignore[method-assign]
    generation = generate(target, [5, 6, 7, 11], 40, LOOP, HeadDrafter(make_head(), growth, Repeats(8)))
    assert sum(seen) == generation.stats.drafted
    assert max(seen) > 3
