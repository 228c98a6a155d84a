"""The report: the same prompts decoded with every method of report.baselines, as tables and files."""

import os
import platform
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from headstart.common.files import check_folder
from headstart.common.launcher import end_with_parent
from headstart.common.progress import Progress
from headstart.common.run_lock import only_run_in
from headstart.heads.base import DraftHead
from headstart.heads.target_config import locate_target
from headstart.heads.target_origin import TargetOrigin
from headstart.inference.core.sampling import sampling_from_recipe
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.drafters.model import Tokenizer
from headstart.inference.engine.budget import refuse_trees_of
from headstart.inference.engine.checks import check_length
from headstart.inference.report.compare import Outcome, summarise_methods
from headstart.inference.report.files import draw_searched_trees, write_report
from headstart.inference.report.journal import Journal, journal_path, made_from, remove_journals
from headstart.inference.report.methods import NEED_A_HEAD, build_methods
from headstart.inference.report.page import on_terminal
from headstart.inference.report.questions import SPEC_BENCH, Chat, Prompt, read_questions
from headstart.inference.report.rounds import Round, able_to_batch, numbered_batches, run_rounds
from headstart.inference.report.runs import Method
from headstart.inference.report.tables import LEGEND, short_table
from headstart.inference.report.trace import Trace, trace
from headstart.inference.show.colours import LEGEND as COLOURS
from headstart.inference.show.inputs import head_folders, held_out_prompts, taps_to_read
from headstart.inference.targets.loading import pick_device, processor_name, slow_format
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import load_tokenizer, text_of
from headstart.recipes import Recipe
from headstart.recipes.checks import refuse_original_target


