"""Laws of the tree and of what is read from it: who sees whom, which nodes stay, which path the target takes."""

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from inference.drafters.growth import Fixed, Pool
from inference.tree import Tree, ancestor_mask, squared_mask
from inference.verify import Accepted, accept, accept_allowed


def random_parents(nodes: int) -> list[int]:
    return [-1] + [int(torch.randint(node, ())) for node in range(1, nodes)]


def ragged(trees: list[tuple[list[int], list[int]]]) -> Tree:
    """Tokens and parents of each row, the shorter ones filled up with nodes that hang nowhere."""
    longest = max(len(tokens) for tokens, _ in trees)
    return Tree(
        torch.tensor([tokens + tokens[-1:] * (longest - len(tokens)) for tokens, _ in trees]),
        torch.tensor([parents + [-1] * (longest - len(parents)) for _, parents in trees]),
    )


def naive_mask(parents: list[int]) -> Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]  # parents precede children, so mask[parent] is already final
    return mask


SHAPES = {
    "root": [-1],
    "chain": [*range(-1, 63)],  # as deep as it gets
    "chain of 65": [*range(-1, 64)],  # one step more than a power of two
    "star": [-1] + [0] * 30,
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_mask_of_an_extreme_tree_is_the_naive_one(name: str) -> None:
    for mask in (ancestor_mask, squared_mask):
        assert torch.equal(mask(torch.tensor([SHAPES[name]]))[0], naive_mask(SHAPES[name]))


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 17, 60])
def test_the_masks_of_any_trees_are_the_naive_ones(nodes: int) -> None:
    """Each row its own, the nodes that hang nowhere included: they see themselves alone, and no one sees them."""
    rows = [random_parents(nodes) for _ in range(10)] + [[-1] * nodes]
    for mask in (ancestor_mask, squared_mask):
        assert torch.equal(mask(torch.tensor(rows)), torch.stack([naive_mask(row) for row in rows]))


def test_depths_count_the_edges_to_the_root() -> None:
    """0 - 1 - 3        0 - 1 - 2     4 and 5 hang nowhere
    \\- 2 - 4 - 5            \\- 3
    """
    tree = Tree(torch.arange(12).view(2, 6), torch.tensor([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 1, -1, -1]]))
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3], [0, 1, 2, 2, 0, 0]]
    assert tree.shape == (2, 6)
    roots = Tree.root_only(torch.tensor([[7], [8]]))
    assert (roots.tokens.tolist(), roots.depths.tolist()) == ([[7], [8]], [[0], [0]])


