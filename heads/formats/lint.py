"""Check a head's folder, ours or published, against what each engine's loader reads, without running the engine.

    headstart lint runs/tiny/export/vllm --target assets/demo_target
    headstart lint runs/tiny/export/vllm --target assets/demo_target --engine sglang

Mistakes in a head's files seldom raise an error in an engine; they silently cost acceptance. Each one found is a line:
engine, severity, config.json key or tensor, what the file holds, what is allowed. An error means that the engine fails
or drafts worse than the head was trained to; a warning marks a value that is correct only if the head was trained that
way. Without --engine, an export of ours is checked for the engines that its config.json names, and any other head for
every engine that reads its layout as it is. Exit code 1 if there is an error, 0 otherwise.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from headstart.heads.files import HeadFiles
from headstart.heads.formats.layouts import layout_of
from headstart.heads.formats.subject import Subject, Violation
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetOrigin, locate_target
from headstart.recipes.other_commands import OWN_FORMAT


def main(arguments: Namespace) -> None:
    broken = lint(arguments.export, arguments.target, arguments.engine)
    print("\n".join(map(str, broken)) or all_is_well(arguments.export, arguments.engine))
    sys.exit(1 if any(violation.severity == "error" for violation in broken) else 0)


def all_is_well(export: Path, engines: Sequence[str] | None) -> str:
    """The line to print if nothing was found: it names the engines that the head was checked for."""
    checked = engines or engines_of(HeadFiles.read(export))
    if not checked:
        return f"{export}: not checked, as its config.json says that no engine serves it; give one, as in --engine vllm"
    return f"{export}: all is well; nothing was found for {', '.join(checked)}"


def lint(export: Path, target: str, engines: Sequence[str] | None = None) -> list[Violation]:
    """The violations that keep these engines from serving the head as trained; by default those it is meant for."""
    files, folder = HeadFiles.read(export), locate_target(target, field="--target")
    named = engines or engines_of(files)
    broken = violations(files, FrozenTarget.from_folder(folder, torch.float32), named)
    trained = TargetOrigin.from_config(files.config)
    if trained is not None and trained.is_another(now := TargetOrigin.of(folder)):
        allowed = f"--target is {now}, of other weights or another config, so that fewer drafts may be accepted"
        broken += [Violation(each, "warning", "config.json headstart.target", str(trained), allowed) for each in named]
    return broken


def engines_of(files: HeadFiles) -> tuple[str, ...]:
    """The engines that our export lists; for another head all that read its layout as it is."""
    named = files.config.get("headstart", {}).get("engines")
    if named is not None:
        return tuple(named)
    return tuple(engine for engine in layout_of(files).rules if engine not in OWN_FORMAT)


def violations(files: HeadFiles, frozen: FrozenTarget, engines: Iterable[str]) -> list[Violation]:
    """Everything that keeps these engines from serving the head as it was trained."""
    layout = layout_of(files)
    subject = Subject(files, layout, frozen)
    broken: list[Violation] = []
    for engine in engines:
        if engine in layout.rules:
            broken += [violation for rule in layout.rules[engine] for violation in rule(subject, engine)]
        else:
            allowed = f"{engine} cannot read {layout.name}, only {', '.join(layout.rules)} can"
            broken.append(Violation(engine, "error", "layout", layout.name, allowed))
    return broken
