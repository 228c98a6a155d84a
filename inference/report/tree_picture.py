"""A picture of a draft tree of fixed shape: the thicker an edge, the likelier the target accepts the node after it."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headstart.heads.calibration import Path, StaticTree


def draw_tree(tree: StaticTree, nodes: int) -> Figure:
    """The root on the left, one column per depth, the likeliest child at the top."""
    paths = tree.best(nodes)
    places = rows(paths)
    depth, height = max(map(len, paths)), max(places.values())
    figure = Figure(figsize=(2.2 * depth + 2, 0.32 * height + 1.2), layout="constrained")
    panel: Axes = figure.subplots()
    for path, chance in zip(paths, tree.chances, strict=False):
        above = path[:-1]
        panel.plot([len(above), len(path)], [-places[above], -places[path]], color="C0", lw=0.4 + 5 * chance, zorder=1)
        panel.text(len(path) + 0.04, -places[path], f"{path[-1]}: {chance:.2f}", fontsize=7, va="center")
    panel.scatter([len(path) for path in places], [-row for row in places.values()], s=14, color="C1", zorder=2)
    panel.set_title(f"{len(paths)} draft tokens, expected acceptance length {tree.expected(nodes):.2f}", fontsize=9)
    panel.set_axis_off()
    panel.set_xlim(-0.2, depth + 0.6)
    return figure


def rows(paths: tuple[Path, ...]) -> dict[Path, int]:
    """The row of each node, the root included: leaves take one row each, a parent shares the row of its first child."""
    known, leaf = set(paths), 0
    places: dict[Path, int] = {}
    for path in sorted([(), *paths]):
        places[path] = leaf
        leaf += (*path, 0) not in known
    return places
