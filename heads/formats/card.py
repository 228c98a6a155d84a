"""Writes the README.md of an export: what the head is, how it was trained, what was measured, how to serve it."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from headstart.common.files import read_growing_jsonl, read_json
from headstart.common.remote import shown
from headstart.heads.base import DraftHead
from headstart.heads.files import MODEL
from headstart.heads.formats.commands import headstart_section, serving_sections
from headstart.heads.formats.layouts import FORMATS, ServedTarget, engine_files, is_whole_target, native_files
from headstart.heads.formats.subject import Violation
from headstart.recipes.schema import SELF, Recipe

KIND_NAMES = {"eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "medusa": "Medusa", "block": "Block", "mtp": "MTP"}
WHOLE = (
    "This folder is the whole target with the tuned layer in place of its own. Files of weights without that layer are "
    "links to the target's; upload or copy what they point to."
)
LOGGED_LENGTHS = {"heldout/tau": "0", "heldout/tau_t1": "1"}  # key in the training log -> its temperature


def card(
    recipe: Recipe,
    head: DraftHead,
    target: ServedTarget,
    target_folder: Path,
    folder: Path,
    violations: dict[str, list[Violation]],
) -> str:
    """The whole README.md. `violations` holds what each engine's contract finds wrong; an engine without errors gets
    its command, the others get the reasons. The commands find the export in `folder`."""
    source = recipe.head_in_use
    is_own = source == recipe.head_dir
    recipe = as_trained(recipe) if is_own else recipe
    format_files, is_whole = FORMATS[recipe.export.format].files, is_whole_target(head, recipe.export.format)
    can_load = format_files in (native_files, engine_files) and not is_whole
    unknown = f"Unknown: the head comes from `{source}`, not from this run."
    parts = [
        front_matter(head, target),
        f"# {KIND_NAMES[head.kind]} draft head for {target.name}",
        f"A draft head for speculative decoding with `{target.name}`. In every decoding step the head proposes draft "
        f"tokens, and the target verifies all of them in a single forward pass. The text remains the target's own; "
        f"only the number of forward passes goes down.",
        "## What it is",
        "\n".join(facts(head, target)),
        "## Training data",
        "\n".join(data(recipe, target_folder)) if is_own else unknown,
        "## Training",
        "\n".join(training(recipe)) if is_own else unknown,
        "## Measured",
        measured(recipe, source),
        "## Serving",
        f"The commands name the folder of this export. Once it is on the hub, ORG/NAME stands for it: `hf upload "
        f"ORG/NAME {quote(str(folder))}`.",
        *([WHOLE] if is_whole else []),
        *serving_sections(head, target, folder, violations),
        "### headstart",
        headstart_section(target, folder, can_load),
        "## Limits",
        "\n".join(limits(recipe, head, is_own)),
    ]
    return "\n\n".join(parts) + "\n"


def as_trained(recipe: Recipe) -> Recipe:
    """The recipe with the head and train sections that the exported weights were trained with, if that is recorded."""
    path = recipe.checkpoints_dir / f"step-{exported(recipe).get('step', 0)}" / "state.json"
    if not path.is_file():
        return recipe
    inputs = read_json(path)["inputs"]
    changes = {}
    for name in ("head", "train"):
        section = getattr(recipe, name)
        recorded = {key: inputs[f"{name}.{key}"] for key in type(section).model_fields if f"{name}.{key}" in inputs}
        changes[name] = type(section).model_validate({**section.model_dump(), **recorded})
    return recipe.model_copy(update=changes)


def front_matter(head: DraftHead, target: ServedTarget) -> str:
    """The YAML header that a model hub reads."""
    base = [] if Path(target.name).is_dir() else [f"base_model: {target.name}"]
    return "\n".join(["---", *base, "tags:", "- speculative-decoding", f"- {head.kind}", "---"])


def facts(head: DraftHead, target: ServedTarget) -> Iterator[str]:
    parameters = sum(parameter.numel() for parameter in head.parameters())
    yield f"- kind: {KIND_NAMES[head.kind]}, {parameters:,} parameters, hidden size {head.feature_size}"
    yield (
        f"- input from the target: hidden_states {list(head.taps)} of its {head.target.num_layers} layers, where "
        f"hidden_states[i] is the input of layer i"
    )
    vocab = head.vocab
    share = "all" if vocab.is_full else f"{len(vocab.ids):,}"
    yield f"- draft vocabulary: {share} of the target's {vocab.target_size:,} tokens"
    if target.revision:
        yield f"- target revision: {target.revision}"


def data(recipe: Recipe, target_folder: Path) -> Iterator[str]:
    section = recipe.data
    if section.store is not None:
        yield f"- features: those stored in `{shown(section.store)}`"
    else:
        yield f"- prompts: {num_prompts(recipe, 'train', section.num_prompts):,} from `{section.prompts}`"
        yield responses(recipe)
    yield f"- chat template: {template(target_folder)}"


def num_prompts(recipe: Recipe, split: str, asked: int) -> int:
    """The number of prompts of a split, by default as many as the recipe asks for."""
    stage = recipe.prompts_dir / "stage.json"
    facts = read_json(stage).get("facts", {}) if stage.is_file() else {}
    return int(facts.get(split, asked))


def responses(recipe: Recipe) -> str:
    section = recipe.data
    if section.responses == "given":
        which = "each of the assistant's turns" if section.turns == "all" else "the assistant's last turn"
        return f"- responses: taken from the conversations as they are, {which}"
    temperatures = ", ".join(f"{temperature:g}" for temperature in section.temperatures)
    target = "the target" if recipe.joint.mode is None else "the target before it was tuned"
    return (
        f"- responses: written by {target} itself, at most {section.response_tokens} tokens after prompts of at most "
        f"{section.prompt_tokens}, at temperatures {temperatures} in turn"
    )


def template(target_folder: Path) -> str:
    """The target's chat template with its digest: a head trained on one template drafts worse with any other."""
    separate, config = target_folder / "chat_template.jinja", target_folder / "tokenizer_config.json"
    text = separate.read_text() if separate.is_file() else None
    if text is None and config.is_file():
        text = read_json(config).get("chat_template")
    if text is None:
        return "none, the target's tokenizer has no template; prompts were continued as plain text"
    digest = hashlib.sha256(str(text).encode()).hexdigest()[:16]
    return f"the target's own for prompts of messages (sha256 {digest}...); plain text was continued without one"


