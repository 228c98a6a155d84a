"""The report's picture: a bar for each method's speed-up, as an SVG."""

from collections.abc import Sequence
from html import escape

from headstart.inference.report.compare import Outcome
from headstart.inference.report.tables import heading

WIDTH, ROW_HEIGHT, NAME_WIDTH, BAR_WIDTH = 800, 24, 180, 320
STYLE = "text { font: 14px sans-serif; fill: #222 } rect { fill: #43a24f } .plain { fill: #999 }"
DARK = "@media (prefers-color-scheme: dark) { text { fill: #ddd } }"


def picture(groups: Sequence[list[Outcome]]) -> str:
    """Bars of the speed-up over plain decoding; each group holds the outcomes of one temperature and batch size."""
    longest = max(outcome.speedups["plain"].value for group in groups for outcome in group)
    parts, bottom = [], 0
    for group in groups:
        bottom += ROW_HEIGHT
        parts.append(f'<text x="0" y="{bottom - 7}" font-weight="bold">{escape(heading(group))}</text>')
        for outcome in group:
            bottom += ROW_HEIGHT
            speedup, length = outcome.speedups["plain"].value, outcome.stats.acceptance_length
            width, kind = BAR_WIDTH * speedup / longest, ' class="plain"' * (not outcome.stats.drafted)
            figures = f"{speedup:.2f} times plain, {length:.2f} tokens per step"
            parts += [
                f'<text x="0" y="{bottom - 7}">{escape(outcome.method)}</text>',
                f'<rect x="{NAME_WIDTH}" y="{bottom - 20}" width="{width:.1f}" height="16"{kind}/>',
                f'<text x="{NAME_WIDTH + width + 8:.1f}" y="{bottom - 7}">{figures}</text>',
            ]
    size = f'width="{WIDTH}" height="{bottom}" viewBox="0 0 {WIDTH} {bottom}"'
    content = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE} {DARK}</style>\n{content}\n</svg>\n'
