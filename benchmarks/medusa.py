"""Acceptance length of three kinds of heads trained on one harvest with the same steps, with several draft trees.

    python benchmarks/medusa.py recipes/tiny.yaml decode.depth=4
    python benchmarks/medusa.py recipes/tiny_full.yaml decode.depth=4 decode.head=assets/demo_head

Each kind takes its head and optimizer from its own tiny recipe. Data, steps, batch size and trees come from the recipe
given here, and every kind is unrolled to that recipe's draft depth. Heads are trained in RUN_DIR/compare and reused if
they are there; decode.head may name an EAGLE-3 head that is trained already. All heads are calibrated on the report's
first prompts and decode the others.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from headstart.data_pipelines.harvest import harvest
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, new_head
from headstart.heads.target_config import folder_of
from headstart.inference.calibrate import fit_calibration, score_text
from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import sampling_from_recipe
from headstart.inference.drafters.build import load_drafting_head, searched_tree
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic, Fixed, GrowthPolicy
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.loading import held_out_prompts
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, load_recipe, run_command
from headstart.trainers import run

KINDS = {
    "Medusa-1": ("tiny_medusa.yaml",),
    "EAGLE-1": ("tiny_eagle1.yaml",),
    "EAGLE-3": ("tiny_full.yaml",),
}
CALIBRATION = 8  # first prompts of the report, which heads are calibrated on
RANDOM_TREES, RANKS = 20, 10
COLUMNS = ("head", "parameters", "untrained", "chain", "searched tree", "dynamic tree")
AcceptanceLength = Callable[[DraftHead, GrowthPolicy], float]
NodePath = tuple[int, ...]


def main() -> None:
    run_command(__doc__, compare)


def compare(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    recipes = {name: variant(recipe, name) for name in KINDS}
    harvest(recipes["EAGLE-3"])  # its taps serve all kinds
    for name, each in recipes.items():
        if not (head_folder(recipe, name) / "config.json").is_file():
            run(each)
    for temperature in recipe.report.temperatures:
        title = f"acceptance length, temperature {temperature:g}, {recipe.decode.nodes} draft tokens"
        table = Table(title=f"{title}, {recipe.train.steps} training steps of batch {recipe.train.batch_size}")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "head" else "right")
        for name, each in recipes.items():
            table.add_row(*row(each, head_folder(recipe, name), name, temperature))
        Console().print(table)
        medusa = recipes["Medusa-1"]
        print(against_random_trees(medusa, head_folder(recipe, "Medusa-1"), temperature))


def variant(recipe: Recipe, name: str) -> Recipe:
    """The recipe of a kind of head, with the data, steps and trees of the given recipe."""
    (file, *overrides), depth = KINDS[name], recipe.decode.depth
    if file == "tiny_medusa.yaml":
        overrides += [f"head.medusa_heads={depth}", f"decode.depth={depth}"]
    own = load_recipe(Path(__file__).parents[1] / "recipes" / file, overrides)
    shared = ("steps", "batch_size", "warmup_steps", "checkpoint_every")
    train = {field: getattr(recipe.train, field) for field in shared}
    train |= {"unroll": depth, "eval_prompts": 0}
    return own.model_copy(
        update={
            "run_dir": recipe.run_dir / "compare" / name.lower(),
            "seed": recipe.seed,
            "target": recipe.target,
            "data": recipe.data.model_copy(update={"folder": recipe.data_folder}),
            "train": own.train.model_copy(update=train),
            "decode": recipe.decode,
            "report": recipe.report,
            "log": recipe.log,
        }
    )


def head_folder(recipe: Recipe, name: str) -> Path:
    given = recipe.decode.head if name == "EAGLE-3" else None
    return given or variant(recipe, name).head_dir


def calibrated(recipe: Recipe, folder: Path) -> tuple[TargetModel, DraftHead]:
    """Load a head and its target and calibrate the head on prompts that are not measured."""
    frozen = FrozenTarget.from_folder(folder_of(recipe.target), torch.float32)
    target = TargetModel.load(recipe.target, load_head_for(folder, frozen).taps)
    head, decode = load_drafting_head(folder, target), recipe.decode
    prompts = held_out_prompts(recipe)[:CALIBRATION]
    head.calibration = fit_calibration(target, head, prompts, decode.depth, decode.max_new_tokens)
    return target, head


def row(recipe: Recipe, folder: Path, name: str, temperature: float) -> list[str]:
    """The table row of one kind of head."""
    target, head = calibrated(recipe, folder)
    untrained = new_head(recipe.head, target.frozen, head.vocab, recipe.seed).eval().requires_grad_(False)
    length, decode = length_meter(recipe, target, temperature), recipe.decode
    searched = Fixed(searched_tree(head).best(decode.nodes))
    lengths = [
        length(untrained, searched),
        length(head, Dynamic.chain(decode.depth)),
        length(head, searched),
        length(head, Dynamic(decode.depth, decode.width, decode.nodes)),
    ]
    size = sum(parameter.numel() for parameter in head.parameters())
    return [name, f"{size:,}", *(f"{each:.2f}" for each in lengths)]


def against_random_trees(recipe: Recipe, folder: Path, temperature: float) -> str:
    """Compare the searched tree with random ones on the same texts, which do not depend on the tree."""
    target, head = calibrated(recipe, folder)
    texts = [ranks_of_text(target, head, request, recipe.decode.depth) for request in requests(recipe, temperature)]
    nodes, generator, found = recipe.decode.nodes, random.Random(recipe.seed), searched_tree(head)
    trees = [random_tree(nodes, recipe.decode.depth, generator) for _ in range(RANDOM_TREES)]
    drawn = [length_from_ranks(texts, tree) for tree in trees]
    return (
        f"Medusa-1, acceptance length with {nodes} draft tokens: searched tree "
        f"{length_from_ranks(texts, found.best(nodes)):.2f} (expected over greedy and sampled text: "
        f"{found.expected(nodes):.2f}); {RANDOM_TREES} random trees: best {max(drawn):.2f}, "
        f"mean {sum(drawn) / len(drawn):.2f}"
    )


def ranks_of_text(target: TargetModel, head: DraftHead, request: Request, depth: int) -> list[list[int]]:
    """The ranks of a text's tokens among the head's guesses, for a text that the target writes.

    found[t][k] is the rank of token t + 1 + k among the guesses at level k, made when token t was the last one known.
    """
    (written,) = generate_batch(target, [request], head_drafter(head, Dynamic.chain(depth)))
    text, prompt = torch.tensor([request.prompt + written.tokens]), len(request.prompt)
    found: list[list[int]] = [[] for _ in written.tokens]
    for number, level in enumerate(score_text(target, head, text, prompt, request.sampling, depth)):
        scores = level.scores(head.calibration.at(number)[2])
        chosen = scores.gather(1, level.columns.unsqueeze(1))
        for t, rank in enumerate((scores > chosen).sum(1).tolist()[prompt - 1 :]):
            found[t].append(rank)
    return found


def length_from_ranks(texts: list[list[list[int]]], tree: Sequence[NodePath]) -> float:
    """The acceptance length of decoding these texts with a tree, computed from the ranks."""
    known, tokens, steps = set(tree), 0, 0
    for ranks in texts:
        newest = 0  # the first token comes from the prefill
        while newest + 1 < len(ranks):
            path: NodePath = ()
            while len(path) < len(ranks[newest]) and (*path, ranks[newest][len(path)]) in known:
                path = (*path, ranks[newest][len(path)])
            taken = min(len(path) + 1, len(ranks) - 1 - newest)
            newest, tokens, steps = newest + taken, tokens + taken, steps + 1
    return tokens / steps


def length_meter(recipe: Recipe, target: TargetModel, temperature: float) -> AcceptanceLength:
    """A function that measures the acceptance length of a head with a growth, over the prompts not calibrated on."""
    asked, decode = requests(recipe, temperature), recipe.decode

    def acceptance_length(head: DraftHead, growth: GrowthPolicy) -> float:
        generations = generate_batch(target, asked, head_drafter(head, growth), decode.max_batch)
        return DecodeStats.sum_of(generation.stats for generation in generations).acceptance_length

    return acceptance_length


def requests(recipe: Recipe, temperature: float) -> list[Request]:
    """The report's prompts that were not calibrated on."""
    sampling = sampling_from_recipe(recipe, temperature)
    prompts = held_out_prompts(recipe)[CALIBRATION:]
    return [Request(prompt, recipe.decode.max_new_tokens, sampling) for prompt in prompts]


def random_tree(nodes: int, depth: int, generator: random.Random) -> tuple[NodePath, ...]:
    """A tree grown node by node; each node is drawn from those whose parent and earlier siblings are in the tree."""
    tree: list[NodePath] = []
    candidates: list[NodePath] = [(0,)]
    while len(tree) < nodes:
        path = candidates.pop(generator.randrange(len(candidates)))
        tree.append(path)
        if path[-1] + 1 < RANKS:
            candidates.append((*path[:-1], path[-1] + 1))
        if len(path) < depth:
            candidates.append((*path, 0))
    return tuple(tree)


if __name__ == "__main__":
    main()
