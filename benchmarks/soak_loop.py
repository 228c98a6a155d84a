"""Does the decode loop stay right, and the same size, under mixed traffic? In this process, without a server.

    PYTHONPATH=tests/support python benchmarks/soak_loop.py --minutes 20

Requests of all kinds come in bursts and leave at random: with drafts and without, greedy and sampled, with shared
beginnings, long prompts that are read in pieces, stop strings, grammars, lengths up to the end of the context, and
some whose own work fails. After each step `tests/support/sound_loop.py` checks the loop's state. Each text that ends
must be the one that its request writes alone and without drafts, each that is cut or fails must begin that text, and
memory must stay flat. Exit code 1 otherwise.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from soak import MOST_GROWTH, SCHEMA, WORDS
from sound_loop import assert_sound
from torch import Tensor

from headstart import SpeculativeModel
from headstart.inference.core.constraint import Constraint
from headstart.inference.core.constraint import Path as Tokens
from headstart.inference.core.request import Generation, Request, StopStrings
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.text_rules import TextRules
from headstart.inference.serve.api.constraints import Grammars
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import Tokenizer, load_tokenizer, text_of
from headstart.recipes.schema import DecodeSection

ROOT = Path(__file__).parents[1]
TARGET, HEAD = ROOT / "assets/demo_target", ROOT / "assets/demo_head"
ROWS = 8
PREFIX_MEMORY = 8 * 2**20  # so little that prefixes are dropped
BURST, CANCELS, SWITCH = 0.02, 0.01, 0.02  # chances of each step; rows draft while no prompt is read


class OwnFailure(Exception):
    """Raised on purpose by the constraint `Failing`."""


@dataclass(frozen=True)
class Failing:
    """A constraint that allows everything, until it fails."""

    after: int
    vocab_size: int

    def start(self) -> "FailingState":
        return FailingState(torch.ones(self.vocab_size, dtype=torch.bool), self.after)


@dataclass
class FailingState:
    every: Tensor
    left: int

    def allowed(self, path: Tokens) -> Tensor:
        return self.every

    def advance(self, tokens: list[int]) -> int:
        self.left -= len(tokens)
        if self.left < 0:
            raise OwnFailure
        return len(tokens)


class Traffic:
    """Draws requests, and knows what each writes alone."""

    def __init__(self, target: TargetModel, tokenizer: Tokenizer, kinds: int) -> None:
        self.target, self.text = target, partial(text_of, tokenizer)
        size, ends = target.config.vocab_size, target.end_tokens
        grammars = Grammars(tokenizer, size, ends)
        self.constraints: list[Callable[[], Constraint | None]] = [
            *[lambda: None] * 6,
            partial(grammars.json_schema, SCHEMA["json_schema"]["schema"]),
            partial(grammars.regex, r"[a-z_]{3,12}( = [0-9]{1,4}\n[a-z_]{3,12}){0,6}"),
            lambda: TextRules((), size, target.max_positions, tuple(ends), min_new_tokens=12),
            lambda: Failing(9, size),
        ]
        lines = (TARGET / "heldout_prompts.jsonl").read_text().splitlines()
        self.prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
        draw = random.Random(0)
        self.pool = [self._draw(draw) for _ in range(kinds)]
        self.alone: dict[int, Generation] = {}

    def _draw(self, draw: random.Random) -> Request:
        prompt = [*draw.choice(self.prompts[:4]), *draw.choice(self.prompts)] * draw.choice([1, 1, 1, 3])
        most = self.target.max_positions
        if draw.random() < 0.1:  # up to the end of the context
            prompt = (prompt * most)[: most - draw.randint(1, 20)]
        prompt = prompt[: most - 1]
        sampling: dict[str, Any] = draw.choice(
            [{}, {}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 30}, {"temperature": 0.9, "min_p": 0.02}]
        )
        sampling |= draw.choice([{}, {}, {}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}])
        stops = draw.choice([(), (), ("\n\n",), ("self", "return "), ("<|endoftext|>", draw.choice(WORDS))])
        constraint = draw.choice(self.constraints)()
        return Request(
            prompt,
            min(draw.randint(1, 80), most - len(prompt)),
            Sampling(**sampling, seed=draw.randrange(1000)),
            StopStrings(stops, self.text) if stops else None,
            logprobs=draw.random() < 0.2,
            end_tokens=draw.choice([None, None, ()]) if constraint is None else None,
            priority=draw.choice([0, 0, 0, 1]),
            alternatives=draw.choice([0, 3]),
            speculative=draw.random() < 0.7,
            constraint=constraint,
        )

    def written_alone(self, kind: int) -> Generation:
        """The text of a request of the pool, decoded alone and without drafts."""
        if kind not in self.alone:
            loop = DecodeLoop(self.target, max_batch=1)
            number = loop.submit(self.pool[kind])
            while not loop.idle:
                loop.step()
            self.alone[kind] = loop.generations[number]
            loop.close()
        return self.alone[kind]


def agrees(found: Generation, alone: Generation) -> bool:
    """Is a text the one that its request writes alone, as far as it goes? The logprobs, too, up to rounding."""
    count = len(found.tokens)
    near = all(abs(a - b) < 1e-3 for a, b in zip(found.logprobs or [], alone.logprobs or [], strict=False))
    if found.finish == "cancelled":
        return near and found.tokens == alone.tokens[:count]
    if found.finish == "error":  # a step with drafts fails at the whole of what it accepts
        return isinstance(found.error, OwnFailure) and alone.finish == "error" and found.tokens == alone.tokens[:count]
    return near and (found.tokens, found.finish) == (alone.tokens, alone.finish)


def soak(loop: DecodeLoop, traffic: Traffic, minutes: float) -> tuple[Counter[str], list[int]]:
    """Counts of what happened, and the memory every few seconds."""
    draw, process, counts = random.Random(1), psutil.Process(), Counter[str]()
    kinds: dict[int, int] = {}
    by_load = loop.decode_step.speculation
    ends, sampled, memory = time.monotonic() + 60 * minutes, time.monotonic(), list[int]()
    for kind in range(len(traffic.pool)):
        traffic.written_alone(kind)  # first, so that the memory for these is not taken for a leak
    ends += time.monotonic() - sampled
    while time.monotonic() < ends or not loop.idle:
        if time.monotonic() < ends and (loop.idle or draw.random() < BURST) and len(loop.waiting) < 2 * ROWS:
            for _ in range(draw.randint(1, 6)):
                kind = draw.randrange(len(traffic.pool))
                kinds[loop.submit(traffic.pool[kind])] = kind
        if kinds and draw.random() < CANCELS:
            loop.cancel(draw.choice([*kinds]))
        if draw.random() < 0.1:
            loop.schedule.chunk_with_rows = draw.randint(1, 64)
        if draw.random() < SWITCH:  # rows draft always for a while, or only where that pays
            loop.decode_step.speculation = draw.choice([None, by_load])
        loop.step()
        assert_sound(loop)
        counts["steps"] += 1
        for number, generation in loop.take_ended():
            loop.forget(number)
            kind = kinds.pop(number)
            counts[generation.finish] += 1
            counts["drafted"] += bool(generation.stats.drafted)
            counts["after a known prefix"] += bool(generation.cached_tokens)
            counts["tokens"] += len(generation.tokens)
            if not agrees(generation, traffic.written_alone(kind)):
                counts["wrong"] += 1
                print(f"request {number}, kind {kind}: {generation}, alone {traffic.alone[kind]}", file=sys.stderr)
        if time.monotonic() - sampled > 2:
            sampled = time.monotonic()
            memory.append(process.memory_info().rss)
    return counts, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="minutes of traffic (default: %(default)s)")
    parser.add_argument("--kinds", type=int, default=400, help="different requests (default: %(default)s)")
    arguments = parser.parse_args()
    decode = DecodeSection(growth="cost_aware", repeats=8)
    model = SpeculativeModel.from_folders(TARGET, HEAD, decode)
    assert model.drafter is not None
    traffic = Traffic(model.target, load_tokenizer(TARGET), arguments.kinds)
    loop = DecodeLoop(model.target, model.drafter, ROWS, prefix_memory=PREFIX_MEMORY, speculation=model.speculation)
    counts, memory = soak(loop, traffic, arguments.minutes)
    third = len(memory) // 3
    early, late = max(memory[third : 2 * third], default=1), max(memory[2 * third :], default=1)
    ended = sum(counts[finish] for finish in ("end", "stop", "length"))
    table = Table("what", "seen", "allowed")
    right = f"{ended + counts['cancelled'] + counts['error'] - counts['wrong']} right, {counts['wrong']} wrong"
    table.add_row("texts compared with the same request alone", right, "none wrong")
    size = f"{early / 2**20:.0f} MiB, then {late / 2**20:.0f} MiB"
    table.add_row("most memory in the second and last third", size, f"{MOST_GROWTH:.0%} more")
    for what in ("steps", "tokens", "end", "stop", "length", "cancelled", "error", "drafted", "after a known prefix"):
        table.add_row(what, f"{counts[what]}", "")
    Console().print(table)
    sys.exit(bool(counts["wrong"]) or late / early - 1 > MOST_GROWTH)


if __name__ == "__main__":
    main()
