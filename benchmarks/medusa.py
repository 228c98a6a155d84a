"""Four kinds of heads from one harvest, with the same steps: tokens per target step of each, in several trees.

    python benchmarks/medusa.py recipes/tiny.yaml decode.depth=4
    python benchmarks/medusa.py recipes/tiny_full.yaml decode.depth=4 report.head=assets/demo_head

Each kind is the head of its own tiny recipe, with that recipe's optimizer; data, steps, batch and trees are those of
the recipe named here, and all are unrolled as deep as it drafts. Each is trained below RUN_DIR/compare, or taken from
there; an EAGLE-3 head that is there already may be named as report.head. All are calibrated on the report's first
prompts and decode the others.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from data_pipelines.harvest import harvest
from heads.base import DraftHead
from heads.checkpoint import load_head, new_head
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from inference.calibrate import fit_calibration, score_text
from inference.decode import generate_batch
from inference.drafters.cost_aware import searched_tree
from inference.drafters.growth import Dynamic, Fixed, Growth
from inference.drafters.head import HeadDrafter
from inference.inputs import held_out_prompts
from inference.request import DecodeStats, Request
from inference.sampling import sampling_from_recipe
from inference.target.model import TargetModel
from recipes import Recipe, load_recipe, run_command
from trainers.run import run

KINDS = {
    "Medusa-1": ("tiny_medusa.yaml",),
    "Hydra": ("tiny_medusa.yaml", "head.sequential=true"),
    "EAGLE-1": ("tiny_eagle1.yaml",),
    "EAGLE-3": ("tiny_full.yaml",),
}
CALIBRATION = 8  # of the report's prompts are calibrated on, as in training
RANDOM_TREES, RANKS = 20, 10
COLUMNS = ("head", "parameters", "untrained", "chain", "searched tree", "dynamic tree")
Tau = Callable[[DraftHead, Growth], float]
NodePath = tuple[int, ...]


def main() -> None:
    run_command(__doc__, compare)


def compare(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    recipes = {name: variant(recipe, name) for name in KINDS}
    harvest(recipes["EAGLE-3"])  # whose taps serve all
    for name, each in recipes.items():
        if not (head_folder(recipe, name) / "config.json").is_file():
            run(each)
    for temperature in recipe.report.temperatures:
        title = f"tokens per target step, temperature {temperature:g}, {recipe.decode.nodes} nodes"
        table = Table(title=f"{title}, {recipe.train.steps} steps of {recipe.train.batch_size}")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "head" else "right")
        for name, each in recipes.items():
            table.add_row(*row(each, head_folder(recipe, name), name, temperature))
        Console().print(table)
        medusa = recipes["Medusa-1"]
        print(against_random_trees(medusa, head_folder(recipe, "Medusa-1"), temperature))


def variant(recipe: Recipe, name: str) -> Recipe:
    """A kind's own recipe, on the data of this one and with its steps and trees."""
    (file, *overrides), depth = KINDS[name], recipe.decode.depth
    if file == "tiny_medusa.yaml":
        overrides += [f"head.medusa_heads={depth}", f"train.unroll={depth}", f"decode.depth={depth}"]
    own = load_recipe(Path(__file__).parents[1] / "recipes" / file, overrides)
    shared = ("steps", "batch_size", "warmup_steps", "checkpoint_every", "eval_every", "log_every")
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
    given = recipe.report.head if name == "EAGLE-3" else None
    return given or variant(recipe, name).head_dir


def calibrated(recipe: Recipe, folder: Path) -> tuple[TargetModel, DraftHead]:
    """A head and its target; every head is calibrated alike, on prompts that none is measured on."""
    frozen = FrozenTarget.from_folder(locate_target(recipe.target.path, recipe.target.revision), torch.float32)
    target = TargetModel.load(recipe.target, load_head(folder, frozen).taps)
    head, decode = load_head(folder, target.frozen), recipe.decode
    prompts = held_out_prompts(recipe)[:CALIBRATION]
    head.calibration = fit_calibration(target, head, prompts, decode.depth, decode.max_new_tokens)
    return target, head


