"""The cost of a training step (forward and backward) of an EAGLE-3 head, next to SpecForge's and speculators'.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --peer specforge=VENV --peer speculators=VENV

On a CPU with one thread it measures CPU seconds, and how much resident memory grows over what the process had before
its first step. Every contender is a process of its own, and they alternate step by step, so a busy machine slows all of
them down; rely on the ratios only. A second table shows how our memory grows with the sequence length, a third one
(alone: --optimizers) the step of recipes/smollm2_135m.yaml in float32 with either optimizer. On CUDA it
measures the shapes of Llama-3-8B, one contender after the other: tokens per second, and the peak memory of a step.

A peer is a virtual environment with these packages. Its own requirements include a serving engine, so it is installed
without them (`--no-deps`). torch has our version, as a CUDA build if there is a device.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0
    VENV/bin/pip install --no-deps specforge==0.2.0
    VENV/bin/pip install transformers==5.8.1 accelerate psutil pydantic pyyaml requests triton torch==2.13.0

    python -m venv VENV && VENV/bin/pip install torch==2.13.0
    VENV/bin/pip install --no-deps speculators==0.9.0
    VENV/bin/pip install transformers==5.19.0 datasets==5.1.0 hs-connectors==0.9.0 pydantic-settings loguru rich tqdm \
        typer click httpx psutil openai torch==2.13.0

Each contender uses its fastest configuration that runs. On a CPU that is dense attention, the compact teacher and the
in-place loss (in torch, see peers/specforge_step.py) for SpecForge, and SDPA with the eager loss for speculators; on
CUDA it is FlexAttention and fused losses for both.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peers.contender import Case
from rich.console import Console
from rich.progress import track
from rich.table import Table

FOLDER = Path(__file__).resolve().parent
PEERS = ("specforge", "speculators")
OURS = "headstart"

SMALL, LONG, LONGEST, LARGE_VOCAB = "2 x 256", "1 x 1024", "1 x 4096", "2 x 256, V 32000"
CASES = {
    SMALL: Case(batch=2, seq=256, vocab=4096, draft_vocab=2048),
    LONG: Case(batch=1, seq=1024, vocab=4096, draft_vocab=2048),
    LONGEST: Case(batch=1, seq=4096, vocab=4096, draft_vocab=2048),
    LARGE_VOCAB: Case(batch=2, seq=256, vocab=32000, draft_vocab=8000),
}
LLAMA3_8B = Case(
    batch=1,
    seq=2048,
    vocab=128256,
    draft_vocab=32000,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    mlp=14336,
    num_layers=32,
    device="cuda",
    dtype="bfloat16",
)
DEVICE_CASES = {f"1 x {seq}": replace(LLAMA3_8B, seq=seq) for seq in (2048, 8192)}
SMOLLM2 = Case(  # recipes/smollm2_135m.yaml, with texts of full length
    batch=8,
    seq=512,
    vocab=49152,
    draft_vocab=8192,
    hidden=576,
    num_heads=9,
    num_kv_heads=3,
    mlp=1536,
    unroll=5,
    num_layers=30,
    norms=True,
)
OPTIMIZERS = ("adamw", "muon")
LENGTHS = (1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Cost:
    """The cost of one step: the least time of several, because other work can only add to it, and the most memory."""

    cpu: float  # seconds
    wall: float
    growth: float  # MiB of memory on top of what was in use before the first step


class Contender:
    """A process of benchmarks/peers that runs a training step on request."""

    def __init__(self, name: str, python: str, case: Case, script: str | None = None) -> None:
        # The process sets torch's number of threads itself; this is for other libraries.
        environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads)}
        command = [python, "-W", "ignore", "-m", f"peers.{script or name}_step", json.dumps(asdict(case))]
        self.name = name
        self.process = subprocess.Popen(
            command, cwd=FOLDER, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions = self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line of the process; raises ValueError if it has ended, after its own error on stderr."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"{self.name}: its process ended with code {self.process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.communicate()  # the process exits at the end of its input


def measure(pythons: dict[str, str], case: Case, repeats: int) -> tuple[dict[str, Cost], dict[str, Any]]:
    """The cost and the versions of each contender; they alternate step by step after one warm-up step."""
    with ExitStack() as stack:
        rivals = [Contender(name, python, case) for name, python in pythons.items()]
        costs = in_turn(stack, rivals, repeats)
        versions = {rival.name: rival.versions for rival in rivals}
    return costs, versions


def in_turn(stack: ExitStack, rivals: list[Contender], repeats: int) -> dict[str, Cost]:
    for rival in rivals:
        stack.callback(rival.close)
    answers: dict[str, list[dict[str, Any]]] = {rival.name: [] for rival in rivals}
    for _ in range(1 + repeats):
        for rival in rivals:
            answers[rival.name].append(rival.step())
    return {name: least(found) for name, found in answers.items()}


def least(answers: list[dict[str, Any]]) -> Cost:
    warm = answers[1:]
    return Cost(
        cpu=min(answer["cpu"] for answer in warm),
        wall=min(answer["wall"] for answer in warm),
        growth=max(answer["peak"] - answer["start"] for answer in warm),
    )


def measure_all(
    console: Console, pythons: dict[str, str], cases: dict[str, Case], repeats: int
) -> tuple[dict[str, dict[str, Cost]], dict[str, Any]]:
    """The costs of each case, and the versions of each contender."""
    costs: dict[str, dict[str, Cost]] = {}
    versions: dict[str, Any] = {}
    for name, case in track(cases.items(), description="steps", console=console, transient=True):
        costs[name], versions = measure(pythons, case, repeats)
    return costs, versions


def memory_by_length(console: Console, cases: dict[int, Case]) -> dict[int, float]:
    """How much our memory grows in a step, in MiB, by the length of the sequence."""
    growths = {}
    for length, case in track(cases.items(), "lengths", console=console, transient=True):
        growths[length] = measure({OURS: sys.executable}, case, repeats=1)[0][OURS].growth
    return growths


def cpu_table(costs: dict[str, dict[str, Cost]], title: str) -> Table:
    table = Table(title=f"one training step on one thread, hidden size 256, {title}")
    table.add_column("case")
    table.add_column("trainer")
    for column in ("CPU s", "over ours", "MiB of growth", "over ours"):
        table.add_column(column, justify="right")
    for case, found in costs.items():
        for name, cost in found.items():
            times = [f"{times_ours(found, name, field):.2f}" for field in ("cpu", "growth")]
            table.add_row(case, name, f"{cost.cpu:.2f}", times[0], f"{cost.growth:.0f}", times[1])
        table.add_section()
    return table


def times_ours(found: dict[str, Cost], name: str, field: str) -> float:
    """A peer's cost over ours."""
    return asdict(found[name])[field] / asdict(found[OURS])[field]


