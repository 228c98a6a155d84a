"""One part of benchmarks/gpu.py, which runs each in a process of its own: python benchmarks/gpu_parts.py PART FOLDER.

Every number goes to FOLDER/results.jsonl at the moment it is measured, so that a part that fails or is cut off leaves
what it found. Weights and texts are random: only times, memory and shapes matter here. On a machine without CUDA the
parts run at a toy size, to try the script.
"""

import gc
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data_pipelines.features.batches import Sample, TrainingBatch
from headstart.data_pipelines.features.features import tap
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import PAGE_TOKENS, Slots
from headstart.inference.core.drafter import Drafter, NoDrafter
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import Tree, block_mask, causal_block, size_bucket
from headstart.inference.core.verify import VerifiedOnHost, VerifiedRow
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import DecodeLoop, loop_of
from headstart.inference.kernels import join_linears, own_layers_of
from headstart.inference.targets.attention import fuse_head, grouped_attention
from headstart.inference.targets.cuda_graph import Graphed, SpareSteps, StaticStep
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, load_recipe
from headstart.trainers.objectives.unrolled import Teacher
from headstart.trainers.parallel.head_on_ranks import build_optimizers
from headstart.trainers.step import autocast, head_in_training, tf32_allowed

ROOT = Path(__file__).parents[1]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
SIZES: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TOY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3_8B = LlamaConfig(**(SIZES if CUDA else TOY), bos_token_id=None, eos_token_id=None)
PACKAGES = ("torch", "transformers", "accelerate", "triton", "safetensors", "numpy", "pydantic", "peft", "datasets")
TREE = Dynamic(7, 10, 59) if CUDA else Dynamic(3, 3, 7)  # EAGLE-3's tree of 60 nodes, the root counted


