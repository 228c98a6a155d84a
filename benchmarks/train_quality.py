"""Acceptance length of our head and of one that speculators trains: same features, size, batches, steps and decoder.

    python benchmarks/train_quality.py recipes/tiny.yaml train.steps=600 --peer speculators=VENV

trainers/eagle.py trains ours with the recipe's settings. Theirs is trained in an environment of speculators
(train_step.py says how to make it) with its own model, whose lm_head stays the target's, its loss (KL, equal weights
for all unroll steps), optimizers (Muon and AdamW), linear schedule and clipping; architecture, number of unroll steps
and batches are the recipe's. Both learning rates are the best of a sweep of shorter runs, by acceptance length on
separate prompts. The table shows the seconds of training and the acceptance length (tau) of both heads on the recipe's
held-out prompts, as a chain and with the recipe's tree, without calibration. If theirs takes longer, a last row has a
head of ours that trained for the same time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from train_step import peer_python

from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.harvest import harvest
from headstart.heads.base import DraftHead
from headstart.heads.formats.convert import convert
from headstart.heads.kinds.checkpoint import draft_vocab, load_head_for
from headstart.heads.target_config import TargetConfig, folder_of
from headstart.inference.core.request import DecodeStats
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.build import growth_from_recipe
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.engine.loop import generate
from headstart.inference.generate.loading import held_out_prompts
from headstart.inference.report.command import machine
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.command_line import recipe_from_command_line
from headstart.recipes.schema_heads import Eagle3Section
from headstart.trainers.loop import SampleOrder

ROOT = Path(__file__).resolve().parents[1]
OURS, PEER = "headstart", "speculators"
OUR_RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # factors of the recipe's learning rates
THEIR_RATES = (3e-3, 1e-2, 3e-2, 9e-2, 2.7e-1)  # the default of both its Muon and its AdamW is 1e-3
SWEEP_SHARE = 4  # runs of the sweep have a quarter of the steps
SWEEP_PROMPTS = 6
TEMPERATURES = (0.0, 1.0)
GROWTHS = ("chain", "tree")

Train = Callable[[float, int, Path], Path]  # (rate, steps, empty folder) -> folder of the head


def train_ours(arguments: list[str], recipe: Recipe, rate: float, steps: int, folder: Path) -> Path:
    """Train with trainers/eagle.py as a user starts it, on the features of the recipe's run."""
    for stage in (recipe.prompts_dir, recipe.responses_dir, recipe.features_dir):
        (folder / stage.name).symlink_to(stage.absolute())
    overrides = overrides_of(recipe, rate, steps, folder)
    call([sys.executable, str(ROOT / "trainers" / "eagle.py"), *arguments, *overrides], folder)
    return folder / "head"


