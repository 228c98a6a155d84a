"""The cost of a plain decoding step on a CPU, and of drafting a tree.

    headstart smollm2
    python benchmarks/cpu_step.py --target models/SmolLM2-135M-Instruct --head assets/smollm2_head

The table has milliseconds of passes over 1, 8 and 16 tokens after 150: the layers' own code, compiled layers, the
products with packed weights alone, and torch's own layers of the same sizes. They take turns, and the figures are
medians. A line compares drafting a tree to a plain step. Another table has what the same bits in every pass cost: the
target's passes, and the same as transformers runs them, with torch's products and attention; least of the turns.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from headstart import SpeculativeModel
from headstart.heads.base import DraftHead
from headstart.inference.core.tree import Tree
from headstart.inference.drafters.cost_measurement import Bench
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.kernels.compiled import CompiledForward
from headstart.inference.kernels.fast_layers import JointLinear, PackedLinear
from headstart.inference.targets.attention import own_attention_of
from headstart.inference.targets.loading import processor_name
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

CONTEXT, SIZES, TURNS = 150, (1, 8, 16), 60
KINDS = ("own code", "compiled", "products alone", "torch's products")
WIDTH, LEVELS = 4, 4  # of the drafted tree
WARM = 5
EXACT_SIZES = {1: 20, 8: 20, 512: 5, 4096: 2}  # tokens of a pass, and its turns


@contextmanager
def own_code(layers: list[nn.Module]) -> Iterator[None]:
    """Within this context the layers are not compiled."""
    forwards = [vars(layer).pop("forward") for layer in layers]
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            vars(layer)["forward"] = forward


def products(target: TargetModel) -> list[PackedLinear]:
    """Every packed product of a pass, once."""
    modules = [*target.model.modules()]
    joint = {id(each.product): each.product.product for each in modules if isinstance(each, JointLinear)}
    return [each for each in [*modules, *joint.values()] if isinstance(each, PackedLinear)]


def torchs(own: list[PackedLinear], dtype: torch.dtype) -> list[nn.Linear]:
    """torch's products of the same sizes."""
    return [nn.Linear(each.in_features, each.out_features, bias=False, dtype=dtype) for each in own]


def load(options: argparse.Namespace) -> TargetModel:
    section = {"path": options.target, "dtype": options.dtype, "device": "cpu"}
    return compiling(TargetModel.load(TargetSection.model_validate(section), ()))


def compiling(target: TargetModel) -> TargetModel:
    if target.fast_form.compiler is None:
        sys.exit("nothing is compiled here: the weights are not packed, or there is no C++ compiler")
    target.fast_form.compiler.after_calls = 1
    return target