def row(recipe: Recipe, folder: Path, name: str, temperature: float) -> list[str]:
    """One of the table."""
    target, head = calibrated(recipe, folder)
    untrained = new_head(recipe.head, target.frozen, head.vocab, recipe.seed).eval().requires_grad_(False)
    tau, decode = taker(recipe, target, temperature), recipe.decode
    searched = Fixed(searched_tree(head).best(decode.nodes))
    lengths = [
        tau(untrained, searched),
        tau(head, Dynamic.chain(decode.depth)),
        tau(head, searched),
        tau(head, Dynamic(decode.depth, decode.width, decode.nodes)),
    ]
    size = sum(parameter.numel() for parameter in head.parameters())
    return [name, f"{size:,}", *(f"{length:.2f}" for length in lengths)]


def against_random_trees(recipe: Recipe, folder: Path, temperature: float) -> str:
    """Is the searched tree better than any of those that were drawn? All on the same texts, which no tree changes."""
    target, head = calibrated(recipe, folder)
    texts = [ranked(target, head, request, recipe.decode.depth) for request in requests(recipe, temperature)]
    nodes, generator, found = recipe.decode.nodes, random.Random(recipe.seed), searched_tree(head)
    trees = [random_tree(nodes, recipe.decode.depth, generator) for _ in range(RANDOM_TREES)]
    drawn = [walked(texts, tree) for tree in trees]
    return (
        f"Medusa-1, {nodes} nodes: the searched tree {walked(texts, found.best(nodes)):.2f} (expected of greedy and "
        f"sampled text together: {found.expected(nodes):.2f}); of {RANDOM_TREES} random ones the best "
        f"{max(drawn):.2f}, the mean {sum(drawn) / len(drawn):.2f}"
    )


def ranked(target: TargetModel, head: DraftHead, request: Request, depth: int) -> list[list[int]]:
    """Of a text that the target writes: found[t][k] is which of the guesses of level k, made when token t of it was the
    newest, became its token t + 1 + k."""
    (written,) = generate_batch(target, [request], HeadDrafter(head, Dynamic.chain(depth)))
    text, prompt = torch.tensor([request.prompt + written.tokens]), len(request.prompt)
    found: list[list[int]] = [[] for _ in written.tokens]
    for number, level in enumerate(score_text(target, head, text, prompt, request.sampling, depth)):
        scores = level.scores(head.calibration.at(number)[2])
        chosen = scores.gather(1, level.columns.unsqueeze(1))
        for t, rank in enumerate((scores > chosen).sum(1).tolist()[prompt - 1 :]):
            found[t].append(rank)
    return found


def walked(texts: list[list[list[int]]], tree: Sequence[NodePath]) -> float:
    """tau of decoding these texts with a tree, without decoding them again."""
    known, tokens, steps = set(tree), 0, 0
    for ranks in texts:
        newest = 0  # the first token comes out of the prompt's pass
        while newest + 1 < len(ranks):
            path: NodePath = ()
            while len(path) < len(ranks[newest]) and (*path, ranks[newest][len(path)]) in known:
                path = (*path, ranks[newest][len(path)])
            taken = min(len(path) + 1, len(ranks) - 1 - newest)
            newest, tokens, steps = newest + taken, tokens + taken, steps + 1
    return tokens / steps


def taker(recipe: Recipe, target: TargetModel, temperature: float) -> Tau:
    """What gives tau of a head with a way to grow, over all prompts that were not calibrated on."""
    asked, decode = requests(recipe, temperature), recipe.decode

    def tau(head: DraftHead, growth: Growth) -> float:
        stats = DecodeStats()
        for generation in generate_batch(target, asked, HeadDrafter(head, growth), decode.max_batch):
            stats.add(generation.stats)
        return stats.acceptance_length

    return tau


def requests(recipe: Recipe, temperature: float) -> list[Request]:
    """The report's prompts that were not calibrated on."""
    sampling = sampling_from_recipe(recipe.decode, temperature)
    prompts = held_out_prompts(recipe)[CALIBRATION:]
    return [Request(prompt, recipe.decode.max_new_tokens, sampling) for prompt in prompts]


def random_tree(nodes: int, depth: int, generator: random.Random) -> tuple[NodePath, ...]:
    """Grown node by node from whatever may come next."""
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
