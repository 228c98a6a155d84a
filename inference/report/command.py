"""What heads and drafters are worth: plain against speculative decoding, with the output checked throughout.

    python -m inference.report recipes/tiny.yaml
    python -m inference.report recipes/tiny_full.yaml report.head=assets/demo_head
    python -m inference.report recipes/tiny_full.yaml report.head=assets/demo_head \\
        'report.baselines=[plain, generate, generate_lookup, chain, tree, prompt_lookup, lookahead, early_exit]' \\
        report.prompts=question.jsonl 'report.batches=[1, 4]' 'report.temperatures=[0, 1]'
    python -m inference.report recipes/tiny_full.yaml report.head=assets/demo_head \\
        'report.other_heads={medusa: runs/medusa/head}' decode.depth=4

Prints tables and writes report.json, report.md, report.png and report.html to RUN_DIR/report, and a searched tree as
tree.png.
"""

import platform
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console

from heads.base import DraftHead
from heads.checkpoint import load_head
from heads.target_config import locate_target
from inference.decode import check_length
from inference.inputs import head_folders, held_out_prompts, taps_to_read
from inference.report.compare import Outcome, Run, Way, in_batches, run_all, summarise_all
from inference.report.files import draw_searched_trees, write_report
from inference.report.methods import OF_HEADS, build_ways
from inference.report.page import on_terminal
from inference.report.questions import Prompt, read_questions
from inference.report.tables import as_tables
from inference.report.trace import Trace, trace
from inference.sampling import sampling_from_recipe
from inference.target.model import TargetModel, pick_device
from inference.target.tokenizer import load_tokenizer, text_of
from recipes import Recipe, run_command
from recipes.tuned_target import refuse_original_target

Runs = list[list[Run]]  # of each way, on each few prompts that are decoded together


