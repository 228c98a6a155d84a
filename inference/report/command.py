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
SPEED-Bench's prepare_data.py writes is reported in its eleven categories, and a throughput split in three. Files of
GSM8K, HumanEval, MBPP and MATH-500 are read as published; the lines of several JSONL files may stand in one.

The table on the terminal shows acceptance length, tokens/s, speed-up over plain decoding, and how many texts equal
plain decoding's. All must, where a token has the same bits in every pass. Where passes round differently the report
says so, and token forcing judges the texts: plain passes read each one, and a token is outside if it is neither the
target's own choice at its position nor a near-tie.

Writes report.json and report.md to RUN_DIR/report. They also have the speed-up's 95 % interval, figures by category and
the share of distinct tokens, which is low for texts that loop; report.json has what SPEED-Bench and aiperf publish,
under their names.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from headstart.common.errors import wrong_value
from headstart.common.files import write_text
from headstart.common.progress import Progress
from headstart.common.remote import shown
from headstart.common.run_lock import only_run_in
from headstart.heads.base import DraftHead
from headstart.heads.target_config import folder_of
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.engine.budget import check_length, check_vocabulary, refuse_trees_of
from headstart.inference.generate.loading import (
    OWN_HEAD,
    head_folders,
    held_out_prompts,
    taps_to_read,
    warn_of_other_targets,
)
from headstart.inference.report.compare import Comparison, Outcome
from headstart.inference.report.forcing import Forcing
from headstart.inference.report.methods import NEED_A_HEAD, Method, build_methods
from headstart.inference.report.questions import SPEC_BENCH, Prompt, QuestionTemplate, read_questions
from headstart.inference.report.rounds import able_to_batch, run_rounds
from headstart.inference.report.tables import as_markdown, legend, short_table
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.loading import pick_device, processor_name, slow_format
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.checks import refuse_original_target

WARMUP_PROMPTS = 3  # decoded before timing starts at the first temperature; one is enough for the others


@dataclass(frozen=True)
class Benchmark:
    """What is loaded for a report: prompts, target, heads by name, and the methods to compare."""

    prompts: list[Prompt]
    chat: QuestionTemplate
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
        chat = QuestionTemplate(template, target.max_positions - recipe.decode.max_new_tokens)
        prompts = [chat.shortened(prompt) for prompt in prompts]
        for prompt in prompts:
            check_length(target, prompt.tokens, recipe.decode.max_new_tokens)
            check_vocabulary(target, prompt.tokens)
        heads = {name: load_drafting_head(folder, target) for name, folder in folders.items()}
        return cls(prompts, chat, target, heads, build_methods(recipe, target, heads))

    def outcomes(
        self, batch: int, max_new_tokens: int, sampling: Sampling, warmup: int, progress: Progress
    ) -> list[Outcome]:
        """The outcomes of every method that can decode batches of this size."""
        methods = able_to_batch(self.methods, batch, self.prompts)
        if left_out := [method.name for method in self.methods if method not in methods]:
            names = ", ".join(left_out)
            progress.console.print(f"left out in batches of {batch}, which transformers does not decode so: {names}")
        note = f"temperature {sampling.temperature:g}, batches of {batch}"
        rounds = run_rounds(
            methods,
            self.target,
            self.prompts,
            max_new_tokens,
            sampling,
            warmup,
            batch,
            self.chat.next_turn,
            lambda run: progress.advance(len(run.texts), note),
        )
        forcing = None
        if self.target.difference_in_bits is not None:
            progress.advance(0, f"{note}, token forcing")
            forcing = Forcing.measured(self.target, self.prompts, max_new_tokens, sampling)
        return Comparison(methods, rounds, sampling, batch, forcing).outcomes()


