"""The report's outcomes as tables for the terminal and for Markdown, and as a figure."""

import math

from matplotlib.figure import Figure
from rich.table import Table

from inference.report.compare import Outcome
from inference.report.statistics import Interval

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
    """The first table's rows, one for each way, the heading first; times in ms."""
    rows = [list(COLUMNS)]
    for outcome in outcomes:
        ratios, plain = outcome.speedups, outcome.speedups["plain"]
        rows.append(
            [
                outcome.way,
                f"{outcome.stats.acceptance_length:.2f}",
                f"{outcome.tokens_per_second:.1f}",
                f"{plain.value:.2f}",
                "" if outcome.way == "plain" else spread(plain),
                f"{ratios['generate'].value:.2f}" if "generate" in ratios else "",
                same_text(outcome),
                f"{outcome.distinct:.2f}",
                *(milliseconds(seconds) for seconds in (outcome.first_token, *outcome.per_token)),
            ]
        )
    return rows


def further_tables(outcomes: list[Outcome]) -> list[list[list[str]]]:
    """What the first table has no room for: speed beside transformers' drafting, and tau by category."""
    tables = []
    baselines = [name for name in outcomes[0].speedups if name.startswith("generate")]
    if baselines not in ([], ["generate"]):
        rows = [[o.way, *(f"{one.value:.2f} ({spread(one)})" for one in over(o, baselines))] for o in outcomes]
        tables.append([["tokens/s (95 %)", *(f"x {name}" for name in baselines)], *rows])
    categories = list(outcomes[0].tau_by_category)
    if len(categories) > 1:
        ahead = [o for o in outcomes if o.stats.tokens > o.stats.steps]  # the others yield one token a step everywhere
        rows = [[name, *(f"{o.tau_by_category[name]:.2f}" for o in ahead)] for name in categories]
        tables.append([["tau", *(o.way for o in ahead)], *rows])
    return tables


def spread(interval: Interval) -> str:
    return "?" if math.isnan(interval.low) else f"{interval.low:.2f}-{interval.high:.2f}"


def over(outcome: Outcome, baselines: list[str]) -> list[Interval]:
    return [outcome.speedups[name] for name in baselines]


def milliseconds(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{1000 * seconds:.1f}"


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
    rows = cells(outcomes)
    tables = [rich_table(heading(outcomes), [row[:ON_TERMINAL] for row in rows])]
    tables.append(rich_table("", [[row[0], *row[ON_TERMINAL:]] for row in rows]))
    tables += [rich_table("", table) for table in further_tables(outcomes)]
    tables[-1].caption, tables[-1].caption_justify = caption, "left"
    return tables


def rich_table(title: str, rows: list[list[str]]) -> Table:
    table = Table(title=title)
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def as_markdown(outcomes: list[Outcome]) -> str:
    tables = map(markdown_table, [cells(outcomes), *further_tables(outcomes)])
    lines = [*acceptance_by_depth(outcomes).split("\n"), *divergence_lines(outcomes)]
    return "\n\n".join([f"{heading(outcomes)}:", *tables, "; ".join(line for line in lines if line) + "."]) + "\n"


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
            (length, [o.stats.acceptance_length for o in outcomes], "tokens per target step (tau)"),
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
