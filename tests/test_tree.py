"""Laws of the tree and of what is read from it: who sees whom, which nodes stay, which path the target takes."""

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from inference.drafters.head import Pool
from inference.tree import Tree, ancestor_mask
from inference.verify import accept


def random_parents(nodes: int) -> Tensor:
    return torch.tensor([-1] + [int(torch.randint(node, ())) for node in range(1, nodes)])


def naive_mask(parents: Tensor) -> Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:].tolist(), start=1):
        mask[node] |= mask[parent]  # parents precede children, so mask[parent] is already final
    return mask


SHAPES = {
    "root": torch.tensor([-1]),
    "chain": torch.arange(-1, 63),  # as deep as it gets
    "chain of 65": torch.arange(-1, 64),  # one step more than a power of two
    "star": torch.tensor([-1] + [0] * 30),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_mask_of_an_extreme_tree_is_the_naive_one(name: str) -> None:
    assert torch.equal(ancestor_mask(SHAPES[name]), naive_mask(SHAPES[name]))


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 17, 60])
def test_the_mask_of_any_tree_is_the_naive_one(nodes: int) -> None:
    for _ in range(10):
        parents = random_parents(nodes)
        assert torch.equal(ancestor_mask(parents), naive_mask(parents))


def test_depths_count_the_edges_to_the_root() -> None:
    """0 - 1 - 3
    \\- 2 - 4 - 5
    """
    tree = Tree(torch.arange(6), torch.tensor([-1, 0, 0, 1, 2, 4]))
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert Tree.root_only(7).depths.tolist() == [0]


def test_shapes_are_checked_while_testing() -> None:
    """Otherwise every other test would pass with the shape checks switched off."""
    with pytest.raises(TypeCheckError):
        Tree(torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    with pytest.raises(TypeCheckError):
        ancestor_mask(torch.zeros(3))


def random_pool(levels: int, width: int, score_step: float) -> Pool:
    """Grown as the drafter grows; scores fall in multiples of `score_step`, so that many tie, also with their parent.

    A node's token is its own number.
    """

    def fall(*shape: int) -> Tensor:
        return torch.randint(3, shape) * score_step

    scores, parents = [-fall(width)], [torch.zeros(width, dtype=torch.long)]
    frontier, first = torch.arange(1, width + 1), 1  # the number of the level's first node
    for _ in range(levels - 1):
        above = scores[-1][frontier - first]
        first += len(scores[-1])
        scores.append((above.unsqueeze(1) - fall(width, width)).flatten())
        parents.append(frontier.repeat_interleave(width))
        frontier = first + scores[-1].topk(width).indices
    numbers = torch.arange(1, 1 + sum(map(len, scores)))
    return Pool(scores, list(numbers.split([len(level) for level in scores])), parents)


@pytest.mark.parametrize("score_step", [0.0, 1.0, 0.125], ids=["all tied", "many ties", "ties"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_best_nodes_are_closed_under_parents_even_with_ties(width: int, score_step: float) -> None:
    for levels in (1, 2, 5):
        pool = random_pool(levels, width, score_step)
        scores, parents = torch.cat(pool.scores), torch.cat(pool.parents)
        for count in range(1, len(scores) + 3):
            tree = pool.best(torch.tensor([0]), count)
            numbers, above = tree.tokens[1:], tree.parents[1:]
            assert len(tree) == 1 + min(count, len(scores))
            assert tree.parents[0] == -1
            assert (above < torch.arange(1, len(tree))).all()  # parents precede children
            assert torch.equal(tree.tokens[above], parents[numbers - 1])  # and are those that were drafted
            best = scores.sort(descending=True).values[:count]
            assert torch.equal(scores[numbers - 1].sort(descending=True).values, best)


def test_the_accepted_path_follows_the_choices_and_ends_with_the_bonus() -> None:
    """9 - 4 - 6        choices: behind 9 the target takes 5, behind 5 it takes 8, behind 8 it takes 2
    \\- 5 - 7
        \\- 8 - 1     which was not drafted: the bonus token
    """
    tree = Tree(torch.tensor([9, 4, 5, 6, 7, 8, 1]), torch.tensor([-1, 0, 0, 1, 2, 2, 5]))
    accepted = accept(tree, torch.tensor([5, 6, 8, 0, 0, 2, 0]))
    assert accepted.path == [0, 2, 5]
    assert accepted.tokens == [5, 8, 2]


def test_acceptance_is_the_longest_path_of_right_tokens() -> None:
    for _ in range(200):
        nodes = int(torch.randint(1, 20, ()))
        tree = Tree(torch.randint(3, (nodes,)), random_parents(nodes))  # siblings are often the same token
        choices = torch.randint(3, (nodes,))
        right = [True]
        for node in range(1, nodes):
            parent = int(tree.parents[node])
            right.append(right[parent] and bool(tree.tokens[node] == choices[parent]))
        accepted = accept(tree, choices)
        assert all(right[node] for node in accepted.path)
        assert accepted.path == sorted(accepted.path)
        assert all(tree.parents[b] == a for a, b in zip(accepted.path, accepted.path[1:], strict=False))
        assert accepted.tokens == [int(choices[node]) for node in accepted.path]
        last = accepted.path[-1]
        assert not any(right[node] for node in range(nodes) if int(tree.parents[node]) == last)
