"""Two ways to weigh the depths of a head's loss: decay and D-PACE, the same steps and features, several seeds.

    python benchmarks/depth_weights.py recipes/smollm2_135m_block.yaml --steps 60 --seeds 3,4 \\
        data.folder=runs/smollm2_135m report.num_prompts=24

trainers/block.py or trainers/eagle.py trains a head per seed and kind of weights with the recipe's settings, in
RUN_DIR/WEIGHTS-SEED; heads that are there already are not trained again. Then all heads draft a chain and the recipe's
tree on the prompts of the report. The tables show what training took and what the head expects (tau: tokens per target
step), and the acceptance length of each head; the last lines the one of D-PACE over that of decay, all seeds together,
with a 95 % interval over prompts. It times nothing, so other work may run meanwhile.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch
from block_quality import Trained, prompts_of, target_for, train
from lossless import count_texts
from rich.console import Console
from rich.table import Table

from headstart.common.progress import Progress
from headstart.inference.core.request import DecodeStats
from headstart.inference.core.sampling import sampling_from_recipe
from headstart.inference.drafters.block import head_drafter
from headstart.inference.drafters.build import growth_from_recipe, load_drafting_head
from headstart.inference.report.command import machine
from headstart.inference.report.compare import speedup
from headstart.inference.report.methods import Method
from headstart.inference.report.rounds import Round, run_rounds
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, load_recipe
from headstart.recipes.load import RecipeError
from headstart.recipes.schema import PYTHON_STDLIB

WEIGHTS = ("decay", "d_pace")
GROWTHS = ("chain", "tree")

Heads = dict[tuple[str, int], Trained]  # by weights and seed


def train_all(path: str, overrides: list[str], recipe: Recipe, seeds: Sequence[int], steps: int) -> Heads:
    """A head for each kind of weights and each seed; an interrupted run goes on."""
    heads: Heads = {}
    unread = recipe.run_dir / "unread.jsonl"  # a run wants held-out prompts, but decodes none of them here
    unread.parent.mkdir(parents=True, exist_ok=True)
    unread.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    # The features of one run for all seeds, which decide what else a run draws: its prompts, too.
    of_store = {
        "data.folder": "null",
        "data.store": recipe.features_dir,
        "data.prompts": PYTHON_STDLIB,
        "data.self_system_prompts": "null",
        "data.heldout_prompts": unread,
    }
    shared = [f"{name}={value}" for name, value in of_store.items()]
    for seed, weights in product(seeds, WEIGHTS):
        changes = [*overrides, *shared, f"seed={seed}", f"train.depth_weights={weights}"]
        own = load_recipe(path, [*changes, f"run_dir={recipe.run_dir / f'{weights}-{seed}'}"])
        heads[weights, seed] = train(path, own, changes, 1.0, steps)
    return heads


def methods_of(recipe: Recipe, heads: Heads, target: TargetModel) -> Iterator[Method]:
    for (weights, seed), trained in heads.items():
        head = load_drafting_head(trained.folder / "head", target)
        for growth in GROWTHS:
            chosen = recipe.decode.growth if growth == "tree" else growth
            section = recipe.decode.model_copy(update={"growth": chosen, "paths": None})
            name = f"{weights}, seed {seed}, {growth}"
            yield Method(name, head_drafter(head, growth_from_recipe(section, target, head)))


def run(path: str, overrides: list[str], recipe: Recipe, seeds: Sequence[int], steps: int) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    heads = train_all(path, overrides, recipe, seeds, steps)
    table = Table("weights", "seed", "steps", "tokens", "expected tau")
    for (weights, seed), trained in heads.items():
        table.add_row(weights, str(seed), f"{steps:,}", f"{trained.tokens:,}", f"{trained.tau:.3f}")
    console.print(table)
    target = target_for([trained.folder / "head" for trained in heads.values()], recipe)
    methods = [*methods_of(recipe, heads, target)]
    prompts, new_tokens = prompts_of(recipe, target), recipe.decode.max_new_tokens
    for temperature in recipe.report.temperatures:
        sampling = sampling_from_recipe(recipe, temperature)
        with Progress(f"temperature {temperature:g}", len(prompts) * len(methods), "texts") as progress:
            after = partial(count_texts, progress)
            rounds = run_rounds(methods, target, prompts, new_tokens, sampling, warmup=0, after_run=after)
        show(console, rounds, methods, f"temperature {temperature:g}, {len(prompts)} prompts", recipe.seed)


def show(console: Console, rounds: list[Round], methods: list[Method], title: str, seed: int) -> None:
    """Each method's acceptance length, then D-PACE over decay."""
    stats = {method.name: [each.runs[place].stats for each in rounds] for place, method in enumerate(methods)}
    table = Table("method", "acceptance length", title=title)
    for name, runs in stats.items():
        total = DecodeStats.sum_of(own for each in runs for own in each)
        table.add_row(name, f"{total.acceptance_length:.3f}")
    console.print(table)
    for growth in GROWTHS:
        sums = {weights: steps_and_tokens(stats, weights, growth) for weights in WEIGHTS}
        gain = speedup(*sums["d_pace"], *sums["decay"], seed)
        console.print(
            f"{title}, {growth}: D-PACE over decay {gain.value:.3f} (95 % interval {gain.low:.3f} to {gain.high:.3f})"
        )


def steps_and_tokens(
    stats: dict[str, list[list[DecodeStats]]], weights: str, growth: str
) -> tuple[list[float], list[int]]:
    """The target steps and the new tokens on each prompt, those of all seeds together."""
    runs = [own for name, own in stats.items() if name.startswith(f"{weights},") and name.endswith(growth)]
    by_prompt = [[own for each in same for own in each] for same in zip(*runs, strict=True)]
    return (
        [float(sum(own.steps for own in each)) for each in by_prompt],
        [sum(own.tokens for own in each) for each in by_prompt],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="of a head that drafts several depths")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=60, help="of each head (default: %(default)s)")
    parser.add_argument("--seeds", default="3,4", help="of the runs (default: %(default)s)")
    given = parser.parse_intermixed_args()
    try:
        seeds = [int(seed) for seed in given.seeds.split(",")]
        run(given.recipe, given.overrides, load_recipe(given.recipe, given.overrides), seeds, given.steps)
    except (RecipeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
