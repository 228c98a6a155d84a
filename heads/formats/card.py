"""Writes the README.md of an export: what the head is, how it was trained, what was measured, how to serve it.

The text is in card.md.jinja; this module collects its figures.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from headstart.common.files import read_growing_jsonl, read_json
from headstart.common.remote import shown
from headstart.heads.base import DraftHead
from headstart.heads.files import MODEL
from headstart.heads.formats.commands import in_python
from headstart.heads.formats.layouts import is_whole_target, serving_sections
from headstart.heads.formats.subject import ServedTarget, Violation
from headstart.recipes.schema import SELF, Recipe

TEMPLATE = Path(__file__).with_name("card.md.jinja")
LOGGED_LENGTHS = {"heldout/tau": "0", "heldout/tau_t1": "1"}  # key in the training log -> its temperature


def card(
    recipe: Recipe,
    head: DraftHead,
    target: ServedTarget,
    target_folder: Path,
    folder: Path,
    violations: dict[str, list[Violation]],
    for_transformers: bool,
) -> str:
    """The whole README.md. `violations` holds what each engine's contract finds wrong; an engine without errors gets
    its command, the others get the reasons; so does transformers if the export has code for it. The commands find the
    export in `folder`."""
    source = recipe.head_in_use
    is_own = source == recipe.head_dir
    recipe = as_trained(recipe) if is_own else recipe
    is_full_target = is_whole_target(head, recipe.export.format)
    heldout, report = heldout_row(recipe), report_of(recipe, source)
    adapter = str(recipe.target.adapter) if recipe.target.adapter else None
    # For engines a GGUF file is the folder it was unpacked into, and an adapter the folder it was merged into.
    given = replace(target, name=recipe.target.path, adapter=adapter)
    return template().render(
        recipe=recipe,
        head=head,
        kind=head.title,
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        dtype=str(next(head.parameters()).dtype).removeprefix("torch."),
        target=given,
        target_is_local=Path(given.name).expanduser().exists(),
        template_digest=template_digest(target_folder),
        source=source,
        is_own=is_own,
        store=recipe.data.store and shown(recipe.data.store),
        num_prompts=num_prompts(recipe, "train", recipe.data.num_prompts),
        heldout=heldout,
        accuracies=[value for name, value in (heldout or {}).items() if name.startswith("heldout/accuracy_")],
        lengths=acceptance_lengths(recipe),
        num_eval_prompts=min(recipe.train.eval_prompts, num_prompts(recipe, "heldout", recipe.train.eval_prompts)),
        report=report,
        measurements=[] if report is None else list(measurements(report)),
        SELF=SELF,
        is_full_target=is_full_target,
        for_transformers=for_transformers,
        serving=list(serving_sections(head, target, folder, violations)),
        can_load=recipe.export.format != "speculators" and not is_full_target,
        served=target,
        folder=folder,
    )


@cache
def template() -> Template:
    jinja = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    jinja.filters |= {"number": "{:g}".format, "shell": quote, "python": in_python}
    return jinja.from_string(TEMPLATE.read_text())


def as_trained(recipe: Recipe) -> Recipe:
    """The recipe with the head, train and data sections of the exported weights' training, as far as recorded."""
    state = recipe.checkpoints_dir / f"step-{exported(recipe).get('step', 0)}" / "state.json"
    stages = [state, *(folder / "stage.json" for folder in (recipe.prompts_dir, recipe.responses_dir))]
    inputs: dict[str, Any] = {}
    for path in stages:
        inputs |= read_json(path)["inputs"] if path.is_file() else {}
    for digest in ("data.prompts", "data.heldout_prompts"):  # of the files' content
        inputs.pop(digest, None)
    changes = {}
    for name in ("head", "train", "data"):
        section = getattr(recipe, name)
        recorded = {key: inputs[f"{name}.{key}"] for key in type(section).model_fields if f"{name}.{key}" in inputs}
        changes[name] = type(section).model_validate({**section.model_dump(), **recorded})
    return recipe.model_copy(update=changes)


def num_prompts(recipe: Recipe, split: str, asked: int) -> int:
    """The number of prompts in a split; `asked`, the recipe's number, if the stage has not recorded it."""
    stage = recipe.prompts_dir / "stage.json"
    facts = read_json(stage).get("facts", {}) if stage.is_file() else {}
    return int(facts.get(split, asked))


def template_digest(target_folder: Path) -> str | None:
    """A digest of the target's chat template: a head trained on one template drafts worse with any other."""
    separate, config = target_folder / "chat_template.jinja", target_folder / "tokenizer_config.json"
    text = separate.read_text() if separate.is_file() else None
    if text is None and config.is_file():
        text = read_json(config).get("chat_template")
    return None if text is None else hashlib.sha256(str(text).encode()).hexdigest()[:16]


def heldout_row(recipe: Recipe) -> dict[str, Any] | None:
    """The logged held-out metrics of the exported weights, which may come from an earlier step than the last."""
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


def report_of(recipe: Recipe, source: Path) -> dict[str, Any] | None:
    """The run's report; None if there is none, or if it measured another head, older weights or another target."""
    path, weights = recipe.report_dir / "report.json", source / MODEL
    if not path.is_file() or path.stat().st_mtime < weights.stat().st_mtime:
        return None
    report: dict[str, Any] = read_json(path, "make it again with headstart report RECIPE, or remove it")
    head, measured = report["head"], report["recipe"]["target"]
    target = recipe.target.model_dump(mode="json", include={"path", "adapter"})
    is_same = head is not None and Path(head).resolve() == source.resolve()
    return report if is_same and {name: measured.get(name) for name in target} == target else None


def measurements(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The figures of the head's own outcomes in a report, with the speed-up over plain decoding."""
    rows = report["outcomes"]
    plain = {(row["temperature"], row["batch"]): row["tokens_per_second"] for row in rows if row["method"] == "plain"}
    for row in rows:
        if row["method"].partition(" ")[0] not in report["other_heads"]:
            speedup = row["tokens_per_second"] / plain[row["temperature"], row["batch"]]
            yield {**row, "speedup": speedup}
