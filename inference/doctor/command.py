"""Find out why a head guesses worse than it should: a fault in its files, or in an export of it.

    headstart doctor assets/demo_head assets/demo_target
    headstart doctor runs/tiny/head assets/demo_target runs/tiny/export/vllm
    headstart doctor --bits assets/demo_target

The target continues held-out prompts greedily, and the head guesses each of the target's tokens from the true tokens
before it. The table shows how often its top guess is right, by depth: for HEAD as it was trained, and for EXPORT as its
engine interprets it. Then HEAD is measured again with each part in which EXPORT differs: taps, norms, vocabulary map,
RoPE, weights.

Each finding is one line: what was found, what would be right, what it costs, and how to fix it. The errors that lint
finds in EXPORT follow. Exit code 1 if anything is found, 0 otherwise.

With --bits, no head is examined, but whether the target computes the same bits for a token in every pass: with drafts,
next to other rows, with the prompt in other chunks, by compiled layers. The table names the operations that differ.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from headstart.common.files import read_jsonl
from headstart.heads.files import HeadFiles
from headstart.heads.formats.lint import engines_of, violations
from headstart.heads.formats.published import import_head
from headstart.heads.formats.subject import Violation
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.inference.core.request import Request
from headstart.inference.doctor.bits import TracedText, compare, in_lines, rows_of
from headstart.inference.doctor.comparison import compare_parts
from headstart.inference.doctor.findings import Finding, no_right_guess, other_target, other_template
from headstart.inference.doctor.interpretation import Interpretation, ReplayedText, accuracies
from headstart.inference.engine.budget import check_length
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.settings import refuse_outside
from headstart.inference.report.tables import rich_table
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.loading import pick_device
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import load_tokenizer
from headstart.recipes.other_commands import Options
from headstart.recipes.schema import TargetSection

PROMPT_TOKENS, NEW_TOKENS = 90, 9  # of the text whose bits are compared
MAX_DEPTH = 64  # far beyond what any head is served with
# In the folder of the run that trained the head.
PROMPTS, MANIFEST = Path("prompts/heldout.jsonl"), Path("features/manifest.json")


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and how often the top guess of HEAD and of EXPORT is right."""

    findings: list[Finding]
    errors: list[Violation]  # that lint finds in EXPORT
    trained: list[float]  # accuracy by depth
    served: list[float] | None  # None without an export, or with one that cannot be computed


def main(given: Namespace) -> None:
    arguments = vars(given)
    head, target, export = (arguments.pop(name) for name in ("head", "target", "export"))
    bits, dtype = arguments.pop("bits"), arguments.pop("dtype")
    if bits is not None:
        sys.exit(print_bits(TargetSection(path=bits, dtype=dtype, adapter=arguments["adapter"])))
    diagnosis = diagnose(head, target, export, Options(**arguments))
    levels = range(len(diagnosis.trained))
    rows = [["accuracy", *(f"depth {level + 1}" for level in levels)]]
    rows.append(["HEAD, as trained", *(f"{share:.3f}" for share in diagnosis.trained)])
    if export is not None:
        served = diagnosis.served
        rows.append(["EXPORT, as served", *("-" if served is None else f"{served[level]:.3f}" for level in levels)])
    console = Console()
    console.print(rich_table("how often the top guess is the target's choice", rows))
    found = [*diagnosis.findings, *diagnosis.errors]
    console.print("\n".join(map(str, found)) or "nothing found", highlight=False, markup=False, soft_wrap=True)
    sys.exit(1 if found else 0)


def print_bits(section: TargetSection) -> int:
    """Print which passes of a target give a token other bits than plain decoding; returns the exit code."""
    found = [*compare(TracedText.random(TargetModel.load(section, ()), PROMPT_TOKENS, NEW_TOKENS))]
    console = Console()
    console.print(rich_table("logits that have the bits of plain decoding", rows_of(found)))
    lines = [*in_lines(found)] or ["every pass gives the same bits"]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    return 0 if all(each.equal == each.positions for each in found) else 1


