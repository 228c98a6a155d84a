"""Compare decoding methods on the same prompts: speed, acceptance length, and whether the text is the target's own.

    headstart report recipes/tiny.yaml
    headstart report recipes/tiny_full.yaml decode.head=assets/demo_head
    headstart report recipes/tiny_full.yaml decode.head=assets/demo_head \\
        'report.baselines=[plain, generate, generate_lookup, chain, tree, prompt_lookup]' \\
        report.prompts=question.jsonl 'report.batches=[1, 4]' 'report.temperatures=[0, 1]'
    headstart report recipes/tiny_full.yaml decode.head=assets/demo_head \\
        'report.other_heads={medusa: runs/medusa/head}' decode.depth=4

Every method of report.baselines decodes the same prompts, at each of report.temperatures and in each of
report.batches. Methods alternate prompt by prompt, so that a slow phase of the machine hits all of them.

report.prompts is a JSONL file of questions by category, such as Spec-Bench's, which is reported in its six groups:
download data/spec_bench/question.jsonl from github.com/hemingkx/Spec-Bench. Later turns of a question are asked too,
each after plain decoding's answer to the one before, so that all methods continue the same text. The test.parquet that
SPEED-Bench's prepare_data.py writes is reported in its eleven categories, and a throughput split in three.

An interrupted report continues where it stopped if recipe, prompts, heads and machine are the same.

The table on the terminal shows acceptance length, tokens/s, speed-up over plain decoding, and token forcing: plain
passes read each text, and a token is outside if it is neither the target's own choice at its place nor a near-tie. The
first prompt's text is printed with its draft tokens coloured.

Writes report.json, report.md and report.html, with pictures if matplotlib is installed, to RUN_DIR/report. They also
have the speed-up's 95 % interval, the acceptance rate by depth, latencies and distinct tokens.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from headstart.common.errors import CONTINUES, wrong_value
from headstart.common.files import check_folder, remove, write_text
from headstart.common.progress import Progress
from headstart.common.remote import shown
from headstart.common.run_lock import only_run_in
from headstart.heads.base import DraftHead
from headstart.heads.target_config import TargetOrigin, folder_of
from headstart.inference.core.request import Detokenize
from headstart.inference.core.sampling import sampling_from_recipe
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.engine.budget import check_length, check_vocabulary, refuse_trees_of
from headstart.inference.generate.loading import OWN_HEAD, head_folders, held_out_prompts, taps_to_read
from headstart.inference.report.compare import Comparison, Outcome
from headstart.inference.report.forcing import Forcing
from headstart.inference.report.methods import NEED_A_HEAD, Method, build_methods
from headstart.inference.report.questions import SPEC_BENCH, Chat, Prompt, read_questions
from headstart.inference.report.rounds import JOURNAL, Journal, Setting, able_to_batch, made_from, run_rounds
from headstart.inference.report.tables import COLUMNS, LEGEND, NOTE, as_markdown, page, short_table
from headstart.inference.report.trace import Trace, on_terminal, trace
from headstart.inference.show import LEGEND as COLOURS
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.loading import pick_device, processor_name, slow_format
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import text_of
from headstart.recipes import Recipe, run_command
from headstart.recipes.checks import refuse_original_target

WARMUP_PROMPTS = 3  # decoded before timing starts


@dataclass(frozen=True)
class Benchmark:
    """All that is loaded for a report: prompts, target, heads by name, and the methods to compare."""

    prompts: list[Prompt]
    chat: Chat
    target: TargetModel
    heads: dict[str, DraftHead]
    methods: list[Method]

    @classmethod
    def load(cls, recipe: Recipe, folders: Mapping[str, Path]) -> "Benchmark":
        """Load the heads in these folders; raises ValueError for one that does not fit, or for missing prompts."""
        section = recipe.report
        # Cheap checks come before the target is loaded; heads come first, as training one makes the prompts too.
        taps = taps_to_read(recipe) if folders else ()
        template = ChatTemplate.of(recipe.target)
        prompts = report_prompts(recipe, template)
        torch.set_num_threads(section.threads or torch.get_num_threads())
        refuse_trees_of(recipe, max(section.batches))
        if hint := slow_format("target.dtype", recipe.target.dtype, pick_device(recipe.target.device)):
            print(hint)
        target = TargetModel.load_to_answer(recipe.target, taps)
        chat = Chat(template, target.max_positions - recipe.decode.max_new_tokens)
        prompts = [*map(chat.shortened, prompts)]
        for prompt in prompts:
            check_length(target, prompt.tokens, recipe.decode.max_new_tokens)
            check_vocabulary(target, prompt.tokens)
        heads = {name: load_drafting_head(folder, target) for name, folder in folders.items()}
        return cls(prompts, chat, target, heads, build_methods(recipe, target, heads))


def main() -> None:
    run_command(__doc__, report, CONTINUES)


def report(recipe: Recipe) -> list[Outcome]:
    """Measure every method, print the tables and write the files; ValueError for a wrong head or missing prompts."""
    with only_run_in(recipe.report_dir, "a report"):
        return make_report(recipe)


def make_report(recipe: Recipe) -> list[Outcome]:
    """The report, in a folder that no other report writes into."""
    refuse_original_target(recipe)
    check_folder(recipe.report_dir)
    folders = {} if set(NEED_A_HEAD).isdisjoint(recipe.report.baselines) else head_folders(recipe)
    benchmark, console = Benchmark.load(recipe, folders), Console()
    warn_of_other_targets(benchmark.heads, folder_of(recipe.target))
    about = made_from(recipe, machine(), folders, benchmark.prompts)
    measured = Journal(recipe.report_dir / JOURNAL, about)
    groups = measure(recipe, benchmark, measured)
    text = partial(text_of, benchmark.chat.template.tokenizer)
    traces = trace_methods(recipe, benchmark)
    for one in traces:
        console.rule(f"{one.method}: {COLOURS}")
        console.print(on_terminal(one, text))
    write_report(recipe, folders, groups, traces, text)
    remove(measured.path)  # the same command measures again
    files = "report.json, report.md, report.html"
    console.print(f"written to {shown(recipe.report_dir)}: {files}", highlight=False, soft_wrap=True)
    if drawing_module() is None:
        print("matplotlib is not installed, so no pictures were drawn; to get them: pip install -e '.[report]'")
    return [outcome for group in groups for outcome in group]


def measure(recipe: Recipe, benchmark: Benchmark, measured: Journal) -> list[list[Outcome]]:
    """The outcomes of every method at each setting, whose table is printed as soon as it is ready."""
    settings = [Setting(*pair) for pair in product(recipe.report.temperatures, recipe.report.batches)]
    turns = sum(1 + len(prompt.later) for prompt in benchmark.prompts)
    num_texts = turns * sum(len(able_to_batch(benchmark.methods, setting.batch)) for setting in settings)
    groups = []
    with Progress("report", num_texts, "texts", done=measured.num_texts) as progress:
        for setting in settings:
            groups.append(measure_at(setting, recipe, benchmark, measured, progress))
            progress.console.print(short_table(groups[-1]))
        progress.console.print(LEGEND, highlight=False)
    return groups


def measure_at(
    setting: Setting, recipe: Recipe, benchmark: Benchmark, measured: Journal, progress: Progress
) -> list[Outcome]:
    """The outcomes of every method that can decode batches of this size."""
    methods = able_to_batch(benchmark.methods, setting.batch)
    if left_out := [method.name for method in benchmark.methods if method not in methods]:
        names = ", ".join(left_out)
        progress.console.print(f"left out in batches of {setting.batch}, where transformers does not draft: {names}")
    sampling = sampling_from_recipe(recipe, setting.temperature)
    what = f"temperature {setting.temperature:g}, batches of {setting.batch}"
    rounds = run_rounds(
        methods,
        benchmark.target,
        benchmark.prompts,
        recipe.decode.max_new_tokens,
        sampling,
        WARMUP_PROMPTS,
        setting.batch,
        benchmark.chat.next_turn,
        measured.done[setting],
        lambda run: progress.advance(len(run.texts), what),
        partial(measured.add, setting),
    )
    reading = partial(progress.advance, 0, f"{what}, reading the texts")
    tokens = [prompt.tokens for prompt in benchmark.prompts]
    forcing = Forcing.measured(benchmark.target, tokens, recipe.decode.max_new_tokens, sampling)
    return Comparison(methods, rounds, forcing, setting.batch, reading).outcomes()


def report_prompts(recipe: Recipe, template: ChatTemplate) -> list[Prompt]:
    """The prompts of the recipe's question file, each with its category, or else the run's held-out prompts."""
    section = recipe.report
    if section.prompts is None:
        prompts = [Prompt(tokens, "held-out") for tokens in held_out_prompts(recipe)]
        if not prompts:
            allowed, remedy = "a file that yields a prompt is", "add prompts there, or name another with report.prompts"
            raise wrong_value("data.heldout_prompts", recipe.data.heldout_prompts, allowed, remedy)
        return prompts
    if not section.prompts.is_file():
        remedy = f"put the prompts there ({SPEC_BENCH}), or leave it out for the held-out prompts"
        raise wrong_value("report.prompts", section.prompts, "an existing JSONL file is", remedy)
    return read_questions(section.prompts, template, recipe.data.prompt_tokens, section.num_prompts)


def warn_of_other_targets(heads: Mapping[str, DraftHead], folder: Path) -> None:
    """Print a line for each head that was trained for other weights than those of the report's target."""
    now = TargetOrigin.of(folder) if heads else None
    for name, head in heads.items():
        if now is not None and head.origin is not None and head.origin.is_another(now):
            print(
                f"{name or 'the head'} was trained for {head.origin}, and target.path is {now}: fewer of its draft "
                f"tokens may be accepted (headstart doctor says more)"
            )


