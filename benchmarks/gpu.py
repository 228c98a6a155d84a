"""The first minutes on a GPU: is it right, how fast is it, and is that what we predicted?

    python benchmarks/gpu.py                          # all parts, about ten minutes, the most important first
    python benchmarks/gpu.py --only decoding,training --folder runs/gpu

Each part is a process of its own with a time limit. Numbers go to FOLDER/results.jsonl at the moment they are measured
and each part's output to FOLDER/PART.log, so a part that fails or is cut off costs only itself. *tests* are those that
need a GPU: the fused kernels equal the portable ones, and captured decode steps write the texts of changing shapes and
of the CPU, for every head; *pipeline* harvests, trains and measures recipes/tiny.yaml; *soak* is half a minute of mixed
traffic, its texts and memory checked (benchmarks/soak_loop.py); these run beside each other.
*decoding*, *training*, *harvesting*, *attention*, *graphs* and *compiled* follow one after another, on random weights
of Llama-3-8B's shape (benchmarks/gpu_parts.py). The end is a table of the results beside the predictions and bars.
Needs no network. Without CUDA it runs at a toy size, to try the script.
"""

import argparse
import json
import os
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
    Part("pipeline", 150, (*PIPELINE, "log.wandb=disabled"), alone=False),
    Part("soak", 150, ("benchmarks/soak_loop.py", "--minutes", "0.5", "--kinds", "60"), alone=False),
    Part("decoding", 110),
    Part("training", 100),
    Part("harvesting", 80),
    Part("attention", 60),
    Part("graphs", 80),
    Part("compiled", 100),
)


@dataclass(frozen=True)
class Expectation:
    """A prediction for one H100, from arithmetic before any GPU was seen, and the bar, as a bound on a figure."""

    what: str
    figure: tuple[str, str]  # part, and name in its results
    over: tuple[str, str] | None  # the figure is divided by this one
    prediction: str
    at_most: float | None = None
    at_least: float | None = None
    factor: float = 1.0


ONE_NODE = ("decoding", "target step of 1 nodes, ms")
EXPECTATIONS = (
    Expectation(
        "plain captured decoding over the bandwidth limit",
        ("decoding", "plain, captured, tokens/s"),
        ("decoding", "limit"),
        "0.55 to 0.62",
        at_least=0.6,
    ),
    Expectation(
        "64 nodes over one", ("decoding", "target step of 64 nodes, ms"), ONE_NODE, "1.05 to 1.25", at_most=1.25
    ),
    Expectation(
        "EAGLE-3 step, tree of 60, over one node", ("decoding", "EAGLE-3 tree, ms"), ONE_NODE, "1.5", at_most=1.5
    ),
    Expectation("EAGLE-3 step, tree of 60, ms", ("decoding", "EAGLE-3 tree, ms"), None, "12.5 to 14"),
    Expectation(
        "training step at the 8B recipe's batch, bfloat16, s",
        ("training", "EAGLE-3: step of 8 x 2048, bfloat16, s"),
        None,
        "1.0 to 1.3",
        at_most=1.3,
        factor=2,  # micro-batches
    ),
    Expectation(
        "the same in float32 without TF32",
        ("training", "EAGLE-3: step of 8 x 2048, float32, s"),
        None,
        "8.7",
        factor=2,
    ),
    Expectation(
        "responses of 64 rows, three temperatures, tokens/s",
        ("harvesting", "responses of 64 rows, three temperatures, tokens/s"),
        None,
        "1500 to 2100",
    ),
    Expectation(
        "responses of 64 rows, greedy, tokens/s",
        ("harvesting", "responses of 64 rows, greedy, tokens/s"),
        None,
        "2500",
    ),
    Expectation(
        "all graphs of 64 rows x 60 nodes, GiB",
        ("graphs", "graphs of 64 rows x 60 nodes together, GiB"),
        None,
        "20",
        at_most=2.0,
    ),
    Expectation("tapping, tokens/s", ("harvesting", "tapping 4 x 2048, tokens/s"), None, "35000"),
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
    console.print(verdict(folder / "results.jsonl"))


def run(parts: list[Part], folder: Path, console: Console) -> None:
    side_by_side = [part for part in parts if not part.alone]
    for group in [side_by_side, *([part] for part in parts if part.alone)]:
        started = time.monotonic()
        running = [(part, start(part, folder)) for part in group]
        for part, process in running:
            try:
                code = str(process.wait(max(part.limit - (time.monotonic() - started), 1)))
            except subprocess.TimeoutExpired:
                process.kill()
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
        return subprocess.Popen(part.arguments(folder), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def verdict(path: Path) -> Table:
    """A table of predictions, results and bars."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found: dict[tuple[str, str], Any] = {(line["part"], line["name"]): line.get("value") for line in lines}
    table = Table("what", "predicted", "found", "bar", "")
    for each in EXPECTATIONS:
        value, over = found.get(each.figure), 1.0 if each.over is None else found.get(each.over)
        bar = f"at most {each.at_most}" if each.at_most else f"at least {each.at_least}" if each.at_least else ""
        if value is None or over is None:
            table.add_row(each.what, each.prediction, "not measured", bar, "")
            continue
        figure = each.factor * value / over
        met = figure <= (each.at_most or figure) and figure >= (each.at_least or figure)
        table.add_row(each.what, each.prediction, f"{figure:.4g}", bar, ("met" if met else "missed") if bar else "")
    return table


if __name__ == "__main__":
    main()