@dataclass(frozen=True)
class Contest:
    """Everything that takes part: prompts, target, heads by name, and the ways to decode."""

    prompts: list[Prompt]
    target: TargetModel
    heads: dict[str, DraftHead]
    ways: list[Way]

    @classmethod
    def load(cls, recipe: Recipe) -> "Contest":
        """Raises ValueError for a head that does not fit or prompts that are missing."""
        section, prompts = recipe.report, report_prompts(recipe)
        torch.set_num_threads(section.threads or max(torch.get_num_threads() // section.workers, 1))
        # Cheap checks come before the target is loaded.
        taps = taps_to_read(recipe) if needs_head(recipe) else ()
        if section.workers > 1 and (device := pick_device(recipe.target.device)).type != "cpu":
            raise ValueError(f"report.workers: {section.workers} given, 1 is allowed on {device}; leave it out")
        target = TargetModel.load(recipe.target, taps)
        for prompt in prompts:
            check_length(target, prompt.tokens, recipe.decode.max_new_tokens)
        folders = head_folders(recipe) if needs_head(recipe) else {}
        heads = {name: load_head(folder, target.frozen) for name, folder in folders.items()}
        return cls(prompts, target, heads, build_ways(recipe, target, heads))


def main() -> None:
    run_command(__doc__, report)


def report(recipe: Recipe) -> list[Outcome]:
    """Measure, print and write; raises ValueError for a head that does not fit or prompts that are missing."""
    refuse_original_target(recipe, recipe.report.head)
    contest, console = Contest.load(recipe), Console()
    outcomes = measure(recipe, contest, console)
    folder = locate_target(recipe.target.path, recipe.target.revision)
    text = partial(text_of, load_tokenizer(folder, recipe.target.trust_remote_code))
    traces = trace_ways(recipe, contest)
    for one in traces:
        console.rule(f"{one.way}: drafted tokens on green, the deeper the darker; bonus tokens underlined")
        console.print(on_terminal(one, text))
    about = {**machine(), "processes": recipe.report.workers} if recipe.report.workers > 1 else machine()
    folders = head_folders(recipe) if needs_head(recipe) else {}
    written = write_report(recipe, about, folders, outcomes, traces, text)
    written += draw_searched_trees(recipe, contest.heads)
    console.print(f"written to {recipe.report_dir}: {', '.join(written)}", highlight=False)
    return outcomes


def measure(recipe: Recipe, contest: Contest, console: Console) -> list[Outcome]:
    """Every way at every temperature and batch size, the tables printed as they come."""
    outcomes: list[Outcome] = []
    for (temperature, batch), runs in zip(settings(recipe), all_runs(recipe, contest, console), strict=True):
        ways = in_batches(contest.ways, batch)
        if left_out := [way.name for way in contest.ways if way not in ways]:
            console.print(f"not in batches of {batch}, as transformers drafts for one prompt: {', '.join(left_out)}")
        sampling = sampling_from_recipe(recipe.decode, temperature)
        found = summarise_all(ways, runs, contest.target, contest.prompts, sampling, batch)
        for table in as_tables(found):
            console.print(table)
        outcomes += found
    return outcomes


def settings(recipe: Recipe) -> list[tuple[float, int]]:
    """Temperatures and batch sizes."""
    return list(product(recipe.report.temperatures, recipe.report.batches))


def all_runs(recipe: Recipe, contest: Contest, console: Console) -> Iterator[Runs]:
    """Setting by setting; with several workers the others' shares are waited for, and put in their places."""
    count = recipe.report.workers
    own = (runs_of_share(recipe, contest, setting, 0, console) for setting in settings(recipe))
    if count == 1:
        yield from own
        return
    with ProcessPoolExecutor(count - 1, get_context("spawn")) as pool:
        others = [pool.submit(runs_of_worker, recipe, number) for number in range(1, count)]
        shares = [list(own), *(other.result() for other in others)]
    for at_setting in zip(*shares, strict=True):
        yield [in_turn(of_way) for of_way in zip(*at_setting, strict=True)]


def in_turn(shares: tuple[list[Run], ...]) -> list[Run]:
    """The first of each share, then the second of each, ..."""
    return [share[place] for place in range(len(shares[0])) for share in shares if place < len(share)]


def runs_of_worker(recipe: Recipe, number: int) -> list[Runs]:
    """What a further process does: its share at every setting, with a target and drafters of its own."""
    contest = Contest.load(recipe)
    return [runs_of_share(recipe, contest, setting, number, Console(quiet=True)) for setting in settings(recipe)]


def runs_of_share(recipe: Recipe, contest: Contest, setting: tuple[float, int], number: int, console: Console) -> Runs:
    """Each way on a worker's share of the prompts."""
    (temperature, batch), section = setting, recipe.report
    ways, sampling = in_batches(contest.ways, batch), sampling_from_recipe(recipe.decode, temperature)
    units = [contest.prompts[start : start + batch] for start in range(0, len(contest.prompts), batch)]
    about = f"decoding {len(contest.prompts)} prompts in {len(ways)} ways at temperature {temperature}"
    with console.status(about):
        own = units[number :: section.workers]
        return run_all(ways, contest.target, own, recipe.decode.max_new_tokens, sampling, section.warmup_prompts)


def report_prompts(recipe: Recipe) -> list[Prompt]:
    """Of the recipe's question file, by category, or else the held-out ones."""
    section = recipe.report
    if section.prompts is None:
        return [Prompt(tokens, "held-out") for tokens in held_out_prompts(recipe)]
    if not section.prompts.is_file():
        raise ValueError(f"report.prompts: {section.prompts} is missing; give a JSONL file of prompts")
    folder = locate_target(recipe.target.path, recipe.target.revision)
    tokenizer = load_tokenizer(folder, recipe.target.trust_remote_code)
    return read_questions(section.prompts, tokenizer, recipe.data.prompt_tokens, section.num_prompts)


def needs_head(recipe: Recipe) -> bool:
    return not set(OF_HEADS).isdisjoint(recipe.report.baselines)


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


def trace_ways(recipe: Recipe, contest: Contest) -> list[Trace]:
    """How each way that drafts came by its text on one prompt, at the first temperature."""
    sampling = sampling_from_recipe(recipe.decode, recipe.report.temperatures[0])
    prompt, new_tokens = contest.prompts[0].tokens, recipe.decode.max_new_tokens
    lossy = "" if sampling.lossless else " (typical acceptance, LOSSY)"
    return [
        trace(way.name + lossy, way.drafter, contest.target, prompt, new_tokens, sampling)
        for way in contest.ways
        if way.drafter is not None
    ]
