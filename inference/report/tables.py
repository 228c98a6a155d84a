"""The report on a terminal, as Markdown, and as an HTML page without scripts: tables, plots and coloured texts."""

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from textwrap import fill

from rich.table import Table

from headstart.inference.core.request import Detokenize
from headstart.inference.report.compare import CategoryFigures, Interval, Outcome
from headstart.inference.report.forcing import Forced
from headstart.inference.report.trace import Trace, coloured
from headstart.inference.show import LIGHT_INK, SHADES

COLUMNS = {
    "method": "generate: transformers' own; plain: no drafts; chain, tree: a head's drafts; untrained: a random "
    "head's, or those of the checkpoint's own MTP layer",
    "acceptance length": "mean number of tokens per target step, the bonus token included (tau)",
    "tokens/s": "new tokens per second of wall time, prefill included",
    "speed-up": "tokens/s over plain decoding",
    "95 % interval": "of the speed-up over plain decoding, from a bootstrap over prompts",
    "speed-up over generate": "tokens/s over transformers' own generate",
    "token forcing": "tokens outside: neither plain passes' own choice at their place nor a near-tie; of all tokens",
    "distinct tokens": "mean share of distinct tokens in a text; low for a text that loops",
    "first token (ms)": "median time until the first token",
    "per token p50 (ms)": "median time per later token",
    "p95 (ms)": "95th percentile of the time per later token",
}
SHORT = ("method", "acceptance length", "tokens/s", "speed-up", "token forcing")  # the columns on a terminal
LEGEND = "\n".join(f"{column}: {COLUMNS[column]}" for column in SHORT)
HEADER_WIDTH = 13  # characters per line of a header on a terminal
NOTE = "Acceptance length: tokens per target step, the bonus token included (tau). Speed-up: over plain decoding."


def cells(outcomes: list[Outcome]) -> list[list[str]]:
    """The main table: a header, then a row for each method."""
    rows = [list(COLUMNS)]
    for outcome in outcomes:
        speedups, over_plain = outcome.speedups, outcome.speedups["plain"]
        rows.append(
            [
                outcome.method,
                f"{outcome.stats.acceptance_length:.2f}",
                f"{outcome.tokens_per_second:.1f}",
                f"{over_plain.value:.2f}",
                "" if outcome.method == "plain" else low_to_high(over_plain),
                f"{speedups['generate'].value:.2f}" if "generate" in speedups else "",
                outside(outcome.forced),
                f"{outcome.distinct:.2f}",
                *(milliseconds(seconds) for seconds in (outcome.first_token, *outcome.per_token)),
            ]
        )
    return rows


def further_tables(outcomes: list[Outcome]) -> list[list[list[str]]]:
    """Tables that only some reports have: speed-up over transformers' own drafting, figures by category."""
    tables = []
    baselines = [name for name in outcomes[0].speedups if name.startswith("generate")]
    if baselines not in ([], ["generate"]):
        rows = [[o.method, *(with_interval(o.speedups[name]) for name in baselines)] for o in outcomes]
        tables.append([["speed-up (95 % interval)", *(f"over {name}" for name in baselines)], *rows])
    if len(outcomes[0].by_category) > 1:
        tables += tables_by_category(outcomes)
    return tables


def tables_by_category(outcomes: list[Outcome]) -> list[list[list[str]]]:
    """For each figure, a table of methods by categories."""
    drafting = [o for o in outcomes if o.stats.tokens > o.stats.steps]  # without drafts the length is 1 everywhere
    comparable = [o for o in outcomes if o.forced is not None]
    figures: list[tuple[str, list[Outcome], Callable[[CategoryFigures], str]]] = [
        ("acceptance length", drafting, lambda found: f"{found.acceptance_length:.2f}"),
        ("token forcing", comparable, lambda found: outside(found.forced)),
    ]
    if all(found.speedups for found in outcomes[0].by_category.values()):
        figures[1:1] = [
            ("tokens/s", outcomes, lambda found: f"{found.tokens_per_second:.1f}"),
            ("speed-up (95 % interval)", outcomes, lambda found: with_interval(found.speedups["plain"])),
        ]
    return [
        [[name, *rows[0].by_category], *([row.method, *map(cell, row.by_category.values())] for row in rows)]
        for name, rows, cell in figures
        if rows
    ]


def with_interval(interval: Interval) -> str:
    return f"{interval.value:.2f} ({low_to_high(interval)})"


def low_to_high(interval: Interval) -> str:
    return "?" if math.isnan(interval.low) else f"{interval.low:.2f}-{interval.high:.2f}"


def milliseconds(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{1000 * seconds:.1f}"


def outside(forced: Forced | None) -> str:
    """How many tokens are outside, or why none were judged."""
    return "different random numbers" if forced is None else f"{forced.outside} of {forced.positions}"


def forcing_lines(outcomes: list[Outcome]) -> list[str]:
    """For each method with tokens that plain passes would not choose: how many are near-ties, and how near."""
    return [
        f"{outcome.method}: {forced.near_ties} of {forced.positions} tokens are near-ties, {forced.outside} outside; "
        f"widest gap {forced.widest:.2g}, rounding moves gaps by up to {outcome.rounding:.2g} here"
        for outcome in outcomes
        if (forced := outcome.forced) is not None and forced.near_ties + forced.outside > 0
    ]


def acceptance_lines(outcomes: list[Outcome]) -> list[str]:
    """For each method that drafts, the share of its steps that accepted at least 1, 2, ... draft tokens."""
    return [
        f"acceptance rate by depth, {outcome.method}: " + " ".join(f"{share:.2f}" for share in outcome.stats.acceptance)
        for outcome in outcomes
        if outcome.stats.acceptance
    ]


def heading(outcomes: list[Outcome]) -> str:
    tokens = sum(outcome.new_tokens for outcome in outcomes) // len(outcomes)
    first = outcomes[0]
    together = "" if first.batch == 1 else f" in batches of {first.batch}"
    cut = f"; {first.shortened} prompts shortened to fit the target's positions" if first.shortened else ""
    return f"temperature {first.temperature:g}, {first.prompts} prompts{together}, {tokens} tokens per method{cut}"


def short_table(outcomes: list[Outcome]) -> Table:
    """The main columns, for the terminal; the caption counts near-ties."""
    rows = [[row[list(COLUMNS).index(column)] for column in SHORT] for row in cells(outcomes)]
    rows[1:] = [[*figures, fill(same, HEADER_WIDTH)] for *figures, same in rows[1:]]
    table = rich_table(heading(outcomes), rows)
    table.caption, table.caption_justify = "\n".join(forcing_lines(outcomes)), "left"
    return table


def rich_table(title: str, rows: list[list[str]]) -> Table:
    """A table for the terminal; the first row is the header, the first column is aligned left."""
    table = Table(title=title)
    for number, column in enumerate(rows[0]):
        header = fill(column, HEADER_WIDTH, break_long_words=False)
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def as_markdown(outcomes: list[Outcome]) -> str:
    tables = map(markdown_table, [cells(outcomes), *further_tables(outcomes)])
    lines = "\n".join(f"- {line}" for line in [*acceptance_lines(outcomes), *forcing_lines(outcomes)])
    return "\n\n".join([f"{heading(outcomes)}:", *tables, *([lines] if lines else [])]) + "\n"


def markdown_table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " + "| ---: " * (len(rows[0]) - 1) + "|", *lines[1:]])


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