def synchronise() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Results:
    """The results file of a part."""

    def __init__(self, part: str, folder: Path) -> None:
        self.part, self.path, self.started = part, folder / "results.jsonl", time.perf_counter()

    def add(self, name: str, **values: Any) -> None:
        line = {"part": self.part, "second": round(time.perf_counter() - self.started, 1), "name": name, **values}
        print(json.dumps(line), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def measure(self, name: str, work: Callable[[], Any], **facts: Any) -> None:
        """Add what `work` returns, with the memory that the process holds and the warnings of torch. A failure is a
        result too, and does not stop the part."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = work()
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:800]}
        said = sorted({str(each.message)[:200] for each in caught if "raph" in str(each.message)})
        values = found if isinstance(found, dict) else {"value": found}
        memory = {"reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)} if CUDA else {}
        self.add(name, **facts, **values, **memory, **({"warnings": said} if said else {}))


def seconds(work: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median seconds of a call, the device's work included."""
    for _ in range(warmup):
        work()
    times = []
    for _ in range(repeats if CUDA else 2):
        synchronise()
        started = time.perf_counter()
        work()
        synchronise()
        times.append(time.perf_counter() - started)
    return median(times)


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    return round(1000 * seconds(work, repeats), 3)


@dataclass(frozen=True)
class Setting:
    """A target of an 8B model's shape and an EAGLE-3 head, both with random weights, and a length of prompt."""

    target: TargetModel
    head: DraftHead
    prompt: int

    @classmethod
    def random(cls, prompt: int = 512 if CUDA else 32) -> "Setting":
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        with DEVICE:
            torch.set_default_dtype(DTYPE)
            model = LlamaForCausalLM(LLAMA3_8B)
            torch.set_default_dtype(default)
        layers = LLAMA3_8B.num_hidden_layers
        target = TargetModel(model, (2, layers // 2, layers - 3))
        setting = cls(target, random_head("llama3_8b", target.frozen).to(DTYPE), prompt)
        if CUDA:
            target.speed_up(lambda: target)
        return replace(setting, head=setting.drafting(setting.head))

    def drafting(self, head: DraftHead) -> DraftHead:
        """The head in the target's dtype and fast form."""
        if CUDA:
            join_linears(head)
            fuse_head(head, self.target.fast_form.fused)
            self.target.fast_form.choose_products(head)
        return head.to(DTYPE).eval().requires_grad_(False)

    @property
    def tokens(self) -> list[int]:
        return torch.arange(self.prompt).remainder(self.target.config.vocab_size).tolist()

    def forget(self) -> None:
        self.target.singleton(SpareSteps).clear()
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def random_head(recipe: str, frozen: FrozenTarget) -> DraftHead:
    """A head as a recipe has it, with random weights."""
    section, size = load_recipe(ROOT / f"recipes/{recipe}.yaml").head, frozen.config.vocab_size
    is_block = section.kind == "block"
    own = {"taps": None, **({"mask_token_id": None} if is_block else {})}
    vocab = DraftVocab(torch.arange(size if is_block else min(32000, size)), size)
    return new_head(section.model_copy(update=own), frozen, vocab, seed=0).to(DEVICE)


def decode_rate(setting: Setting, drafter: Drafter | None, static: bool, new_tokens: int) -> float:
    """Tokens per second after the prefill and the first two steps, in the second of two runs."""
    for _ in range(2):
        loop = loop_of(setting.target, [Request(setting.tokens, new_tokens)], drafter, static=static)
        steps = loop.run()
        next(steps)
        next(steps)
        synchronise()
        started, before = time.perf_counter(), len(loop.generations[0].tokens)
        for _ in steps:
            pass
        synchronise()
        rate = (len(loop.generations[0].tokens) - before) / (time.perf_counter() - started)
    return round(rate, 1)


def pages(capacity: int) -> int:
    """The capacity that decoding would choose."""
    return -(-capacity // PAGE_TOKENS) * PAGE_TOKENS


def target_step(setting: Setting, nodes: int, rows: int = 1, sampling: Sampling | None = None) -> Callable[[], object]:
    """A captured target step that verifies a binary tree of this many nodes after the prompt, as a call."""
    cache = setting.target.passes.new_cache(pages(setting.prompt + size_bucket(nodes)), batch=rows, static=True)
    cache.set_lengths([setting.prompt] * rows)
    step = StaticStep(setting.target, NoDrafter(nodes.bit_length() - 1), cache)
    samplings = BatchSampling([replace(sampling or Sampling(), seed=row) for row in range(rows)], DEVICE)
    tokens = torch.zeros(rows, nodes, dtype=torch.long, device=DEVICE)
    parents = ((torch.arange(nodes, device=DEVICE) + 1) // 2 - 1).expand(rows, -1).contiguous()
    return partial(step.verify, Tree(tokens, parents), samplings)


def decode_step(
    setting: Setting, growth: Dynamic, rows: int = 1, sampling: Sampling | None = None
) -> Callable[[], Any]:
    """A whole captured step, draft and verify, without the host's share, as a call."""
    target, drafter = setting.target, head_drafter(setting.head, growth)
    cache = target.passes.new_cache(
        pages(setting.prompt + drafter.max_nodes + 1), drafter.cache_shape, rows, static=True
    )
    cache.target.set_lengths([setting.prompt] * rows)
    verified = VerifiedOnHost(
        taps=torch.zeros(rows, 3, len(drafter.taps) * target.config.hidden_size, dtype=target.dtype, device=DEVICE),
        next_tokens=torch.zeros(rows, 3, dtype=torch.long, device=DEVICE),
        roots=torch.zeros(rows, 1, dtype=torch.long, device=DEVICE),
        sampling=BatchSampling([replace(sampling or Sampling(), seed=row) for row in range(rows)], DEVICE),
        history=None,
        rows=[VerifiedRow([], setting.prompt - 3, 3, growth.depth)] * rows,
    )
    return partial(StaticStep(target, drafter, cache), verified)


def environment(results: Results) -> None:
    """Versions, the device, and what is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    results.add("versions", python=platform.python_version(), cuda=torch.version.cuda, cpus=os.cpu_count(), **found)
    if CUDA:
        query = "--query-gpu=name,driver_version,memory.total,memory.used"
        said = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True).stdout
        results.add("device", gpu=said.strip(), cudnn=torch.backends.cudnn.version())


@torch.inference_mode()
def decoding(results: Results) -> None:
    """Plain decoding against the limit of the memory's bandwidth, steps by number of nodes, and an EAGLE-3 step."""
    setting = Setting.random()
    weights = sum(each.numel() * each.element_size() for each in setting.target.model.parameters())
    weights -= setting.target.frozen.embedding.nbytes  # a step reads one row of the input embedding
    bandwidth = copy_bandwidth()
    results.add("limit", value=round(bandwidth / weights, 1), copy_gb_per_s=round(bandwidth / 1e9), weights=weights)
    results.add("fused kernels", value=sorted(setting.target.fast_form.fused))
    results.add("products, microseconds of torch's and the chosen", **setting.target.fast_form.products)
    new_tokens = 64 if CUDA else 8
    results.measure("plain, captured, tokens/s", lambda: decode_rate(setting, None, True, new_tokens))
    for nodes in (1, 8, 64):
        results.measure(f"target step of {nodes} nodes, ms", partial(milliseconds, target_step(setting, nodes)))
    block = replace(setting, head=setting.drafting(random_head("qwen3_8b_block", setting.target.frozen)))
    results.measure("block head, chain of 6, ms", partial(milliseconds, decode_step(block, Dynamic.chain(6))))
    for prompt in (2048, 8192, 32768) if CUDA else (64,):
        longer = replace(setting, prompt=prompt)
        results.measure(f"target step of 1 nodes, {prompt} keys, ms", partial(milliseconds, target_step(longer, 1)))
        results.measure(f"EAGLE-3 tree, {prompt} keys, ms", partial(milliseconds, decode_step(longer, TREE)))
        setting.forget()
    for rows in (8, 64) if CUDA else (2,):
        for name, step in (
            ("plain", target_step(setting, 1, rows)),
            ("chain of 2", decode_step(setting, Dynamic.chain(2), rows)),
        ):
            results.measure(f"{rows} rows, {name}, ms", partial(milliseconds, step))
        setting.forget()
    for name, growth in {"chain of 6": Dynamic.chain(6), "tree": TREE}.items():
        results.measure(f"EAGLE-3 {name}, ms", partial(milliseconds, decode_step(setting, growth)))
    sampled = decode_step(setting, TREE, 1, Sampling(1.0))
    results.measure("EAGLE-3 tree at temperature 1, ms", partial(milliseconds, sampled))
    results.measure("capture of a target step, s", partial(first_call, target_step(setting, 32)))
    with own_layers_of(setting.target.model):  # without the kernels, and without joined projections
        results.measure("target step of 1 nodes, own layers, ms", partial(milliseconds, target_step(setting, 1)))
    setting.forget()
    ours = partial(decode_rate, setting, None, False, 16)
    results.measure("plain, changing shapes, tokens/s", ours)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(2**30 if CUDA else 2**24, dtype=torch.uint8, device=DEVICE)
    goal = torch.empty_like(source)
    return 2 * source.nbytes / seconds(partial(goal.copy_, source))


def first_call(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    synchronise()
    return round(time.perf_counter() - started, 3)


@torch.inference_mode()
def graphs(results: Results) -> None:
    """The memory that captured steps of many rows take up together, and their times."""
    setting = Setting.random()
    for rows in (16, 64) if CUDA else (2,):
        setting.forget()
        steps = {
            f"{name}, {rows} rows x 60 nodes, {sampled}, ms": make(rows, sampling)
            for sampled, sampling in {"greedy": Sampling(), "T=1": Sampling(1.0)}.items()
            for name, make in {
                "draft and verify": partial(decode_step, setting, TREE),
                "verify": partial(target_step, setting, 60),
            }.items()
        }
        before = torch.cuda.memory_reserved() if CUDA else 0
        for name, step in steps.items():
            results.measure(name, partial(milliseconds, step, 5))
        if CUDA:
            torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved() - before if CUDA else 0
        results.add(f"graphs of {rows} rows x 60 nodes together, GiB", value=round(held / 2**30, 2))


@dataclass(frozen=True)
class Lesson:
    """A micro-batch of a recipe on random features, and the head that learns from it."""

    recipe: Recipe
    frozen: FrozenTarget
    head: DraftHead
    samples: list[Sample]

    @classmethod
    def of(cls, name: str, frozen: FrozenTarget, rows: int, length: int) -> "Lesson":
        recipe, size = load_recipe(ROOT / f"recipes/{name}.yaml"), frozen.config.vocab_size
        head, most = random_head(name, frozen), min(32000, size)
        states = frozen.config.hidden_size
        samples = [
            Sample(
                torch.randint(0, most, (length,)),
                torch.arange(length) > length // 4,
                torch.randn(length, len(head.taps) * states).bfloat16(),
                torch.randn(length, states).bfloat16(),
            )
            for _ in range(rows)
        ]
        return cls(recipe, frozen, head, samples)

    def collate(self) -> TrainingBatch:
        return TrainingBatch.collate(self.samples, torch.float32, DEVICE)

    def stepping(self, precision: str) -> Callable[[], float]:
        """An optimizer step as trainers/step.py computes it, as a call that returns the loss."""
        train = self.recipe.train.model_copy(update={"precision": precision})
        teacher = Teacher(self.frozen, self.head.vocab, getattr(torch, precision))
        unrolled = head_in_training(self.recipe.model_copy(update={"train": train}), self.head, teacher)
        batch, optimizers = self.collate(), build_optimizers(self.head, train)

        def step() -> float:
            with autocast(train, DEVICE):
                supervision = unrolled.supervise(batch, "0 1")
                scores = unrolled(batch, supervision, supervision.counts(unrolled.objective.unroll))
            scores.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), train.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return float(scores.loss)

        return step

    def cost(self, precision: str, tf32: bool) -> dict[str, Any]:
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses: list[float] = []
        with tf32_allowed(DEVICE if tf32 else torch.device("cpu")):
            step = self.stepping(precision)
            taken = seconds(lambda: losses.append(step()), 2 if precision == "float32" else 4, 2)
        allocated = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0
        tokens = sum(len(sample.tokens) for sample in self.samples)
        return {
            "value": round(taken, 3),
            "tokens_per_s": round(tokens / taken),
            "losses": [round(losses[0], 3), round(losses[-1], 3)],
            "allocated_gib": round(allocated, 2),
        }


def training(results: Results) -> None:
    """An optimizer step at the 8B recipe's micro-batch, and a quarter of the block recipe's."""
    config = TargetConfig.from_dict(LLAMA3_8B.to_dict())
    length, rows = (2048, 8) if CUDA else (48, 4)
    with DEVICE:
        embedding, lm_head = (0.02 * torch.randn(config.vocab_size, config.hidden_size) for _ in range(2))
        frozen = FrozenTarget(config, embedding, torch.ones(config.hidden_size), None, lm_head)
    for kind, name, count in (("EAGLE-3", "llama3_8b", rows), ("block", "qwen3_8b_block", rows // 4)):
        lesson = Lesson.of(name, frozen, count, length)
        batch = f"{count} x {length}"
        results.measure(f"{kind}: collating {batch}, ms", partial(milliseconds, lesson.collate, 3))
        results.measure(f"{kind}: step of {batch}, bfloat16, s", partial(lesson.cost, "bfloat16", False))
        if kind == "EAGLE-3":
            results.measure(f"{kind}: step of {batch}, float32, TF32, s", partial(lesson.cost, "float32", True))
            results.measure(f"{kind}: step of {batch}, float32, s", partial(lesson.cost, "float32", False))


@torch.inference_mode()
def harvesting(results: Results) -> None:
    """A full batch of responses, with rows of one temperature and of three, and the pass that taps hidden states."""
    setting = Setting.random()
    rows = 64 if CUDA else 4
    for name, temperatures in {"greedy": (0.0,), "T=1": (1.0,), "three temperatures": (0.0, 0.7, 1.0)}.items():
        responses = partial(response_rate, setting, rows, temperatures)
        results.measure(f"responses of {rows} rows, {name}, tokens/s", responses)
    for chunk in (512, 2048):
        reading_rate(setting, chunk)  # kernels are chosen at their first call
        results.measure(f"reading 16 prompts, {chunk} at a time, tokens/s", partial(reading_rate, setting, chunk))
    texts = [[1 + row] * (2048 if CUDA else 64) for row in range(4)]
    results.measure("tapping 4 x 2048, tokens/s", partial(tapping_rate, setting, texts))


def response_rate(setting: Setting, rows: int, temperatures: tuple[float, ...]) -> dict[str, float]:
    prompt, new_tokens = (256, 1024) if CUDA else (16, 32)
    loop = DecodeLoop(setting.target, None, rows, prompts_first=True)
    for row in range(rows):
        sampling = Sampling(temperatures[row % len(temperatures)], seed=row)
        loop.submit(Request([1 + row] * prompt, new_tokens, sampling))
    started = time.perf_counter()
    while len(loop.batch.rows) < rows:
        loop.step()
    synchronise()
    prefill = time.perf_counter() - started
    for _ in range(3):
        loop.step()
    step = seconds(loop.step, 20, 0)
    loop.close()
    setting.forget()
    rates = {"value": round(rows / step), "prefill_tokens_per_s": round(rows * prompt / prefill)}
    return {**rates, "ms": round(1000 * step, 2)}


def reading_rate(setting: Setting, chunk: int) -> int:
    length = 1024 if CUDA else 16
    loop = DecodeLoop(setting.target, None, 16, prefill_chunk=chunk, prompts_first=True)
    for row in range(16):
        loop.submit(Request([1 + row] * length, 4))
    synchronise()
    started = time.perf_counter()
    while len(loop.batch.rows) < 16:
        loop.step()
    synchronise()
    taken = time.perf_counter() - started
    loop.close()
    setting.forget()
    return round(16 * length / taken)


def tapping_rate(setting: Setting, texts: list[list[int]]) -> int:
    return round(sum(map(len, texts)) / seconds(partial(tap, setting.target, texts), 5, 1))


@torch.inference_mode()
def kernels(results: Results) -> None:
    """Attention of one layer and row by our kernel and with a mask, captured, over the layers of a model in turn."""
    heads, size, layers = (32, 128, 32) if CUDA else (4, 16, 2)
    key_heads = heads // 4
    for keys in (512, 2048, 8192, 32768) if CUDA else (64,):
        slots = Slots([torch.randn(layers, 2, 1, key_heads, keys, size, dtype=DTYPE, device=DEVICE)], static=True)
        for nodes in (1, 64):
            slots.set_lengths([keys - nodes])
            block = causal_block(nodes, DEVICE)
            query = torch.randn(1, heads, nodes, size, dtype=DTYPE, device=DEVICE)
            for carries in (True, False):
                mask = block_mask(slots, block, DTYPE, carries_keys=carries)

                def work(query: Tensor, mask: Tensor = mask, slots: Slots = slots) -> tuple[Tensor, ...]:
                    pairs = ((key, value) for key, value in slots.layers)
                    return tuple(grouped_attention(nn.Identity(), query, *pair, mask)[0] for pair in pairs)

                name = f"{layers} layers, {nodes} nodes, {keys} keys, {'our kernel' if carries else 'with a mask'}, ms"
                if CUDA or not carries:
                    results.measure(name, partial(milliseconds, partial(Graphed(work), query)))


def run_timed(results: Results, name: str, *command: str, until: Callable[[], bool] = lambda: False) -> None:
    """Add the seconds and the memory of a command, which is killed once `until` holds; its output goes to the part's
    log. A failure is a result too."""
    started, free = time.perf_counter(), torch.cuda.mem_get_info()[0] if CUDA else 0
    least = free
    with subprocess.Popen([sys.executable, *command], cwd=ROOT) as process:
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            least = min(least, torch.cuda.mem_get_info()[0] if CUDA else 0)
            if until():
                process.kill()
            time.sleep(0.05)
        process.returncode = os.waitstatus_to_exitcode(ended[1])
    facts = {"resident_gb": round(ended[2].ru_maxrss / 1e6, 2), "device_gb": round((free - least) / 1e9, 2)}
    results.add(f"{name}, s", value=round(time.perf_counter() - started, 1), code=process.returncode, **facts)


def wide_pair(results: Results) -> tuple[str, str]:
    """The demo's target and head in an 8B model's shape; as they are without a card."""
    target, head, wide = "assets/demo_target", "assets/demo_head", results.path.parent / "wide"
    if not CUDA:
        return target, head
    if not (wide / "head").exists():
        run_timed(results, "widening", "benchmarks/widen.py", target, str(wide), "--size", "8B", "--head", head)
    return str(wide), str(wide / "head")


def widened(results: Results) -> None:
    """Real text and real acceptance at an 8B model's cost: plain decoding and a head's trees, T = 0 and 1."""
    target, head = wide_pair(results)
    prompts = f"report.num_prompts={6 if CUDA else 1}", "report.prompts=assets/demo_target/heldout_prompts.jsonl"
    own = f"target.path={target}", f"decode.head={head}", f"run_dir={results.path.parent / 'widened'}", *prompts
    for dtype in ("bfloat16", "float32"):
        more = f"target.dtype={dtype}", "report.baselines=[plain,tree]", "report.temperatures=[0.0,1.0]"
        run_timed(results, f"report in {dtype}", "-m", "headstart.cli", "report", "recipes/tiny.yaml", *own, *more)


def recipe(results: Results) -> None:
    """The 8B recipe on the widened target: dry run, prompts to report, killed once after a checkpoint."""
    target, _ = wide_pair(results)
    shutil.rmtree(run_dir := results.path.parent / "recipe", ignore_errors=True)
    demo, taps = "assets/demo_target", "" if CUDA else "head.taps=[2,8,13]"
    settings = f"""data.prompts={demo}/prompts_768.jsonl data.heldout_prompts={demo}/heldout_prompts.jsonl
        data.prompt_tokens=64 data.heldout_samples=16 data.shard_samples=64 data.online=[auto] {taps}
        head.draft_vocab_size=1024 train.warmup_steps=1 train.eval_prompts=4 report.baselines=[plain,tree]"""
    if CUDA:  # the target has 512 positions
        settings += """ data.num_prompts=768 data.response_tokens=448 train.steps=300 train.batch_size=16
            train.checkpoint_every=100 decode.max_new_tokens=256 report.num_prompts=2"""
    else:
        settings += """ data.num_prompts=32 data.response_tokens=32 train.steps=4 train.batch_size=4
            train.checkpoint_every=2 decode.max_new_tokens=32 report.num_prompts=1"""
    own = "recipes/llama3_8b.yaml", f"run_dir={run_dir}", f"target.path={target}", *settings.split()
    train = "trainers/eagle.py", *own
    run_timed(results, "dry run", *train, "train.dry_run=true")
    run_timed(results, "killed after a checkpoint", *train, until=lambda: any(run_dir.glob("checkpoints/step-*[0-9]")))
    run_timed(results, "resumed to the end", *train)
    run_timed(results, "report", "-m", "headstart.cli", "report", *own)
    run_timed(results, "export", "-m", "headstart.cli", "export", *own, "export.format=vllm")


PARTS = {
    each.__name__: each for each in (environment, decoding, training, harvesting, graphs, kernels, widened, recipe)
}


def main() -> None:
    part, folder = sys.argv[1], Path(sys.argv[2])
    PARTS[part](Results(part, folder))


if __name__ == "__main__":
    main()