@dataclass(frozen=True)
class Benchmark:
    """All that is loaded for a report: prompts, target, heads by name, and the methods to compare."""

    prompts: list[Prompt]
    chat: Chat
    target: TargetModel
    heads: dict[str, DraftHead]
    methods: list[Method]

    @classmethod
    def load(cls, recipe: Recipe) -> "Benchmark":
        """Raise ValueError for a head that does not fit the target or for missing prompts."""
        section = recipe.report
        # Cheap checks come before the target is loaded; heads come first, as training one makes the prompts too.
        taps = taps_to_read(recipe) if needs_head(recipe) else ()
        tokenizer = recipe_tokenizer(recipe)
        prompts = report_prompts(recipe, tokenizer)
        torch.set_num_threads(section.threads or max(torch.get_num_threads() // section.workers, 1))
        if section.workers > 1 and (device := pick_device(recipe.target.device)).type != "cpu":
            raise ValueError(
                f"report.workers: {section.workers} given, only 1 is allowed on {device} because workers share a CPU; "
                "leave it out"
            )
        if section.workers > (most := max(os.cpu_count() or 1, 2)):
            raise ValueError(
                f"report.workers: {section.workers} given, 1 to {most} is allowed, one per core, as each loads the "
                "target; lower it"
            )
        refuse_trees_of(recipe, max(section.batches))
        if hint := slow_format("target.dtype", recipe.target.dtype, pick_device(recipe.target.device)):
            print(hint)
        target = TargetModel.load(recipe.target, taps)
        chat = Chat(tokenizer, target.max_positions - recipe.decode.max_new_tokens)
        prompts = [*map(chat.shortened, prompts)]
        for prompt in prompts:
            check_length(target, prompt.tokens, recipe.decode.max_new_tokens)
        folders = head_folders(recipe) if needs_head(recipe) else {}
        heads = {name: load_drafting_head(folder, target) for name, folder in folders.items()}
        return cls(prompts, chat, target, heads, build_methods(recipe, target, heads))


@dataclass(frozen=True)
class Setting:
    """What one table of the report is measured at."""

    temperature: float
    batch: int


def report(recipe: Recipe) -> list[Outcome]:
    """Measure every method, print the tables and write the files.

    Raises ValueError for a head that does not fit the target or for missing prompts.
    """
    with only_run_in(recipe.report_dir, "a report"):
        return make_report(recipe)


def make_report(recipe: Recipe) -> list[Outcome]:
    """The report, in a folder that no other report writes into."""
    refuse_original_target(recipe, recipe.report.head)
    check_folder(recipe.report_dir)
    benchmark, console = Benchmark.load(recipe), Console()
    warn_of_other_targets(benchmark.heads, locate_target(recipe.target.path, recipe.target.revision))
    drawn = draw_searched_trees(recipe, benchmark.heads)  # before the work, because it fails for a head without a tree
    journal = open_journal(recipe, benchmark, 0)
    with Progress("report", num_own_texts(recipe, benchmark), "texts", done=journal.num_texts) as progress:
        outcomes = measure(recipe, benchmark, journal, progress)
    text = partial(text_of, benchmark.chat.tokenizer)
    traces = trace_methods(recipe, benchmark)
    for one in traces:
        console.rule(f"{one.method}: {COLOURS}")
        console.print(on_terminal(one, text))
    about = {**machine(), "processes": recipe.report.workers} if recipe.report.workers > 1 else machine()
    folders = head_folders(recipe) if needs_head(recipe) else {}
    written = write_report(recipe, about, folders, outcomes, traces, text) + drawn
    remove_journals(recipe)
    console.print(f"written to {recipe.report_dir}: {', '.join(written)}", highlight=False, soft_wrap=True)
    return outcomes


def open_journal(recipe: Recipe, benchmark: Benchmark, worker: int) -> Journal:
    """The journal of one worker, with what an earlier run of this report has measured."""
    folders = head_folders(recipe) if needs_head(recipe) else {}
    wanted = made_from(recipe, machine(), folders, benchmark.prompts, benchmark.methods)
    return Journal(journal_path(recipe, worker), wanted)


def measure(recipe: Recipe, benchmark: Benchmark, journal: Journal, progress: Progress) -> list[Outcome]:
    """Measure every method at every setting; each setting's table is printed as soon as it is ready."""
    outcomes: list[Outcome] = []
    console = progress.console
    for setting, rounds in zip(settings(recipe), all_rounds(recipe, benchmark, journal, progress), strict=True):
        methods = able_to_batch(benchmark.methods, setting.batch)
        if left_out := [method.name for method in benchmark.methods if method not in methods]:
            names = ", ".join(left_out)
            console.print(f"left out in batches of {setting.batch}, where transformers does not draft: {names}")
        sampling = sampling_from_recipe(recipe, setting.temperature)
        found = summarise_methods(methods, rounds, benchmark.target, sampling, setting.batch)
        console.print(short_table(found))
        outcomes += found
    console.print(LEGEND, highlight=False)
    return outcomes


def settings(recipe: Recipe) -> list[Setting]:
    return [Setting(*pair) for pair in product(recipe.report.temperatures, recipe.report.batches)]


def all_rounds(recipe: Recipe, benchmark: Benchmark, journal: Journal, progress: Progress) -> Iterator[list[Round]]:
    """The rounds of each setting; several workers share the batches of prompts."""
    count = recipe.report.workers
    own = (rounds_of_share(recipe, benchmark, setting, 0, journal, progress) for setting in settings(recipe))
    if count == 1:
        yield from own
        return
    with ProcessPoolExecutor(count - 1, get_context("spawn"), start_worker) as pool:
        try:
            others = [pool.submit(rounds_of_worker, recipe, number) for number in range(1, count)]
            shares = [list(own), *(other.result() for other in others)]
        except BaseException:
            for worker in active_children():
                worker.terminate()
            raise
    for at_setting in zip(*shares, strict=True):
        yield [each for rounds in at_setting for each in rounds]


def rounds_of_worker(recipe: Recipe, number: int) -> list[list[Round]]:
    """Run in a process of its own, with its own target and drafters: the worker's share at every setting."""
    benchmark = Benchmark.load(recipe)
    journal = open_journal(recipe, benchmark, number)
    with Progress("report", 0, "texts", active=False) as progress:
        return [rounds_of_share(recipe, benchmark, setting, number, journal, progress) for setting in settings(recipe)]


def start_worker() -> None:
    """Let a worker end without a traceback at Ctrl-C, which the main process reports, and with the main process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


def rounds_of_share(
    recipe: Recipe, benchmark: Benchmark, setting: Setting, number: int, journal: Journal, progress: Progress
) -> list[Round]:
    """Run each method on one worker's share of the prompts."""
    methods = able_to_batch(benchmark.methods, setting.batch)
    sampling = sampling_from_recipe(recipe, setting.temperature)
    what = f"temperature {setting.temperature:g}, batches of {setting.batch}"
    measured_at = setting.temperature, setting.batch
    return run_rounds(
        methods,
        benchmark.target,
        share_of(recipe, benchmark, setting, number),
        recipe.decode.max_new_tokens,
        sampling,
        recipe.report.warmup_prompts,
        benchmark.chat.next_turn,
        journal.done[measured_at],
        lambda run: progress.advance(len(run.texts), what),
        partial(journal.add, measured_at),
    )


def share_of(recipe: Recipe, benchmark: Benchmark, setting: Setting, number: int) -> list[tuple[int, list[Prompt]]]:
    """The numbered batches of prompts that one worker decodes."""
    return numbered_batches(benchmark.prompts, setting.batch)[number :: recipe.report.workers]


def num_own_texts(recipe: Recipe, benchmark: Benchmark) -> int:
    """How many texts the main process decodes."""
    return sum(
        sum(1 + len(prompt.later) for _, batch in share_of(recipe, benchmark, setting, 0) for prompt in batch)
        * len(able_to_batch(benchmark.methods, setting.batch))
        for setting in settings(recipe)
    )


def recipe_tokenizer(recipe: Recipe) -> Tokenizer:
    folder = locate_target(recipe.target.path, recipe.target.revision)
    return load_tokenizer(folder, recipe.target.trust_remote_code)


def report_prompts(recipe: Recipe, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of the recipe's question file, each with its category, or else the run's held-out prompts."""
    section = recipe.report
    if section.prompts is None:
        prompts = [Prompt(tokens, "held-out") for tokens in held_out_prompts(recipe)]
        if not prompts:
            raise ValueError(
                f"data.heldout_prompts: {recipe.data.heldout_prompts} given, which yields no prompt; a file with one "
                "or more is allowed; add prompts there, or name another file with report.prompts"
            )
        return prompts
    if not section.prompts.is_file():
        raise ValueError(
            f"report.prompts: {section.prompts} given, an existing JSONL file is allowed; put the prompts there "
            f"({SPEC_BENCH}), or leave it out for the held-out prompts"
        )
    return read_questions(section.prompts, tokenizer, recipe.data.prompt_tokens, section.num_prompts)


def needs_head(recipe: Recipe) -> bool:
    return not set(NEED_A_HEAD).isdisjoint(recipe.report.baselines)


def warn_of_other_targets(heads: Mapping[str, DraftHead], folder: Path) -> None:
    """Print a line for each head that was trained for other weights than those of the report's target."""
    now = TargetOrigin.of(folder) if heads else None
    for name, head in heads.items():
        if now is not None and head.origin is not None and head.origin.sha256 != now.sha256:
            print(
                f"{name or 'the head'} was trained for {head.origin}, and target.path is {now}: fewer of its draft "
                f"tokens may be accepted (headstart doctor says more)"
            )


def machine() -> dict[str, Any]:
    """The hardware and versions that figures were measured with."""
    device = pick_device("auto")
    return {
        "device": f"{device.type} ({processor_name(device)})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def trace_methods(recipe: Recipe, benchmark: Benchmark) -> list[Trace]:
    """Trace each method that drafts, on the first prompt at the first temperature."""
    sampling = sampling_from_recipe(recipe, recipe.report.temperatures[0])
    prompt, new_tokens = benchmark.prompts[0].tokens, recipe.decode.max_new_tokens
    return [
        trace(method.name, method.drafter, benchmark.target, prompt, new_tokens, sampling)
        for method in benchmark.methods
        if method.drafter is not None
    ]
