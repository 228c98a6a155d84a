"""Findings of the doctor, one line each, and those that need no measurement: files, target, chat template."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.common.errors import named_errors
from headstart.common.files import read_json
from headstart.heads.files import HeadFiles
from headstart.heads.formats import config_rules, tensor_rules
from headstart.heads.formats.kinds.registry import layout_of
from headstart.heads.formats.lint import violations
from headstart.heads.formats.subject import Subject, Violation
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import SMOLLM2_SOURCES, TargetOrigin
from headstart.inference.targets.tokenizer import load_tokenizer

MIN_ACCURACY = 0.02  # a head below it is untrained, damaged or made for another target
CATEGORIES = {  # finding -> words in the location or text of a violation that lint finds; the first match counts
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
    """One fault: what was found, what would be right, how to fix it, and what it costs."""

    category: str
    found: str
    right: str
    advice: str
    cost: str = "not measured, found by inspecting the files"

    def __str__(self) -> str:
        return f"{self.category}: {self.found}; right: {self.right}; cost: {self.cost}; fix: {self.advice}"


def head_violations(files: HeadFiles, frozen: FrozenTarget) -> list[Finding]:
    """Faults in a head's files that matter in every engine."""
    subject = Subject(files, layout_of(files), frozen)
    rules = tensor_rules.finite, tensor_rules.number_formats, config_rules.fits_the_target, *subject.layout.head_rules
    return [as_finding(violation, files.folder) for rule in rules for violation in rule(subject, "any engine")]


def export_violations(files: HeadFiles, frozen: FrozenTarget, engine: str) -> list[Finding]:
    """Errors that lint finds in an export."""
    errors = [each for each in violations(files, frozen, [engine]) if each.severity == "error"]
    return [as_finding(violation, files.folder) for violation in errors]


def as_finding(violation: Violation, folder: Path) -> Finding:
    text = f"{violation.where} {violation.allowed}" if violation.where.startswith("tensor") else violation.where
    category = next((name for name, words in CATEGORIES.items() if any(word in text for word in words)), "files")
    found = f"{folder.name}: {violation.where} is {str(violation.value)[:60]}"
    return Finding(category, found, violation.allowed, f"correct the files in {folder}")


def with_unmeasured(measured: list[Finding], by_files: list[Finding]) -> list[Finding]:
    """The measured findings, then the others: all of category files, and the first of each category without one."""
    findings = list(measured)
    for finding in by_files:
        if finding.category == "files" or finding.category not in {each.category for each in findings}:
            findings.append(finding)
    return findings


def no_right_guess(folder: Path, accuracy: Sequence[float], tokens: int) -> Iterator[Finding]:
    """Yield a finding if next to no guess is right, so that every draft token would be rejected."""
    if max(accuracy) < MIN_ACCURACY:
        shares = ", ".join(f"{value:.3f}" for value in accuracy)
        found = f"{folder.name} guesses next to no token right: {shares} of {tokens}"
        right = f"{MIN_ACCURACY:g} or more at some depth, which any head trained for TARGET reaches"
        advice = "name the target that it was trained for, copy its files again, or train it"
        cost = "every draft token is rejected, and decoding is slower than without the head"
        yield Finding("accuracy", found, right, advice, cost)


def other_target(files: HeadFiles, target: Path) -> Iterator[Finding]:
    """Yield a finding if the head records that it was trained for other weights than TARGET's."""
    trained, now = TargetOrigin.from_config(files.config), TargetOrigin.of(target)
    if trained is not None and trained.is_another(now):
        advice = "name that target"
        for source, words in SMOLLM2_SOURCES.items():
            if (trained.source or "").startswith(words):
                advice = f"fetch that target with headstart smollm2 NEW_FOLDER --source {source} and name it"
        advice += (
            ", or fit the head to this one with headstart calibrate RECIPE, or train a head with headstart train RECIPE"
        )
        right = f"{trained}, for which {files.folder.name} was trained"
        cost = "not measured; these weights write other texts, so fewer draft tokens are accepted"
        yield Finding("target", f"TARGET is {now}", right, advice, cost)


def other_template(named: Path | None, default: Path, target: Path) -> Iterator[Finding]:
    """Yield a finding if the manifest of the training features records another chat template than TARGET's."""
    manifest = named or default
    if named is not None and not named.is_file():
        raise ValueError(f"--manifest: {named} not found; name the manifest.json in a folder of features")
    if not manifest.is_file():
        return
    remedy = "name the manifest.json in a folder of features, or harvest again"
    with named_errors("--manifest"):
        content = read_json(manifest, remedy)
        if not isinstance(content, dict):
            raise ValueError(f"{manifest} is not a JSON object, one is required: {remedy}")
    trained = content.get("chat_template_sha256")
    now = hashlib.sha256(str(load_tokenizer(target).chat_template).encode()).hexdigest()
    if trained not in (None, now):
        found = f"TARGET's chat template has hash {now[:12]}"
        right = f"hash {trained[:12]}, which {manifest} records for training"
        advice = "restore TARGET's chat template, or harvest and train again"
        cost = "not measured; every conversation starts differently from those the head was trained on"
        yield Finding("template", found, right, advice, cost)
