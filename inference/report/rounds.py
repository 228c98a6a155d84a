"""Run methods on the same batches of prompts in alternation, later turns of a chat after the first ones.

The rounds that a report has measured are kept in a file, so that the same command continues where it was killed.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from headstart.common.files import append_jsonl, read_growing_jsonl, write_jsonl
from headstart.heads.files import MODEL
from headstart.heads.target_config import folder_of
from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import loop_of
from headstart.inference.report.methods import Method
from headstart.inference.report.questions import Prompt
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

Place = tuple[int, int]  # number of a batch of questions, turn of the chat; both from 0
NextTurn = Callable[[Prompt, list[int]], Prompt | None]  # the prompt after a prompt and its answer; None at the end


@dataclass
class Run:
    """The texts that one method wrote for a few prompts decoded together, and the time it took."""

    texts: list[list[int]]  # new tokens of each prompt
    stats: list[DecodeStats]
    seconds: float  # wall time of the whole batch
    first_token: list[float]  # seconds until the first token, per prompt
    per_token: list[float]  # seconds of each later token; the tokens of one step share its time equally

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class Round:
    """A batch of prompts and every method's run on it."""

    place: Place
    prompts: list[Prompt]
    runs: list[Run]  # one for each method

    def of_category(self, category: str) -> "Round | None":
        """The same without prompts of other categories; None if no prompt is left. Times stay those of the batch."""
        kept = [number for number, prompt in enumerate(self.prompts) if prompt.category == category]
        runs = [
            replace(run, texts=[run.texts[number] for number in kept], stats=[run.stats[number] for number in kept])
            for run in self.runs
        ]
        return Round(self.place, [self.prompts[number] for number in kept], runs) if kept else None


def run_rounds(
    methods: list[Method],
    target: TargetModel,
    prompts: list[Prompt],
    max_new_tokens: int,
    sampling: Sampling,
    warmup: int,
    batch: int = 1,
    next_turn: NextTurn | None = None,
    done: Mapping[Place, list[Run]] | None = None,
    after_run: Callable[[Run], None] = lambda run: None,
    after_round: Callable[[Round], None] = lambda found: None,
) -> list[Round]:
    """Every method's runs on the prompts, `batch` of them at a time, and on the later turns of their chats.

    With `next_turn`, plain decoding is among the methods, and a later turn follows its answer for all of them: so they
    continue the same text, even those that sample with random numbers of their own. Rounds in `done` are not run again.
    `after_run` and `after_round` are called between runs. The `warmup` longest batches are decoded first, untimed.
    """

    def run(method: Method, prompts: list[Prompt]) -> Run:
        return run_batch(method, target, [prompt.tokens for prompt in prompts], max_new_tokens, sampling)

    done, rounds = done or {}, list[Round]()
    batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    missing = [each for number, each in enumerate(batches) if (number, 0) not in done]
    missing.sort(key=lambda each: max(len(prompt.tokens) for prompt in each), reverse=True)
    for method, each in product(methods, missing[:warmup]):  # they allocate everything that depends on size
        run(method, each)
    target.fast_form.finish()
    for number, prompts in enumerate(batches):
        turn = 0
        while prompts:
            place = number, turn
            if place in done:
                rounds.append(Round(place, prompts, done[place]))
            else:
                runs = in_rotation(methods, number, partial(run, prompts=prompts), after_run)
                rounds.append(Round(place, prompts, runs))
                after_round(rounds[-1])
            if next_turn is None:
                break
            answers = rounds[-1].runs[plain_place(methods)].texts
            follow = (next_turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))
            turn, prompts = turn + 1, [prompt for prompt in follow if prompt is not None]
    return rounds


def in_rotation(
    methods: list[Method], first: int, run: Callable[[Method], Run], after_run: Callable[[Run], None]
) -> list[Run]:
    """Each method's run; methods take turns at going first, so that a slow phase of the machine hits all of them."""
    runs: dict[int, Run] = {}
    for turn in range(len(methods)):
        place = (first + turn) % len(methods)
        runs[place] = run(methods[place])
        after_run(runs[place])
    return [runs[place] for place in range(len(methods))]


def plain_place(methods: Sequence[Method]) -> int:
    """Where plain decoding is among the methods."""
    return next(i for i, method in enumerate(methods) if method.drafter is None and not method.transformers)


def able_to_batch(methods: list[Method], batch: int) -> list[Method]:
    """The methods that can decode `batch` prompts together."""
    return [method for method in methods if batch == 1 or not method.one_prompt_at_a_time]


def texts_of(rounds: Sequence[Round], place: int) -> list[list[int]]:
    """The texts that one method wrote."""
    return [text for each in rounds for text in each.runs[place].texts]


