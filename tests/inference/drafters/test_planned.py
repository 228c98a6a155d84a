"""Captured steps plan their trees from earlier ones, as no step may wait for its own chances."""

from collections import Counter

import pytest
import torch
from scripted import SetCosts, paths

from headstart.inference.core.drafter import Situation
from headstart.inference.core.tree import Tree
from headstart.inference.drafters.costs import CostAware
from headstart.inference.drafters.growth import ByChance, Dynamic, Pool


@pytest.mark.parametrize(
    ("chances", "level", "nodes", "shape"),
    [
        ([0.99, 0.98, 0.97, 0.96, 0.01, 0.01, 0.01], 0.01, 400, (4, 7)),  # sure, and all is cheap
        ([0.99, 0.98, 0.97, 0.96, 0.01, 0.01, 0.01], 5.0, 400, (1, 3)),  # a level takes as long as five steps
        ([0.99, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01], 0.01, 2, (1, 1)),  # verifying is dear, and one token is likely
    ],
    ids=["deep", "shallow", "one token"],
)
def test_steps_draft_as_deep_and_verify_as_many_nodes_as_costs_and_earlier_chances_say(
    chances: list[float], level: float, nodes: float, shape: tuple[int, int]
) -> None:
    growth, full = CostAware(4, 3, 7, SetCosts(level, nodes)), (4, 7)
    parents = torch.tensor([[-1, 0, 1, 2, 3, 0, 0, 1]]).expand(2, -1)
    drawn = Tree(parents + 5, parents, 4, log_chances=torch.tensor([chances, chances]).log())
    planned = []
    for _ in range(1000):
        policy, size = growth.planned(Situation(2, 1, greedy=True))
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
