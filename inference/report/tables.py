"""The report's tables on a terminal and as Markdown."""

import math
from collections.abc import Callable
from textwrap import fill

from rich.table import Table

from headstart.inference.report.compare import Figures, Interval, Outcome

COLUMNS = {
    "method": "generate: transformers' own; plain: no drafts; chain, tree: a head's drafts; untrained: drafts of a "
    "random head, or of the checkpoint's own MTP layer",
    "acceptance length": "mean number of tokens per target step, the bonus token included (tau)",
    "tokens/s": "new tokens per second of wall time, prefill included",
    "speed-up": "tokens/s over plain decoding",
    "95 % interval": "of the speed-up over plain decoding, from a bootstrap over prompts",
    "same text": "texts that equal plain decoding's, of all; passes of transformers' own methods round differently in "
    "half precision, so theirs may differ where two tokens are nearly as likely",
    "token forcing": "tokens outside, of all: neither the choice of plain passes at their position nor a near-tie",
    "distinct tokens": "mean share of distinct tokens in a text; low for a text that loops",
}
SHORT = ("method", "acceptance length", "tokens/s", "speed-up", "same text", "token forcing")  # on a terminal
HEADER_WIDTH = 13  # characters per line of a header on a terminal

Rows = list[list[str]]  # the first one is the header


def columns_of(outcomes: list[Outcome]) -> list[str]:
    """Tokens are forced only where texts may differ by rounding."""
    is_forced = any(outcome.forced is not None for outcome in outcomes)
    return [column for column in COLUMNS if is_forced or column != "token forcing"]


def legend(outcomes: list[Outcome], short: bool = True) -> list[str]:
    return [f"{column}: {COLUMNS[column]}" for column in columns_of(outcomes) if not short or column in SHORT]


def main_table(outcomes: list[Outcome]) -> Rows:
    baselines, columns = [name for name in outcomes[0].speedups if name != "plain"], columns_of(outcomes)
    forces = "token forcing" in columns
    rows = [[*columns, *(f"speed-up over {name} (95 % interval)" for name in baselines)]]
    for outcome in outcomes:
        over_plain, forced = outcome.speedups["plain"], outcome.forced
        rows.append(
            [
                outcome.method,
                f"{outcome.acceptance_length:.2f}",
                f"{outcome.tokens_per_second:.1f}",
                f"{over_plain.value:.2f}",
                "" if outcome.method == "plain" else low_to_high(over_plain),
                "different random numbers" if outcome.same is None else f"{outcome.same} of {outcome.prompts}",
                *(["not judged" if forced is None else f"{forced.outside} of {forced.positions}"] if forces else []),
                f"{outcome.distinct:.2f}",
                *(with_interval(outcome.speedups[name]) for name in baselines),
            ]
        )
    return rows


def tables_by_category(outcomes: list[Outcome]) -> list[Rows]:
    """For each figure, a table of methods by categories; none if there is only one category."""
    if len(outcomes[0].by_category) == 1:
        return []
    drafting = [each for each in outcomes if each.acceptance_length > 1]  # others have a length of 1
    timed = outcomes if all(figures.speedups for figures in outcomes[0].by_category.values()) else []
    columns: list[tuple[str, list[Outcome], Callable[[Figures], str]]] = [
        ("acceptance length", drafting, lambda figures: f"{figures.acceptance_length:.2f}"),
        ("tokens/s", timed, lambda figures: f"{figures.tokens_per_second:.1f}"),
        ("speed-up (95 % interval)", timed, lambda figures: with_interval(figures.speedups["plain"])),
    ]
    return [
        [[name, *rows[0].by_category], *([row.method, *map(cell, row.by_category.values())] for row in rows)]
        for name, rows, cell in columns
        if rows
    ]


def with_interval(interval: Interval) -> str:
    return f"{interval.value:.2f} ({low_to_high(interval)})"


def low_to_high(interval: Interval) -> str:
    return "?" if math.isnan(interval.low) else f"{interval.low:.2f}-{interval.high:.2f}"


def lines(outcome: Outcome) -> list[str]:
    """What the table cannot show: the share of steps that accepted at least 1, 2, ... draft tokens, the steps without
    drafts as these did not pay, and the tokens that plain passes would not choose."""
    found, stats, forced = list[str](), outcome.stats, outcome.forced
    if stats.acceptance:
        found.append("acceptance rate by depth " + " ".join(f"{share:.2f}" for share in stats.acceptance))
    if outcome.method != "plain" and stats.resting_steps:
        found.append(f"in {stats.resting_steps} of {stats.steps} steps drafts were off, as they did not pay")
    if forced is not None and forced.near_ties + forced.outside > 0:
        found.append(
            f"{forced.near_ties} of {forced.positions} tokens are near-ties, {forced.outside} outside; widest gap "
            f"{forced.widest:.2g}, rounding moves gaps by up to {outcome.rounding:.2g} here"
        )
    return [f"{outcome.method}: {each}" for each in found]


def heading(outcomes: list[Outcome]) -> str:
    tokens = sum(outcome.new_tokens for outcome in outcomes) // len(outcomes)
    first = outcomes[0]
    batches = "" if first.batch == 1 else f" in batches of {first.batch}"
    cut = f"; {first.shortened} prompts shortened to fit the target's positions" if first.shortened else ""
    return f"temperature {first.temperature:g}, {first.prompts} prompts{batches}, {tokens} tokens per method{cut}"


def short_table(outcomes: list[Outcome]) -> Table:
    """The main columns, for the terminal, and the lines of each method below."""
    places = [number for number, column in enumerate(columns_of(outcomes)) if column in SHORT]
    header, *rows = [[row[place] for place in places] for row in main_table(outcomes)]
    rows = [header, *([fill(cell, HEADER_WIDTH) for cell in row] for row in rows)]
    table = rich_table(heading(outcomes), rows)
    table.caption, table.caption_justify = "\n".join(line for outcome in outcomes for line in lines(outcome)), "left"
    return table


def rich_table(title: str, rows: Rows) -> Table:
    """A table for the terminal; the first column is aligned left."""
    table = Table(title=title)
    for number, column in enumerate(rows[0]):
        header = fill(column, HEADER_WIDTH, break_long_words=False)
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def as_markdown(outcomes: list[Outcome]) -> str:
    tables = [markdown_table(rows) for rows in (main_table(outcomes), *tables_by_category(outcomes))]
    notes = "\n".join(f"- {line}" for outcome in outcomes for line in lines(outcome))
    return "\n\n".join([f"{heading(outcomes)}:", *tables, *([notes] if notes else [])]) + "\n"


def markdown_table(rows: Rows) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " + "| ---: " * (len(rows[0]) - 1) + "|", *lines[1:]])
