"""What heads and drafters are worth: plain against speculative decoding, with the output checked throughout.

    python -m inference.report recipes/tiny.yaml
    python -m inference.report recipes/tiny_full.yaml report.head=assets/demo_head
    python -m inference.report recipes/tiny_full.yaml report.head=assets/demo_head \\
        'report.baselines=[plain, generate, generate_lookup, chain, tree, prompt_lookup, lookahead, early_exit]' \\
        report.prompts=question.jsonl 'report.batches=[1, 4]' 'report.temperatures=[0, 1]'

Prints tables and writes report.json, report.md, report.png and report.html to RUN_DIR/report, and a searched tree as
tree.png.
"""

import json
import platform
from functools import partial
from importlib.metadata import version
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from heads.build import load_head, new_head
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from inference.compare import Outcome, Way, compare
from inference.decode import check_length
from inference.drafters.build import build_drafter, load_draft_model
from inference.drafters.cost_aware import growth_from_recipe, searched_tree
from inference.drafters.growth import Growth
from inference.drafters.head import HeadDrafter
from inference.page import on_terminal, page
from inference.question_sets import Prompt, read_questions
from inference.report_tables import COLUMNS, as_markdown, as_tables, cells, draw, heading, speedups
from inference.sampling import sampling_from_recipe
from inference.target import TargetModel, pick_device
from inference.tokenizer import Tokenizer, load_tokenizer, text_of
from inference.trace import Trace, trace
from inference.tree_picture import draw_tree
from recipes import Recipe, run_command
from recipes.jsonl import read_jsonl
from recipes.schema import Baseline
from recipes.tuned import refuse_original_target

FILES = ("report.json", "report.md", "report.png", "report.html")


def main() -> None:
    run_command(__doc__, report)


def report(recipe: Recipe) -> list[Outcome]:
    """Measure, print and write; raises ValueError for a head that does not fit or prompts that are missing."""
    if recipe.report.threads is not None:
        torch.set_num_threads(recipe.report.threads)
    refuse_original_target(recipe, recipe.report.head)
    prompts = report_prompts(recipe)
    target_folder = locate_target(recipe.target.path, recipe.target.revision)
    # Cheap checks come before the target is loaded.
    taps = saved_taps(recipe, target_folder) if needs_head(recipe) else ()
    target = TargetModel.load(recipe.target, taps)
    for prompt in prompts:
        check_length(target, prompt.tokens, recipe.decode.max_new_tokens)
    ways = build_ways(recipe, target)

    console, outcomes = Console(), []
    for temperature, batch in product(recipe.report.temperatures, recipe.report.batches):
        with console.status(f"decoding {len(prompts)} prompts in {len(ways)} ways at temperature {temperature}"):
            sampling = sampling_from_recipe(recipe.decode, temperature)
            new_tokens, warmup = recipe.decode.max_new_tokens, recipe.report.warmup_prompts
            found = compare(ways, target, prompts, new_tokens, sampling, warmup, batch)
        for table in as_tables(found):
            console.print(table)
        outcomes += found
    tokenizer = load_tokenizer(target_folder, recipe.target.trust_remote_code)
    traces = trace_ways(recipe, ways, target, prompts[0].tokens)
    for one in traces:
        console.rule(f"{one.way}: drafted tokens on green, the deeper the darker; bonus tokens underlined")
        console.print(on_terminal(one, partial(text_of, tokenizer)))
    write_report(recipe, outcomes, traces, tokenizer)
    written = list(FILES)
    if needs_head(recipe) and recipe.decode.growth.startswith("searched"):
        tree = searched_tree(load_head(head_folder(recipe), target.frozen))
        draw_tree(tree, recipe.decode.nodes).savefig(recipe.report_dir / "tree.png", dpi=150)
        written.append("tree.png")
    console.print(f"written to {recipe.report_dir}: {', '.join(written)}", highlight=False)
    return outcomes


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


def held_out_prompts(recipe: Recipe) -> list[list[int]]:
    path = recipe.prompts_dir / "heldout.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing; make it with: python -m data_pipelines.prompts RECIPE")
    return [row["tokens"] for row in islice(read_jsonl(path), recipe.report.num_prompts)]


def needs_head(recipe: Recipe) -> bool:
    return not {"chain", "tree", "untrained"}.isdisjoint(recipe.report.baselines)


