"""Check that vLLM drafts with our exports exactly as headstart does, for every kind of head on the bundled target.

    make check-vllm
    python tests/interop/check_vllm.py path/to/vllm/bin/python [NAME ...]

Decodes the same prompts greedily with chains of draft tokens, in headstart and in vLLM. Compares the number of steps,
the number of draft tokens accepted at each depth, and both texts with what the target writes alone. Prints the table of
docs/interop.md. Exit code 1 if anything differs.
"""

import argparse
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from served_heads import CASES, DRAFT_TOKENS, TARGET, WORK, Case, export_recipe, heldout_prompts

from headstart.common.files import read_jsonl
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="path of a Python interpreter that has vLLM")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"heads to check, by default all: {', '.join(CASES)}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    prompts = [row["tokens"] for row in islice(read_jsonl(heldout_prompts()), NUM_PROMPTS)]
    alone = target_texts(prompts)
    rows, versions = [], {}
    frozen = FrozenTarget.from_folder(TARGET, torch.float32)
    for name in given.names or list(CASES):
        source = CASES[name].make(frozen)
        texts, *mine = decode(source, prompts)
        theirs = in_vllm(given.python, export(export_recipe(source, CASES[name])), CASES[name], prompts)
        versions = theirs["versions"]
        same = sum(text == ours == its for text, ours, its in zip(alone, texts, theirs["texts"], strict=True))
        rows.append((name, *mine, theirs["drafts"], theirs["accepted_at_depth"], same))
        print(*rows[-1], flush=True)  # as progress: each row takes a minute or more
    print(table(rows, len(prompts), versions))
    sys.exit(0 if all(row[1:3] == row[3:5] and row[5] == len(prompts) for row in rows) else 1)


def target_texts(prompts: list[list[int]]) -> list[list[int]]:
    """What the target writes without draft tokens."""
    target = TargetModel.load(TARGET_SECTION, ())
    return [generate(target, prompt, NEW_TOKENS).tokens for prompt in prompts]


def decode(head: Path, prompts: list[list[int]]) -> tuple[list[list[int]], int, list[int]]:
    """Decode in headstart with chains, counted as vLLM counts: its last step drafts beyond the last requested token.

    Returns the texts, the number of steps that drafted, and in how many at least 1, 2, ... draft tokens were accepted.
    """
    frozen = FrozenTarget.from_folder(TARGET, torch.float32)
    target = TargetModel.load(TARGET_SECTION, load_head_for(head, frozen).taps)
    drafter = head_drafter(load_head_for(head, target.frozen), Dynamic.chain(DRAFT_TOKENS))
    texts, steps, accepted = [], 0, [0] * DRAFT_TOKENS
    for prompt in prompts:
        text: list[int] = []
        for block in loop_of(target, [Request(prompt, NEW_TOKENS + DRAFT_TOKENS + 1)], drafter).run():
            steps += bool(text)  # the first token comes from the prefill
            for depth in range(len(block.tokens) - 1):
                accepted[depth] += 1
            text += block.tokens
            if len(text) >= NEW_TOKENS:
                break
        texts.append(text[:NEW_TOKENS])
    return texts, steps, accepted


def in_vllm(python: str, folder: Path, case: Case, prompts: list[list[int]]) -> dict[str, Any]:
    job, result = WORK / "job.json", WORK / "result.json"
    content = {"target": str(TARGET), "head": str(folder), "method": case.method, "parallel": case.parallel}
    content |= {"draft_tokens": DRAFT_TOKENS, "prompts": prompts, "max_new_tokens": NEW_TOKENS, "result": str(result)}
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