def overrides_of(recipe: Recipe, rate: float, steps: int, folder: Path) -> list[str]:
    """What makes the recipe a run of so many steps in this folder, at so many times its learning rates."""
    train = recipe.train
    changes = {
        "run_dir": folder,
        "train.steps": steps,
        "train.warmup_steps": min(train.warmup_steps, steps // 10),
        "train.learning_rate": rate * train.learning_rate,
        "train.muon_learning_rate": rate * train.muon_learning_rate,
        "train.checkpoint_every": steps,
        "train.eval_prompts": 0,
        "log.wandb": "disabled",
    }
    return [f"{name}={value}" for name, value in changes.items()]


def train_theirs(python: str, recipe: Recipe, target: Path, rate: float, steps: int, folder: Path) -> Path:
    """Train with speculators in its environment and import the head; raises ValueError for a head it cannot match."""
    section, config = recipe.head, TargetConfig.from_folder(target)
    if not isinstance(section, Eagle3Section) or section.hidden_size:
        raise ValueError(
            f"head: {section.model_dump()} given, an eagle3 head with the target's width is allowed; use "
            "recipes/tiny.yaml"
        )
    store = FeatureStore(recipe.features_dir, "train")
    vocab = draft_vocab(section, store.token_counts(config.vocab_size))
    order = SampleOrder(store.shard_sizes, recipe.seed)
    job = {
        "target": str(target.absolute()),
        "shards": [str((store.folder / shard["file"]).absolute()) for shard in store.shards],
        "batches": [order.of_step(step, recipe.train.batch_size) for step in range(steps)],
        "taps": section.taps or config.default_taps(),
        "draft_vocab": vocab.ids.tolist(),
        "fc_norm": section.norms,
        "norm_output": section.norms,
        "unroll": recipe.train.unroll,
        "learning_rate": rate,
        "seed": recipe.seed,
        "threads": torch.get_num_threads(),
        "head": str(folder / "saved"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    script = ROOT / "benchmarks" / "peers" / "speculators_train.py"
    call([python, str(script), str(folder / "job.json")], folder)
    convert(folder / "saved", folder / "head", str(target))
    return folder / "head"


def call(command: list[str], folder: Path) -> None:
    """Run a command; if it fails, raises ValueError with the end of its output."""
    log = folder / "log.txt"
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise ValueError(f"{' '.join(command[:3])} ended with {code}:\n{log.read_text()[-2000:]}")


def acceptance_length(
    recipe: Recipe, target: TargetModel, head: DraftHead, growth: str, temperature: float, prompts: list[list[int]]
) -> float:
    """Mean tokens per target step over all prompts, drafting a chain or the recipe's tree."""
    decode = recipe.decode.model_copy(update={"growth": "chain"}) if growth == "chain" else recipe.decode
    drafter = head_drafter(head, growth_from_recipe(decode, target, head))
    sampling = Sampling(temperature, seed=recipe.seed)
    texts = (generate(target, prompt, decode.max_new_tokens, sampling, drafter) for prompt in prompts)
    return DecodeStats.sum_of(text.stats for text in texts).acceptance_length


def best_rate(
    train: Train, rates: tuple[float, ...], steps: int, measure: Callable[[Path], float], console: Console
) -> float:
    """The rate whose head has the largest acceptance length."""
    lengths: dict[float, float] = {}
    for rate in rates:
        with tempfile.TemporaryDirectory() as folder:
            lengths[rate] = measure(train(rate, steps, Path(folder)))
        console.print(f"  rate {rate:g}, {steps} steps: acceptance length {lengths[rate]:.2f}")
    return max(lengths, key=lengths.__getitem__)


def run(recipe: Recipe, arguments: list[str], peers: dict[str, str]) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    console = Console(highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    harvest(recipe)
    folder = folder_of(recipe.target)
    trainers: dict[str, tuple[Train, tuple[float, ...]]] = {OURS: (partial(train_ours, arguments, recipe), OUR_RATES)}
    if PEER in peers:
        trainers[PEER] = (partial(train_theirs, peers[PEER], recipe, folder), THEIR_RATES)
    else:
        console.print(f"{PEER} is not measured; benchmarks/train_step.py --help says how to install it")
    report = recipe.report.model_copy(update={"num_prompts": recipe.report.num_prompts + SWEEP_PROMPTS})
    everything = held_out_prompts(recipe.model_copy(update={"report": report}))
    prompts, apart = everything[: recipe.report.num_prompts], everything[recipe.report.num_prompts :]
    taps = recipe.head.taps if isinstance(recipe.head, Eagle3Section) else None
    target = TargetModel.load(recipe.target, taps or TargetConfig.from_folder(folder).default_taps())

    def measure(head: Path) -> float:
        return acceptance_length(recipe, target, load_head_for(head, target.frozen), "tree", 0.0, apart)

    table = Table(title=f"acceptance length on {len(prompts)} held-out prompts")
    table.add_column("head")
    measured = [f"{growth}, T {temperature:g}" for temperature in TEMPERATURES for growth in GROWTHS]
    for column in ("rate", "steps", "seconds", *measured):
        table.add_column(column, justify="right")
    rates, spent = dict[str, float](), dict[str, float]()

    def add_row(name: str, trainer: str, steps: int) -> None:
        rate = rates[trainer]
        with tempfile.TemporaryDirectory() as place:
            started = time.perf_counter()
            head = load_head_for(trainers[trainer][0](rate, steps, Path(place)), target.frozen)
            spent[name] = time.perf_counter() - started
        lengths = [
            acceptance_length(recipe, target, head, growth, temperature, prompts)
            for temperature in TEMPERATURES
            for growth in GROWTHS
        ]
        table.add_row(name, f"{rate:g}", f"{steps}", f"{spent[name]:.0f}", *(f"{each:.2f}" for each in lengths))

    for name, (train, swept_rates) in trainers.items():
        console.print(f"{name}:")
        rates[name] = best_rate(train, swept_rates, recipe.train.steps // SWEEP_SHARE, measure, console)
        add_row(name, name, recipe.train.steps)
    if PEER in spent and spent[PEER] > spent[OURS]:
        add_row(f"{OURS}, as many seconds", OURS, round(recipe.train.steps * spent[PEER] / spent[OURS]))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--peer", type=peer_python, action="append", default=[])
    given, arguments = parser.parse_known_args()
    recipe = recipe_from_command_line(__doc__, arguments)
    try:
        run(recipe, arguments, dict(given.peer))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
