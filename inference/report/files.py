"""Write the report: JSON with every figure, Markdown, a figure, the HTML page, and pictures of searched trees."""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from headstart.common.files import whole_file, write_text
from headstart.heads.base import DraftHead
from headstart.inference.core.request import Detokenize
from headstart.inference.drafters.build import searched_tree
from headstart.inference.report.compare import Outcome
from headstart.inference.report.page import page
from headstart.inference.report.tables import COLUMNS, NOTE, as_markdown, draw
from headstart.inference.report.trace import Trace
from headstart.inference.report.tree_picture import draw_tree
from headstart.inference.show.inputs import OWN_HEAD
from headstart.recipes import Recipe


def write_report(
    recipe: Recipe,
    machine: Mapping[str, Any],
    folders: Mapping[str, Path],
    outcomes: list[Outcome],
    traces: list[Trace],
    text: Detokenize,
) -> list[str]:
    """Write into the recipe's report folder and return the file names; `folders` holds the heads' folders by name."""
    folder = recipe.report_dir
    settings = product(recipe.report.temperatures, recipe.report.batches)
    groups = {(t, b): [o for o in outcomes if (o.temperature, o.batch) == (t, b)] for t, b in settings}
    others = {name: str(path) for name, path in folders.items() if name != OWN_HEAD}
    content: dict[str, Any] = {
        "machine": machine,
        "head": str(folders[OWN_HEAD]) if folders else None,
        "other_heads": others,
        "recipe": recipe.model_dump(mode="json"),
        "outcomes": [outcome.as_json() for outcome in outcomes],
    }
    write_text(folder / "report.json", json.dumps(content, indent=1) + "\n")
    heads = [f"Head `{folders[OWN_HEAD]}`", *(f"{name} `{path}`" for name, path in others.items())] if folders else []
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    tables = "\n".join(as_markdown(found) for found in groups.values())
    columns = "\n".join(f"- {name}: {meaning}" for name, meaning in COLUMNS.items())
    write_text(folder / "report.md", f"{'; '.join([*heads, about])}.\n\n{NOTE}\n\n{tables}\nColumns:\n\n{columns}\n")
    whole_page = page(f"headstart on {recipe.target.path}", list(groups.values()), traces, text)
    write_text(folder / "report.html", whole_page)
    write_png(folder / "report.png", draw(groups))
    return ["report.json", "report.md", "report.png", "report.html"]


def write_png(path: Path, figure: Figure) -> None:
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def draw_searched_trees(recipe: Recipe, heads: Mapping[str, DraftHead]) -> list[str]:
    """Draw each head's searched tree if the recipe drafts with it; returns the file names."""
    files = []
    for name, head in heads.items() if recipe.decode.growth.startswith("searched") else ():
        files.append("tree.png" if name == OWN_HEAD else f"tree_{name}.png")
        write_png(recipe.report_dir / files[-1], draw_tree(searched_tree(head), recipe.decode.nodes))
    return files
