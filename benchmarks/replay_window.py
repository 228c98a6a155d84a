"""Measures the replay window of a hybrid target: new tokens per second by window size and acceptance length.

    python benchmarks/replay_window.py

A random hybrid target of more than 30 M weights continues texts with drafts that are right as often as an acceptance
length says. `at once` moves the states in a pass of their own after each rejection, as other engines do; a window reads
what was accepted again with the next drafts. All ways take turns, text by text, and every text is compared to that of
plain decoding. Speeds are medians over the turns, relative to plain decoding in the same turn. `by costs` drafts only
while that pays by the measured costs of passes, as chat and serve do; one loop writes all of its texts.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.inference.core.cache import KVCache
from headstart.inference.core.request import Request
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.costs import CostSurface, CostTable
from headstart.inference.engine.loop import DecodeLoop, generate
from headstart.inference.targets import passes
from headstart.inference.targets.model import TargetModel

DEPTH = 4
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "eos_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **SIZES,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    },
    "falcon_h1": {
        **SIZES,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "head_dim": 64,
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
    },
    "lfm2": {
        **SIZES,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "layer_types": (["conv"] * 3 + ["full_attention"]) * 3,
    },
}


class RightAtTimes:
    """Drafts a chain of the true continuation, each token right with one chance."""

    taps: tuple[int, ...] = ()
    cache_shape = None
    max_nodes, depth = DEPTH + 1, DEPTH
    static_shapes = False

    def __init__(self, text: list[int], chance: float) -> None:
        self.text, self.chance = text, chance

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Do nothing: `draft` is given the whole text."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        (known,), (left,) = verified.texts, verified.remaining
        random = torch.Generator().manual_seed(len(known))
        right = (torch.rand(DEPTH, generator=random) < self.chance).tolist()
        drafts = self.text[len(known) :][: min(DEPTH, left)]
        drafts = [token if is_right else token ^ 1 for token, is_right in zip(drafts, right, strict=False)]
        tokens = torch.tensor([[known[-1], *drafts]])
        return Tree(tokens, torch.arange(len(drafts) + 1).unsqueeze(0) - 1)


def chance_for(acceptance: float) -> float:
    """The chance of each draft token with which a step yields `acceptance` tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**depth for depth in range(DEPTH + 1)) < acceptance else (low, middle)
    return low


@contextmanager
def window_of(size: int | None) -> Iterator[None]:
    """Replay with a window of this size; None: at once."""

    def at_once(self: passes.Passes, cache: KVCache, drafts: bool) -> bool:
        assert cache.recurrent is not None
        if longest := cache.recurrent.longest(1):
            self._advance_states(cache, longest)
        return drafts

    if size is None:
        with patch.object(passes.Passes, "prepare_step", at_once):
            yield
    else:
        with patch.object(passes, "WINDOW", size):
            yield


def costs_of(target: TargetModel) -> CostTable:
    """The seconds of passes over chains, by their size; drafting costs nothing here."""
    cache, sizes = target.passes.new_cache(64), (1, 2, 3, 5, 8, 12, 16, 21)
    target.passes.prefill(torch.arange(32).unsqueeze(0), cache.row(0), 0, [31])
    cache.set_lengths([32])
    best = [1e9] * len(sizes)
    for _ in range(5):
        for place, size in enumerate(sizes):
            tokens = torch.arange(size).unsqueeze(0)
            started = time.perf_counter()
            with torch.inference_mode():
                target.passes.tree(Tree(tokens, tokens - 1), cache)
            best[place] = min(best[place], time.perf_counter() - started)
    rising = tuple(accumulate(best, max))
    return CostTable(CostSurface(sizes, rising, sizes[-1], (0.0, 0.0), (0.0, 0.0), (1e-9, 0.0), (1e-9, 0.0)), width=1)


def by_costs(loop: DecodeLoop, prompt: list[int], wanted: list[int]) -> float:
    """How long the loop takes to write the text again."""
    started = time.perf_counter()
    found = loop.generations[loop.submit(Request(prompt, len(wanted)))]
    while not loop.idle:
        loop.step()
    took = time.perf_counter() - started
    assert found.tokens == wanted, "another text"
    return took


def seconds(target: TargetModel, prompt: list[int], wanted: list[int], drafter: RightAtTimes | None = None) -> float:
    """How long it takes to write the text again."""
    started = time.perf_counter()
    found = generate(target, prompt, len(wanted), drafter=drafter)
    took = time.perf_counter() - started
    assert found.tokens == wanted, "another text"
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=CONFIGS, default="qwen3_5_text")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each text")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.target, **CONFIGS[options.target]))
    target = TargetModel(model.eval(), ())
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.target}, {weights / 1e6:.0f} M weights, float32, {options.threads} threads")
    windows: dict[str, int | None] = {"at once": None, **{f"window {size}": size for size in (4, 8, 16)}}
    names = [f"{name}, x plain" for name in (*windows, "by costs")]
    print(f"| acceptance length | plain tokens/s | {' | '.join(names)} |")
    costs = costs_of(target)
    for acceptance in (1.5, 2.0, 3.0):
        ratios: dict[str, list[float]] = {name: [] for name in windows}
        plain, drafts = list[float](), RightAtTimes([], chance_for(acceptance))
        loop = DecodeLoop(target, drafts, 1, costs=costs)
        ratios["by costs"] = []
        for turn in range(options.turns + 1):
            prompt = torch.randint(8192, (32,), generator=torch.Generator().manual_seed(turn)).tolist()
            text = generate(target, prompt, options.tokens).tokens
            drafts.text = prompt + text
            alone = seconds(target, prompt, text)
            for name, size in windows.items():
                with window_of(size):
                    took = seconds(target, prompt, text, drafts)
                if turn:  # the first warms up
                    ratios[name].append(alone / took)
            took = by_costs(loop, prompt, text)
            if turn:
                ratios["by costs"].append(alone / took)
                plain.append(options.tokens / alone)
        cells = [f"{statistics.median(ratios[name]):.2f}" for name in ratios]
        print(f"| {acceptance} | {statistics.median(plain):.1f} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
