"""The report as one page without scripts: plots, and texts coloured by how each token came; the same on a terminal."""

from collections.abc import Callable, Sequence
from html import escape

from rich.text import Text

from inference.compare import Outcome
from inference.svg import Series, bar_plot, legend, line_plot, tree_drawing
from inference.trace import Trace

Detokenize = Callable[[list[int]], str]

# By depth of the draft: the deeper, the darker; a bonus token is plain.
SHADES = ("#d9f0d3", "#b8e2b0", "#93d08c", "#6abb6b", "#43a24f", "#258a3b", "#0f6f2b")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 2px 8px; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 }
svg.plot { width: 460px; max-width: 100%; font: 11px system-ui } .title { font-weight: 600; font-size: 13px }
.grid { stroke: #ddd } .small { font-size: 9px }
.legend span { margin-right: 1em } .legend i { display: inline-block; width: 12px; height: 12px; margin-right: 4px }
pre { white-space: pre-wrap; background: #fafafa; padding: 1em; border: 1px solid #ddd; overflow: visible }
.prompt { color: #888 } .step { position: relative; cursor: default } .step:hover { outline: 1px solid #444 }
.bonus { border-bottom: 2px solid #e08214 } .tree { display: none; position: absolute; z-index: 1; top: 1.5em; left: 0;
background: #fff; border: 1px solid #444; padding: 4px } .step:hover .tree, .step:focus .tree { display: block }
.tree text { font: 11px monospace; fill: #999 } .tree .taken { font-weight: 700; fill: #0f6f2b; stroke-width: 2 }
.tree line { stroke: #ccc } .tree line.taken { stroke: #0f6f2b }
"""


def shade(depth: int) -> str:
    return SHADES[min(depth, len(SHADES)) - 1]


def page(
    title: str, groups: Sequence[tuple[str, list[Outcome], list[list[str]]]], traces: Sequence[Trace], text: Detokenize
) -> str:
    """`groups` are the outcomes that were measured alike, each with a heading and the rows of its table."""
    body = [f"<h1>{escape(title)}</h1>"]
    for heading, outcomes, rows in groups:
        body += [f"<h2>{escape(heading)}</h2>", html_table(rows), *plots(outcomes)]
    if traces:
        shades = "".join(f'<span style="background:{shade(d)}"> {d} </span>' for d in range(1, len(SHADES) + 1))
        body.append(
            f"<h2>How each token came</h2><p>Drafted at depth {shades}, or deeper; the underlined token of each "
            "step is the bonus. Point at a step to see its tree, what was taken in bold.</p>"
        )
        body += [f"<h3>{escape(one.way)}</h3>{coloured(one, text)}" for one in traces]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def plots(outcomes: list[Outcome]) -> list[str]:
    """Acceptance by depth, speed against tree size, and tau by category where there are several."""
    drafting = [outcome for outcome in outcomes if outcome.stats.drafted]
    depths = [
        Series(o.way, [(float(d), share) for d, share in enumerate(o.stats.acceptance, start=1)]) for o in drafting
    ]
    sizes = [Series(o.way, [(o.stats.drafted / o.stats.steps, o.tokens_per_second)]) for o in drafting]
    found = [legend([o.way for o in drafting])]
    if drafting:
        found.append(line_plot("share of steps that accept at least d drafts", "d", depths))
        found.append(line_plot("tokens per second by drafted nodes per step", "nodes", sizes))
    categories = list(outcomes[0].tau_by_category)
    if len(categories) > 1 and drafting:
        taus = [Series(o.way, [(float(i), o.tau_by_category[c]) for i, c in enumerate(categories)]) for o in drafting]
        found.append(bar_plot("tokens per target step (tau) by category", categories, taus))
    return found


def html_table(rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"


def coloured(trace: Trace, text: Detokenize) -> str:
    """A text as spans, a step's tree hidden in each."""
    parts = [f'<span class="prompt">{escape(text(trace.prompt))}</span>{escape(text([trace.first]))}']
    for step in trace.steps:
        tokens = "".join(
            f'<span style="background:{shade(depth)}">{escape(text([token]))}</span>'
            if depth < len(step.path)
            else f'<span class="bonus">{escape(text([token]))}</span>'
            for depth, token in enumerate(step.taken, start=1)
        )
        labels = [repr(text([token]))[1:-1] for token in step.tokens]
        drawing = tree_drawing(labels, step.parents, step.path)
        parts.append(f'<span class="step" tabindex="0">{tokens}<span class="tree">{drawing}</span></span>')
    return f"<pre>{''.join(parts)}</pre>"


def on_terminal(trace: Trace, text: Detokenize) -> Text:
    """The same colours with rich; bonus tokens are underlined."""
    found = Text(text(trace.prompt), style="dim")
    found.append(text([trace.first]), style="not dim")
    for step in trace.steps:
        for depth, token in enumerate(step.taken, start=1):
            style = f"black on {shade(depth)}" if depth < len(step.path) else "underline"
            found.append(text([token]), style=f"not dim {style}")
    return found