def head_folder(recipe: Recipe) -> Path:
    return recipe.head_dir if recipe.report.head is None else recipe.report.head


def saved_taps(recipe: Recipe, target_folder: Path) -> tuple[int, ...]:
    """The taps of the head to be measured, which is refused here if it does not fit the target."""
    frozen = FrozenTarget.from_folder(target_folder, torch.float32)
    return load_head(head_folder(recipe), frozen).taps


def build_ways(recipe: Recipe, target: TargetModel) -> list[Way]:
    """The report's rows, plain decoding among them."""
    named = recipe.report.baselines
    heads = head_ways(recipe, target) if needs_head(recipe) else {}
    depth = recipe.decode.depth

    def build(name: Baseline) -> Way:
        if name in heads:
            return heads[name]
        if name == "plain":
            return Way(name)
        if name == "generate":
            return Way(name, transformers=True)
        if name == "generate_lookup":
            return Way(name, transformers=True, lookup=depth)
        if name == "generate_assisted":
            draft = load_draft_model(recipe.decode, recipe.target)
            return Way(name, transformers=True, assistant=(draft, depth))
        section = recipe.decode.model_copy(update={"drafter": name})
        return Way(name, build_drafter(section, target, recipe.target))

    return [build(name) for name in (named if "plain" in named else ("plain", *named))]


def head_ways(recipe: Recipe, target: TargetModel) -> dict[str, Way]:
    """The head as a chain and as the recipe's tree, and one of the same sizes that was never trained."""
    head = load_head(head_folder(recipe), target.frozen)

    def growth(**changes: str) -> Growth:
        """One for each way: a growth that adapts would learn from the others."""
        return growth_from_recipe(recipe.decode.model_copy(update=changes), target, head)

    ways = {
        "chain": Way("chain", HeadDrafter(head, growth(growth="chain"))),
        "tree": Way("tree", HeadDrafter(head, growth())),
    }
    if "untrained" in recipe.report.baselines:
        untrained = new_head(recipe.head, target.frozen, head.vocab, recipe.seed).eval().requires_grad_(False)
        ways["untrained"] = Way("untrained", HeadDrafter(untrained.to(target.device, target.dtype), growth()))
    return ways


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


def trace_ways(recipe: Recipe, ways: list[Way], target: TargetModel, prompt: list[int]) -> list[Trace]:
    """How each way that drafts came by its text on one prompt, at the first temperature."""
    sampling = sampling_from_recipe(recipe.decode, recipe.report.temperatures[0])
    lossy = "" if sampling.lossless else " (typical acceptance, LOSSY)"
    return [
        trace(way.name + lossy, way.drafter, target, prompt, recipe.decode.max_new_tokens, sampling)
        for way in ways
        if way.drafter is not None
    ]


def write_report(recipe: Recipe, outcomes: list[Outcome], traces: list[Trace], tokenizer: Tokenizer) -> None:
    recipe.report_dir.mkdir(parents=True, exist_ok=True)
    settings = list(product(recipe.report.temperatures, recipe.report.batches))
    groups = {(t, b): [o for o in outcomes if (o.temperature, o.batch) == (t, b)] for t, b in settings}
    content: dict[str, Any] = {
        "machine": machine(),
        "head": str(head_folder(recipe)) if needs_head(recipe) else None,
        "recipe": recipe.model_dump(mode="json"),
        "outcomes": [outcome.as_json() for outcome in outcomes],
        "speedups": {f"{t}, batch {b}": speedups(found) for (t, b), found in groups.items()},
    }
    (recipe.report_dir / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    about = ", ".join(f"{name} {value}" for name, value in content["machine"].items())
    tables = "\n".join(as_markdown(found) for found in groups.values())
    head = f"Head `{content['head']}`; " if content["head"] else ""
    (recipe.report_dir / "report.md").write_text(f"{head}{about}.\n\n{tables}")
    parts = [(heading(found), found, [list(COLUMNS), *cells(found)]) for found in groups.values()]
    title = f"headstart on {recipe.target.path}"
    (recipe.report_dir / "report.html").write_text(
        page(title, parts, traces, partial(text_of, tokenizer)), encoding="utf-8"
    )
    draw(groups).savefig(recipe.report_dir / "report.png", dpi=150)


if __name__ == "__main__":
    main()
