"""Look at a run's data: samples coloured by what is trained on, lengths, and which rows gave nothing and why.

    python -m data_pipelines.inspect recipes/tiny.yaml

Shows the responses where they are written, else the prompts, which it makes if they are missing.
"""

import json
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text as Coloured

from data_pipelines.prompts import INTAKE_REPORT, make_prompts
from data_pipelines.responses import Text
from data_pipelines.stage import Json, Stage
from heads.target_config import locate_target
from inference.target.tokenizer import Tokenizer, load_tokenizer
from recipes import Recipe, run_command
from recipes.jsonl import read_jsonl

SAMPLES = 4  # shown in full
BADS = 20  # shown of the rows that gave nothing
BINS, BAR = 10, 40  # of a histogram: its bins, and the characters of its longest bar


def main() -> None:
    run_command(__doc__, lambda recipe: inspect(recipe, Console()))


def inspect(recipe: Recipe, console: Console) -> None:
    """Print it all."""
    stage = make_prompts(recipe)
    texts = [Text.from_row(row) for row in training_rows(recipe, stage)]
    section = recipe.target
    tokenizer = load_tokenizer(locate_target(section.path, section.revision), section.trust_remote_code)
    for number, text in enumerate(texts[:SAMPLES]):
        console.rule(f"sample {number}: {len(text.tokens)} tokens, {sum(text.loss_mask)} trained on")
        console.print(coloured(tokenizer, text))
    console.print(histogram("tokens of a sample", [len(text.tokens) for text in texts]))
    console.print(histogram("of these trained on", [sum(text.loss_mask) for text in texts]))
    for intake in json.loads((stage.folder / INTAKE_REPORT).read_text()):
        console.print(bad_rows(intake))


def training_rows(recipe: Recipe, prompts: Stage) -> Iterator[Json]:
    """What the run trains on, as far as it is written."""
    written = sorted(recipe.responses_dir.glob("train-*.jsonl"))
    if written:
        for path in written:
            yield from read_jsonl(path)
        return
    for row in read_jsonl(prompts.folder / "train.jsonl"):
        given = {"tokens": row["text"], "spans": row["spans"]} if "spans" in row else None
        yield given or {"prompt": row["tokens"], "response": []}


def coloured(tokenizer: Tokenizer, text: Text) -> Coloured:
    """What is trained on in bold green, the rest dim; runs are decoded whole, as one token may be half a letter."""
    line, start = Coloured(), 0
    for place in range(1, len(text.tokens) + 1):
        if place == len(text.tokens) or text.loss_mask[place] != text.loss_mask[start]:
            line.append(
                str(tokenizer.decode(text.tokens[start:place])), "bold green" if text.loss_mask[start] else "dim"
            )
            start = place
    return line


def histogram(title: str, values: list[int]) -> Table:
    width = max(values) // BINS + 1
    counts = Counter(value // width for value in values)
    table = Table(title, "samples", "", box=None, title_justify="left")
    for number in range(max(counts) + 1):
        bar = "█" * round(BAR * counts[number] / max(counts.values()))
        table.add_row(f"{number * width} - {(number + 1) * width - 1}", str(counts[number]), bar)
    return table


def bad_rows(intake: Json) -> Table:
    """The rows of a source that gave nothing."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in intake["bad"].items()) or "none"
    title = f"{intake['source']}: {intake['rows']} rows, bad: {kinds}; {len(intake['cut'])} prompts cut"
    table = Table("line", "kind", "why", title=title, title_justify="left")
    for row in intake["bad_rows"][:BADS]:
        table.add_row(str(row["line"]), row["kind"], row["why"])
    if len(intake["bad_rows"]) > BADS:
        table.add_row("...", "", f"{len(intake['bad_rows']) - BADS} more in {INTAKE_REPORT}")
    return table


if __name__ == "__main__":
    main()
