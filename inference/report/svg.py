"""Plots and draft trees as inline SVG without scripts; text, grid and tree colours come from the page's style."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 460.0, 260.0, 46.0, 16.0, 40.0, 24.0
NAMES, ROW = 150.0, 20.0  # a plot by category: width of the names, height of a row


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Scale:
    """An axis that starts at 0 and ends at the first round number no value exceeds."""

    first: float  # coordinate of 0
    last: float  # coordinate of `end`
    step: float  # between grid lines
    end: float  # the largest value shown

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float) -> "Scale":
        largest = max(values, default=1.0) or 1.0
        power = 10.0 ** math.floor(math.log10(largest / 5))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= largest / 5)
        return cls(first, last, step, step * math.ceil(largest / step - 1e-9))

    @property
    def lines(self) -> list[float]:
        """Values of the grid lines."""
        return [self.step * number for number in range(round(self.end / self.step) + 1)]

    def place(self, value: float) -> float:
        """The coordinate of a value."""
        return self.first + (self.last - self.first) * value / self.end


def line_plot(title: str, x_label: str, series: Sequence[Series]) -> str:
    """A line through the points of each series; hovering over a point shows its values."""
    points = [point for one in series for point in one.points]
    across = Scale.over([x for x, _ in points], LEFT + 8, WIDTH - RIGHT)
    up = Scale.over([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = []
    for value in up.lines:
        y = up.place(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(text(LEFT - 5, y + 4, f"{value:.4g}", "end"))
    parts += [text(across.place(value), HEIGHT - BOTTOM + 14, f"{value:.4g}") for value in across.lines]
    parts.append(text((LEFT + WIDTH) / 2, HEIGHT - 6, x_label))
    for number, one in enumerate(series):
        places = [(across.place(x), up.place(y)) for x, y in one.points]
        if len(places) > 1:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour(number)}" stroke-width="2"/>')
        for place, (x, y) in zip(places, one.points, strict=True):
            parts.append(dot(place, number, f"{one.name}: {x:.3g}, {y:.3g}"))
    return framed(title, WIDTH, HEIGHT, parts)


def category_plot(title: str, categories: Sequence[str], series: Sequence[Series]) -> str:
    """One row per category with a dot for each series; a point is (value, middle of the row, counted in rows)."""
    width, height = 2 * WIDTH, TOP + ROW * len(categories) + BOTTOM
    across = Scale.over([x for one in series for x, _ in one.points], NAMES, width - RIGHT)
    parts = []
    for value in across.lines:
        x = across.place(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}" class="grid"/>')
        parts.append(text(x, height - BOTTOM + 14, f"{value:.4g}"))
    for number, name in enumerate(categories):
        short = name if len(name) <= 24 else "…" + name[-23:]
        parts.append(text(NAMES - 8, TOP + ROW * (number + 0.5) + 4, short, "end"))
    for number, one in enumerate(series):
        for x, y in one.points:
            about = f"{one.name}, {categories[int(y)]}: {x:.3g}"
            parts.append(dot((across.place(x), TOP + ROW * y), number, about))
    return framed(title, width, height, parts)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def dot(place: tuple[float, float], number: int, about: str) -> str:
    x, y = place
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour(number)}"><title>{escape(about)}</title></circle>'


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def framed(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    heading = f'<text x="{LEFT}" y="14" class="title">{escape(title)}</text>'
    size = f'viewBox="0 0 {width:g} {height:g}" style="width:{width:g}px"'
    return f'<svg class="plot" {size} role="img" aria-label="{escape(title)}">{heading}{"".join(parts)}</svg>'


def legend(names: Sequence[str]) -> str:
    items = [
        f'<span><i style="background:{colour(number)}"></i>{escape(name)}</span>' for number, name in enumerate(names)
    ]
    return f'<p class="legend">{"".join(items)}</p>'


def tree_drawing(labels: Sequence[str], parents: Sequence[int], path: Sequence[int]) -> str:
    """A draft tree from left to right, one row per leaf, the accepted path in bold."""
    children: dict[int, list[int]] = {}
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children.setdefault(parent, []).append(node)
            depths[node] = depths[parent] + 1
    leaves = [node for node in depth_first(children) if node not in children]
    rows = [0.0] * len(parents)
    for row, leaf in enumerate(leaves):
        rows[leaf] = float(row)
    for node in reversed(range(len(parents))):  # parents precede their children
        if node in children:
            rows[node] = sum(rows[child] for child in children[node]) / len(children[node])
    width, height = 76 * (max(depths) + 1) + 8, 20 * max(len(leaves), 1) + 8
    places = [(8 + 76 * depth, 16 + 20 * row) for depth, row in zip(depths, rows, strict=True)]
    parts = []
    for node, (x, y) in enumerate(places):
        style = "taken" if node in path else "left"
        if parents[node] >= 0:
            from_x, from_y = places[parents[node]]
            parts.append(
                f'<line x1="{from_x + 44}" y1="{from_y - 4:.0f}" x2="{x - 3}" y2="{y - 4:.0f}" class="{style}"/>'
            )
        parts.append(f'<text x="{x}" y="{y:.0f}" class="{style}">{escape(labels[node][:8])}</text>')
    size = f'viewBox="0 0 {width} {height:.0f}" style="width:{width}px"'
    return f'<svg {size} role="img" aria-label="draft tree of this step">{"".join(parts)}</svg>'


def depth_first(children: dict[int, list[int]]) -> list[int]:
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(children.get(node, []))
    return order
