"""Find where a head's acceptance is lost: replay held-out samples, as it was trained and as it is served.

    python -m inference.doctor assets/demo_head assets/demo_target
    python -m inference.doctor runs/tiny/head assets/demo_target runs/tiny/export/vllm

The target writes on from held-out prompts; the head guesses each of its tokens from the true ones before it. What may
be wrong is tried one thing at a time: the parts in which EXPORT differs from HEAD, and other readings of HEAD's files.
Prints accuracy per depth, then one line for each finding: what was found, what is right, what it costs, what to do.
Exit code 1 if anything is found, 0 otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from heads.formats.contracts import ENGINES, engines_of
from heads.formats.files import HeadFiles
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from inference.decode import check_length, generate_batch
from inference.doctor.export_parts import compare_parts
from inference.doctor.findings import Finding, beyond, export_breaches, head_breaches, named_once, other_template
from inference.doctor.other_readings import better_readings, number_format
from inference.doctor.reading import Measure, Reading, Replay, accuracies
from inference.report.tables import rich_table
from inference.request import Request
from inference.target.model import TargetModel, pick_device
from inference.target.tokenizer import load_tokenizer
from recipes.command_line import command_name
from recipes.jsonl import read_jsonl
from recipes.schema import TargetSection

PROMPTS, MANIFEST = Path("prompts/heldout.jsonl"), Path("features/manifest.json")  # of the run that a head belongs to


@dataclass(frozen=True)
class Options:
    """How much is replayed."""

    samples: Path | None = None  # JSONL; None: the run's held-out prompts, else the target's
    manifest: Path | None = None  # of the run's features; None: beside the head, if there
    count: int = 8
    new_tokens: int = 64
    depth: int = 4
    engine: str | None = None  # that reads EXPORT; None: the first that it is meant for


@dataclass(frozen=True)
class Diagnosis:
    findings: list[Finding]
    trained: list[float]  # accuracy per depth
    served: list[float] | None  # None without an export, and for one that cannot be computed


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("head", type=Path, help="folder of the head as it was trained")
    parser.add_argument("target", help="folder or hub name of the model that it drafts for")
    parser.add_argument("export", type=Path, nargs="?", help="folder of the head as it is served")
    parser.add_argument("--samples", type=Path, help="JSONL of held-out prompts, rows with tokens or prompt")
    parser.add_argument("--manifest", type=Path, help="manifest.json of the features that the head was trained on")
    parser.add_argument("--count", type=int, default=Options.count, help="prompts to replay")
    parser.add_argument("--new-tokens", type=int, default=Options.new_tokens, help="that the target writes to each")
    parser.add_argument("--depth", type=int, default=Options.depth, help="guesses to look at")
    parser.add_argument("--engine", choices=ENGINES, help="that serves EXPORT; the first that it is meant for")
    given = vars(parser.parse_args(argv))
    head, target, export = given.pop("head"), given.pop("target"), given.pop("export")
    try:
        found = diagnose(head, target, export, Options(**given))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    console = Console()
    levels = [f"depth {level + 1}" for level in range(len(found.trained))]
    rows = [["accuracy", *levels], ["HEAD, as trained", *(f"{value:.3f}" for value in found.trained)]]
    if export is not None:
        served = ["-"] * len(levels) if found.served is None else [f"{value:.3f}" for value in found.served]
        rows.append(["EXPORT, as served", *served])
    console.print(rich_table("share of guesses that are the target's choice", rows))
    for finding in found.findings:
        console.print(str(finding), highlight=False, markup=False, soft_wrap=True)
    if not found.findings:
        console.print("nothing found")
    sys.exit(1 if found.findings else 0)


def diagnose(head: Path, target_name: str, export: Path | None, options: Options) -> Diagnosis:
    """Everything that is wrong with a head, and with what was exported of it.

    Raises ValueError for what cannot be read or replayed, naming it.
    """
    for name in ("count", "new_tokens", "depth"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: {getattr(options, name)} given, 1 or more is allowed")
    files, folder = HeadFiles.read(head), locate_target(target_name)
    prompts = held_out(head, folder, options)
    ends = FrozenTarget.from_folder(folder, torch.float32)
    reading, by_files = Reading.trained(files, ends), head_breaches(files, ends)
    served, served_by_files = None, []
    if export is not None:
        export_files = HeadFiles.read(export)
        engine = options.engine or next(iter(engines_of(export_files)), "vllm")
        served, served_by_files = (
            Reading.served(export_files, ends, engine),
            export_breaches(export_files, ends, engine),
        )
    target = load_target(folder, taps_to_try(reading, served, ends.config.num_layers))
    replays = replay(target, prompts, options.new_tokens)
    measure = partial(accuracies, replays=replays, frozen=target.frozen, depth=options.depth)

    try:
        trained = measure(reading)
    except ValueError:
        if not by_files:
            raise
        return Diagnosis(by_files, [], None)
    tokens = sum(one.text.shape[1] - one.prompt for one in replays)
    measured = [*better_readings(reading, target.frozen, measure, tokens), *number_format(reading, measure)]
    found = [*template_findings(head, folder, options), *named_once(measured, by_files)]
    if served is None:
        return Diagnosis(with_lengths(found, replays, reading), trained, None)
    differences = list(compare_parts(reading, served, measure))
    inherited = {(finding.category, finding.right) for finding in by_files}
    own = [finding for finding in served_by_files if (finding.category, finding.right) not in inherited]
    found = with_lengths(found, replays, reading)
    found += with_lengths(named_once(differences, own), replays, served)
    return Diagnosis(found, trained, measured_if_possible(served, measure))


def held_out(head: Path, target: Path, options: Options) -> list[list[int]]:
    """Tokens of the prompts to replay; raises ValueError where there are none."""
    places = [options.samples] if options.samples else [head.parent / PROMPTS, target / "heldout_prompts.jsonl"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        looked = " and ".join(map(str, places))
        raise ValueError(f"--samples: {looked} not found; name a JSONL file of rows with tokens or prompt")
    prompts, tokenizer = [], None
    for number, row in enumerate(islice(read_jsonl(path), options.count), start=1):
        if isinstance(row.get("tokens"), list):
            prompts.append(row["tokens"])
        elif isinstance(row.get("prompt"), str):
            tokenizer = tokenizer or load_tokenizer(target)
            prompts.append(list(tokenizer(row["prompt"])["input_ids"]))
        else:
            raise ValueError(f"{path} row {number} has {sorted(row)}; tokens (a list) or prompt (text) is allowed")
    if not prompts:
        raise ValueError(f"{path} holds no row; give at least one prompt")
    return prompts


def taps_to_try(reading: Reading, served: Reading | None, last: int) -> tuple[int, ...]:
    """All hidden states that some reading may ask for, as far as the target has them."""
    wanted = {tap + by for tap in reading.taps for by in (-1, 0, 1)} | set(served.taps if served else ())
    return tuple(sorted(tap for tap in wanted if 0 <= tap <= last))


def load_target(folder: Path, taps: tuple[int, ...]) -> TargetModel:
    """In float32 on a CPU, so that no near-tie flips; in bfloat16 on a GPU, so that large ones fit."""
    dtype: Any = "float32" if pick_device("auto").type == "cpu" else "bfloat16"
    return TargetModel.load(TargetSection(path=str(folder), dtype=dtype), taps)


def replay(target: TargetModel, prompts: list[list[int]], new_tokens: int) -> list[Replay]:
    """What the target writes to each prompt, greedily, and its hidden states while it reads that."""
    for prompt in prompts:
        check_length(target, prompt, new_tokens)
    replays = []
    written = generate_batch(target, [Request(prompt, new_tokens) for prompt in prompts])
    for prompt, generation in zip(prompts, written, strict=True):
        text = torch.tensor([prompt + generation.tokens], device=target.device)
        states = target.forward(text[:, :-1], last_only=True).taps.split(target.config.hidden_size, dim=-1)
        replays.append(Replay(text, len(prompt), dict(zip(target.taps, states, strict=True))))
    return replays


def template_findings(head: Path, target: Path, options: Options) -> list[Finding]:
    """By the manifest of the features, where there is one; raises ValueError for one that was named and is missing."""
    path = options.manifest or head.parent / MANIFEST
    if path.is_file():
        return list(other_template(path, target))
    if options.manifest is not None:
        raise ValueError(f"--manifest: {path} not found; name the manifest.json of a folder of features")
    return []


def with_lengths(found: list[Finding], replays: list[Replay], reading: Reading) -> list[Finding]:
    """What a short context costs in these texts."""
    cost = beyond(reading, [one.text.shape[1] for one in replays]) or "nothing in texts as short as the replayed ones"
    return [replace(one, cost=cost) if one.category == "context length" else one for one in found]


def measured_if_possible(reading: Reading, measure: Measure) -> list[float] | None:
    """None for an export that cannot be computed, which its findings say."""
    try:
        return measure(reading)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
