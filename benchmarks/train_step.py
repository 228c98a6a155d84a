"""What a training step (forward and backward) of an EAGLE-3 or block head costs, beside SpecForge's and speculators'.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --peer specforge=VENV --peer speculators=VENV
    python benchmarks/train_step.py --heads block --peer speculators=VENV

On a CPU with one thread it measures CPU seconds, and how much resident memory grows over what the process had before
its first step. Every contender is a process of its own, and they alternate step by step, so a busy machine hits all of
them; rely on the ratios only. A second table shows how our memory grows with the sequence length, a third which of our
goals are met. Block heads (DFlash) are measured beside speculators alone. On CUDA it measures EAGLE-3 at the shapes of
Llama-3-8B, one contender after the other: tokens per second, and the peak memory that a step allocates.

A peer is a virtual environment with these packages. Its own requirements include a serving engine, so it is installed
without them (`--no-deps`); torch is the version that we are measured with, as a CUDA build if there is a device.

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peers.contender import Case
from rich.console import Console
from rich.progress import track
from rich.table import Table

FOLDER = Path(__file__).resolve().parent
PEERS = ("specforge", "speculators")
HEADS = ("eagle3", "block")
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
LENGTHS = (1024, 2048, 4096, 8192, 16384)
RIVAL = "specforge"  # the fastest peer on a CPU
SPEED_BARS = {SMALL: 1.0, LARGE_VOCAB: 1.0, LONG: 1.5, LONGEST: 6.0}  # our speed over its, at least
MEMORY_BAR = 0.2  # our memory growth over its at the longest case, at most
LINEAR_BAR = 1.1  # memory growth per token over that at half the length, at most

# DFlash with 128 blocks, the whole vocabulary as usual for it: as speculators trains it by default, and a smaller one.
BLOCK_LONG = Case(
    batch=1,
    seq=1024,
    vocab=4096,
    draft_vocab=4096,
    num_taps=5,
    block_size=16,
    anchors=128,
    head_layers=5,
    to_text=True,
)
BLOCK_CASES = {
    "5 layers, blocks of 16, text": BLOCK_LONG,
    "2 layers, blocks of 8, soft CE": replace(BLOCK_LONG, block_size=8, head_layers=2, to_text=False),
    "5 layers, blocks of 16, half the vocabulary": replace(BLOCK_LONG, draft_vocab=2048),
}
BLOCK_RIVAL = "speculators"
BLOCK_BAR = 0.8  # our CPU seconds over its, at most
BLOCK_LENGTHS = (1024, 2048, 4096, 8192)
TOKENS_PER_BLOCK = 8  # at every length


def block_case(length: int) -> Case:
    """One sequence with a block for every eighth token."""
    return replace(BLOCK_LONG, seq=length, anchors=length // TOKENS_PER_BLOCK)


@dataclass(frozen=True)
class Cost:
    """The cost of one step: the least time of several, because other work can only add to it, and the most memory."""

    cpu: float  # seconds
    wall: float
    growth: float  # MiB of memory on top of what was in use before the first step


@dataclass(frozen=True)
class Bar:
    """A goal for our training step, and what was measured."""

    text: str
    value: float
    met: bool


class Contender:
    """A process of benchmarks/peers that runs a training step on request."""

    def __init__(self, name: str, python: str, case: Case) -> None:
        # The process sets torch's number of threads itself; this is for other libraries.
        environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads)}
        command = [python, "-W", "ignore", "-m", f"peers.{name}_{case.script}", json.dumps(asdict(case))]
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
        found: dict[str, Any] = json.loads(line)
        return found

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.communicate()  # the process exits at the end of its input


@contextmanager
def contenders(pythons: dict[str, str], case: Case) -> Iterator[list[Contender]]:
    with ExitStack() as stack:
        found = []
        for name, python in pythons.items():
            found.append(Contender(name, python, case))
            stack.callback(found[-1].close)
        yield found


def measure(pythons: dict[str, str], case: Case, repeats: int) -> tuple[dict[str, Cost], dict[str, Any]]:
    """The cost and the versions of each contender; they alternate step by step after one warm-up step."""
    with contenders(pythons, case) as rivals:
        answers: dict[str, list[dict[str, Any]]] = {rival.name: [] for rival in rivals}
        for _ in range(1 + repeats):
            for rival in rivals:
                answers[rival.name].append(rival.step())
        versions = {rival.name: rival.versions for rival in rivals}
    return {name: least(found) for name, found in answers.items()}, versions


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


def lengths_table(growths: dict[int, float], title: str = "") -> Table:
    table = Table(title=f"our memory growth, by length of one sequence{title}")
    for column in ("tokens", "MiB of growth", "KiB per token"):
        table.add_column(column, justify="right")
    for length, growth in growths.items():
        table.add_row(str(length), f"{growth:.0f}", f"{1024 * growth / length:.0f}")
    return table


def peer_bars(costs: dict[str, dict[str, Cost]]) -> list[Bar]:
    bars = []
    for case, least_ratio in SPEED_BARS.items():
        if case in costs:
            ratio = times_ours(costs[case], RIVAL, "cpu")
            text = f"{case}: at least {least_ratio:g} times the speed of {RIVAL}"
            bars.append(Bar(text, ratio, ratio >= least_ratio))
    if LONGEST in costs:
        share = 1 / times_ours(costs[LONGEST], RIVAL, "growth")
        bars.append(Bar(f"{LONGEST}: at most {MEMORY_BAR:g} of the memory of {RIVAL}", share, share <= MEMORY_BAR))
    return bars


def block_bars(costs: dict[str, dict[str, Cost]]) -> list[Bar]:
    shares = {case: 1 / times_ours(found, BLOCK_RIVAL, "cpu") for case, found in costs.items() if BLOCK_RIVAL in found}
    return [
        Bar(f"{case}: at most {BLOCK_BAR:g} of the CPU seconds of {BLOCK_RIVAL}", share, share <= BLOCK_BAR)
        for case, share in shares.items()
    ]


def linear_bar(growths: dict[int, float]) -> Bar:
    per_token = [growth / length for length, growth in growths.items()]
    worst = max(after / before for before, after in pairwise(per_token))
    lengths = f"{min(growths)} to {max(growths)}"
    text = (
        f"memory linear in the length, {lengths} tokens: per token at most {LINEAR_BAR:g} times that at half the length"
    )
    return Bar(text, worst, worst <= LINEAR_BAR)


def bars_table(bars: list[Bar]) -> Table:
    table = Table("goal", "measured", "", title="goals")
    for bar in bars:
        table.add_row(bar.text, f"{bar.value:.2f}", "met" if bar.met else "MISSED")
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
        "--heads", nargs="+", choices=HEADS, default=HEADS, help="kinds of heads to measure (default: all)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="steps to measure per contender and case (default: %(default)s)"
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=max(LENGTHS),
        help="longest sequence to measure, in tokens (default: %(default)s)",
    )
    found = parser.parse_args()
    if found.repeats < 1 or found.longest < min(LENGTHS):
        parser.error(
            f"--repeats {found.repeats} and --longest {found.longest} given, at least 1 and {min(LENGTHS)} are allowed"
        )
    return found


def main() -> None:
    given, console = arguments(), Console()
    pythons = {OURS: sys.executable, **dict(given.peer)}
    console.print(f"{platform.machine()}, {platform.system()}, 1 thread, torch {torch.__version__}", highlight=False)
    try:
        if "eagle3" in given.heads:
            run_eagle3(console, pythons, given.repeats, given.longest)
        if "block" in given.heads:
            run_block(console, pythons, given.repeats, given.longest)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if missing := [name for name in PEERS if name not in pythons]:
        console.print(f"not measured: {', '.join(missing)}; --help says how to install a peer and pass it as --peer")
    if not torch.cuda.is_available():
        console.print("no CUDA device found: the shapes of Llama-3-8B are not measured")
    elif "eagle3" in given.heads:
        console.print(device_table(pythons, given.repeats))


def run_eagle3(console: Console, pythons: dict[str, str], repeats: int, longest: int) -> None:
    cases = {name: case for name, case in CASES.items() if case.seq <= longest}
    costs, versions = measure_all(console, pythons, cases, repeats)
    growths = memory_by_length(console, {n: replace(CASES[LONG], seq=n) for n in LENGTHS if n <= longest})
    say_versions(console, versions)
    console.print(cpu_table(costs, "EAGLE-3, unroll 7"))
    console.print(lengths_table(growths))
    say_bars(console, (peer_bars(costs) if RIVAL in pythons else []), growths)


def run_block(console: Console, pythons: dict[str, str], repeats: int, longest: int) -> None:
    pythons = {name: python for name, python in pythons.items() if name in (OURS, BLOCK_RIVAL)}
    costs, versions = measure_all(console, pythons, BLOCK_CASES, repeats)
    growths = memory_by_length(console, {n: block_case(n) for n in BLOCK_LENGTHS if n <= longest})
    say_versions(console, versions)
    console.print(cpu_table(costs, "DFlash, 1 x 1024 tokens, 128 blocks"))
    console.print(lengths_table(growths, ", a block for every eighth token"))
    say_bars(console, block_bars(costs), growths)


def say_versions(console: Console, versions: dict[str, Any]) -> None:
    for name, found in versions.items():
        console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), highlight=False)


def say_bars(console: Console, bars: list[Bar], growths: dict[int, float]) -> None:
    bars = bars + ([linear_bar(growths)] if len(growths) > 1 else [])
    if bars:
        console.print(bars_table(bars))


if __name__ == "__main__":
    main()