def device_table(pythons: dict[str, str], repeats: int) -> Table:
    """Measure the contenders one at a time on the device; a failure is named in its row and explained on stderr."""
    table = Table(title=f"one step on {torch.cuda.get_device_name()}, shapes of Llama-3-8B, bfloat16, unroll 7")
    table.add_column("case")
    table.add_column("trainer")
    for column in ("tokens/s", "MiB of growth"):
        table.add_column(column, justify="right")
    for title, case in DEVICE_CASES.items():
        for name, python in pythons.items():
            try:
                cost = measure({name: python}, case, repeats)[0][name]
                table.add_row(title, name, f"{case.num_tokens / cost.wall:.0f}", f"{cost.growth:.0f}")
            except ValueError as error:
                print(error, file=sys.stderr)
                table.add_row(title, name, "failed", "failed")
        table.add_section()
    return table


def optimizers_table(repeats: int) -> Table:
    """Measure our whole step with each optimizer, in turn."""
    table = Table(title="one training step of SmolLM2's head, float32, 8 texts of 512 tokens, with the update")
    for column in ("optimizer", "CPU s", "over adamw"):
        table.add_column(column, justify="right")
    with ExitStack() as stack:
        cases = {name: replace(SMOLLM2, optimizer=name) for name in OPTIMIZERS}
        costs = in_turn(stack, [Contender(name, sys.executable, case, OURS) for name, case in cases.items()], repeats)
    for name, cost in costs.items():
        table.add_row(name, f"{cost.cpu:.2f}", f"{cost.cpu / costs[OPTIMIZERS[0]].cpu:.3f}")
    return table


def lengths_table(growths: dict[int, float]) -> Table:
    table = Table(title="our memory growth, by length of one sequence")
    for column in ("tokens", "MiB of growth", "KiB per token"):
        table.add_column(column, justify="right")
    for length, growth in growths.items():
        table.add_row(str(length), f"{growth:.0f}", f"{1024 * growth / length:.0f}")
    return table


def peer_python(text: str) -> tuple[str, str]:
    """Parse `specforge=VENV` into the peer's name and its Python; an argparse error names what is allowed."""
    name, _, venv = text.partition("=")
    python = Path(venv).expanduser().absolute() / "bin" / "python"
    if name not in PEERS or not python.exists():
        raise argparse.ArgumentTypeError(
            f"{text!r} given, NAME=VENV is allowed: NAME one of {', '.join(PEERS)}, VENV the folder of its environment"
        )
    return name, str(python)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer",
        type=peer_python,
        action="append",
        default=[],
        metavar="NAME=VENV",
        help=f"measure a peer too: {' or '.join(PEERS)}",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="steps to measure per contender and case (default: %(default)s)"
    )
    parser.add_argument("--optimizers", action="store_true", help="measure our step with Muon and AdamW, nothing else")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats} given, at least 1 is allowed")
    return options


def main() -> None:
    options, console = arguments(), Console()
    pythons = {OURS: sys.executable, **dict(options.peer)}
    console.print(f"{platform.machine()}, {platform.system()}, 1 thread, torch {torch.__version__}", highlight=False)
    if options.optimizers:
        console.print(optimizers_table(options.repeats))
        return
    try:
        measure_on_cpu(console, pythons, options.repeats)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if missing := [name for name in PEERS if name not in pythons]:
        console.print(f"not measured: {', '.join(missing)}; --help says how to install a peer and pass it as --peer")
    if torch.cuda.is_available():
        console.print(device_table(pythons, options.repeats))
    else:
        console.print("no CUDA device: the shapes of Llama-3-8B are not measured")


def measure_on_cpu(console: Console, pythons: dict[str, str], repeats: int) -> None:
    costs, versions = measure_all(console, pythons, CASES, repeats)
    growths = memory_by_length(console, {n: replace(CASES[LONG], seq=n) for n in LENGTHS})
    for name, packages in versions.items():
        console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in packages.items()), highlight=False)
    console.print(cpu_table(costs, "EAGLE-3, unroll 7"))
    console.print(lengths_table(growths))
    console.print(optimizers_table(repeats))


if __name__ == "__main__":
    main()
