"""A block head beside an EAGLE-3 head: one store of features, the same steps, two budgets, the best rate of three.

    python benchmarks/block_quality.py recipes/smollm2_135m.yaml recipes/smollm2_135m_block.yaml --steps 60 \\
        data.folder=runs/smollm2_135m report.num_prompts=24

Each head is trained for --steps steps at half, one and two times its recipe's learning rates, and beyond if the best is
the first or the last; the rate whose head expects the longest drafts of held-out texts is trained for --times as many
steps, too. Heads lie in RUN_DIR/compare and are not trained again. Overrides after the two recipes go to both.

The first table tells what training took, and what the head expects (tau: tokens per target step). Then each head drafts
a chain, the recipe's tree and a cost-aware one; the block head also a tree whose nodes on one level all have the same
children (marginal), where its own trees have children that follow from the node's token (conditional). All methods take
turns on the prompts of the report. The last lines tell what drafting takes, in one step, at equal depth.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from lossless import count_texts
from rich.console import Console
from rich.table import Table
from train_quality import OUR_RATES, ROOT, call, overrides_of, swept

from headstart.common.files import read_jsonl
from headstart.common.progress import Progress
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.checkpoint import load_head_for
from headstart.heads.target_config import folder_of
from headstart.inference.core.request import DecodeStats
from headstart.inference.core.sampling import sampling_from_recipe
from headstart.inference.drafters.block import BlockDrafter
from headstart.inference.drafters.build import growth_from_recipe, load_drafting_head
from headstart.inference.drafters.cost_measurement import Bench
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.report.command import machine, report_prompts
from headstart.inference.report.compare import speedup
from headstart.inference.report.methods import Method
from headstart.inference.report.questions import Chat, Prompt
from headstart.inference.report.rounds import Round, plain_place, run_rounds, seconds_and_tokens
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, load_recipe
from headstart.recipes.load import RecipeError

CONTEXT, REPEATS = 256, 25  # of the draft times


@dataclass(frozen=True)
class Trained:
    """A head, and what training it took."""

    name: str  # the kind of head
    rate: float
    steps: int
    folder: Path  # of the run
    tau: float  # what it expects on held-out texts
    tokens: int
    seconds: float

    @property
    def label(self) -> str:
        return f"{self.name}, {self.steps} steps"

    @property
    def row(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.rate:g}",
            f"{self.steps:,}",
            f"{self.tokens:,}",
            f"{self.seconds:.0f}",
            f"{self.tau:.3f}",
        )


def train(path: str, recipe: Recipe, overrides: list[str], rate: float, steps: int) -> Trained:
    """Train as a user would, unless it was done before; an interrupted run goes on."""
    name = recipe.head.kind
    folder = recipe.run_dir / "compare" / f"{name}-{steps}-{rate:g}"
    taken = folder / "seconds.json"
    if not taken.is_file():
        trainer = ROOT / "trainers" / ("block.py" if name == "block" else "eagle.py")
        command = [sys.executable, str(trainer), path, *overrides, f"data.folder={recipe.data_folder}"]
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        call([*command, *overrides_of(recipe, rate, steps, folder)], folder)
        taken.write_text(json.dumps(time.perf_counter() - started))
    last = [row for row in read_jsonl(folder / "metrics.jsonl") if "heldout/expected_tau" in row][-1]
    tau, tokens = float(last["heldout/expected_tau"]), int(last["train/tokens"])
    return Trained(name, rate, steps, folder, tau, tokens, json.loads(taken.read_text()))


def sweep(path: str, recipe: Recipe, overrides: list[str], steps: int) -> list[Trained]:
    """A head for each rate of the sweep."""
    tried: list[Trained] = []

    def tau(rate: float) -> float:
        tried.append(train(path, recipe, overrides, rate, steps))
        return tried[-1].tau

    swept(OUR_RATES, tau)
    return tried


def target_for(heads: Iterable[Path], recipe: Recipe) -> TargetModel:
    """The recipe's target with the hidden states that these heads read."""
    folder = folder_of(recipe.target)
    frozen = FrozenTarget.from_folder(folder, torch.float32)
    taps = {tap for head in heads for tap in load_head_for(head, frozen).taps}
    return TargetModel.load(recipe.target, tuple(sorted(taps)))


def prompts_of(recipe: Recipe, target: TargetModel) -> list[Prompt]:
    """The prompts of the report, shortened to what the target has positions for."""
    template = ChatTemplate.of(recipe.target)
    chat = Chat(template, target.max_positions - recipe.decode.max_new_tokens)
    return [chat.shortened(prompt) for prompt in report_prompts(recipe, template)]


