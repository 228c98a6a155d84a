"""Findings of the doctor, one line each, and those that need no measurement: files, chat template, context length."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.heads.files import HeadFiles
from headstart.heads.formats import config_rules, tensor_rules
from headstart.heads.formats.kinds.registry import layout_of
from headstart.heads.formats.lint import violations
from headstart.heads.formats.subject import Subject, Violation
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import SMOLLM2_SOURCES, TargetOrigin
from headstart.inference.targets.tokenizer import load_tokenizer

MIN_ACCURACY = 0.02  # a head below it is untrained, damaged or made for another target
CATEGORIES = {  # finding -> words in the place or text of a contract violation; the first match counts
    "context length": ("max_position_embeddings",),
    "dtype": ("finite numbers", "floating-point format"),
    "files": ("target_rope", "config.json vocab_size"),  # made for another target
    "taps": ("aux_hidden_state", "target_layer_ids"),
    "slots": ("sample_from_anchor", "block_size", "mask_token_id"),
    "RoPE base": ("rope",),
    "norm": ("norm",),
    "vocabulary map": ("d2t", "t2d", "token_map", "vocab_size"),
}


@dataclass(frozen=True)
class Finding:
    """One fault: what was found, what would be right, what it costs, and how to fix it."""

    category: str
    found: str
    right: str
    cost: str
    advice: str

    def __str__(self) -> str:
        return f"{self.category}: {self.found}; right: {self.right}; cost: {self.cost}; fix: {self.advice}"


def largest_loss(right: list[float], wrong: list[float]) -> str:
    """The accuracy at the depth that loses most, in words."""
    level = max(range(len(right)), key=lambda level: right[level] - wrong[level])
    return f"accuracy at depth {level + 1} is {wrong[level]:.2f} instead of {right[level]:.2f}"


def as_finding(violation: Violation, folder: Path) -> Finding:
    text = f"{violation.where} {violation.allowed}" if violation.where.startswith("tensor") else violation.where
    category = next((name for name, words in CATEGORIES.items() if any(word in text for word in words)), "files")
    found = f"{folder.name}: {violation.where} is {str(violation.value)[:60]}"
    cost = "not measured, found by inspecting the files"
    return Finding(category, found, violation.allowed, cost, f"correct the files in {folder}")


def head_violations(files: HeadFiles, frozen: FrozenTarget) -> list[Finding]:
    """Faults in a head's files that matter in every engine."""
    subject = Subject(files, layout_of(files), frozen)
    rules = tensor_rules.finite, tensor_rules.number_formats, config_rules.fits_the_target, *subject.layout.head_rules
    return [as_finding(violation, files.folder) for rule in rules for violation in rule(subject, "any engine")]


def export_violations(files: HeadFiles, frozen: FrozenTarget, engine: str) -> list[Finding]:
    """Errors that the engine's contract finds in an export."""
    found = violations(files, frozen, [engine])
    return [as_finding(violation, files.folder) for violation in found if violation.severity == "error"]


def with_unmeasured(measured: list[Finding], by_files: list[Finding]) -> list[Finding]:
    """The measured findings, then those from the files in categories without a finding so far; all of `files`."""
    kept, seen = list(measured), {finding.category for finding in measured}
    for finding in by_files:
        if finding.category not in seen or finding.category == "files":
            kept.append(finding)
            seen.add(finding.category)
    return kept


def no_right_guess(folder: Path, accuracy: Sequence[float], tokens: int) -> Iterator[Finding]:
    """Yield a finding if next to no guess is right, so that every draft token would be rejected."""
    if max(accuracy) < MIN_ACCURACY:
        shown = ", ".join(f"{value:.3f}" for value in accuracy)
        found = f"{folder.name} guesses next to no token right: {shown} of {tokens}"
        right = f"{MIN_ACCURACY:g} or more at some depth, which any head trained for TARGET reaches"
        cost = "every draft token is rejected, and decoding is slower than without the head"
        advice = "name the target that it was trained for, copy its files again, or train it"
        yield Finding("accuracy", found, right, cost, advice)


def other_target(files: HeadFiles, target: Path) -> Iterator[Finding]:
    """Yield a finding if the head records that it was trained for other weights than those of the target at hand."""
    trained, now = TargetOrigin.from_config(files.config), TargetOrigin.of(target)
    if trained is not None and trained.is_another(now):
        right = f"{trained}, for which {files.folder.name} was trained"
        cost = "not measured; these weights write other texts, so fewer draft tokens are accepted"
        yield Finding("target", f"TARGET is {now}", right, cost, advice_on(trained))


def advice_on(trained: TargetOrigin) -> str:
    """How to bring a head and the target that it was trained for together."""
    fit = "fit the head to this one with headstart calibrate RECIPE, or train a head for it with headstart train RECIPE"
    for source, words in SMOLLM2_SOURCES.items():
        if (trained.source or "").startswith(words):
            return f"fetch that target with headstart smollm2 NEW_FOLDER --source {source} and name it, or {fit}"
    return f"name that target, or {fit}"


def other_template(named: Path | None, own: Path, target: Path) -> Iterator[Finding]:
    """Yield a finding if the head was trained with another chat template than the target's tokenizer has now.

    The manifest of the training features says with which: the one that is named, else the run's own if it is there.
    """
    manifest = named or own
    if not manifest.is_file():
        if named is not None:
            raise ValueError(f"--manifest: {named} not found; name the manifest.json in a folder of features")
        return
    try:
        trained = dict(json.loads(manifest.read_text())).get("chat_template_sha256")
    except (ValueError, TypeError) as error:
        required = "the manifest.json in a folder of features is required: name another, or harvest again"
        raise ValueError(f"--manifest: {manifest} is no JSON object ({error}); {required}") from error
    now = hashlib.sha256(str(load_tokenizer(target).chat_template).encode()).hexdigest()
    if trained is not None and trained != now:
        found = f"TARGET's chat template has hash {now[:12]}"
        right = f"hash {trained[:12]}, which {manifest} records for training"
        cost = "not measured; every conversation starts differently from those the head was trained on"
        advice = "restore TARGET's chat template, or harvest and train again"
        yield Finding("template", found, right, cost, advice)