def training(recipe: Recipe) -> Iterator[str]:
    section = recipe.train
    rate = f"{section.learning_rate:g}"
    if section.optimizer == "muon":
        rate = f"{section.muon_learning_rate:g} (AdamW parameters: {rate})"
    yield (
        f"- {section.steps:,} steps of {section.batch_size} sequences with {section.optimizer}, learning rate {rate}, "
        f"objective {section.objective or 'of the paper'}, unrolled to depth {recipe.unroll}"
    )
    if section.start_from is not None:
        yield f"- warm start: from the head in `{section.start_from}`; the tokens that it had read are not counted here"
    if recipe.joint.mode is not None:
        yield f"- the target's layers were tuned together with the head ({recipe.joint.mode}): use the tuned target"
    row = heldout_row(recipe)
    if row is None:
        yield "- held-out figures: none found"
        return
    depths = sum(name.startswith("heldout/accuracy_") for name in row)
    shown = " ".join(f"{row[f'heldout/accuracy_{depth}']:.3f}" for depth in range(depths))
    yield f"- held-out data after step {row['step']:,}: loss {row['heldout/loss_0']:.3f}, accuracy by depth {shown}"
    if lengths := acceptance_lengths(recipe):
        shown = ", ".join(f"{length:.2f} at temperature {temperature}" for temperature, length in lengths.items())
        count = min(section.eval_prompts, num_prompts(recipe, "heldout", section.eval_prompts))
        yield f"- acceptance length after that step, on {count} held-out prompts: {shown}"
    yield from learning_curve(recipe)


def heldout_row(recipe: Recipe) -> dict[str, Any] | None:
    """The logged held-out metrics of the exported weights, which need not be those of the last step."""
    step = exported(recipe).get("step", recipe.train.steps)
    rows = read_growing_jsonl(recipe.metrics_path)
    return next((row for row in reversed(rows) if "heldout/loss_0" in row and row["step"] == step), None)


def acceptance_lengths(recipe: Recipe) -> dict[str, float]:
    """The exported weights' acceptance length on held-out prompts by temperature, as far as training measured it."""
    row = heldout_row(recipe) or {}
    return {temperature: round(row[name], 2) for name, temperature in LOGGED_LENGTHS.items() if name in row}


def exported(recipe: Recipe) -> dict[str, Any]:
    """Training's record about the exported weights; empty if there is none."""
    record = recipe.checkpoints_dir / "exported.json"
    return read_json(record, "remove it, and the head is written again") if record.is_file() else {}


