"""How close decoding comes to the memory bandwidth limit of a CUDA device, for an 8B shape and the demo target.

    python benchmarks/gpu.py recipes/tiny_full.yaml decode.head=assets/demo_head

For a target of Llama-3-8B's shape with random weights in bfloat16: plain decoding compared with transformers'
`generate` and with the bandwidth limit (measured copy bandwidth over the bytes of the weights), a target step by number
of nodes, and an EAGLE-3 step with the speed-up it gives at several acceptance lengths; each with eager and with
compiled layers. For the demo target: the report's own tables. Needs no network. Without CUDA it says so and measures
nothing; `BENCHMARK_SHAPE=tiny` then runs the same on the CPU at a toy size, to try the script.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data_pipelines.prompts.prompts import make_prompts
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import load_head_for, new_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.drafter import PLAIN, Drafter
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.verify import VerifiedOnHost
from headstart.inference.drafters.block import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import loop_of
from headstart.inference.generate.inputs import taps_to_read
from headstart.inference.report.command import machine, recipe_template, report_prompts
from headstart.inference.report.compare import Comparison
from headstart.inference.report.methods import Method
from headstart.inference.report.rounds import run_rounds
from headstart.inference.report.tables import short_table
from headstart.inference.targets.cuda_graph import SpareSteps, StaticStep
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command
from headstart.recipes.schema import Eagle3Section

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
DEPTH = 6
REPEATS = 30
LLAMA3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    bos_token_id=None,
    eos_token_id=None,
)
TOY = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=None,
    eos_token_id=None,
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Setting:
    """A target and head with random weights, and the sizes to measure."""

    target: TargetModel
    head: DraftHead
    prompt: int  # tokens
    new_tokens: int


def random_setting(config: LlamaConfig, device: torch.device, prompt: int, new_tokens: int) -> Setting:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(default)
    layers = config.num_hidden_layers
    target = TargetModel(model, (2, layers // 2, layers - 3))
    vocab = DraftVocab(torch.arange(min(32000, config.vocab_size)), config.vocab_size)
    head = new_head(Eagle3Section(kind="eagle3"), target.frozen, vocab, seed=0).to(device, dtype)
    return Setting(target, head.eval().requires_grad_(False), prompt, new_tokens)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Mean seconds of `repeats` runs, after three warm-up runs."""
    for _ in range(3):
        work()
    synchronise(device)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronise(device)
    return (time.perf_counter() - started) / repeats


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def eager_and_compiled(setting: Setting, prefix: str, measure: Callable[[], Result]) -> dict[str, Result]:
    """The measurement with eager layers and with target.compile, by prefix + eager or compiled."""
    found = {f"{prefix}eager": measure()}
    setting.target.kept(SpareSteps).clear()
    setting.target.compiles = True
    found[f"{prefix}compiled"] = measure()
    setting.target.kept(SpareSteps).clear()
    setting.target.compiles = False
    return found


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: goal.copy_(source), device, 10)


def decode_rate(setting: Setting, drafter: Drafter | None, static: bool) -> float:
    """Tokens per second after the prefill."""
    prompt = torch.arange(setting.prompt).remainder(setting.target.config.vocab_size).tolist()
    for _ in range(2):  # the first one warms up
        loop = loop_of(setting.target, [Request(prompt, setting.new_tokens)], drafter, static=static)
        steps = loop.run()
        next(steps)
        next(steps)  # a graph is captured in the first step
        synchronise(setting.target.device)
        started, before = time.perf_counter(), len(loop.generations[0].tokens)
        for _ in steps:
            pass
        synchronise(setting.target.device)
        rate = (len(loop.generations[0].tokens) - before) / (time.perf_counter() - started)
    return rate


