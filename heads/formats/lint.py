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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from headstart.common.errors import errors_as_messages
from headstart.heads.files import HeadFiles
from headstart.heads.formats import block_rules, config_rules, medusa_rules, tensor_rules
from headstart.heads.formats.subject import Subject, Violation, layout_of
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetOrigin, locate_target
from headstart.recipes.other_commands import OWN_FORMAT, lint_options


def main(argv: Sequence[str] | None = None) -> None:
    arguments = lint_options(__doc__, argv)
    with errors_as_messages():
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
    checked = engines or engines_of(files)
    broken = violations(files, FrozenTarget.from_folder(folder, torch.float32), checked)
    trained = TargetOrigin.from_config(files.config)
    if trained is not None and trained.is_another(now := TargetOrigin.of(folder)):
        allowed = f"--target is {now}, of other weights or another config, so that fewer drafts may be accepted"
        where = "config.json headstart.target"
        broken += [Violation(engine, "warning", where, str(trained), allowed) for engine in checked]
    return broken


# Which rules apply to which head layout on which engine: a head that breaks none is served there as it was trained.
Rule = Callable[[Subject, str], Iterator[Violation]]

SHARED: tuple[Rule, ...] = (
    config_rules.architectures,
    config_rules.layer_options,
    config_rules.one_llama_layer,
    config_rules.fits_the_target,
    config_rules.positions,
    config_rules.rope,
    tensor_rules.names_and_shapes,
    *tensor_rules.WEIGHTS,
    tensor_rules.embedding,
)
EAGLE3: tuple[Rule, ...] = (
    *SHARED,
    config_rules.gives_hidden_states,
    config_rules.draft_vocabulary,
    config_rules.norms,
    config_rules.taps,
    tensor_rules.vocabulary_map,
    tensor_rules.spelling,
)
MEDUSA: tuple[Rule, ...] = (
    medusa_rules.architecture,
    medusa_rules.counts,
    medusa_rules.hidden_size,
    medusa_rules.full_vocabulary,
    medusa_rules.bias,
    tensor_rules.names_and_shapes,
    config_rules.fits_the_target,
    *tensor_rules.WEIGHTS,
)
BLOCK: tuple[Rule, ...] = (
    config_rules.architectures,
    config_rules.layer_options,
    block_rules.block_size,
    block_rules.slot_convention,
    block_rules.causality,
    block_rules.mask_token,
    block_rules.taps,
    block_rules.own_lm_head,
    tensor_rules.names_and_shapes,
    config_rules.fits_the_target,
    config_rules.rope,
    config_rules.draft_vocabulary,
    *tensor_rules.WEIGHTS,
)
RULES: dict[str, dict[str, tuple[Rule, ...]]] = {  # layout -> engine that can serve it -> its rules
    "eagle3": {
        "vllm": EAGLE3,
        "sglang": EAGLE3,
        "tensorrt_llm": EAGLE3,
        "llama_cpp": EAGLE3,
    },
    "eagle1": dict.fromkeys(("vllm", "sglang"), (*SHARED, tensor_rules.eagle1_bias)),
    "speculators": dict.fromkeys(
        ("vllm", "speculators"), (*EAGLE3, config_rules.speculators_sections, config_rules.speculators_verifier)
    ),
    "medusa": {"vllm": MEDUSA},
    "mtp": dict.fromkeys(("vllm", "sglang"), (config_rules.fits_the_target, *tensor_rules.WEIGHTS)),
    "block": dict.fromkeys(("vllm", "sglang"), BLOCK),
    "speculators_block": dict.fromkeys(
        ("vllm", "speculators"), (*BLOCK, block_rules.draft_length, config_rules.speculators_verifier)
    ),
}


def engines_of(files: HeadFiles) -> tuple[str, ...]:
    """The engines that our export lists; for another head all that read its layout as it is."""
    named = files.config.get("headstart", {}).get("engines")
    if named is not None:
        return tuple(named)
    return tuple(engine for engine in RULES[layout_of(files)] if engine not in OWN_FORMAT)


def violations(files: HeadFiles, frozen: FrozenTarget, engines: Iterable[str]) -> list[Violation]:
    """Everything that keeps these engines from serving the head as it was trained."""
    subject = Subject(files, layout_of(files), frozen)
    broken: list[Violation] = []
    for engine in engines:
        rules = RULES[subject.layout].get(engine)
        if rules is None:
            allowed = f"{engine} cannot read {subject.layout}, only {', '.join(RULES[subject.layout])} can"
            broken.append(Violation(engine, "error", "layout", subject.layout, allowed))
        else:
            broken += [violation for rule in rules for violation in rule(subject, engine)]
    return broken
