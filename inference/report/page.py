"""The report as one HTML page without scripts: tables, plots, and texts coloured by each token's draft depth.

The coloured texts are also made for the terminal.
"""

from collections.abc import Sequence
from html import escape

from rich.text import Text

from headstart.inference.core.request import Detokenize
from headstart.inference.core.verify import BONUS
from headstart.inference.report.compare import Outcome
from headstart.inference.report.svg import Series, category_plot, legend, line_plot, tree_drawing
from headstart.inference.report.tables import COLUMNS, NOTE, cells, further_tables, heading
from headstart.inference.report.trace import Trace, TracedStep
from headstart.inference.show.colours import LIGHT_INK, SHADES, shade, token_style
from headstart.inference.show.text_stream import TextStream

ON_DARK = ("#1c3322", "#1f4227", "#22522c", "#256331", "#277034", "#4fae58", "#8fd694")
DARK_INK = 6  # on a dark page: from this depth on, letters are black
STYLE = """
:root { color-scheme: light dark; --ink: #222; --faint: #666; --paper: #fff; --panel: #f6f6f6; --line: #ddd;
  --taken: #0f6f2b; --bonus: #c2680b }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --faint: #999; --paper: #181818; --panel: #242424;
  --line: #444; --taken: #6abb6b; --bonus: #f0a04a } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem 12rem;
  color: var(--ink); background: var(--paper) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: 0 0 1em; white-space: nowrap }
td, th { padding: 2px 8px; text-align: right } td:first-child, th:first-child { text-align: left }
tr:nth-child(even) { background: var(--panel) }
svg { max-width: 100%; height: auto } .wide svg { max-width: none }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink) }
svg .title { font-weight: 600; font-size: 13px } .grid { stroke: var(--line) }
.legend span { margin-right: 1em; white-space: nowrap }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 4px }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); padding: 1em;
  border: 1px solid var(--line) }
.prompt { color: var(--faint) } .step { cursor: default } .step:hover, .step:focus { outline: 1px solid var(--ink) }
.bonus { border-bottom: 2px solid var(--bonus) }
.tree { display: none; position: fixed; z-index: 1; bottom: 1rem; right: 1rem; max-width: calc(100vw - 2rem);
  box-sizing: border-box; pointer-events: none; background: var(--paper); border: 1px solid var(--ink); padding: 6px }
.step:hover .tree, .step:focus .tree { display: block }
.tree text { font: 11px monospace; fill: var(--faint); white-space: pre } .tree line { stroke: var(--line) }
.tree text.taken { font-weight: 700; fill: var(--taken) } .tree line.taken { stroke: var(--taken); stroke-width: 2 }
"""


def shade_rules(colours: Sequence[str], inks: tuple[str, str], turn: int) -> str:
    """CSS classes d1, d2, ... for the depths; letters take the second ink from depth `turn` on."""
    return "\n".join(
        f".d{depth} {{ background: {colour}; color: {inks[depth >= turn]} }}"
        for depth, colour in enumerate(colours, start=1)
    )


def style() -> str:
    on_dark = shade_rules(ON_DARK, ("#eee", "#111"), DARK_INK)
    on_light = shade_rules(SHADES, ("#111", "#fff"), LIGHT_INK)
    return f"{STYLE}{on_light}\n@media (prefers-color-scheme: dark) {{ {on_dark} }}\n"