def report(recipe: Recipe) -> list[Outcome]:
    """Measure every method, print the tables and write the files; ValueError for a wrong head or missing prompts."""
    with only_run_in(recipe.report_dir, "a report"):
        refuse_original_target(recipe)
        folders = {} if set(NEED_A_HEAD).isdisjoint(recipe.report.baselines) else head_folders(recipe)
        benchmark = Benchmark.load(recipe, folders)
        origins = {name or "the head": head.origin for name, head in benchmark.heads.items()}
        warn_of_other_targets(origins, folder_of(recipe.target))
        groups = measure(recipe, benchmark)
        write_report(recipe, folders, groups, exactness(benchmark.target))
        print(f"written to {shown(recipe.report_dir)}: report.json, report.md")
    return [outcome for group in groups for outcome in group]


def measure(recipe: Recipe, benchmark: Benchmark) -> list[list[Outcome]]:
    """The outcomes at each temperature and batch size; their table is printed as soon as it is ready."""
    section, groups = recipe.report, []
    turns = sum(1 + len(prompt.later) for prompt in benchmark.prompts)
    num_methods = sum(len(able_to_batch(benchmark.methods, each, benchmark.prompts)) for each in section.batches)
    with Progress("report", turns * num_methods * len(section.temperatures), "texts") as progress:
        for temperature, batch in product(section.temperatures, section.batches):
            sampling = Sampling(temperature, seed=recipe.seed)
            warmup = WARMUP_PROMPTS if temperature == section.temperatures[0] else 1
            groups.append(benchmark.outcomes(batch, recipe.decode.max_new_tokens, sampling, warmup, progress))
            progress.console.print(short_table(groups[-1]))
        progress.console.print("\n".join([*legend(groups[-1]), exactness(benchmark.target)]), highlight=False)
    return groups


def report_prompts(recipe: Recipe, template: ChatTemplate) -> list[Prompt]:
    """The prompts of the recipe's question file, each with its category, or else the run's held-out prompts, by
    whether they show pictures if some do."""
    section = recipe.report
    if section.prompts is None:
        requests = held_out_prompts(recipe)
        kinds = ["texts" if each.images is None else "pictures" for each in requests]
        names = kinds if len({*kinds}) > 1 else ["held-out"] * len(kinds)
        prompts = [Prompt(each.prompt, name, images=each.images) for each, name in zip(requests, names, strict=True)]
        if not prompts:
            allowed, remedy = "a file that yields a prompt is", "add prompts there, or name another with report.prompts"
            raise wrong_value("data.heldout_prompts", recipe.data.heldout_prompts, allowed, remedy)
        return prompts
    if not section.prompts.is_file():
        remedy = f"put the prompts there ({SPEC_BENCH}), or leave it out for the held-out prompts"
        raise wrong_value("report.prompts", section.prompts, "an existing JSONL file is", remedy)
    return read_questions(section.prompts, template, recipe.data.prompt_tokens, section.num_prompts)


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


def exactness(target: TargetModel) -> str:
    """Whether the texts must be the same in every way of decoding."""
    found = target.difference_in_bits
    return "a token has the same bits in every pass" if found is None else f"passes round differently: {found}"


def write_report(recipe: Recipe, folders: Mapping[str, Path], groups: list[list[Outcome]], exact: str) -> None:
    """Write into the recipe's report folder; `folders` holds the heads' folders by name."""
    folder, about = recipe.report_dir, machine()
    other_heads = {name: str(path) for name, path in folders.items() if name != OWN_HEAD}
    content: dict[str, Any] = {
        "machine": about,
        "same_bits": exact,
        "head": str(folders[OWN_HEAD]) if folders else None,
        "other_heads": other_heads,
        "recipe": recipe.model_dump(mode="json"),
        "outcomes": [outcome.as_json() for group in groups for outcome in group],
    }
    write_text(folder / "report.json", json.dumps(content, indent=1) + "\n")
    heads = [f"{name} `{path}`" for name, path in {"Head": content["head"], **other_heads}.items()] if folders else []
    conditions = "; ".join([*heads, ", ".join(f"{name} {value}" for name, value in about.items())])
    tables = "\n".join(map(as_markdown, groups))
    columns = "\n".join(f"- {line}" for line in legend(groups[-1], short=False))
    write_text(folder / "report.md", f"{conditions}; {exact}.\n\n{tables}\nColumns:\n\n{columns}\n")