@torch.inference_mode()
def passes(options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of each kind and number of tokens."""
    target = load(options)
    cache, layers = target.passes.new_cache(CONTEXT + 64), target.layers
    own = products(target)
    others = torchs(own, target.dtype)
    cache.target.set_lengths([CONTEXT])
    times: dict[str, list[float]] = defaultdict(list)

    def run(count: int) -> None:
        tree = Tree(torch.arange(count)[None] + 300, torch.arange(count)[None] - 1)
        target.passes.tree(tree, cache)

    def multiply(packed: Sequence[PackedLinear | nn.Linear], count: int) -> None:
        for product in packed:
            product(torch.zeros(1, count, product.in_features, dtype=target.dtype))

    def timed(kind: str, count: int, work: Callable[[int], None]) -> None:
        started = time.perf_counter()
        work(count)
        times[f"{kind}, {count}"].append(1000 * (time.perf_counter() - started))

    for count in SIZES:
        for _ in range(3):  # asked for, compiled, checked
            run(count)
            target.fast_form.finish()
    assert all(isinstance(vars(layer)["forward"], CompiledForward) for layer in layers)
    for _ in range(TURNS):
        for count in SIZES:
            with own_code(layers):
                timed(KINDS[0], count, run)
            timed(KINDS[1], count, run)
            timed(KINDS[2], count, partial(multiply, own))
            timed(KINDS[3], count, partial(multiply, others))
    return {key: statistics.median(found) for key, found in times.items()}


@torch.inference_mode()
def drafting(options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of drafting a tree, and of a plain step."""
    model = SpeculativeModel.from_folders(options.target, options.head, dtype=options.dtype, device="cpu")
    target, drafter = compiling(model.target), model.drafter
    assert isinstance(drafter, TreeDrafter)
    assert isinstance(drafter.head, DraftHead)
    bench = Bench(target, drafter.head, WIDTH, CONTEXT, 1, 64)
    works: dict[str, Callable[[], object]] = {
        "drafting": bench.drafting(LEVELS),
        "plain step": partial(bench.verify, 1),
    }
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(TURNS):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            times[name].append(1000 * (time.perf_counter() - started))
        if turn < WARM:
            target.fast_form.finish()
            times.clear()
    return {name: statistics.median(found) for name, found in times.items()}


@torch.inference_mode()
def exactness(options: argparse.Namespace) -> dict[str, float]:
    """Least milliseconds of passes by kernels with one order of sums, and as transformers runs them."""
    target = load(options)
    assert target.difference_in_bits is None
    targets = {"ours": target, "theirs": target.unpacked}
    times: dict[str, list[float]] = defaultdict(list)
    for count, turns in EXACT_SIZES.items():
        tokens, before = torch.arange(count)[None] + 300, CONTEXT if count <= SIZES[-1] else 0
        for turn in range(WARM + turns if before else turns):
            for name, each in targets.items():
                cache = each.passes.new_cache(before + count)
                cache.target.set_lengths([before])
                tree = Tree(tokens, torch.arange(count)[None] - 1)
                code = nullcontext() if each is target else own_attention_of(each.model)
                started = time.perf_counter()
                with code:
                    if before:
                        each.passes.tree(tree, cache)
                    else:
                        each.passes.forward(tokens, cache=cache, last_only=True)
                times[f"{name}, {count}"].append(1000 * (time.perf_counter() - started))
            if before and turn < WARM:
                target.fast_form.finish()
    return {key: min(found) for key, found in times.items()}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "passes": passes,
    "drafting": drafting,
    "exactness": exactness,
}


def measured(options: argparse.Namespace, part: str) -> dict[str, float]:
    """A part in a process of its own."""
    command = [sys.executable, __file__, "--target", options.target, "--dtype", options.dtype, "--part", part]
    command += ["--head", options.head] if options.head else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of a model whose weights 16 bits can hold")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--head", help="folder of a head for it, of which the drafting of a tree is timed")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options)))
        return
    console, threads = Console(width=120), torch.get_num_threads()
    console.print(
        f"{processor_name(torch.device('cpu'))}, {threads} threads, torch {torch.__version__}, {options.dtype}"
    )
    found = measured(options, "passes")
    table = Table("milliseconds", *(f"{count} tokens" for count in SIZES))
    for kind in KINDS:
        table.add_row(kind, *(f"{found[f'{kind}, {count}']:.1f}" for count in SIZES))
    console.print(table)
    found = measured(options, "exactness")
    table = Table("milliseconds, the same bits in every pass", *(f"{count} tokens" for count in EXACT_SIZES))
    for name in ("ours", "theirs"):
        table.add_row(name, *(f"{found[f'{name}, {count}']:.1f}" for count in EXACT_SIZES))
    ratios = [found[f"ours, {count}"] / found[f"theirs, {count}"] for count in EXACT_SIZES]
    table.add_row("ratio", *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)
    if options.head:
        found = measured(options, "drafting")
        share, nodes = found["drafting"] / found["plain step"], WIDTH * LEVELS
        console.print(
            f"drafting {nodes} nodes on {LEVELS} levels: {found['drafting']:.1f} ms, {share:.2f} of a plain step"
        )


if __name__ == "__main__":
    main()