def methods_of(trained: Trained, recipe: Recipe, target: TargetModel) -> Iterator[Method]:
    head = load_drafting_head(trained.folder / "head", target)
    for growth in ("chain", recipe.decode.growth, "cost_aware"):
        section = recipe.decode.model_copy(update={"growth": growth, "paths": None})
        name = "tree" if growth == recipe.decode.growth else growth.replace("_", "-")
        yield Method(f"{trained.label}, {name}", head_drafter(head, growth_from_recipe(section, target, head)))
    if isinstance(head, BlockHead) and head.markov_head is not None:
        drafter = BlockDrafter(head, growth_from_recipe(recipe.decode, target, head))
        drafter.markov_head = None
        yield Method(f"{trained.label}, marginal tree", drafter)


def compare(recipe: Recipe, methods: list[Method], target: TargetModel, console: Console) -> None:
    """Print a table for each temperature."""
    prompts, new_tokens = prompts_of(recipe, target), recipe.decode.max_new_tokens
    for temperature in recipe.report.temperatures:
        sampling = sampling_from_recipe(recipe, temperature)
        with Progress(f"temperature {temperature:g}", len(prompts) * len(methods), "texts") as progress:
            rounds = run_rounds(
                methods,
                target,
                prompts,
                new_tokens,
                sampling,
                warmup=1,
                after_run=partial(count_texts, progress),
            )
        table = Table(title=f"temperature {temperature:g}, {len(prompts)} prompts, up to {new_tokens} new tokens")
        for column in ("method", "acceptance length", "tokens/s", "over plain", "95 % interval"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for place, method in enumerate(methods):
            table.add_row(method.name, *figures(rounds, place, plain_place(methods), recipe.seed))
        console.print(table)


def figures(rounds: list[Round], place: int, plain: int, seed: int) -> tuple[str, ...]:
    stats = DecodeStats.sum_of(own for each in rounds for own in each.runs[place].stats)
    seconds, tokens = seconds_and_tokens(rounds, place)
    gain = speedup(seconds, tokens, *seconds_and_tokens(rounds, plain), seed)
    return (
        f"{stats.acceptance_length:.2f}",
        f"{sum(tokens) / sum(seconds):.1f}",
        f"{gain.value:.2f}",
        f"{gain.low:.2f}-{gain.high:.2f}",
    )


def draft_times(heads: dict[str, DraftHead], depth: int, width: int, target: TargetModel) -> dict[str, float]:
    """Median seconds of drafting so many levels in one step; the heads take turns."""
    works = {
        name: Bench(target, head, width, CONTEXT, 1, width * depth + 8).drafting(depth) for name, head in heads.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - started)
    return {name: median(times) for name, times in taken.items()}


def measure(paths: list[str], recipes: list[Recipe], overrides: list[str], steps: int, times: int) -> None:
    torch.set_num_threads(recipes[0].report.threads or torch.get_num_threads())
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    table = Table("head", "rate", "steps", "tokens", "seconds", "expected tau")
    kept: list[tuple[Trained, Recipe]] = []
    for path, recipe in zip(paths, recipes, strict=True):
        tried = sweep(path, recipe, overrides, steps)
        best = max(tried, key=lambda each: each.tau)
        longer = train(path, recipe, overrides, best.rate, times * steps)
        kept += [(best, recipe), (longer, recipe)]
        for each in (*tried, longer):
            table.add_row(*each.row)
    console.print(table)
    target = target_for([each.folder / "head" for each, _ in kept], recipes[0])
    methods = [Method("plain"), *(method for each in kept for method in methods_of(*each, target))]
    compare(recipes[0], methods, target, console)
    heads = {each.name: load_drafting_head(each.folder / "head", target) for each, _ in kept}
    depth = min(head.max_levels or 99 for head in heads.values())  # EAGLE-3 drafts deeper than it was trained
    for width in (1, recipes[-1].decode.width):
        found = draft_times(heads, depth, width, target)
        told = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in found.items())
        first, *_, last = found.values()
        console.print(f"drafting {depth} levels of {width}: {told}; the last over the first {last / first:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs=2, help="of the EAGLE-3 head, then of the block head")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=60, help="of the small budget (default: %(default)s)")
    parser.add_argument("--times", type=int, default=4, help="how much larger the other one is (default: %(default)s)")
    given = parser.parse_intermixed_args()
    try:
        recipes = [load_recipe(path, given.overrides) for path in given.recipes]
        measure(given.recipes, recipes, given.overrides, given.steps, given.times)
    except (RecipeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
