"""The report's tables on a terminal and as Markdown."""

import math
from collections.abc import Callable
from textwrap import fill

from rich.table import Table

from headstart.inference.report.compare import CategoryFigures, Interval, Outcome
from headstart.inference.report.forcing import Forced

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
AIPERF_COLUMNS = {  # the headers of aiperf, and its tags
    "Token-Weighted Acceptance Length": "spec_decode_token_weighted_acceptance_length",
    "Overall Draft Acceptance Rate (%)": "spec_decode_overall_draft_acceptance_rate",
}
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
    rows = [[*columns, *(f"speed-up over {name} (95 % interval)" for name in baselines)]]
    for outcome in outcomes:
        over_plain = outcome.speedups["plain"]
        rows.append(
            [
                outcome.method,
                f"{outcome.stats.acceptance_length:.2f}",
                f"{outcome.tokens_per_second:.1f}",
                f"{over_plain.value:.2f}",
                "" if outcome.method == "plain" else low_to_high(over_plain),
                same_of(outcome),
                *([outside(outcome.forced)] if "token forcing" in columns else []),
                f"{outcome.distinct:.2f}",
                *(with_interval(outcome.speedups[name]) for name in baselines),
            ]
        )
    return rows


def tables_by_category(outcomes: list[Outcome]) -> list[Rows]:
    """For each figure, a table of methods by categories; none if there is only one category."""
    if len(outcomes[0].by_category) == 1:
        return []
    drafting = [each for each in outcomes if each.stats.tokens > each.stats.steps]  # others have a length of 1
    same, judged = ([each for each in outcomes if getattr(each, name) is not None] for name in ("same", "forced"))
    timed = outcomes if all(figures.speedups for figures in outcomes[0].by_category.values()) else []
    columns: list[tuple[str, list[Outcome], Callable[[CategoryFigures], str]]] = [
        ("acceptance length", drafting, lambda figures: f"{figures.acceptance_length:.2f}"),
        ("tokens/s", timed, lambda figures: f"{figures.tokens_per_second:.1f}"),
        ("speed-up (95 % interval)", timed, lambda figures: with_interval(figures.speedups["plain"])),
        ("same text", same, same_of),
        ("token forcing", judged, lambda figures: outside(figures.forced)),
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


def same_of(figures: Outcome | CategoryFigures) -> str:
    return "different random numbers" if figures.same is None else f"{figures.same} of {figures.prompts}"


def outside(forced: Forced | None) -> str:
    return "not judged" if forced is None else f"{forced.outside} of {forced.positions}"


def forcing_lines(outcomes: list[Outcome]) -> list[str]:
    """For each method with tokens that plain passes would not choose: the number of near-ties, and the widest gap."""
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


def resting_lines(outcomes: list[Outcome]) -> list[str]:
    """For each method whose drafts were switched off at times: in how many of its steps."""
    return [
        f"{outcome.method}: in {outcome.stats.resting_steps} of {outcome.stats.steps} steps drafts were off, as they "
        "did not pay"
        for outcome in outcomes
        if outcome.method != "plain" and outcome.stats.resting_steps
    ]


def published_table(outcomes: list[Outcome]) -> Rows:
    """The figures of methods that draft in SPEED-Bench's and in aiperf's terms; only a header if none does."""
    rows = [["method", "Average_AL", "Joint_Acceptance_Rate, from 2", "Output TPS", *AIPERF_COLUMNS]]
    for outcome in outcomes:
        if figures := outcome.published:
            _, *shares = (f"{share:.2f}" for share in figures["Joint_Acceptance_Rate"].values())
            numbers = [figures["Output TPS"], *(figures[tag] for tag in AIPERF_COLUMNS.values())]
            first = [outcome.method, f"{figures['Average_AL']:.2f}", " ".join(shares)]
            rows.append([*first, *(f"{number:.2f}" for number in numbers)])
    return rows


def heading(outcomes: list[Outcome]) -> str:
    tokens = sum(outcome.new_tokens for outcome in outcomes) // len(outcomes)
    first = outcomes[0]
    batches = "" if first.batch == 1 else f" in batches of {first.batch}"
    cut = f"; {first.shortened} prompts shortened to fit the target's positions" if first.shortened else ""
    return f"temperature {first.temperature:g}, {first.prompts} prompts{batches}, {tokens} tokens per method{cut}"


def short_table(outcomes: list[Outcome]) -> Table:
    """The main columns, for the terminal; the caption counts near-ties and steps without drafts."""
    places = [number for number, column in enumerate(columns_of(outcomes)) if column in SHORT]
    header, *rows = [[row[place] for place in places] for row in main_table(outcomes)]
    rows = [header, *([fill(cell, HEADER_WIDTH) for cell in row] for row in rows)]
    table = rich_table(heading(outcomes), rows)
    table.caption, table.caption_justify = "\n".join(resting_lines(outcomes) + forcing_lines(outcomes)), "left"
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
    every = [main_table(outcomes), *tables_by_category(outcomes), published_table(outcomes)]
    tables = [markdown_table(rows) for rows in every if len(rows) > 1]
    each_line = [*acceptance_lines(outcomes), *resting_lines(outcomes), *forcing_lines(outcomes)]
    lines = "\n".join(f"- {line}" for line in each_line)
    return "\n\n".join([f"{heading(outcomes)}:", *tables, *([lines] if lines else [])]) + "\n"


def markdown_table(rows: Rows) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " + "| ---: " * (len(rows[0]) - 1) + "|", *lines[1:]])
