"""Plots as inline SVG: lines, points and bars, without any library or script."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 260, 46, 40, 24


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]


def axes(title: str, x_label: str, most_x: float, most_y: float) -> list[str]:
    """A frame from 0 to the largest values, with five lines across."""
    parts = [f'<text x="{LEFT}" y="14" class="title">{escape(title)}</text>']
    for i in range(6):
        value, y = most_y * i / 5, place_y(most_y * i / 5, most_y)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    if most_x:
        for i in range(6):
            x = place_x(most_x * i / 5, most_x)
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{most_x * i / 5:.3g}</text>'
            )
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def place_x(value: float, most: float) -> float:
    return LEFT + 8 + (WIDTH - LEFT - 24) * value / most


def place_y(value: float, most: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / most


def framed(parts: Sequence[str]) -> str:
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def line_plot(title: str, x_label: str, series: Sequence[Series]) -> str:
    """Points of each series, joined; hover names them."""
    points = [point for one in series for point in one.points]
    most_x, most_y = (max((point[i] for point in points), default=1.0) or 1.0 for i in (0, 1))
    parts = axes(title, x_label, most_x, most_y)
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        places = [(place_x(x, most_x), place_y(y, most_y)) for x, y in one.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (value_x, value_y) in zip(places, one.points, strict=True):
            about = f"<title>{escape(one.name)}: {value_x:.3g}, {value_y:.3g}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{about}</circle>')
    return framed(parts)


def bar_plot(title: str, groups: Sequence[str], series: Sequence[Series]) -> str:
    """A group of bars for each name; x of a point is its group's number."""
    most = max((y for one in series for _, y in one.points), default=1.0) or 1.0
    parts, room = axes(title, "", 0.0, most), (WIDTH - LEFT - 16) / max(len(groups), 1)
    width = 0.8 * room / max(len(series), 1)
    for number, one in enumerate(series):
        for group, value in one.points:
            x, y = LEFT + 8 + group * room + number * width, place_y(value, most)
            about = f"<title>{escape(one.name)}, {escape(groups[int(group)])}: {value:.3g}</title>"
            size = f'width="{width:.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{COLOURS[number % len(COLOURS)]}">{about}</rect>')
    for number, name in enumerate(groups):
        x = LEFT + 8 + (number + 0.4) * room
        short = escape(name if len(name) <= 14 else name[:13] + "…")
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle" class="small">{short}</text>')
    return framed(parts)


def legend(names: Sequence[str]) -> str:
    items = [
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    ]
    return f'<p class="legend">{"".join(items)}</p>'


def tree_drawing(labels: Sequence[str], parents: Sequence[int], path: Sequence[int]) -> str:
    """A tree from left to right, leaves below each other, the path that was taken in bold."""
    children: dict[int, list[int]] = {}
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children.setdefault(parent, []).append(node)
            depths[node] = depths[parent] + 1
    rows, order, next_row = [0.0] * len(parents), list(range(len(parents))), 0
    leaves = [node for node in depth_first(children) if node not in children]
    for node in leaves:
        rows[node], next_row = float(next_row), next_row + 1
    for node in reversed(order):  # parents precede their children
        if node in children:
            rows[node] = sum(rows[child] for child in children[node]) / len(children[node])
    width, height = 76 * (max(depths) + 1) + 8, 20 * max(next_row, 1) + 8
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
    return f'<svg width="{width}" height="{height:.0f}">{"".join(parts)}</svg>'


def depth_first(children: dict[int, list[int]]) -> list[int]:
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(children.get(node, []))
    return order
