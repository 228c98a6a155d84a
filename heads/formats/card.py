"""README.md of an export: what the head is, what was measured, and how each engine serves it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heads.base import DraftHead
from heads.formats.commands import here, serving
from heads.formats.files import MODEL
from heads.formats.layouts import FORMATS, ServedTarget, engine_files, native_files
from heads.formats.subject import Finding
from recipes.schema import Recipe

TAUS = {"heldout/tau": "0", "heldout/tau_t1": "1"}  # what training logs -> its temperature


def card(
    recipe: Recipe,
    head: DraftHead,
    target: ServedTarget,
    target_folder: Path,
    folder: Path,
    verdicts: dict[str, list[Finding]],
) -> str:
    """`verdicts` holds what each engine's contract finds; those without findings get a command."""
    source = recipe.export.head or recipe.head_dir
    own, unknown = source == recipe.head_dir, f"Not known here: the head comes from {source}."
    parts = [
        front_matter(head, target),
        f"# {head.kind} draft head for {target.name}",
        f"Drafts tokens for `{target.name}`, which then verifies them: the text stays the target's own.",
        "## What it is",
        "\n".join(facts(head, target)),
        "## Data",
        "\n".join(data(recipe, target_folder)) if own else unknown,
        "## Training",
        "\n".join(training(recipe)) if own else unknown,
        "## Measured",
        measured(recipe, source),
        "## Serving",
        *serving(head, target, folder, verdicts),
        "### headstart",
        here(target, folder, FORMATS[recipe.export.format].files in (native_files, engine_files)),
        "## Limits",
        "\n".join(limits(recipe, head, own)),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(head: DraftHead, target: ServedTarget) -> str:
    """What a model hub reads."""
    base = [] if Path(target.name).is_dir() else [f"base_model: {target.name}"]
    return "\n".join(["---", *base, "tags:", "- speculative-decoding", f"- {head.kind}", "---"])


def facts(head: DraftHead, target: ServedTarget) -> Iterator[str]:
    parameters = sum(parameter.numel() for parameter in head.parameters())
    yield f"- {head.kind}, {parameters:,} parameters, width {head.feature_size}"
    yield f"- reads hidden_states {list(head.taps)} of the target's {head.target.num_layers} layers (i enters layer i)"
    vocab = head.vocab
    yield f"- drafts {len(vocab.ids):,} of the target's {vocab.target_size:,} tokens"
    if target.revision:
        yield f"- the target is revision {target.revision} of its repository"


def data(recipe: Recipe, target_folder: Path) -> Iterator[str]:
    section = recipe.data
    if section.store is not None:
        yield f"- features: those stored in `{section.store}`"
    else:
        yield f"- prompts: `{section.prompts}`, {section.num_prompts:,} of them"
        yield responses(recipe)
    yield f"- template: {template(target_folder)}"


def responses(recipe: Recipe) -> str:
    section = recipe.data
    if section.responses == "given":
        which = "each of the assistant's turns" if section.turns == "all" else "the assistant's last turn"
        return f"- responses: as they stand in the conversations, {which}"
    temperatures = ", ".join(f"{temperature:g}" for temperature in section.temperatures)
    target = "the target" if recipe.joint.mode is None else "the target before it was tuned"
    return (
        f"- responses: written by {target} itself, at most {section.response_tokens} tokens behind prompts of at most "
        f"{section.prompt_tokens}, at temperatures {temperatures} in turn"
    )


def template(target_folder: Path) -> str:
    """The target's chat template by its digest, since a head is trained on one and served well with no other."""
    beside, config = target_folder / "chat_template.jinja", target_folder / "tokenizer_config.json"
    text = beside.read_text() if beside.is_file() else None
    if text is None and config.is_file():
        text = json.loads(config.read_text()).get("chat_template")
    if text is None:
        return "the target's tokenizer has none; prompts are continued as plain text"
    digest = hashlib.sha256(str(text).encode()).hexdigest()[:16]
    return f"the target's own for rows of messages (sha256 {digest}...); rows of plain text are continued as they are"


def training(recipe: Recipe) -> Iterator[str]:
    section = recipe.train
    rate = f"{section.learning_rate:g}"
    if section.optimizer == "muon":
        rate = f"{section.muon_learning_rate:g} (AdamW's part: {rate})"
    yield (
        f"- {section.steps:,} steps of {section.batch_size} sequences, {section.optimizer}, learning rate {rate}, "
        f"unrolled {section.unroll} times, objective {section.objective}"
    )
    if recipe.joint.mode is not None:
        yield f"- the target's layers learnt with it ({recipe.joint.mode}): it drafts for the tuned target alone"
    row = heldout_row(recipe)
    if row is None:
        yield "- held-out figures: none found"
        return
    shown = " ".join(f"{row[f'heldout/accuracy_{depth}']:.3f}" for depth in range(section.unroll))
    yield f"- held out, after step {row['step']:,}: loss {row['heldout/loss_0']:.3f}, accuracy by depth {shown}"
    lengths = [f"{row[name]:.2f} at temperature {temperature}" for name, temperature in TAUS.items() if name in row]
    if lengths:
        yield f"- accepted length then, on {section.eval_prompts} held-out prompts: {', '.join(lengths)}"


def heldout_row(recipe: Recipe) -> dict[str, Any] | None:
    """What was measured on held-out data of the weights that became the head, which need not be the last ones."""
    noted = recipe.checkpoints_dir / "exported.json"
    step = json.loads(noted.read_text())["step"] if noted.is_file() else recipe.train.steps
    rows = [json.loads(row) for row in lines_of(recipe.metrics_path)]
    return next((row for row in reversed(rows) if "heldout/loss_0" in row and row["step"] == step), None)


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line] if path.is_file() else []


