"""The rounds that a report has measured so far, so that the same command continues where it was killed."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from headstart.common.files import append_jsonl, read_growing_jsonl, write_jsonl
from headstart.heads.files import MODEL
from headstart.heads.target_config import locate_target
from headstart.inference.core.request import DecodeStats
from headstart.inference.report.questions import Prompt
from headstart.inference.report.rounds import Place, Round, Run
from headstart.recipes import Recipe

NAME = "measured.jsonl"  # in the report's folder until the report is written


class Setting(NamedTuple):
    """The conditions of one table of the report."""

    temperature: float
    batch: int


class Journal:
    """A file to which every finished round is added as one line; the first line says what was measured, and where."""

    def __init__(self, path: Path, made_from: Mapping[str, Any]) -> None:
        """Reuse the rounds of an earlier run of the same report; those of any other are dropped."""
        rows = read_growing_jsonl(path)
        is_same = rows[:1] == [json.loads(json.dumps(made_from))]
        rows = rows[1:] if is_same else []
        self.path, self.done = path, defaultdict[Setting, dict[Place, list[Run]]](dict)
        write_jsonl(path, [made_from, *rows])  # without a torn last line
        for row in rows:
            runs = [Run(**{**run, "stats": [DecodeStats(**stats) for stats in run["stats"]]}) for run in row["runs"]]
            self.done[Setting(row["temperature"], row["batch"])][row["number"], row["turn"]] = runs

    @property
    def num_texts(self) -> int:
        return sum(len(run.texts) for rounds in self.done.values() for runs in rounds.values() for run in runs)

    def add(self, setting: Setting, found: Round) -> None:
        place = dict(zip(("number", "turn"), found.place, strict=True))
        append_jsonl(self.path, [{**setting._asdict(), **place, "runs": [asdict(run) for run in found.runs]}])


def made_from(
    recipe: Recipe, machine: Mapping[str, Any], folders: Mapping[str, Path], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """The facts that must agree before an earlier run's figures are reused; `folders` holds the heads' by name."""
    target = locate_target(recipe.target.path, recipe.target.revision)
    weights = {path.name: path.stat() for path in sorted(target.glob("*.safetensors"))}
    return {
        "recipe": recipe.model_dump(mode="json"),
        "machine": dict(machine),
        "target": {name: [found.st_size, found.st_mtime_ns] for name, found in weights.items()},
        "heads": {name: hashlib.sha256((folder / MODEL).read_bytes()).hexdigest() for name, folder in folders.items()},
        "prompts": hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest(),
    }
