"""What a head is worth: plain against speculative decoding of held-out prompts, with the output checked throughout.

    python -m inference.report recipes/tiny.yaml
    python -m inference.report recipes/tiny_full.yaml report.head=assets/demo_head

Prints a table and writes report.json, report.md and report.png to RUN_DIR/report, and a searched tree as tree.png.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from heads.build import load_head, new_head
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from inference.compare import Outcome, Way, compare
from inference.decode import check_length
from inference.drafters.cost_aware import growth_from_recipe, searched_tree
from inference.drafters.growth import Growth
from inference.drafters.head import HeadDrafter
from inference.sampling import sampling_from_recipe
from inference.target import TargetModel, pick_device
from inference.tree_picture import draw_tree
from recipes import Recipe, run_command


def main() -> None:
    run_command(__doc__, report)


def report(recipe: Recipe) -> list[Outcome]:
    """Measure, print and write; raises ValueError for a head that does not fit or prompts that are missing."""
    if recipe.report.threads is not None:
        torch.set_num_threads(recipe.report.threads)
    prompts = held_out_prompts(recipe)
    target_folder = locate_target(recipe.target.path, recipe.target.revision)
    # Cheap checks come before the target is loaded.
    taps = saved_taps(recipe, target_folder)
    target = TargetModel.load(recipe.target, taps)
    for prompt in prompts:
        check_length(target, prompt, recipe.decode.max_new_tokens)
    ways = build_ways(recipe, target)

    console, outcomes = Console(), []
    for temperature in recipe.report.temperatures:
        with console.status(f"decoding {len(prompts)} prompts in {len(ways)} ways at temperature {temperature}"):
            sampling = sampling_from_recipe(recipe.decode, temperature)
            found = compare(ways, target, prompts, recipe.decode.max_new_tokens, sampling, recipe.report.warmup_prompts)
        console.print(as_table(found))
        outcomes += found
    write_report(recipe, outcomes)
    written = "report.json, report.md, report.png"
    if recipe.decode.growth.startswith("searched"):
        tree = searched_tree(load_head(head_folder(recipe), target.frozen))
        draw_tree(tree, recipe.decode.nodes).savefig(recipe.report_dir / "tree.png", dpi=150)
        written += ", tree.png"
    console.print(f"written to {recipe.report_dir}: {written}", highlight=False)
    return outcomes


def held_out_prompts(recipe: Recipe) -> list[list[int]]:
    path = recipe.prompts_dir / "heldout.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing; make it with: python -m data_pipelines.prompts RECIPE")
    rows = path.read_text().splitlines()[: recipe.report.num_prompts]
    return [json.loads(row)["tokens"] for row in rows]


def head_folder(recipe: Recipe) -> Path:
    return recipe.head_dir if recipe.report.head is None else recipe.report.head


def saved_taps(recipe: Recipe, target_folder: Path) -> tuple[int, ...]:
    """The taps of the head to be measured, which is refused here if it does not fit the target."""
    frozen = FrozenTarget.from_folder(target_folder, torch.float32)
    return load_head(head_folder(recipe), frozen).taps


def build_ways(recipe: Recipe, target: TargetModel) -> list[Way]:
    head = load_head(head_folder(recipe), target.frozen)

    def growth(**changes: str) -> Growth:
        """One for each way: a growth that adapts would learn from the others."""
        return growth_from_recipe(recipe.decode.model_copy(update=changes), target, head)

    ways = {
        "generate": Way("generate", transformers=True),
        "plain": Way("plain"),
        "chain": Way("chain", HeadDrafter(head, growth(growth="chain"))),
        "tree": Way("tree", HeadDrafter(head, growth())),
    }
    if "untrained" in recipe.report.baselines:
        untrained = new_head(recipe.head, target.frozen, head.vocab, recipe.seed).eval().requires_grad_(False)
        ways["untrained"] = Way("untrained", HeadDrafter(untrained.to(target.device, target.dtype), growth()))
    names = list(recipe.report.baselines)
    return [ways[name] for name in (names if "plain" in names else ["plain", *names])]


def speedups(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """Tokens per second of each way over those of `plain` and of `generate`."""
    rates = {outcome.way: outcome.tokens_per_second for outcome in outcomes}
    bases = [base for base in ("plain", "generate") if base in rates]
    return {way: {base: rate / rates[base] for base in bases} for way, rate in rates.items()}


COLUMNS = ("way", "tau", "tokens/s", "x plain", "x generate", "same text", "distinct")


def cells(outcomes: list[Outcome]) -> list[list[str]]:
    """The table's rows, one for each way."""
    ratios, rows = speedups(outcomes), []
    for outcome in outcomes:
        ratio = ratios[outcome.way]
        rows.append(
            [
                outcome.way,
                f"{outcome.stats.tau:.2f}",
                f"{outcome.tokens_per_second:.1f}",
                f"{ratio['plain']:.2f}",
                f"{ratio['generate']:.2f}" if "generate" in ratio else "",
                same_text(outcome),
                f"{outcome.distinct:.2f}",
            ]
        )
    return rows