def learning_curve(recipe: Recipe) -> Iterator[str]:
    """The number of tokens read, the hours and machine, and a table of the acceptance length by tokens read."""
    rows = [row for row in read_growing_jsonl(recipe.metrics_path) if row["step"] <= recipe.train.steps]
    measured = {row["step"]: row for row in rows if "train/tokens" in row}
    if not measured:
        return
    last = measured[max(measured)]
    rates = [row["train/tokens_per_second"] for row in rows if "train/tokens_per_second" in row]
    machine = exported(recipe).get("machine")
    if rates and machine:
        hours = last["train/tokens"] / median(rates) / 3600
        yield f"- {last['train/tokens']:,} tokens read, {hours:.1f} hours of optimizer steps on {machine}"
    lengths = {name: temperature for name, temperature in LOGGED_LENGTHS.items() if name in last}
    if not lengths:
        return
    yield ""
    columns = [f"acceptance length at temperature {each}" for each in lengths.values()]
    yield f"| {' | '.join(['tokens read', *columns])} |"
    yield "| ---: |" + " ---: |" * len(lengths)
    for _, row in sorted(measured.items()):
        yield f"| {row['train/tokens']:,} | " + " | ".join(f"{row[name]:.2f}" for name in lengths) + " |"


def measured(recipe: Recipe, source: Path) -> str:
    """Acceptance length and speed with their conditions, if this run's report measured this head on this target."""
    report = report_of(recipe, source)
    if report is None:
        return "Not measured. Run `headstart report RECIPE` and export again to fill this section."
    lines = [
        "| method | temperature | batch size | prompts | acceptance length | speed-up over plain decoding |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    outcomes = report["outcomes"]
    plain = {key_of(each): each["tokens_per_second"] for each in outcomes if each["method"] == "plain"}
    for outcome in outcomes:
        method, (temperature, batch) = outcome["method"], key_of(outcome)
        if method.partition(" ")[0] in report["other_heads"]:
            continue
        length, speedup = outcome["tau"], outcome["tokens_per_second"] / plain[temperature, batch]
        lines.append(f"| {method} | {temperature:g} | {batch} | {outcome['prompts']} | {length:.2f} | {speedup:.2f} |")
    return "\n".join([*lines, "", conditions(report)])


def key_of(outcome: dict[str, Any]) -> tuple[float, int]:
    """The temperature and batch size at which a method is compared with plain decoding."""
    return outcome["temperature"], outcome["batch"]


def conditions(report: dict[str, Any]) -> str:
    recipe = report["recipe"]
    decode, file = recipe["decode"], recipe["report"]["prompts"] or recipe["data"]["heldout_prompts"]
    prompts = "prompts that the target wrote" if file == SELF else f"prompts of `{file}`"
    about = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    return (
        "Acceptance length (tau) is the mean number of tokens that each forward pass of the target adds to the text, "
        "including the bonus token; plain decoding adds 1. Speed-up is tokens per second relative to plain decoding. "
        f"Measured with headstart on {prompts}, at most {decode['max_new_tokens']} new tokens each; draft "
        f"growth {decode['growth']}, depth {decode['depth']}; acceptance rule {decode['acceptance']}; target in "
        f"{recipe['target']['dtype']}; {about}."
    )


def report_of(recipe: Recipe, source: Path) -> dict[str, Any] | None:
    """The run's report; None if there is none, or if it measured another head, older weights or another target."""
    path, weights = recipe.report_dir / "report.json", source / MODEL
    if not path.is_file() or path.stat().st_mtime < weights.stat().st_mtime:
        return None
    report: dict[str, Any] = read_json(path, "make it again with headstart report RECIPE, or remove it")
    head, target = report["head"], report["recipe"]["target"]["path"]
    is_same = head is not None and Path(head).resolve() == source.resolve() and target == recipe.target.path
    return report if is_same else None


def limits(recipe: Recipe, head: DraftHead, is_own: bool) -> Iterator[str]:
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    yield f"- context: {head.target.max_positions:,} tokens, the same as the target's"
    if is_own and recipe.data.store is None:
        longest = recipe.data.prompt_tokens + recipe.data.response_tokens
        yield f"- length: trained on texts of at most {longest:,} tokens; acceptance after longer texts is unknown"
    yield f"- dtype: the weights are stored in {dtype}; engines compute in the target's dtype"
    yield "- target: for this target only; any other checkpoint, even a fine-tuned one, accepts fewer draft tokens"