def test_shapes_are_checked_while_testing() -> None:
    """Otherwise every other test would pass with the shape checks switched off."""
    with pytest.raises(TypeCheckError):
        Tree(torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    with pytest.raises(TypeCheckError):
        Tree(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(TypeCheckError):
        ancestor_mask(torch.zeros(1, 3))


def random_pool(levels: int, width: int, score_step: float, rows: int = 3) -> Pool:
    """Grown as the drafter grows; scores fall in multiples of `score_step`, so that many tie, also with their parent.

    A node's token is its own number.
    """

    def fall(*shape: int) -> Tensor:
        return torch.randint(3, shape) * score_step

    pool, first = Pool.empty(), 1  # the number of the level's first node
    numbers = torch.arange(1, 1 + width + levels * width**2).expand(rows, -1)
    pool.add(-fall(rows, width), numbers[:, :width], torch.zeros(rows, 1, dtype=torch.long))
    frontier = numbers[:, :width]
    for _ in range(levels - 1):
        above = pool.scores[-1].gather(1, frontier - first)
        first = len(pool) + 1
        scores = (above.unsqueeze(2) - fall(rows, width, width)).flatten(1)
        pool.add(scores, numbers[:, first - 1 :][:, : width**2], frontier)
        frontier = first + scores.topk(width, dim=1).indices
    return pool


@pytest.fixture(params=[0, 10**6], ids=["all at once", "one by one"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few nodes are chosen on the host, many by tensors."""
    monkeypatch.setattr("inference.drafters.growth.FEW", request.param)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("score_step", [0.0, 1.0, 0.125], ids=["all tied", "many ties", "ties"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_best_nodes_are_closed_under_parents_even_with_ties(width: int, score_step: float) -> None:
    roots = torch.zeros(3, 1, dtype=torch.long)
    for levels in (1, 2, 5):
        pool = random_pool(levels, width, score_step)
        all_scores, all_parents = torch.cat(pool.scores, 1), pool.parents
        for count in range(1, len(pool) + 3, 1 if len(pool) < 20 else 5):
            tree = pool.best(roots, count)
            nodes = 1 + min(count, len(pool))
            assert tree.shape == (3, nodes)
            for tokens, tree_parents, scores, parents in zip(
                tree.tokens, tree.parents, all_scores, all_parents, strict=True
            ):
                numbers, above = tokens[1:], tree_parents[1:]
                assert tree_parents[0] == -1
                assert (above < torch.arange(1, nodes)).all()  # parents precede children
                assert torch.equal(tokens[above], parents[numbers - 1])  # and are those that were drafted
                best = scores.sort(descending=True).values[:count]
                assert torch.equal(scores[numbers - 1].sort(descending=True).values, best)


@pytest.mark.usefixtures("either_way")
def test_nodes_that_may_not_be_hang_nowhere() -> None:
    """1 and 2 below the root, 3 and 4 below 1; in the second row there is no room for a second level."""
    none = -torch.inf
    pool = Pool.empty()
    pool.add(torch.tensor([[-1.0, -2.0]] * 2), torch.tensor([[1, 2]] * 2), torch.tensor([[0]] * 2))
    pool.add(torch.tensor([[-1.5, -3.0], [none, none]]), torch.tensor([[3, 4]] * 2), torch.tensor([[1]] * 2))
    tree = pool.best(torch.tensor([[0], [0]]), 3)
    assert tree.tokens[0].tolist() == [0, 1, 2, 3]
    assert tree.parents.tolist() == [[-1, 0, 0, 1], [-1, 0, 0, -1]]


def test_a_fixed_tree_is_its_paths_whatever_the_scores() -> None:
    """0 - 1 - 3 - 5     two children are drafted of 1 and of 2, the second of 1 is no node;
    \\- 2 - 4            in the second row there is no room for the third level
    """
    fixed = Fixed(((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0)))
    pool = Pool.empty()
    pool.add(torch.tensor([[-9.0, -1.0]] * 2), torch.tensor([[10, 11]] * 2), torch.tensor([[0]] * 2))
    pool.add(torch.full((2, 4), -2.0), torch.tensor([[20, 21, 22, 23]] * 2), torch.tensor([[1, 2]] * 2))
    pool.add(torch.tensor([[-5.0], [-torch.inf]]).expand(2, 1), torch.tensor([[30]] * 2), torch.tensor([[3]] * 2))
    tree = fixed.prune(pool, torch.tensor([[7], [8]]))
    assert tree.tokens[0].tolist() == [7, 10, 11, 20, 22, 23, 30]
    assert tree.tokens[1, :6].tolist() == [8, 10, 11, 20, 22, 23]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 2, 3], [-1, 0, 0, 1, 2, 2, -1]]
    assert (fixed.depth, fixed.nodes, fixed.width) == (3, 6, 2)


@pytest.mark.parametrize("paths", [((1,),), ((0,), (0, 1)), ((0, 0),), ((0,), (0, -1)), ((),)], ids=str)
def test_paths_with_a_gap_are_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"decode\.paths: \[.*\] given without the nodes that come before it"):
        Fixed(paths)


def test_the_accepted_path_follows_the_choices_and_ends_with_the_bonus() -> None:
    """9 - 4 - 6        choices: behind 9 the target takes 5, behind 5 it takes 8, behind 8 it takes 2
    \\- 5 - 7
        \\- 8 - 1     which was not drafted: the bonus token
    """
    tree = Tree(torch.tensor([[9, 4, 5, 6, 7, 8, 1]]), torch.tensor([[-1, 0, 0, 1, 2, 2, 5]]))
    assert accept(tree, torch.tensor([[5, 6, 8, 0, 0, 2, 0]])) == [Accepted([0, 2, 5], [5, 8, 2], drafted=6)]


def test_what_hangs_nowhere_is_never_accepted_nor_counted() -> None:
    """9 - 4     and a second 4 and a 5 that hang nowhere, though the target would take 4, then 5."""
    tree = Tree(torch.tensor([[9, 4, 4, 5]]), torch.tensor([[-1, 0, -1, -1]]))
    assert accept(tree, torch.tensor([[4, 5, 5, 5]])) == [Accepted([0, 1], [4, 5], drafted=1)]
    everything = torch.ones(1, 4, dtype=torch.bool)
    assert accept_allowed(tree, torch.tensor([[4, 5, 5, 5]]), everything) == [Accepted([0, 1], [4, 5], drafted=1)]


def test_acceptance_is_each_rows_longest_path_of_right_tokens() -> None:
    for _ in range(100):
        sizes = torch.randint(1, 20, (3,)).tolist()
        tree = ragged([(torch.randint(3, (size,)).tolist(), random_parents(size)) for size in sizes])
        choices = torch.randint(3, tree.shape)  # of 3 tokens, so siblings are often the same one
        for row, found in enumerate(accept(tree, choices)):
            tokens, parents, chosen = tree.tokens[row], tree.parents[row].tolist(), choices[row]
            right = [True]
            for node in range(1, sizes[row]):
                right.append(right[parents[node]] and bool(tokens[node] == chosen[parents[node]]))
            assert all(right[node] for node in found.path)
            assert found.path == sorted(found.path)
            assert all(parents[b] == a for a, b in zip(found.path, found.path[1:], strict=False))
            assert found.tokens == [int(chosen[node]) for node in found.path]
            assert found.drafted == sizes[row] - 1
            assert not any(right[node] for node in range(sizes[row]) if parents[node] == found.path[-1])


def test_what_is_allowed_is_accepted_to_its_greatest_depth() -> None:
    """Typical acceptance: no path of allowed nodes is longer; its tokens are the drafted ones, then the choice."""
    for _ in range(100):
        sizes = torch.randint(1, 20, (3,)).tolist()
        tree = ragged([(torch.randint(97, (size,)).tolist(), random_parents(size)) for size in sizes])
        choices, allowed = torch.randint(97, tree.shape), torch.rand(tree.shape) < 0.6
        for row, found in enumerate(accept_allowed(tree, choices, allowed)):
            parents, may = tree.parents[row].tolist(), allowed[row].tolist()
            depths = [0]
            for node in range(1, sizes[row]):
                depths.append(depths[parents[node]] + 1 if may[node] and depths[parents[node]] >= 0 else -99)
            assert len(found.path) == max(depths) + 1
            assert found.path[0] == 0
            assert all(parents[b] == a and may[b] for a, b in zip(found.path, found.path[1:], strict=False))
            assert found.tokens[:-1] == tree.tokens[row, found.path[1:]].tolist()
            assert found.tokens[-1] == choices[row, found.path[-1]]
            assert found.drafted == sizes[row] - 1