def page(title: str, groups: Sequence[list[Outcome]], traces: Sequence[Trace], text: Detokenize) -> str:
    """Each group holds the outcomes of one temperature and batch size."""
    body = [f"<h1>{escape(title)}</h1><p>{escape(NOTE)}</p>"]
    for outcomes in groups:
        tables = [cells(outcomes), *further_tables(outcomes)]
        body += [f"<h2>{escape(heading(outcomes))}</h2>", *map(html_table, tables), *plots(outcomes)]
    if traces:
        samples = "".join(f'<span class="d{depth}"> {depth} </span>' for depth in range(1, len(SHADES) + 1))
        body.append(
            f"<h2>Where each token came from</h2><p>Draft tokens at depth {samples} or deeper; each step's bonus token "
            "is underlined. Point at a step to see its draft tree, with the accepted path in bold.</p>"
        )
        body += [f"<h3>{escape(one.method)}</h3>{coloured(one, text)}" for one in traces]
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(title)}</title><style>{style()}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def plots(outcomes: list[Outcome]) -> list[str]:
    """Acceptance rate by depth, speed against tree size, and acceptance length by category if there are several."""
    if not any(outcome.stats.drafted for outcome in outcomes):
        return []
    # Every plot gets every method, even those without drafts, so that colours agree between plots.
    depths = [
        Series(o.method, [(float(d), share) for d, share in enumerate(o.stats.acceptance, start=1)]) for o in outcomes
    ]
    sizes = [Series(o.method, [(o.stats.drafted / max(o.stats.steps, 1), o.tokens_per_second)]) for o in outcomes]
    found = [legend([o.method for o in outcomes])]
    found.append(line_plot("acceptance rate by depth (share of target steps)", "depth", depths))
    found.append(line_plot("tokens/s by size of the draft tree", "draft tokens per step", sizes))
    categories = list(outcomes[0].by_category)
    if len(categories) > 1:
        lengths = [
            Series(o.method, [(o.by_category[c].acceptance_length, i + 0.5) for i, c in enumerate(categories)])
            for o in outcomes
        ]
        plot = category_plot("acceptance length by category", categories, lengths)
        found.append(f'<div class="wide">{plot}</div>')
    return found


def html_table(rows: list[list[str]]) -> str:
    """The first row is the header; pointing at a column shows what it means."""
    tips = [f' title="{escape(COLUMNS[cell])}"' if cell in COLUMNS else "" for cell in rows[0]]
    head = "".join(f"<th{tip}>{escape(cell)}</th>" for tip, cell in zip(tips, rows[0], strict=True))
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def pieces(trace: Trace, text: Detokenize) -> tuple[str, list[list[str]]]:
    """The text that the first token adds to the prompt, and the text that each token of each step adds.

    A character spelled by several tokens belongs to the last of them, so the pieces joined are the whole text.
    """
    tokens = [trace.first, *(token for step in trace.steps for token in step.added)]
    stream = TextStream(text, trace.prompt)
    found = [stream.piece(token) for token in tokens]
    found[-1] += stream.rest()
    ends = iter(found[1:])
    return found[0], [[next(ends) for _ in step.added] for step in trace.steps]


def coloured(trace: Trace, text: Detokenize) -> str:
    """The text as HTML: one span per step, which holds the step's draft tree to show on hover."""
    first, by_step = pieces(trace, text)
    parts = [f'<span class="prompt">{escape(text(trace.prompt))}</span>{escape(first)}']
    for step, words in zip(trace.steps, by_step, strict=True):
        tokens = "".join(
            f'<span class="{"bonus" if depth >= len(step.path) else f"d{shade(depth)}"}">{escape(word)}</span>'
            for depth, word in enumerate(words, start=1)
        )
        drawing = tree_drawing(labels(step, text), step.parents, step.path)
        parts.append(f'<span class="step" tabindex="0">{tokens}<span class="tree">{drawing}</span></span>')
    return f"<pre>{''.join(parts)}</pre>"


def labels(step: TracedStep, text: Detokenize) -> list[str]:
    """The text of each node, with spaces as visible dots."""
    return [repr(text([token]))[1:-1].replace(" ", "·") for token in step.tokens]


def on_terminal(trace: Trace, text: Detokenize) -> Text:
    """The text in the same colours for rich, bonus tokens underlined."""
    first, by_step = pieces(trace, text)
    found = Text(text(trace.prompt), style="dim")
    found.append(first, style="not dim")
    for step, words in zip(trace.steps, by_step, strict=True):
        for depth, word in enumerate(words, start=1):
            style = token_style(depth if depth < len(step.path) else BONUS)
            found.append(word, style=f"not dim {style}")
    return found
