"""Laws of draft trees: which nodes attend to which, which nodes are kept, and which path is accepted."""

import itertools
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from scripted import batch_trees, random_parents
from torch import Tensor

from headstart.inference.core.cache import Slots
from headstart.inference.core.tree import PendingTokens, Tree, ancestor_mask, block_mask, squared_mask
from headstart.inference.core.verify import accept, follow
from headstart.inference.drafters.growth import Fixed, Pool


def naive_mask(parents: list[int]) -> Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]  # parents precede children, so mask[parent] is already final
    return mask


# A root, chains of 64 nodes, for which it is the greatest depth, and of one more, a star.
SHAPES = [[-1], [*range(-1, 63)], [*range(-1, 64)], [-1] + [0] * 30]


def test_masks_match_the_naive_ones_and_depths_count_the_edges_to_the_root() -> None:
    """Including nodes without a parent, which see only themselves and are seen by no other node."""
    random = [[random_parents(nodes) for _ in range(10)] + [[-1] * nodes] for nodes in (2, 8, 60)]
    for rows in (*random, *([parents] for parents in SHAPES)):
        for mask in (ancestor_mask, squared_mask):
            assert torch.equal(mask(torch.tensor(rows)), torch.stack([naive_mask(row) for row in rows]))
    # 0 - 1 - 3        0 - 1 - 2     4 and 5 have no parent
    # \\- 2 - 4 - 5            \\- 3
    tree = Tree(torch.arange(12).view(2, 6), torch.tensor([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 1, -1, -1]]))
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3], [0, 1, 2, 2, 0, 0]]
    assert tree.shape == (2, 6)
    roots = Tree.root_only(torch.tensor([[7], [8]]))
    assert (roots.tokens.tolist(), roots.depths.tolist()) == ([[7], [8]], [[0], [0]])


def test_shapes_are_checked_in_tests() -> None:
    """Without this test, nobody would notice if the shape checks were switched off."""
    for shapes in (((2,), (2,)), ((2, 3), (2, 4))):
        with pytest.raises(TypeCheckError):
            Tree(torch.zeros(shapes[0], dtype=torch.long), torch.zeros(shapes[1], dtype=torch.long))
    with pytest.raises(TypeCheckError):
        ancestor_mask(torch.zeros(1, 3))


def random_pool(levels: int, width: int, score_step: float, rows: int = 3) -> Pool:
    """A pool grown level by level. Scores fall by multiples of `score_step`, so many tie, even with their parent.

    A node's token is its number.
    """

    def fall(*shape: int) -> Tensor:
        return torch.randint(3, shape) * score_step

    pool, first = Pool(), 1  # the number of the level's first node
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


@pytest.mark.parametrize("score_step", [0.0, 1.0, 0.125], ids=["all tied", "many ties", "ties"])
def test_the_best_nodes_include_their_parents_even_with_ties(score_step: float) -> None:
    roots = torch.zeros(3, 1, dtype=torch.long)
    for levels, width in itertools.product((1, 2, 5), (1, 2, 4)):
        pool = random_pool(levels, width, score_step)
        all_scores, all_parents = torch.cat(pool.scores, 1), pool.parents
        for count in range(1, len(pool) + 3, 1 if len(pool) < 20 else 5):
            tree = pool.best(roots, count)
            nodes = 1 + min(count, len(pool))
            assert tree.shape == (3, nodes)
            for row, (scores, parents) in enumerate(zip(all_scores, all_parents, strict=True)):
                tokens, tree_parents = tree.tokens[row], tree.parents[row]
                numbers, above = tokens[1:], tree_parents[1:]
                assert tree_parents[0] == -1
                assert (above < torch.arange(1, nodes)).all()  # parents precede children
                assert torch.equal(tokens[above], parents[numbers - 1])  # and are the drafted ones
                best = scores.sort(descending=True).values[:count]
                assert torch.equal(scores[numbers - 1].sort(descending=True).values, best)


@pytest.mark.parametrize("paths", [((1,),), ((0,), (0, 1)), ((0, 0),), ((0,), (0, -1)), ((),)], ids=str)
def test_paths_with_a_gap_are_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"tree: path \[.*\] given without .* fit the tree again"):
        Fixed(paths)


def test_the_accepted_path_is_the_longest_one_of_right_tokens() -> None:
    for _ in range(100):
        sizes = torch.randint(1, 20, (3,)).tolist()
        tree = batch_trees([(torch.randint(3, (size,)).tolist(), random_parents(size)) for size in sizes])
        choices = torch.randint(3, tree.shape)  # of only 3 tokens, so siblings are often equal
        on_device = follow(tree, choices, tree.shape[1])
        for row, found in enumerate(accept(tree, choices)):
            count = int(on_device.counts[row])
            assert found.path == on_device.paths[row, :count].tolist()
            assert found.tokens == on_device.tokens[row, :count].tolist()
            assert found.tokens[-1] == on_device.bonus[row]
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


CAPACITY = 14
LOWEST = torch.finfo(torch.float32).min


def by_definition(lengths: list[int], visible: Tensor, depths: Tensor, keys: int, window: int | None) -> list[Any]:
    size, pending = visible.shape[1:]
    rows = []
    for row, held in enumerate(lengths):
        seen, deep = visible[row % len(visible)], depths[row % len(depths)]
        queries = []
        for query in range(size):
            allowed = []
            for key in range(keys):
                index = key - held  # among the pending tokens
                may = index < 0 or (index < pending and bool(seen[query, index]))
                if may and window is not None:
                    position = key if index < 0 else held + int(deep[index])
                    may = held + int(deep[pending - size + query]) - position < window
                allowed.append(may)
            queries.append(allowed)
        rows.append(queries)
    return rows


# Earlier pending tokens, and the size of the block after them: one token, a tree, a level, one further on.
BLOCKS = [(0, 1), (0, 6), (4, 3), (5, 2)]


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("earlier", "size"), BLOCKS)
def test_a_mask_matches_its_definition(earlier: int, size: int, window: int | None, static: bool) -> None:
    """A pending token sees its row's cached tokens and the visible pending ones, within its window.

    For random visibility, one per row or one for all rows; each token of the block sees itself. Two rows with 3 and 1
    cached tokens and 2 pending ones each:

    row 0    0 0 0    v q                    q is the query, v the other pending token, 0 are cached keys;
    row 1    0        v q       - -          with static shapes every row extends to the capacity
    """
    lengths = [5], [4, 4, 4], [6, 0, 3], [0, 0]
    for held, rows in ((each, rows) for each in lengths for rows in {1, len(each)}):
        slots = Slots([torch.zeros(1, 2, len(held), 1, CAPACITY, 1)], len(held), static)
        slots.set_lengths(held)
        slots.hold(earlier)
        visible = torch.rand(rows, size, earlier + size) < 0.5
        visible[:, :, earlier:] |= torch.eye(size, dtype=torch.bool)
        depths = torch.randint(5, (rows, earlier + size))
        wanted = by_definition(held, visible, depths, slots.num_keys(size), window)
        found = block_mask(slots, PendingTokens(visible, depths), torch.float32, window)
        assert found.dtype == torch.float32
        assert found.shape[1:] == (1, size, CAPACITY if static else max(held) + earlier + size)
        assert (found.expand(len(held), -1, -1, -1)[:, 0] == 0).tolist() == wanted
        assert set(found.unique().tolist()) <= {0.0, LOWEST}
        if window is None:
            assert torch.equal(block_mask(slots, PendingTokens(visible), torch.float32), found)  # without depths
