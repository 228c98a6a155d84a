"""Run every documented command in a fresh clone with a fresh environment, in tiny form: part of each release.

    make walk

The clone is that of the last commit. Its recipes get tiny sizes, large targets become the bundled one, and the commands
are then typed as the documents have them. Each gets a log in runs/walk; a table of commands, seconds and results closes
the walk and is written to runs/walk/table.md. Exit code 1 if a command fails or prints a traceback. walk_plan.py says
how each command is made tiny, and which ones are left to be run by hand.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documented_commands import ROOT, documented_commands
from walk_plan import PREPARED, Walked, outputs, plan, shrink_recipe

LOGS = ROOT / "runs/walk"
LIMIT = 1200  # seconds for one command
# Exit code 1 says that something was found; the command did not fail.
FINDINGS = r"\bdoctor |\btarget_families\.py "
# Instead of all tests, which `make test` runs on every change.
TESTS = "tests/inference/core/test_tree.py tests/laws/test_layout.py"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Result:
    walked: Walked
    seconds: float
    failure: str  # empty if all is well


def main() -> None:
    walked = plan(documented_commands())
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    results = []
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "headstart"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=clone, text=True).strip()
        prepare(clone)
        to_run = [each for each in walked if not each.reason]
        for number, each in enumerate(with_preparations(to_run), start=1):
            results.append(run(each, clone, LOGS / f"{number:03d}.log"))
            print(f"{results[-1].seconds:6.1f} s  {results[-1].failure or 'ok':10}  {shown(each)}", flush=True)
    text = table(commit, results, [each for each in walked if each.reason])
    (LOGS / "table.md").write_text(text)
    print(text)
    sys.exit(1 if any(result.failure for result in results) else 0)


def prepare(clone: Path) -> None:
    """Make the recipes tiny, and put down the files that they and the documents name."""
    for path in clone.glob("recipes/*.yaml"):
        shrink_recipe(path)
    rows = [json.loads(line) for line in (clone / "assets/demo_target/heldout_prompts.jsonl").open()]
    texts = [row["prompt"] for row in rows]
    write_rows(clone / "data/prompts.jsonl", [{"prompt": text} for text in texts[:24]])
    write_rows(clone / "data/heldout_prompts.jsonl", [{"prompt": text} for text in texts[24:36]])
    questions = [{"question_id": n, "category": "code", "turns": [text]} for n, text in enumerate(texts[36:40])]
    write_rows(clone / "question.jsonl", questions)


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_preparations(walked: list[Walked]) -> list[Walked]:
    """The undocumented commands run right before the first documented one that reads stores."""
    first = next(number for number, each in enumerate(walked) if " store " in each.command)
    made = [Walked(command, "(preparation)", walked[first].rank) for command in PREPARED]
    return [*walked[:first], *made, *walked[first:]]


def run(walked: Walked, clone: Path, log: Path) -> Result:
    for path in outputs(walked.command, clone):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    command = ["bash", "-c", walked.command]
    if walked.command.startswith("from "):
        command = ["python", "-c", walked.command]
    start = time.perf_counter()
    with log.open("w") as out:
        out.write(f"$ {walked.command}\n")
        out.flush()
        try:
            pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            code = subprocess.run(command, cwd=clone, env=environment(clone), timeout=LIMIT, **pipes).returncode
        except subprocess.TimeoutExpired:
            code = -1
    seconds = time.perf_counter() - start
    printed = ANSI.sub("", log.read_text(errors="replace"))
    allowed = (0, 1) if re.search(FINDINGS, walked.command) and "error:" not in printed else (0,)
    failure = "" if code in allowed else f"exit code {code}" if code != -1 else f"ran over {LIMIT} s"
    return Result(walked, seconds, failure or ("traceback" if "Traceback (most recent" in printed else ""))


def environment(clone: Path) -> dict[str, str]:
    """A user's shell in the clone after `. .venv/bin/activate`; nothing is downloaded but packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")}
    path = f"{clone / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    # One thread: other work on the machine would slow several down many times.
    fixed = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "THREADS": "1", "PYTEST_ADDOPTS": TESTS}
    return {**kept, **fixed, "VIRTUAL_ENV": str(clone / ".venv"), "PATH": path}


def shown(walked: Walked) -> str:
    command = " ".join(walked.command.split())
    return command if len(command) <= 150 else f"{command[:147]}..."


def table(commit: str, results: list[Result], by_hand: list[Walked]) -> str:
    failed = sum(bool(result.failure) for result in results)
    minutes = sum(result.seconds for result in results) / 60
    lines = [
        f"{time.strftime('%Y-%m-%d')}, commit {commit}: {len(results)} commands in {minutes:.0f} minutes, "
        f"{failed} failed, {len(by_hand)} to be run by hand.",
        "",
        "| documented in | command | seconds | result |",
        "| --- | --- | ---: | --- |",
    ]
    for result in results:
        command = shown(result.walked).replace("|", "\\|")
        lines.append(f"| {result.walked.place} | `{command}` | {result.seconds:.0f} | {result.failure or 'ok'} |")
    for each in by_hand:
        command = shown(each).replace("|", "\\|")
        lines.append(f"| {each.place} | `{command}` | | not run: {each.reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
