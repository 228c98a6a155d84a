"""The report as one HTML page without scripts: tables, plots, and texts coloured by each token's draft depth."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from headstart.inference.core.request import Detokenize
from headstart.inference.report.compare import Outcome
from headstart.inference.report.tables import COLUMNS, NOTE, acceptance_lines, cells, further_tables, heading
from headstart.inference.report.trace import Trace, coloured
from headstart.inference.show import LIGHT_INK, SHADES

STYLE = Path(__file__).with_name("page.css")


def style() -> str:
    """The style sheet, with classes d1, d2, ... for the depths: shades with their own ink, also on dark pages."""
    shades = "\n".join(
        f".d{depth} {{ background: {colour}; color: {'#fff' if depth >= LIGHT_INK else '#111'} }}"
        for depth, colour in enumerate(SHADES, start=1)
    )
    return f"{STYLE.read_text(encoding='utf-8')}{shades}\n"


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
