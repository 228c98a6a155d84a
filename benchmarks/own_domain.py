"""Tune a trained head to one's own domain: acceptance length there and on the old prompts, before and after.

    python benchmarks/own_domain.py recipes/smollm2_135m.yaml --head assets/smollm2_head --prompts 320 \\
        run_dir=runs/own_domain report.prompts=question.jsonl report.num_prompts=24

The domain is Python: questions about the functions and classes of its standard library, made from their documentation.
The target answers --prompts of them, and train.start_from tunes the head on these answers for --epochs epochs, at
--rate times the recipe's learning rates, as a user would. Then the head as it was and the tuned one decode --questions
further questions, about other functions, and the prompts of the report. The table shows the acceptance length with the
recipe's tree, and how it changed with a 95 % interval over prompts. A run that was interrupted goes on.
"""

import argparse
import importlib
import inspect
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from block_quality import prompts_of, target_for
from lossless import count_texts
from rich.console import Console
from rich.table import Table
from train_quality import ROOT, call, overrides_of

from headstart.common.progress import Progress
from headstart.inference.core.request import DecodeStats
from headstart.inference.core.sampling import sampling_from_recipe
from headstart.inference.drafters.build import growth_from_recipe, load_drafting_head
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.generate.loading import held_out_prompts
from headstart.inference.report.command import machine
from headstart.inference.report.compare import speedup
from headstart.inference.report.methods import Method
from headstart.inference.report.questions import Prompt
from headstart.inference.report.rounds import Round, run_rounds
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command
from headstart.recipes.command_line import named_recipe, recipe_parser

MODULES = """
    argparse ast asyncio base64 bisect calendar collections configparser contextlib copy csv dataclasses
    datetime decimal difflib email enum fnmatch fractions functools gzip hashlib heapq html inspect io ipaddress
    itertools json logging math mimetypes operator os os.path pathlib pickle platform pprint queue random re
    secrets shlex shutil signal socket sqlite3 ssl statistics string struct subprocess sys tempfile textwrap
    threading time tokenize traceback types typing unicodedata unittest urllib.parse uuid warnings weakref
    zipfile zlib
"""
QUESTIONS = (
    "What does {name} do in Python?",
    "Show me a short example of {name} in Python.",
    "When would I use {name}, and which arguments does it take?",
    "The Python documentation of {name} says: {doc}\nExplain this to a beginner, with an example.",
    "Write a Python function that uses {name}, and explain it.",
)


def python_questions(seed: int) -> list[str]:
    """A question about each documented function and class of these modules, in an order that the seed decides."""
    documented: dict[str, str] = {}
    for module in map(importlib.import_module, MODULES.split()):
        for name, member in sorted(vars(module).items()):
            if name.startswith("_") or not (inspect.isroutine(member) or inspect.isclass(member)):
                continue
            if (doc := inspect.getdoc(member)) and len(doc) > 60:
                documented.setdefault(f"{module.__name__}.{name}", " ".join(doc.split("\n\n")[0].split())[:400])
    drawn = random.Random(seed)
    asked = [drawn.choice(QUESTIONS).format(name=name, doc=doc) for name, doc in documented.items()]
    drawn.shuffle(asked)
    return asked


def write_prompts(path: Path, questions: list[str]) -> None:
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": q}]}) + "\n" for q in questions))


