"""Run methods on the same batches of prompts in alternation, later turns of a chat after the first ones."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import loop_of
from headstart.inference.report.methods import Method
from headstart.inference.report.questions import Prompt
from headstart.inference.targets.model import TargetModel

NextTurn = Callable[[Prompt, list[int]], Prompt | None]  # the prompt after a prompt and its answer; None at the end


@dataclass
class Run:
    """The texts that one method wrote for a few prompts decoded together, and the time it took."""

    texts: list[list[int]]  # new tokens of each prompt
    stats: list[DecodeStats]
    seconds: float  # wall time of the batch


@dataclass(frozen=True)
class Round:
    """A batch of prompts and every method's run on it."""

    number: int  # the batch's; the later turns of its chats have the same one
    prompts: list[Prompt]
    runs: list[Run]  # one for each method

    def of_category(self, category: str) -> "Round | None":
        """The round with the prompts of one category; None if it has none. Times stay the batch's."""
        members = [i for i, prompt in enumerate(self.prompts) if prompt.category == category]
        runs = [
            replace(run, texts=[run.texts[i] for i in members], stats=[run.stats[i] for i in members])
            for run in self.runs
        ]
        return Round(self.number, [self.prompts[i] for i in members], runs) if members else None


def run_rounds(
    methods: list[Method],
    target: TargetModel,
    prompts: list[Prompt],
    max_new_tokens: int,
    sampling: Sampling,
    warmup: int,
    batch: int = 1,
    next_turn: NextTurn | None = None,
    after_run: Callable[[Run], None] = lambda run: None,
) -> list[Round]:
    """Every method's runs on the prompts, `batch` of them at a time, and on the later turns of their chats.

    Methods take turns at going first, so that a slow phase of the machine hits all of them. With `next_turn`, plain
    decoding is among the methods, and a later turn follows its answer for all of them: they continue the same text,
    even if they sample with other random numbers. The `warmup` longest batches are decoded first, untimed.
    """

    def run(method: Method, prompts: list[Prompt]) -> Run:
        return run_batch(method, target, prompts, max_new_tokens, sampling)

    batches, rounds = [prompts[start : start + batch] for start in range(0, len(prompts), batch)], list[Round]()
    longest = sorted(batches, key=lambda each: max(len(prompt.tokens) for prompt in each), reverse=True)
    for method, each in product(methods, longest[:warmup]):  # they allocate everything that depends on size
        run(method, each)
    target.fast_form.finish()
    for number, prompts in enumerate(batches):
        first = number % len(methods)
        order = [*range(first, len(methods)), *range(first)]
        while prompts:
            runs: dict[int, Run] = {}
            for index in order:
                runs[index] = run(methods[index], prompts)
                after_run(runs[index])
            rounds.append(Round(number, prompts, [runs[index] for index in range(len(methods))]))
            if next_turn is None:
                break
            answers = runs[plain_place(methods)].texts
            turns = (next_turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))
            prompts = [prompt for prompt in turns if prompt is not None]
    return rounds


def plain_place(methods: Sequence[Method]) -> int:
    """The index of plain decoding among the methods."""
    return next(i for i, method in enumerate(methods) if method.drafter is None and not method.transformers)


def able_to_batch(methods: list[Method], batch: int, prompts: Sequence[Prompt]) -> list[Method]:
    """The methods that can decode `batch` of these prompts together."""
    shows_images = any(prompt.images is not None for prompt in prompts)  # transformers asks whose they are
    return [
        method
        for method in methods
        if (batch == 1 or not (method.one_prompt_at_a_time or (shows_images and method.transformers)))
        and not (shows_images and method.assistant is not None)
    ]


def texts_of(rounds: Sequence[Round], index: int) -> list[list[int]]:
    """The texts that one method wrote."""
    return [text for each in rounds for text in each.runs[index].texts]


def stats_of(rounds: Sequence[Round], index: int) -> list[DecodeStats]:
    """One method's statistics of each text."""
    return [stats for each in rounds for stats in each.runs[index].stats]


def seconds_and_tokens(rounds: Sequence[Round], index: int) -> tuple[list[float], list[int]]:
    """Seconds and new tokens of one method on each batch of questions, the turns of a chat together."""
    sums: dict[int, tuple[float, int]] = {}
    for each in rounds:
        run, (seconds, tokens) = each.runs[index], sums.get(each.number, (0.0, 0))
        sums[each.number] = seconds + run.seconds, tokens + sum(map(len, run.texts))
    return [seconds for seconds, _ in sums.values()], [tokens for _, tokens in sums.values()]


def run_batch(
    method: Method, target: TargetModel, prompts: Sequence[Prompt], max_new_tokens: int, sampling: Sampling
) -> Run:
    """Decode the prompts as one batch."""
    if method.transformers:
        return run_transformers(method, target, prompts, max_new_tokens, sampling)
    requests = [Request(prompt.tokens, max_new_tokens, sampling, images=prompt.images) for prompt in prompts]
    loop = loop_of(target, requests, method.drafter, len(prompts), speculation=method.speculation)
    started = time.perf_counter()
    for _ in loop.run():
        pass
    seconds, generations = time.perf_counter() - started, loop.generations.values()
    return Run([each.tokens for each in generations], [each.stats for each in generations], seconds)


def run_transformers(
    method: Method, target: TargetModel, prompts: Sequence[Prompt], max_new_tokens: int, sampling: Sampling
) -> Run:
    """Decode with `generate`, alone or assisted; every forward of the model after the first counts as a step."""
    calls: list[int] = []
    hook = target.unpacked.model.register_forward_pre_hook(lambda *_: calls.append(1))
    started = time.perf_counter()
    tokens = [prompt.tokens for prompt in prompts]
    texts = target.generate(tokens, max_new_tokens, sampling, method.lookup, method.assistant, images=prompts[0].images)
    seconds = time.perf_counter() - started
    hook.remove()
    # As in our loop, the prefill yields the first token and is not a step. Assisted generation verifies draft tokens in
    # the prefill already, so there it counts as a step.
    prefill = int(not method.one_prompt_at_a_time)
    stats = [DecodeStats(len(calls) - prefill, len(text) - prefill, seconds=seconds) for text in texts]
    return Run(texts, stats, seconds)
