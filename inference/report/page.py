"""The report as one HTML page without scripts: tables, plots, and texts coloured by each token's draft depth."""

from collections.abc import Sequence
from html import escape

from headstart.inference.core.request import Detokenize
from headstart.inference.report.compare import Outcome
from headstart.inference.report.tables import COLUMNS, NOTE, acceptance_lines, cells, further_tables, heading
from headstart.inference.report.trace import Trace, coloured
from headstart.inference.show.colours import LIGHT_INK, SHADES

STYLE = """
:root { color-scheme: light dark; --ink: #222; --faint: #666; --paper: #fff; --panel: #f6f6f6; --line: #ddd;
  --taken: #0f6f2b; --bonus: #c2680b }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --faint: #999; --paper: #181818; --panel: #242424;
  --line: #444; --taken: #6abb6b; --bonus: #f0a04a } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem 12rem;
  color: var(--ink); background: var(--paper) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: 0 0 1em; white-space: nowrap }
td, th { padding: 2px 8px; text-align: right } td:first-child, th:first-child { text-align: left }
tr:nth-child(even) { background: var(--panel) } svg { color: var(--ink) } svg text { fill: var(--ink) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); padding: 1em;
  border: 1px solid var(--line) }
.prompt { color: var(--faint) } .step { cursor: default } .step:hover, .step:focus { outline: 1px solid var(--ink) }
.bonus { border-bottom: 2px solid var(--bonus) }
.tree { display: none; position: fixed; z-index: 1; bottom: 1rem; right: 1rem; max-width: calc(100vw - 2rem);
  box-sizing: border-box; overflow: hidden; pointer-events: none; white-space: pre; padding: 6px;
  font: min(11px, 2.5vw)/1.4 monospace; color: var(--faint); background: var(--paper); border: 1px solid var(--ink) }
.step:hover .tree, .step:focus .tree { display: block }
.tree span, .tree b { display: inline-block; width: 10ch } .tree b { color: var(--taken) }
"""


def style() -> str:
    """The style sheet, with classes d1, d2, ... for the depths: shades with their own ink, also on dark pages."""
    shades = "\n".join(
        f".d{depth} {{ background: {colour}; color: {'#fff' if depth >= LIGHT_INK else '#111'} }}"
        for depth, colour in enumerate(SHADES, start=1)
    )
    return f"{STYLE}{shades}\n"


def page(
    title: str, groups: Sequence[list[Outcome]], plots: Sequence[str], traces: Sequence[Trace], text: Detokenize
) -> str:
    """Each group holds the outcomes of one temperature and batch size; `plots` has an <svg> for each, or is empty."""
    body = [f"<h1>{escape(title)}</h1><p>{escape(NOTE)}</p>"]
    for number, outcomes in enumerate(groups):
        tables = [cells(outcomes), *further_tables(outcomes)]
        body += [f"<h2>{escape(heading(outcomes))}</h2>", *map(html_table, tables)]
        body += [f"<p>{escape(line)}</p>" for line in acceptance_lines(outcomes)]
        body += [f'<div class="wide">{plot}</div>' for plot in plots[number : number + 1]]
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


def html_table(rows: list[list[str]]) -> str:
    """The first row is the header; pointing at a column shows what it means."""
    tips = [f' title="{escape(COLUMNS[cell])}"' if cell in COLUMNS else "" for cell in rows[0]]
    head = "".join(f"<th{tip}>{escape(cell)}</th>" for tip, cell in zip(tips, rows[0], strict=True))
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