def tune(recipe: Recipe, given: argparse.Namespace) -> tuple[Path, float]:
    """Answers, features and training in a run of its own; returns its folder and the seconds that it took.

    Runs at other rates share the answers and features.
    """
    folder, data = recipe.run_dir / f"rate-{given.rate:g}", recipe.run_dir / "data"
    for each in (folder, data):
        each.mkdir(parents=True, exist_ok=True)
    questions = python_questions(recipe.seed)
    if len(questions) < given.prompts + given.questions:
        raise ValueError(f"--prompts: {given.prompts} given, {len(questions) - given.questions} or fewer are allowed")
    write_prompts(data / "heldout.jsonl", questions[: given.questions])
    write_prompts(data / "train.jsonl", questions[given.questions : given.questions + given.prompts])
    steps = given.epochs * given.prompts // recipe.train.batch_size
    taken = folder / "seconds.json"
    if not taken.is_file():
        started = time.perf_counter()
        changes = [
            f"data.folder={data}",
            f"data.prompts={data / 'train.jsonl'}",
            f"data.heldout_prompts={data / 'heldout.jsonl'}",
            f"data.num_prompts={given.prompts}",
            f"data.heldout_samples={given.questions}",
            "data.self_system_prompts=null",
            f"train.start_from={given.head}",
            "train.fitted_start=false",
        ]
        trainer = str(ROOT / "trainers" / "eagle.py")
        command = [sys.executable, trainer, given.recipe, *given.overrides]
        call([*command, *overrides_of(recipe, given.rate, steps, folder), *changes], folder)
        taken.write_text(json.dumps(time.perf_counter() - started))
    return folder, json.loads(taken.read_text())


def run(recipe: Recipe, given: argparse.Namespace) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    folder, seconds = tune(recipe, given)
    console.print(f"answers, features and training: {seconds / 60:.1f} minutes")
    heads = {"before": Path(given.head), "after": folder / "head"}
    target = target_for(heads.values(), recipe)
    python = recipe.model_copy(
        update={
            "run_dir": recipe.run_dir / "data",
            "report": recipe.report.model_copy(update={"num_prompts": given.questions}),
        }
    )
    sets = {
        "Python questions": [Prompt(tokens, "python") for tokens in held_out_prompts(python)],
        "old prompts": prompts_of(recipe, target),
    }
    console.print(before_and_after(heads, sets, target, recipe))


def before_and_after(
    heads: Mapping[str, Path], sets: Mapping[str, list[Prompt]], target: TargetModel, recipe: Recipe
) -> Table:
    """Decode the prompts of each set with the heads named "before" and "after" in turn, in the recipe's tree."""
    methods = []
    for name, place in heads.items():
        head = load_drafting_head(place, target)
        methods.append(Method(name, head_drafter(head, growth_from_recipe(recipe.decode, target, head))))
    table = Table("prompts", "temperature", "before", "after", "after over before", "95 % interval")
    for name, prompts in sets.items():
        for temperature in recipe.report.temperatures:
            sampling = sampling_from_recipe(recipe, temperature)
            with Progress(f"{name}, temperature {temperature:g}", len(prompts) * 2, "texts") as progress:
                after = partial(count_texts, progress)
                most = recipe.decode.max_new_tokens
                rounds = run_rounds(methods, target, prompts, most, sampling, warmup=0, after_run=after)
            table.add_row(name, f"{temperature:g}", *figures(rounds, recipe.seed))
    return table


def figures(rounds: list[Round], seed: int) -> Iterator[str]:
    """The acceptance lengths before and after, and how much longer the second one is."""
    sums: list[tuple[list[float], list[int]]] = []
    for place in range(2):
        stats = [own for each in rounds for own in each.runs[place].stats]
        yield f"{DecodeStats.sum_of(stats).acceptance_length:.2f}"
        sums.append(([float(own.steps) for own in stats], [own.tokens for own in stats]))
    gain = speedup(*sums[1], *sums[0], seed)
    yield f"{gain.value:.3f}"
    yield f"{gain.low:.3f}-{gain.high:.3f}"


def options(doc: str | None) -> tuple[Recipe, argparse.Namespace]:
    parser = recipe_parser(doc)
    parser.add_argument("--head", required=True, help="folder of the head to begin from")
    parser.add_argument("--prompts", type=int, default=320, help="questions to train on (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=32, help="questions to measure on (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.1, help="of the recipe's rates (default: %(default)s)")
    given = parser.parse_intermixed_args()
    return named_recipe(given), given


if __name__ == "__main__":
    run_command(__doc__, run, read=options)
