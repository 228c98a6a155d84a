"""The first minutes on a GPU: is it right, how fast is it, and is that what we predicted?

    python benchmarks/gpu.py                          # all parts, about 25 minutes, the most important first
    python benchmarks/gpu.py --only decoding,training --folder runs/gpu

Each part is a process of its own with a time limit. Numbers go to FOLDER/results.jsonl at the moment they are measured
and each part's output to FOLDER/PART.log, so a part that fails or is cut off costs only itself. *tests* are those that
need a GPU: the fused kernels equal the portable ones, and captured decode steps write the texts of changing shapes and
of the CPU, for every head; *pipeline* harvests, trains and measures recipes/tiny.yaml; these run at the same time.
The other parts follow one after another (benchmarks/gpu_parts.py): *kernels* alone, *decoding*, *training*,
*harvesting* and *graphs* on random weights of Llama-3-8B's shape, *widened* and *recipe* on the demo's target in that
shape, from prompts to a report. The end is a table of the results next to the predictions.
Needs no network. Without CUDA it runs at a toy size, to try the script.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    name: str
    limit: int  # seconds
    command: tuple[str, ...] = ()  # otherwise that part of gpu_parts.py
    alone: bool = True  # parts that time nothing run side by side

    def arguments(self, folder: Path) -> list[str]:
        own = self.command or ("benchmarks/gpu_parts.py", self.name, str(folder))
        return [sys.executable, *(each.replace("FOLDER", str(folder)) for each in own)]


TESTS = (
    "-m",
    "pytest",
    "-q",
    "-o",
    "addopts=",
    "-p",
    "no:cacheprovider",
    "-m",
    "gpu",
    "tests/heads/test_unroll_attention.py",
    "tests/inference/targets/test_on_gpu.py",
)
TINY = ("data.num_prompts=256", "train.steps=60", "train.checkpoint_every=60")
PIPELINE = ("trainers/eagle.py", "recipes/tiny.yaml", "run_dir=FOLDER/tiny", *TINY, "train.precision=bfloat16")
PARTS = (
    Part("environment", 60, alone=False),
    Part("tests", 150, TESTS, alone=False),
    Part("pipeline", 150, PIPELINE, alone=False),
    Part("kernels", 60),
    Part("decoding", 150),
    Part("widened", 420),
    Part("recipe", 540),
    Part("training", 100),
    Part("harvesting", 80),
    Part("graphs", 80),
)


# Predictions for one H100, from arithmetic before a measurement: what, prediction, the part that measures it, its
# figure there, and a figure of the same part that it is divided by, or a factor.
ONE_NODE, ROWS = "target step of 1 nodes, ms", "responses of 64 rows"
STEP = "EAGLE-3: step of 8 x 2048"  # one of two micro-batches
EXPECTATIONS: tuple[tuple[str, str, str, str, str | float], ...] = (
    ("captured decoding over the bandwidth limit", "0.76 to 0.80", "decoding", "plain, captured, tokens/s", "limit"),
    ("64 nodes over one", "1.05 to 1.25", "decoding", "target step of 64 nodes, ms", ONE_NODE),
    ("EAGLE-3 step, tree of 60, over one node", "1.5", "decoding", "EAGLE-3 tree, ms", ONE_NODE),
    ("EAGLE-3 step, tree of 60, ms", "9.7 to 10.5", "decoding", "EAGLE-3 tree, ms", 1),
    ("EAGLE-3 step, chain of 6, ms", "8.5 to 9", "decoding", "EAGLE-3 chain of 6, ms", 1),
    ("block head's step, chain of 6, ms", "8 to 8.5", "decoding", "block head, chain of 6, ms", 1),
    ("training step of the 8B recipe, bfloat16, s", "1.0 to 1.3", "training", f"{STEP}, bfloat16, s", 2),
    ("the same in float32 without TF32", "8.7", "training", f"{STEP}, float32, s", 2),
    ("64 rows, T = 0, 0.7, 1, tokens/s", "1500 to 2100", "harvesting", f"{ROWS}, three temperatures, tokens/s", 1),
    ("64 rows, greedy, tokens/s", "2500", "harvesting", f"{ROWS}, greedy, tokens/s", 1),
    ("graphs of 64 rows x 60 nodes, GiB", "20", "graphs", "graphs of 64 rows x 60 nodes together, GiB", 1),
    ("tapping, tokens/s", "35000", "harvesting", "tapping 4 x 2048, tokens/s", 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="these parts, separated by commas")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gpu", help="where results and logs go")
    given = parser.parse_args()
    names = [part.name for part in PARTS]
    wanted = given.only.split(",") if given.only else names
    if unknown := sorted({*wanted} - {*names}):
        parser.error(f"--only: {', '.join(unknown)} given, {', '.join(names)} are allowed")
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").unlink(missing_ok=True)
    console = Console(width=150, highlight=False)
    run([part for part in PARTS if part.name in wanted], folder, console)
    console.print(beside_predictions(folder / "results.jsonl"))


def run(parts: list[Part], folder: Path, console: Console) -> None:
    side_by_side = [part for part in parts if not part.alone]
    for group in [side_by_side, *([part] for part in parts if part.alone)]:
        started = time.monotonic()
        running = [(part, start(part, folder)) for part in group]
        for part, process in running:
            try:
                code = str(process.wait(max(part.limit - (time.monotonic() - started), 1)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its commands, too
                process.wait()
                code = "cut off"
            taken = time.monotonic() - started
            lines = (folder / f"{part.name}.log").read_text(errors="replace").splitlines()
            last = "" if code == "0" else "\n".join(lines[-6:])
            console.print(f"{part.name}: {code} after {taken:.0f} s {last}", markup=False)


def start(part: Part, folder: Path) -> "subprocess.Popen[bytes]":
    paths = [str(ROOT), str(ROOT / "tests/support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / f"{part.name}.log").open("w") as log:
        streams: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(part.arguments(folder), cwd=ROOT, env=environment, **streams)


def beside_predictions(path: Path) -> Table:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    results: dict[tuple[str, str], Any] = {(line["part"], line["name"]): line.get("value") for line in lines}
    table = Table("what", "predicted", "measured")
    for what, prediction, part, name, scale in EXPECTATIONS:
        value = results.get((part, name))
        factor = 1 / (results.get((part, scale)) or float("nan")) if isinstance(scale, str) else scale
        table.add_row(what, prediction, "-" if value is None else f"{factor * value:.4g}")
    return table


if __name__ == "__main__":
    main()
