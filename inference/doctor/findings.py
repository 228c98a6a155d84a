"""Findings of the doctor, one line each, and those that compare no export: accuracy, target, chat template."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.common.files import read_json
from headstart.heads.files import HeadFiles
from headstart.heads.target_config import SMOLLM2_SOURCES, TargetOrigin
from headstart.inference.targets.tokenizer import load_tokenizer

MIN_ACCURACY = 0.02  # a head below it is untrained, damaged or made for another target


@dataclass(frozen=True)
class Finding:
    """One fault: what was found, what would be right, how to fix it, and what it costs."""

    category: str
    found: str
    right: str
    advice: str
    cost: str

    def __str__(self) -> str:
        return f"{self.category}: {self.found}; right: {self.right}; cost: {self.cost}; fix: {self.advice}"


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


def other_template(manifest: Path, target: Path) -> Iterator[Finding]:
    """Yield a finding if the manifest of the training features records another chat template than TARGET's."""
    if not manifest.is_file():
        return
    trained = read_json(manifest, "harvest again").get("chat_template_sha256")
    now = hashlib.sha256(str(load_tokenizer(target).chat_template).encode()).hexdigest()
    if trained not in (None, now):
        found = f"TARGET's chat template has hash {now[:12]}"
        right = f"hash {trained[:12]}, which {manifest} records for training"
        advice = "restore TARGET's chat template, or harvest and train again"
        cost = "not measured; every conversation starts differently from those the head was trained on"
        yield Finding("template", found, right, advice, cost)
