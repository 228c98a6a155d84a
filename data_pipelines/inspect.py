"""Show a run's data: samples with the trained-on text in colour, length histograms, and the unusable rows.

    headstart inspect recipes/tiny.yaml

Shows the responses that are written so far. If there are none, it shows the prompts, and makes them if necessary.
"""

from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text as Coloured

from headstart.common.files import read_jsonl
from headstart.data_pipelines.prompts.prompts import (
    ROW_REPORT,
    describe_prompts,
    load_target_tokenizer,
    make_prompts_alone,
    read_reports,
)
from headstart.data_pipelines.prompts.responses import Response
from headstart.data_pipelines.stages.stage import Json, Stage
from headstart.inference.targets.tokenizer import Tokenizer
from headstart.recipes import Recipe

SAMPLES = 4  # samples shown in full
BAD_ROWS = 20  # rows without a sample shown
BINS, BAR = 10, 30  # a histogram's number of bins, and the characters of its longest bar


def inspect(recipe: Recipe, console: Console | None = None) -> None:
    """Print samples, histograms and unusable rows."""
    console = console or Console()
    stage = make_prompts_alone(recipe)
    texts = [Response.from_row(row) for row in training_rows(recipe, stage)]
    tokenizer = load_target_tokenizer(recipe)
    for number, text in enumerate(texts[:SAMPLES]):
        console.rule(f"sample {number}: {len(text.tokens)} tokens, {sum(text.loss_mask)} trained on")
        console.print(coloured(tokenizer, text))
    console.print(histogram("tokens per sample", [len(text.tokens) for text in texts]))
    console.print(histogram("trained-on tokens per sample", [sum(text.loss_mask) for text in texts]))
    console.out(describe_prompts(recipe), highlight=False)
    for report in read_reports(recipe):
        if report.left_out:
            console.out(f"\nrows of {report.source} that gave no sample:", highlight=False)
            console.print(row_table(report.left_out, report.counts))


def training_rows(recipe: Recipe, prompts: Stage) -> Iterator[Json]:
    """The training samples written so far; the prompts if there are none."""
    written = sorted(recipe.responses_dir.glob("train-*.jsonl"))
    if written:
        for path in written:
            yield from read_jsonl(path)
        return
    for row in read_jsonl(prompts.folder / "train.jsonl"):
        yield {"response": [], **row, "prompt": row["tokens"]}


def coloured(tokenizer: Tokenizer, text: Response) -> Coloured:
    """A sample with the trained-on text in bold green; ranges are decoded whole, as a token may be half a character."""
    line, start = Coloured(), 0
    for position in range(1, len(text.tokens) + 1):
        if position == len(text.tokens) or text.loss_mask[position] != text.loss_mask[start]:
            line.append(
                str(tokenizer.decode(text.tokens[start:position])), "bold green" if text.loss_mask[start] else "dim"
            )
            start = position
    return line


def histogram(title: str, values: list[int]) -> Table:
    width = max(values) // BINS + 1
    counts = Counter(value // width for value in values)
    table = Table(title, "samples", "", box=None, title_justify="left")
    for number in range(max(counts) + 1):
        bar = "█" * round(BAR * counts[number] / max(counts.values()))
        table.add_row(f"{number * width} - {(number + 1) * width - 1}", str(counts[number]), bar)
    return table


def row_table(rows: list[Json], counts: str) -> Table:
    """Rows that gave no sample, and why; `counts` is the unit of their numbers."""
    table = Table(counts, "kind", "why", box=None)
    for row in rows[:BAD_ROWS]:
        table.add_row(str(row["line"]), row["kind"], escape(row["why"]))
    if len(rows) > BAD_ROWS:
        table.add_row("...", "", f"{len(rows) - BAD_ROWS} more in {ROW_REPORT}")
    return table
