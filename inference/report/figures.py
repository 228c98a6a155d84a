"""The report's pictures, drawn with matplotlib, which the extra `report` installs."""

import re
from html import escape
from io import StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headstart.inference.report.compare import Outcome

ALT = "tokens per second, acceptance length and acceptance rate by depth of each method; the tables have the figures"


def as_svg(figure: Figure) -> str:
    """The figure as an <svg> element for a page: its text is text, and black becomes the page's ink."""
    file = StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    svg = file.getvalue().replace("#000000", "currentColor")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])  # every figure has the same ids
    return svg.replace("<svg", f'<svg class="plot" role="img" aria-label="{escape(ALT)}"', 1)


def draw(outcomes: list[Outcome]) -> Figure:
    """Speed, acceptance length, acceptance rate by depth, speed by tree size, and acceptance length by category."""
    figure = Figure(figsize=(10, 8 + 0.3 * len(outcomes[0].by_category)), layout="constrained")
    first, has_categories = outcomes[0], len(outcomes[0].by_category) > 1
    rows: Any = [["speed", "length"], ["depth", "size"], ["category", "category"]]
    ratios = [3, 3, 0.3 * len(first.by_category) + 1]
    shown = 3 if has_categories else 2
    panels = figure.subplot_mosaic(rows[:shown], height_ratios=ratios[:shown])
    figure.suptitle(f"temperature {first.temperature:g}, batch {first.batch}")
    draw_bars(panels["speed"], "tokens/s", "%.0f", outcomes, [o.tokens_per_second for o in outcomes])
    draw_bars(panels["length"], "acceptance length", "%.2f", outcomes, [o.stats.acceptance_length for o in outcomes])
    depth, size, most = panels["depth"], panels["size"], 1
    for number, outcome in enumerate(outcomes):  # methods without draft tokens take a colour too, as in the bars
        look: dict[str, Any] = {"color": f"C{number}", "marker": "o", "label": outcome.method}
        shares = outcome.stats.acceptance
        most = max(most, len(shares))
        if shares:
            depth.plot(range(1, len(shares) + 1), shares, **look)
        size.plot([outcome.stats.drafted / max(outcome.stats.steps, 1)], [outcome.tokens_per_second], **look)
        if has_categories:
            lengths = [found.acceptance_length for found in outcome.by_category.values()]
            panels["category"].plot(lengths, list(outcome.by_category), linestyle="", **look)
    depth.set(title="acceptance rate by depth", xlabel="depth", ylabel="share of target steps", ylim=(0, 1))
    depth.set_xticks(range(1, most + 1))
    size.set(title="tokens/s by size of the draft tree", xlabel="draft tokens per step", ylim=(0, None))
    size.legend(frameon=False)
    if has_categories:
        panels["category"].set(title="acceptance length by category", xlim=(0, None))
        panels["category"].invert_yaxis()
    return figure


def draw_bars(panel: Axes, title: str, number: str, outcomes: list[Outcome], values: list[float]) -> None:
    names = [outcome.method for outcome in outcomes]
    panel.bar_label(panel.bar(names, values, color=[f"C{i}" for i in range(len(names))]), fmt=number)
    panel.set_title(title)
    panel.tick_params(axis="x", rotation=30 if len(names) > 5 or max(map(len, names)) > 12 else 0)
    panel.margins(y=0.15)