def measured(recipe: Recipe, source: Path) -> str:
    """tau with its conditions, if this run's report is of this head on this target."""
    report = report_of(recipe, source)
    if report is None:
        return "Not measured. `python -m inference.report RECIPE` measures it."
    lines = ["| way | temperature | batch | prompts | tau | x plain |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    outcomes = report["outcomes"]
    plain = {(one["temperature"], one["batch"]): one["tokens_per_second"] for one in outcomes if one["way"] == "plain"}
    for one in outcomes:
        if one["way"].partition(" ")[0] in report["other_heads"]:
            continue
        ratio = one["tokens_per_second"] / plain[one["temperature"], one["batch"]]
        row = [one["way"], f"{one['temperature']:g}", str(one["batch"]), str(one["prompts"]), f"{one['tau']:.2f}"]
        lines.append("| " + " | ".join([*row, f"{ratio:.2f}"]) + " |")
    return "\n".join([*lines, "", conditions(report)])


def conditions(report: dict[str, Any]) -> str:
    recipe = report["recipe"]
    decode, prompts = recipe["decode"], recipe["report"]["prompts"] or recipe["data"]["heldout_prompts"]
    about = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    return (
        "tau is the mean number of tokens per target step, the bonus included; measured by headstart's own decoding on "
        f"prompts of `{prompts}`, at most {decode['max_new_tokens']} new tokens each, drafts {decode['growth']} to "
        f"depth {decode['depth']}, acceptance {decode['acceptance']}, target in {recipe['target']['dtype']}; {about}."
    )


def report_of(recipe: Recipe, source: Path) -> dict[str, Any] | None:
    """The run's report; None if there is none, or it is of another head, other weights or another target."""
    path, weights = recipe.report_dir / "report.json", source / MODEL
    if not path.is_file() or path.stat().st_mtime < weights.stat().st_mtime:
        return None
    report: dict[str, Any] = json.loads(path.read_text())
    head, target = report["head"], report["recipe"]["target"]["path"]
    is_same = head is not None and Path(head).resolve() == source.resolve() and target == recipe.target.path
    return report if is_same else None


def limits(recipe: Recipe, head: DraftHead, own: bool) -> Iterator[str]:
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    yield f"- context: {head.target.max_positions:,} tokens, the target's"
    if own and recipe.data.store is None:
        longest = recipe.data.prompt_tokens + recipe.data.response_tokens
        yield f"- trained on texts of at most {longest:,} tokens; how well it drafts behind longer ones is not known"
    yield f"- weights in {dtype}; an engine computes in the target's number format"
    yield "- for this target alone: another checkpoint, also a fine-tuned one, accepts fewer drafts"