def generate_rate(setting: Setting) -> float:
    """The same for transformers' `generate`, from the difference between a long and a short run."""
    prompt = torch.arange(setting.prompt).remainder(setting.target.config.vocab_size).tolist()
    times = []
    for new_tokens in (4, 8, 8 + setting.new_tokens // 2):
        synchronise(setting.target.device)
        started = time.perf_counter()
        setting.target.generate([prompt], new_tokens)
        synchronise(setting.target.device)
        times.append(time.perf_counter() - started)
    return (setting.new_tokens // 2) / (times[2] - times[1])


@torch.inference_mode()
def verify_seconds(setting: Setting, nodes: int) -> float:
    """Seconds of a target step that verifies this many nodes after the prompt, the choice of tokens included."""
    target, device = setting.target, setting.target.device
    cache = target.new_cache(setting.prompt + nodes, static=True)
    cache.set_lengths([setting.prompt])
    step, sampling = StaticStep(target, PLAIN, cache), BatchSampling([Sampling()], device)
    tokens = torch.zeros(1, nodes, dtype=torch.long, device=device)
    parents = ((torch.arange(nodes, device=device) + 1) // 2 - 1).unsqueeze(0)  # a binary tree
    return seconds(lambda: step.replay(step.choose, sampling, tokens, parents), device)


@torch.inference_mode()
def decode_step_seconds(setting: Setting, growth: Dynamic) -> float:
    """Seconds of a whole decode step, draft and verify, without the host's share."""
    target, device = setting.target, setting.target.device
    drafter = head_drafter(setting.head, growth)
    cache = target.new_cache(setting.prompt + drafter.max_nodes + 1, drafter.cache_shape, static=True)
    cache.target.set_lengths([setting.prompt])
    step = StaticStep(target, drafter, cache)
    verified = VerifiedOnHost(
        taps=torch.zeros(1, 3, 3 * target.config.hidden_size, dtype=target.dtype, device=device),
        next_tokens=torch.zeros(1, 3, dtype=torch.long, device=device),
        roots=torch.zeros(1, 1, dtype=torch.long, device=device),
        starts=[setting.prompt - 3],
        counts=[3],
        drafted=[0],
        remaining=[growth.depth],
        sampling=BatchSampling([Sampling()], device),
        history=None,
        texts=[[]],
        keys=[0],
    )
    return seconds(lambda: step(verified), device)


def eight_billion(console: Console, device: torch.device, config: LlamaConfig, prompt: int, new_tokens: int) -> None:
    setting = random_setting(config, device, prompt, new_tokens)
    weights = sum(p.numel() * p.element_size() for p in setting.target.model.parameters())
    weights -= setting.target.frozen.embedding.nbytes  # a step reads only one row of the input embedding
    bandwidth = copy_bandwidth(device)
    limit = bandwidth / weights
    console.print(
        f"a step reads {weights / 1e9:.2f} GB of weights, and copies run at {bandwidth / 1e9:,.0f} GB/s: at most "
        f"{limit:.1f} tokens/s without drafts"
    )

    table = Table(title=f"plain decoding after a prompt of {prompt} tokens")
    for column in ("method", "tokens/s", "of the limit"):
        table.add_column(column, justify="left" if column == "method" else "right")
    rates = {
        "generate": generate_rate(setting),
        "ours, changing shapes": decode_rate(setting, None, static=False),
        **eager_and_compiled(setting, "ours, captured, ", lambda: decode_rate(setting, None, static=True)),
    }
    for method, rate in rates.items():
        table.add_row(method, f"{rate:.1f}", f"{rate / limit:.0%}")
    console.print(table)

    table = Table(title="captured target step, by number of nodes")
    for column in ("layers", "nodes", "ms", "over 1 node"):
        table.add_column(column, justify="left" if column == "layers" else "right")
    steps = eager_and_compiled(setting, "", lambda: {nodes: verify_seconds(setting, nodes) for nodes in NODES})
    for layers, costs in steps.items():
        for nodes, cost in costs.items():
            table.add_row(layers, str(nodes), f"{1000 * cost:.2f}", f"{cost / costs[1]:.2f}")
    console.print(table)

    table = Table(title=f"EAGLE-3 decode step of depth {DEPTH}, with its speed-up by acceptance length")
    for column in ("layers", "tree", "ms", "over 1 node", "length 3", "length 4", "length 5"):
        table.add_column(column, justify="left" if column in ("layers", "tree") else "right")
    shapes = {"chain": Dynamic.chain(DEPTH), "tree of 31": Dynamic(DEPTH, 8, 31), "tree of 63": Dynamic(DEPTH, 10, 63)}
    decode_steps = eager_and_compiled(
        setting, "", lambda: {name: decode_step_seconds(setting, growth) for name, growth in shapes.items()}
    )
    for layers, found in decode_steps.items():
        for name, cost in found.items():
            one = steps[layers][1]
            speedups = [f"{length * one / cost:.2f}" for length in (3, 4, 5)]
            table.add_row(layers, name, f"{1000 * cost:.2f}", f"{cost / one:.2f}", *speedups)
    console.print(table)


def demo(console: Console, recipe: Recipe) -> None:
    """The demo head on the demo target, whose steps are so short that the host's share shows."""
    make_prompts(recipe)
    target = TargetModel.load(recipe.target, taps_to_read(recipe))
    head = load_head_for(recipe.head_in_use, target.frozen)
    depth = recipe.decode.depth
    methods = [
        Method("generate", transformers=True),
        Method("plain"),
        Method("chain", head_drafter(head, Dynamic.chain(depth))),
        Method("tree", head_drafter(head, Dynamic(depth, recipe.decode.width, recipe.decode.nodes))),
    ]
    for temperature in recipe.report.temperatures:
        sampling = Sampling(temperature, seed=recipe.seed)
        prompts = report_prompts(recipe, recipe_template(recipe))
        rounds = run_rounds(methods, target, prompts, recipe.decode.max_new_tokens, sampling, warmup=1)
        console.print(short_table(Comparison(methods, rounds, target, sampling, batch=1).outcomes()))


def main() -> None:
    run_command(__doc__, run)


def run(recipe: Recipe) -> None:
    console = Console()
    if torch.cuda.is_available():
        device, config, prompt, new_tokens = torch.device("cuda"), LLAMA3_8B, 512, 256
    elif os.environ.get("BENCHMARK_SHAPE") == "tiny":
        device, config, prompt, new_tokens = torch.device("cpu"), TOY, 32, 32
    else:
        console.print("no CUDA device found: nothing is measured")
        return
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    eight_billion(console, device, config, prompt, new_tokens)
    demo(console, recipe)


if __name__ == "__main__":
    main()