def same_text(outcome: Outcome) -> str:
    """How many texts are plain decoding's, where that is to be expected."""
    if outcome.rule == "typical" and outcome.stats.drafted:
        return "lossy"
    # transformers draws its own random numbers, and rejection sampling other ones: another text, equally likely.
    other_noise = outcome.way == "generate" or (outcome.rule == "rejection" and outcome.stats.drafted > 0)
    if other_noise and outcome.temperature > 0:
        return "own noise"
    return f"{outcome.identical}/{outcome.prompts}"


def heading(outcomes: list[Outcome]) -> str:
    per_way = sum(outcome.new_tokens for outcome in outcomes) // len(outcomes)
    first = outcomes[0]
    return f"temperature {first.temperature:g}, {first.prompts} held-out prompts, {per_way} tokens each way"


def as_table(outcomes: list[Outcome]) -> Table:
    table = Table(title=heading(outcomes), caption=acceptance_by_depth(outcomes), caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in cells(outcomes):
        table.add_row(*row)
    return table


def as_markdown(outcomes: list[Outcome]) -> str:
    lines = [f"{heading(outcomes)}:", "", "| " + " | ".join(COLUMNS) + " |", "| --- " + "| ---: " * 6 + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in cells(outcomes)]
    return "\n".join(lines) + "\n\n" + acceptance_by_depth(outcomes).replace("\n", "; ") + ".\n"


def acceptance_by_depth(outcomes: list[Outcome]) -> str:
    """One line for each way that drafts: the share of its steps that accepted at least 1, 2, ... drafts."""
    lines = []
    for outcome in outcomes:
        shares = outcome.stats.acceptance
        if shares:
            lines.append(f"{outcome.way} accepts at depth 1, 2, ...: " + " ".join(f"{share:.2f}" for share in shares))
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    device = pick_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def write_report(recipe: Recipe, outcomes: list[Outcome]) -> None:
    recipe.report_dir.mkdir(parents=True, exist_ok=True)
    by_temperature = {t: [o for o in outcomes if o.temperature == t] for t in recipe.report.temperatures}
    content: dict[str, Any] = {
        "machine": machine(),
        "head": str(head_folder(recipe)),
        "recipe": recipe.model_dump(mode="json"),
        "outcomes": [outcome.as_json() for outcome in outcomes],
        "speedups": {str(t): speedups(found) for t, found in by_temperature.items()},
    }
    (recipe.report_dir / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    about = ", ".join(f"{name} {value}" for name, value in content["machine"].items())
    tables = "\n".join(as_markdown(found) for found in by_temperature.values())
    (recipe.report_dir / "report.md").write_text(f"Head `{head_folder(recipe)}`; {about}.\n\n{tables}")
    draw(by_temperature).savefig(recipe.report_dir / "report.png", dpi=150)


def draw(by_temperature: dict[float, list[Outcome]]) -> Figure:
    """Tokens per second, tau and acceptance by depth, a row of panels for each temperature."""
    figure = Figure(figsize=(13, 3.6 * len(by_temperature)), layout="constrained")
    panels = figure.subplots(len(by_temperature), 3, squeeze=False)
    for (speed, length, depth), (temperature, outcomes) in zip(panels, by_temperature.items(), strict=True):
        names, colours = [o.way for o in outcomes], [f"C{i}" for i in range(len(outcomes))]
        for panel, values, title in (
            (speed, [o.tokens_per_second for o in outcomes], "tokens per second"),
            (length, [o.stats.tau for o in outcomes], "tokens per target step (tau)"),
        ):
            panel.bar_label(panel.bar(names, values, color=colours), fmt="%.2f" if panel is length else "%.0f")
            panel.set_title(f"{title}, temperature {temperature:g}")
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


if __name__ == "__main__":
    main()
