"""The report's outcomes as tables for the terminal and for Markdown, and as a figure."""

import math

from matplotlib.figure import Figure
from rich.table import Table

from inference.compare import Outcome


def speedups(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """Tokens per second of each way over those of `plain` and of `generate`."""
    rates = {outcome.way: outcome.tokens_per_second for outcome in outcomes}
    bases = [base for base in ("plain", "generate") if base in rates]
    return {way: {base: rate / rates[base] for base in bases} for way, rate in rates.items()}


COLUMNS = (
    "way",
    "tau",
    "tokens/s",
    "x plain",
    "95 %",
    "x generate",
    "same text",
    "distinct",
    "first token",
    "per token p50",
    "p95",
)
ON_TERMINAL = 7  # of these columns fit 80 characters; the others make a table of their own


def cells(outcomes: list[Outcome]) -> list[list[str]]:
    """The table's rows, one for each way; times in ms."""
    ratios, rows = speedups(outcomes), []
    for outcome in outcomes:
        ratio, range_ = ratios[outcome.way], outcome.speedup
        assert range_ is not None
        rows.append(
            [
                outcome.way,
                f"{outcome.stats.tau:.2f}",
                f"{outcome.tokens_per_second:.1f}",
                f"{ratio['plain']:.2f}",
                "" if outcome.way == "plain" else f"{range_.low:.2f}-{range_.high:.2f}",
                f"{ratio['generate']:.2f}" if "generate" in ratio else "",
                same_text(outcome),
                f"{outcome.distinct:.2f}",
                *(milliseconds(seconds) for seconds in (outcome.first_token, *outcome.per_token)),
            ]
        )
    return rows


def milliseconds(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{1000 * seconds:.1f}"


def category_cells(outcomes: list[Outcome]) -> list[list[str]]:
    """tau of each way by category, the heading first."""
    categories = list(outcomes[0].tau_by_category)
    rows = [[o.way, *(f"{o.tau_by_category[category]:.2f}" for category in categories)] for o in outcomes]
    return [["tau", *categories], *rows]


def same_text(outcome: Outcome) -> str:
    """How many texts are plain decoding's, where that is to be expected."""
    if is_lossy(outcome):
        return "lossy"
    # transformers draws its own random numbers, and rejection sampling other ones: another text, equally likely.
    other_noise = outcome.way.startswith("generate") or (outcome.rule == "rejection" and outcome.stats.drafted > 0)
    if other_noise and outcome.temperature > 0:
        return "own noise"
    return f"{outcome.identical}/{outcome.prompts}"


def is_lossy(outcome: Outcome) -> bool:
    """Is the text another than the target's, by a rule that takes what is likely enough?"""
    return outcome.rule == "typical" and outcome.stats.drafted > 0


def divergence_lines(outcomes: list[Outcome]) -> list[str]:
    """Of each way whose texts differ, how close the two tokens were where they first did."""
    lines = []
    for outcome in outcomes:
        margins = [found.margin for found in outcome.divergences]
        if margins:
            lines.append(
                f"{outcome.way} differs from plain in {len(margins)} texts, at margins of up to {max(margins):.2g}"
            )
    return lines


def heading(outcomes: list[Outcome]) -> str:
    per_way = sum(outcome.new_tokens for outcome in outcomes) // len(outcomes)
    first = outcomes[0]
    together = "" if first.batch == 1 else f" in batches of {first.batch}"
    lossy = "; typical acceptance, LOSSY" if any(map(is_lossy, outcomes)) else ""
    return f"temperature {first.temperature:g}, {first.prompts} prompts{together}, {per_way} tokens each way{lossy}"


def as_tables(outcomes: list[Outcome]) -> list[Table]:
    caption = "\n".join([acceptance_by_depth(outcomes), *divergence_lines(outcomes)])
    rows = [list(COLUMNS), *cells(outcomes)]
    tables = [rich_table(heading(outcomes), [row[:ON_TERMINAL] for row in rows])]
    tables.append(rich_table("", [[row[0], *row[ON_TERMINAL:]] for row in rows]))
    if len(outcomes[0].tau_by_category) > 1:
        tables.append(rich_table("", category_cells(outcomes)))
    tables[-1].caption, tables[-1].caption_justify = caption, "left"
    return tables


def rich_table(title: str, rows: list[list[str]]) -> Table:
    table = Table(title=title)
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if number else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def as_markdown(outcomes: list[Outcome]) -> str:
    blocks = [f"{heading(outcomes)}:", markdown_table([list(COLUMNS), *cells(outcomes)])]
    if len(outcomes[0].tau_by_category) > 1:
        blocks.append(markdown_table(category_cells(outcomes)))
    lines = [*acceptance_by_depth(outcomes).split("\n"), *divergence_lines(outcomes)]
    return "\n\n".join([*blocks, "; ".join(line for line in lines if line) + "."]) + "\n"


def markdown_table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " + "| ---: " * (len(rows[0]) - 1) + "|", *lines[1:]])


def acceptance_by_depth(outcomes: list[Outcome]) -> str:
    """One line for each way that drafts: the share of its steps that accepted at least 1, 2, ... drafts."""
    lines = []
    for outcome in outcomes:
        shares = outcome.stats.acceptance
        if shares:
            lines.append(f"{outcome.way} accepts at depth 1, 2, ...: " + " ".join(f"{share:.2f}" for share in shares))
    return "\n".join(lines)


def draw(groups: dict[tuple[float, int], list[Outcome]]) -> Figure:
    """Tokens per second, tau and acceptance by depth, a row of panels for each temperature and batch size."""
    figure = Figure(figsize=(13, 3.6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 3, squeeze=False)
    for (speed, length, depth), ((temperature, batch), outcomes) in zip(panels, groups.items(), strict=True):
        names = [f"{o.way}\n(lossy)" if is_lossy(o) else o.way for o in outcomes]
        colours = [f"C{i}" for i in range(len(outcomes))]
        for panel, values, title in (
            (speed, [o.tokens_per_second for o in outcomes], "tokens per second"),
            (length, [o.stats.tau for o in outcomes], "tokens per target step (tau)"),
        ):
            panel.bar_label(panel.bar(names, values, color=colours), fmt="%.2f" if panel is length else "%.0f")
            panel.set_title(f"{title}, temperature {temperature:g}, batch {batch}")
            panel.tick_params(axis="x", rotation=30 if len(names) > 5 else 0)
            panel.margins(y=0.15)
        for outcome, colour in zip(outcomes, colours, strict=True):
            shares = outcome.stats.acceptance
            if shares:
                depth.plot(range(1, len(shares) + 1), shares, marker="o", color=colour, label=outcome.way)
        depth.set(title="share of steps that accept at least d drafts", xlabel="d", ylim=(0, 1))
        depth.set_xticks(range(1, max((len(o.stats.accepted_at_depth) for o in outcomes), default=1) + 1))
        if depth.has_data():
            depth.legend()
    return figure