def seconds_and_tokens(rounds: Sequence[Round], place: int) -> tuple[list[float], list[int]]:
    """Seconds and new tokens of one method on each batch of questions, the turns of a chat together."""
    sums: dict[int, tuple[float, int]] = {}
    for each in rounds:
        run, (seconds, tokens) = each.runs[place], sums.get(each.place[0], (0.0, 0))
        sums[each.place[0]] = seconds + run.seconds, tokens + run.tokens
    return [seconds for seconds, _ in sums.values()], [tokens for _, tokens in sums.values()]


def run_batch(
    method: Method, target: TargetModel, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling
) -> Run:
    """Decode the prompts as one batch."""
    if method.transformers:
        return run_transformers(method, target, prompts, max_new_tokens, sampling)
    requests = [Request(prompt, max_new_tokens, sampling) for prompt in prompts]
    loop = loop_of(target, requests, method.drafter, len(prompts))
    first, later, started = [0.0] * len(prompts), [], time.perf_counter()
    last = [started] * len(prompts)
    for block in loop.run():
        now, number, count = time.perf_counter(), block.number, len(block.tokens)
        if last[number] == started:
            first[number] = now - started
        else:
            later += [(now - last[number]) / count] * count
        last[number] = now
    generations = list(loop.generations.values())
    texts = [generation.tokens for generation in generations]
    return Run(texts, [generation.stats for generation in generations], max(last) - started, first, later)


def run_transformers(
    method: Method, target: TargetModel, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling
) -> Run:
    """Decode with `generate`, alone or assisted; every forward of the model after the first counts as a step."""
    calls: list[int] = []
    hook = target.unpacked.model.register_forward_pre_hook(lambda *_: calls.append(1))
    times = TokenTimes() if len(prompts) == 1 else None  # transformers streams a single text only
    started = time.perf_counter()
    texts = target.generate(list(prompts), max_new_tokens, sampling, method.lookup, method.assistant, times)
    seconds = time.perf_counter() - started
    hook.remove()
    # As in our loop, the first token comes from the prefill, which is no step. Assisted generation already verifies
    # draft tokens in the prefill, so there it counts as one.
    prefill_counts = int(method.one_prompt_at_a_time)
    stats = [
        DecodeStats(len(calls) - 1 + prefill_counts, len(text) - 1 + prefill_counts, seconds=seconds) for text in texts
    ]
    if times is None:
        return Run(texts, stats, seconds, [], [])
    arrivals = [(moment - started, count) for moment, count in times.blocks[1:]]
    later = [share for (before, _), (now, count) in pairwise(arrivals) for share in [(now - before) / count] * count]
    return Run(texts, stats, seconds, [arrivals[0][0]], later)


class TokenTimes:
    """A streamer for transformers' `generate` that only notes when tokens arrive."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, int]] = []  # (time, number of tokens); the first block is the prompt

    def put(self, value: Tensor) -> None:
        self.blocks.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Do nothing: the last tokens came with the last `put`."""


JOURNAL = "measured.jsonl"  # in the report's folder until the report is written


class Setting(NamedTuple):
    """The conditions of one table of the report."""

    temperature: float
    batch: int


class Journal:
    """A file to which every finished round is added as one line; the first line says what was measured, and where."""

    def __init__(self, path: Path, made_from: Mapping[str, Any]) -> None:
        """Reuse the rounds of an earlier run of the same report; those of any other are dropped."""
        rows = read_growing_jsonl(path)
        is_same = rows[:1] == [json.loads(json.dumps(made_from))]
        rows = rows[1:] if is_same else []
        self.path, self.done = path, defaultdict[Setting, dict[Place, list[Run]]](dict)
        write_jsonl(path, [made_from, *rows])  # without a torn last line
        for row in rows:
            runs = [Run(**{**run, "stats": [DecodeStats(**stats) for stats in run["stats"]]}) for run in row["runs"]]
            self.done[Setting(row["temperature"], row["batch"])][row["number"], row["turn"]] = runs

    @property
    def num_texts(self) -> int:
        return sum(len(run.texts) for rounds in self.done.values() for runs in rounds.values() for run in runs)

    def add(self, setting: Setting, found: Round) -> None:
        place = dict(zip(("number", "turn"), found.place, strict=True))
        append_jsonl(self.path, [{**setting._asdict(), **place, "runs": [asdict(run) for run in found.runs]}])


def made_from(
    recipe: Recipe, machine: Mapping[str, Any], folders: Mapping[str, Path], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """The facts that must agree before an earlier run's figures are reused; `folders` holds the heads' by name."""
    target = folder_of(recipe.target)
    weights = {path.name: path.stat() for path in sorted(target.glob("*.safetensors"))}
    return {
        "recipe": recipe.model_dump(mode="json"),
        "machine": dict(machine),
        "stats": [field.name for field in fields(DecodeStats)],
        "target": {name: [found.st_size, found.st_mtime_ns] for name, found in weights.items()},
        "heads": {name: hashlib.sha256((folder / MODEL).read_bytes()).hexdigest() for name, folder in folders.items()},
        "prompts": hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest(),
    }