def machine() -> dict[str, Any]:
    """The hardware and versions that figures were measured with."""
    device = pick_device("auto")
    attention = {} if device.type == "cpu" else {"attention": "cuDNN in captured steps, torch's own elsewhere"}
    return {
        "device": f"{device.type} ({processor_name(device)})",
        **attention,
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


def drawing_module() -> ModuleType | None:
    """The module that draws with matplotlib, which the extra `report` installs; None without it."""
    return import_module("headstart.inference.report.figures") if find_spec("matplotlib") else None


def write_report(
    recipe: Recipe,
    folders: Mapping[str, Path],
    groups: list[list[Outcome]],
    traces: list[Trace],
    text: Detokenize,
) -> None:
    """Write into the recipe's report folder; `folders` holds the heads' folders by name."""
    folder, about = recipe.report_dir, machine()
    others = {name: str(path) for name, path in folders.items() if name != OWN_HEAD}
    content: dict[str, Any] = {
        "machine": about,
        "head": str(folders[OWN_HEAD]) if folders else None,
        "other_heads": others,
        "recipe": recipe.model_dump(mode="json"),
        "outcomes": [outcome.as_json() for group in groups for outcome in group],
    }
    write_text(folder / "report.json", json.dumps(content, indent=1) + "\n")
    heads = [f"Head `{folders[OWN_HEAD]}`", *(f"{name} `{path}`" for name, path in others.items())] if folders else []
    conditions = "; ".join([*heads, ", ".join(f"{name} {value}" for name, value in about.items())])
    tables = "\n".join(map(as_markdown, groups))
    columns = "\n".join(f"- {name}: {meaning}" for name, meaning in COLUMNS.items())
    write_text(folder / "report.md", f"{conditions}.\n\n{NOTE}\n\n{tables}\nColumns:\n\n{columns}\n")
    figures = drawing_module()
    plots = [] if figures is None else [figures.as_svg(figures.draw(group)) for group in groups]
    write_text(folder / "report.html", page(f"headstart on {recipe.target.path}", groups, plots, traces, text))