def diagnose(head: Path, target_name: str, export: Path | None, options: Options) -> Diagnosis:
    """Find the faults of a head and of its export; ValueError for a file or option that cannot be used."""
    if options.depth > MAX_DEPTH:
        raise ValueError(f"--depth: {options.depth} given, 1 to {MAX_DEPTH} is allowed; lower it")
    files, folder = HeadFiles.read(head), locate_target(target_name, field="TARGET", adapter=options.adapter)
    ends = FrozenTarget.from_folder(folder, torch.float32)
    import_head(files, ends)  # refuses files that make no head
    trained, served, errors = Interpretation.trained(files, ends), None, list[Violation]()
    if export is not None:
        export_files = HeadFiles.read(export)
        engine = options.engine or next(iter(engines_of(export_files)), "vllm")
        served = Interpretation.served(export_files, ends, engine)
        errors = [each for each in violations(export_files, ends, [engine]) if each.severity == "error"]
    prompts = held_out(head, folder, options)
    taps = {*trained.taps, *(served.taps if served else ())}
    target = load_target(folder, tuple(sorted(tap for tap in taps if 0 <= tap <= ends.config.num_layers)))
    replays = replay(target, prompts, options.new_tokens)
    measure = partial(accuracies, replays=replays, frozen=target.frozen, depth=options.depth)

    accuracy = measure(trained)
    findings = [*no_right_guess(head, accuracy, sum(each.text.shape[1] - each.prompt for each in replays))]
    findings += other_target(files, folder)
    findings += other_template(head.parent / MANIFEST, folder)
    if served is None:
        return Diagnosis(findings, errors, accuracy, None)
    findings += compare_parts(trained, served, measure)
    try:
        return Diagnosis(findings, errors, accuracy, measure(served))
    except ValueError:  # the findings say why it cannot be computed
        return Diagnosis(findings, errors, accuracy, None)


def held_out(head: Path, target: Path, options: Options) -> list[list[int]]:
    """The prompts to replay, as tokens; raises ValueError if there are none."""
    paths = [options.samples] if options.samples else [head.parent / PROMPTS, target / "heldout_prompts.jsonl"]
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        names = " and ".join(map(str, paths))
        raise ValueError(f"--samples: {names} not found; name a JSONL file whose rows have tokens or prompt")
    vocab_size, prompts = TargetConfig.from_folder(target).vocab_size, list[list[int]]()
    without_images = (row for row in read_jsonl(path) if "images" not in row)
    for number, row in enumerate(islice(without_images, options.count), start=1):
        advice = "encode the text with TARGET's tokenizer, or give it as prompt"
        tokens = row.get("tokens")
        if isinstance(row.get("prompt"), str) and not isinstance(tokens, list):
            advice = "the tokenizer in TARGET is another model's, copy the right one; or this prompt has no text"
            tokens = ChatTemplate(load_tokenizer(target)).prompt_tokens(row["prompt"])
        if not isinstance(tokens, list):
            raise ValueError(f"{path}: row {number} has {sorted(row)}; give it tokens (a list) or prompt (text)")
        refuse_outside(f"{path}: row {number}: tokens", tokens, vocab_size, advice)
        if not tokens:
            raise ValueError(
                f"{path}: row {number}: tokens are empty, at least one token id is allowed; leave the row out"
            )
        prompts.append(tokens)
    if not prompts:
        raise ValueError(f"--samples: {path} is empty; a row with tokens or prompt is required: add at least one")
    return prompts


def load_target(folder: Path, taps: tuple[int, ...]) -> TargetModel:
    """Load in float32 on a CPU, so that near-ties do not flip; in bfloat16 on a GPU, so that large targets fit."""
    dtype: Any = "float32" if pick_device("auto").type == "cpu" else "bfloat16"
    return TargetModel.load(TargetSection(path=str(folder), dtype=dtype), taps)


def replay(target: TargetModel, prompts: list[list[int]], new_tokens: int) -> list[ReplayedText]:
    """Continue each prompt greedily, and keep the target's hidden states of the full text."""
    for prompt in prompts:
        check_length(target, prompt, new_tokens, "--new-tokens")
    replays = []
    responses = generate_batch(target, [Request(prompt, new_tokens) for prompt in prompts])
    for prompt, generation in zip(prompts, responses, strict=True):
        text = torch.tensor([prompt + generation.tokens], device=target.device)
        states = target.passes.forward(text[:, :-1], last_only=True).taps.split(target.config.hidden_size, dim=-1)
        replays.append(ReplayedText(text, len(prompt), dict(zip(target.taps, states, strict=True))))
    return replays
