"""What the doctor finds, a line each; and what is found without measuring anything: by files, template and length."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from heads.formats import config_rules, tensor_rules
from heads.formats.contracts import violations
from heads.formats.files import HeadFiles
from heads.formats.subject import MEDUSA, Subject, layout_of
from heads.formats.violation import Violation
from heads.frozen import FrozenTarget
from inference.doctor.reading import Reading
from inference.target.tokenizer import load_tokenizer

CATEGORIES = (  # what the place or text of a breach holds -> its category
    ("max_position_embeddings", "context length"),
    ("finite numbers", "dtype"),
    ("aux_hidden_state", "taps"),
    ("rope", "RoPE base"),
    ("norm", "norm"),
    ("d2t", "vocabulary map"),
    ("t2d", "vocabulary map"),
    ("token_map", "vocabulary map"),
    ("vocab_size", "vocabulary map"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    category: str
    found: str
    right: str
    cost: str
    advice: str

    def __str__(self) -> str:
        return f"{self.category}: {self.found}; right: {self.right}; cost: {self.cost}; to do: {self.advice}"


def drop(right: list[float], wrong: list[float]) -> str:
    """The depth that loses most."""
    level = max(range(len(right)), key=lambda level: right[level] - wrong[level])
    return f"accuracy at depth {level + 1} {right[level]:.2f} -> {wrong[level]:.2f}"


def category_of(breach: Violation) -> str:
    text = f"{breach.where} {breach.allowed}" if "finite numbers" in breach.allowed else breach.where
    return next((category for word, category in CATEGORIES if word in text), "files")


def as_finding(breach: Violation, folder: Path) -> Finding:
    found = f"{folder.name}: {breach.where} is {str(breach.value)[:60]}"
    return Finding(category_of(breach), found, breach.allowed, "not measured, named by the files", f"mend {folder}")


def head_breaches(files: HeadFiles, frozen: FrozenTarget) -> list[Finding]:
    """What keeps a head from drafting as it should wherever it runs, by its files alone."""
    subject = Subject(files, layout_of(files), frozen)
    rules: list[Callable[[Subject, str], Iterator[Violation]]] = [tensor_rules.finite]
    if subject.layout not in MEDUSA:
        rules += [config_rules.fits_the_target, tensor_rules.names_and_shapes]
    if subject.kind == "eagle3":
        rules.append(tensor_rules.vocabulary_map)
    return [as_finding(breach, files.folder) for rule in rules for breach in rule(subject, "any engine")]


def export_breaches(files: HeadFiles, frozen: FrozenTarget, engine: str) -> list[Finding]:
    """What the engine's contract has against an export."""
    breaches = violations(files, frozen, [engine])
    return [as_finding(breach, files.folder) for breach in breaches if breach.severity == "error"]


def named_once(measured: list[Finding], by_files: list[Finding]) -> list[Finding]:
    """What was measured, and of the files what no measurement has named; one line for each category."""
    kept, seen = list(measured), {finding.category for finding in measured}
    for finding in by_files:
        if finding.category not in seen or finding.category == "files":
            kept.append(finding)
            seen.add(finding.category)
    return kept


def other_template(manifest: Path, target: Path) -> Iterator[Finding]:
    """Was the head trained on conversations in another template than the target's tokenizer has now?"""
    trained = json.loads(manifest.read_text()).get("chat_template_sha256")
    now = hashlib.sha256(str(load_tokenizer(target).chat_template).encode()).hexdigest()
    if trained is not None and trained != now:
        advice = "give TARGET its template back, or harvest and train again"
        found = f"TARGET's chat template has the hash {now[:12]}"
        cost = "not measured: every conversation begins otherwise than those trained on"
        yield Finding("template", found, f"{trained[:12]}, as {manifest} says", cost, advice)


def beyond(reading: Reading, lengths: Sequence[int]) -> str | None:
    """Share of the replayed tokens that lie behind the positions that config.json gives the head."""
    limit = reading.config.get("max_position_embeddings")
    if not isinstance(limit, int) or max(lengths) <= limit:
        return None
    share = sum(max(length - limit, 0) for length in lengths) / sum(lengths)
    return f"{share:.0%} of the replayed tokens stand behind position {limit}"
