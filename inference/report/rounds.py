"""Run all methods on the same batches of prompts in alternation, later turns of a chat after the first ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headstart.inference.core.sampling import Sampling
from headstart.inference.report.questions import Prompt
from headstart.inference.report.runs import Method, Run, run_batch
from headstart.inference.targets.model import TargetModel

Place = tuple[int, int]  # number of a batch of questions, turn of the chat; both from 0
NextTurn = Callable[[Prompt, list[int]], Prompt | None]  # what follows a prompt and its answer; None if nothing does


@dataclass(frozen=True)
class Round:
    """A batch of prompts and every method's run on it."""

    place: Place
    prompts: list[Prompt]
    runs: list[Run]  # of each method

    @property
    def categories(self) -> set[str]:
        return {prompt.category for prompt in self.prompts}

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
    batches: Iterable[tuple[int, list[Prompt]]],
    max_new_tokens: int,
    sampling: Sampling,
    warmup: int,
    next_turn: NextTurn | None = None,
    done: Mapping[Place, list[Run]] | None = None,
    after_run: Callable[[Run], None] = lambda run: None,
    after_round: Callable[[Round], None] = lambda found: None,
) -> list[Round]:
    """Every method's runs on these numbered batches of prompts, and on the later turns of their chats.

    With `next_turn`, plain decoding is among the methods, and a later turn follows its answer for all of them: so they
    continue the same text, even those that sample with random numbers of their own. Rounds in `done` are not run again.
    `after_run` and `after_round` are called between runs.
    """
    batches, done, rounds = [*batches], done or {}, []
    if missing := [batch for number, batch in batches if (number, 0) not in done]:
        warm_up(methods, target, missing, max_new_tokens, sampling, warmup)
    for number, batch in batches:
        turn, prompts = 0, batch
        while prompts:
            runs = done.get((number, turn))
            is_new = runs is None
            if runs is None:
                runs = run_in_turn(methods, target, prompts, max_new_tokens, sampling, number, after_run)
            rounds.append(Round((number, turn), prompts, runs))
            if is_new:
                after_round(rounds[-1])
            if next_turn is None:
                break
            answers = runs[plain_place(methods)].texts
            follow = (next_turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))
            turn, prompts = turn + 1, [prompt for prompt in follow if prompt is not None]
    return rounds


def run_in_turn(
    methods: list[Method],
    target: TargetModel,
    prompts: list[Prompt],
    max_new_tokens: int,
    sampling: Sampling,
    first: int,
    after_run: Callable[[Run], None],
) -> list[Run]:
    """Each method's run on one batch of prompts.

    Methods take turns at going first, as `first` counts, so that a slow phase of the machine hits all of them.
    """
    runs: dict[int, Run] = {}
    for turn in range(len(methods)):
        i = (first + turn) % len(methods)
        runs[i] = run_batch(methods[i], target, [prompt.tokens for prompt in prompts], max_new_tokens, sampling)
        after_run(runs[i])
    return [runs[i] for i in range(len(methods))]


def warm_up(
    methods: list[Method],
    target: TargetModel,
    batches: list[list[Prompt]],
    max_new_tokens: int,
    sampling: Sampling,
    count: int,
) -> None:
    """Decode the batches with the `count` longest prompts, which allocate everything that depends on size."""
    longest = sorted(batches, key=lambda batch: max(len(prompt.tokens) for prompt in batch), reverse=True)
    for method in methods:
        for batch in longest[:count]:
            run_batch(method, target, [prompt.tokens for prompt in batch], max_new_tokens, sampling)


def numbered_batches(prompts: list[Prompt], batch: int) -> list[tuple[int, list[Prompt]]]:
    """The prompts in batches, each with its number."""
    return [*enumerate(prompts[start : start + batch] for start in range(0, len(prompts), batch))]


def in_order(rounds: Sequence[Round]) -> list[Round]:
    """The rounds of several workers in the order of one."""
    return sorted(rounds, key=lambda each: each.place)


def plain_place(methods: Sequence[Method]) -> int:
    """Where plain decoding is among the methods."""
    return next(i for i, method in enumerate(methods) if method.drafter is None and not method.transformers)


def able_to_batch(methods: list[Method], batch: int) -> list[Method]:
    """The methods that can decode `batch` prompts together."""
    return [method for method in methods if batch == 1 or not method.one_prompt_at_a_time]


def texts_of(rounds: Sequence[Round], place: int) -> list[list[int]]:
    """What one method wrote."""
    return [text for each in rounds for text in each.runs[place].texts]


def seconds_and_tokens(rounds: Sequence[Round], place: int) -> tuple[list[float], list[int]]:
    """Seconds and new tokens of one method on each batch of questions, the turns of a chat together."""
    sums: dict[int, tuple[float, int]] = {}
    for each in rounds:
        run, (seconds, tokens) = each.runs[place], sums.get(each.place[0], (0.0, 0))
        sums[each.place[0]] = seconds + run.seconds, tokens + run.tokens
    return [seconds for seconds, _ in sums.values()], [tokens for _, tokens in sums.values()]
