"""The report's outcomes as tables for the terminal and for Markdown."""

import math
from collections.abc import Callable
from textwrap import fill

from rich.table import Table

from headstart.inference.report.compare import CategoryFigures, Interval, Outcome
from headstart.inference.report.forcing import Forced

COLUMNS = {
    "method": "generate: transformers' own; plain: no drafts; chain, tree: a head's drafts; untrained: a random head's",
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
