"""Check that vLLM drafts with our exports exactly as headstart does, for every kind of head on the bundled target.

    make check-vllm
    python tests/interop/check_vllm.py path/to/vllm/bin/python [NAME ...]
    python tests/interop/check_vllm.py path/to/vllm/bin/python --saved FOLDER

Decodes the same prompts greedily with chains of draft tokens, in headstart and in vLLM. Compares the number of steps,
the number of draft tokens accepted at each depth, and both texts with what the target writes alone. Prints the table of
docs/interop.md. Exit code 1 if anything differs. With --saved the head is one that speculators saved: vLLM serves its
folder unchanged, and headstart converts it with heads.formats.convert.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from served_heads import CASES, DRAFT_TOKENS, TARGET, WORK, export_recipe, heldout_prompts

from headstart.common.files import read_jsonl
from headstart.heads.formats.convert import convert
from headstart.heads.formats.export import export
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for
from headstart.inference.core.request import Request
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate, loop_of
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

NEW_TOKENS, NUM_PROMPTS = 64, 6
TARGET_SECTION = TargetSection(path=str(TARGET), dtype="float32")


@dataclasses.dataclass(frozen=True)
class Served:
    """One comparison: the head that headstart decodes with, and the folder that vLLM serves."""

    name: str
    head: Path
    folder: Path
    method: str | None  # vLLM's speculative method; None if the folder names its target itself


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="path of a Python interpreter that has vLLM")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"heads to check, by default all: {', '.join(CASES)}")
    parser.add_argument("--saved", type=Path, help="check the head in this folder, saved by speculators, instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    prompts = [row["tokens"] for row in islice(read_jsonl(heldout_prompts()), NUM_PROMPTS)]
    alone = target_texts(prompts)
    rows, versions = [], {}
    for served in [converted(given.saved)] if given.saved else exports(given.names or list(CASES)):
        texts, counts = decode(served.head, prompts)
        theirs = in_vllm(given.python, served, prompts)
        versions = theirs["versions"]
        same = sum(text == ours == its for text, ours, its in zip(alone, texts, theirs["texts"], strict=True))
        mine = (counts.steps, counts.accepted_at_depth)
        rows.append((served.name, *mine, theirs["drafts"], theirs["accepted_at_depth"], same))
        print(*rows[-1], flush=True)  # as progress: each row takes a minute or more
    print(table(rows, len(prompts), versions))
    sys.exit(0 if all(row[1:3] == row[3:5] and row[5] == len(prompts) for row in rows) else 1)


def exports(names: list[str]) -> Iterator[Served]:
    frozen = FrozenTarget.from_folder(TARGET, torch.float32)
    for name in names:
        case = CASES[name]
        source = case.make(frozen)
        yield Served(name, source, export(export_recipe(source, case)), case.method)


def converted(folder: Path) -> Served:
    """A head that speculators saved; raises ValueError unless it drafts DRAFT_TOKENS tokens per step."""
    config = json.loads((folder / "config.json").read_text())
    tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    if tokens != DRAFT_TOKENS:
        raise ValueError(
            f"{folder} drafts {tokens} tokens per step, only {DRAFT_TOKENS} is allowed here; train a head for that many"
        )
    head = WORK / "converted"
    shutil.rmtree(head, ignore_errors=True)
    print("\n".join(convert(folder, head, str(TARGET))))
    return Served("trained by speculators", head, folder, None)


@dataclasses.dataclass
class Counts:
    """The number of steps that drafted, and in how many of them at least 1, 2, ... draft tokens were accepted."""

    steps: int = 0
    accepted_at_depth: list[int] = dataclasses.field(default_factory=lambda: [0] * DRAFT_TOKENS)

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted_at_depth) / self.steps


def target_texts(prompts: list[list[int]]) -> list[list[int]]:
    """What the target writes without draft tokens."""
    target = TargetModel.load(TARGET_SECTION, ())
    return [generate(target, prompt, NEW_TOKENS).tokens for prompt in prompts]


def decode(head: Path, prompts: list[list[int]]) -> tuple[list[list[int]], Counts]:
    """Decode in headstart with chains, counted as vLLM counts: its last step drafts beyond the last requested token."""
    frozen = FrozenTarget.from_folder(TARGET, torch.float32)
    target = TargetModel.load(TARGET_SECTION, load_head_for(head, frozen).taps)
    drafter = head_drafter(load_head_for(head, target.frozen), Dynamic.chain(DRAFT_TOKENS))
    texts, counts = [], Counts()
    for prompt in prompts:
        text: list[int] = []
        for block in loop_of(target, [Request(prompt, NEW_TOKENS + DRAFT_TOKENS + 1)], drafter).run():
            counts.steps += bool(text)  # the first token comes from the prefill
            for depth in range(len(block.tokens) - 1):
                counts.accepted_at_depth[depth] += 1
            text += block.tokens
            if len(text) >= NEW_TOKENS:
                break
        texts.append(text[:NEW_TOKENS])
    return texts, counts


def in_vllm(python: str, served: Served, prompts: list[list[int]]) -> dict[str, Any]:
    job, result = WORK / "job.json", WORK / "result.json"
    content = {
        "target": str(TARGET),
        "head": str(served.folder),
        "method": served.method,
        "draft_tokens": DRAFT_TOKENS,
        "prompts": prompts,
        "max_new_tokens": NEW_TOKENS,
        "result": str(result),
    }
    job.write_text(json.dumps(content))
    result.unlink(missing_ok=True)
    with (WORK / "vllm.log").open("a") as log:
        subprocess.run([python, "tests/interop/serve_in_vllm.py", str(job)], check=True, stdout=log, stderr=log)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def table(rows: list[tuple[Any, ...]], num_prompts: int, versions: dict[str, str]) -> str:
    lines = [
        ", ".join(f"{name} {found}" for name, found in versions.items()) + f"; {num_prompts} prompts x {NEW_TOKENS} "
        f"tokens, greedy, {DRAFT_TOKENS} draft tokens per step, float32",
        "",
        "| head | steps in headstart | accepted at depth 1, 2, ... in headstart | steps in vLLM | accepted in vLLM "
        "| texts equal to the target's |",
        "| --- | ---: | --- | ---: | --- | ---: |",
    ]
    for name, steps, accepted, drafts, theirs, same in rows:
        ours, its = " ".join(map(str, accepted)), " ".join(map(str, theirs))
        lines.append(f"| {name} | {steps} | {ours} | {drafts} | {its} | {same}/{num_prompts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
