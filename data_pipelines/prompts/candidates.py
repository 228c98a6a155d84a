"""Candidates for prompts, written by the target itself (data.prompts self): Magpie, arXiv 2406.08464.

The target reads its chat template up to the user's words, and writes until it ends them. Candidate i has its own random
numbers, so it does not depend on batch, rank or resume. This file rejects candidates that are unusable by themselves;
selection.py compares candidates with each other.

prompts/candidates.jsonl holds every candidate. Until all are written, each rank appends to a file of its own, so a
killed run continues after the last candidate, on any number of ranks.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, islice
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from headstart.common.errors import wrong_value
from headstart.common.files import append_jsonl, read_growing_jsonl, remove, resume_jsonl, write_jsonl
from headstart.common.progress import Progress
from headstart.data_pipelines.prompts.chat_masks import ChatMasks
from headstart.data_pipelines.prompts.conversations import Conversation
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.prompts.selection import RECENT_CANDIDATES, RECENT_USABLE_MIN, Selection
from headstart.data_pipelines.stages.shard_work import texts_together
from headstart.data_pipelines.stages.stage import Json, Stage
from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import FastTokenizer
from headstart.recipes import Recipe
from headstart.recipes.schema import SELF, DataSection

Write = Callable[[list[Request]], list[Generation]]
CANDIDATES = "candidates.jsonl"
BATCHES_TOGETHER = 16  # batches of data.generate_batch candidates that are appended together
USABLE_SHARE_AT_START, SPARE_FACTOR = 0.8, 1.02  # to guess how many candidates give the missing prompts
LETTERS_MIN = 10  # in a user turn; fewer letters are not a question

# Rendered in place of the user's words, to find the text around them; common words, tokenized as usual.
STAND_IN = "What this user asks comes here"
REMEDY = "or name a file of prompts in data.prompts"

# Reasons to reject a candidate.
CUT = "no end within data.self_prompt_tokens"
TOO_LONG = "too long"
TOO_SHORT = "too short"
MARKS = "template marks"


@dataclass(frozen=True)
class Opening:
    """The tokens around the words of a user turn."""

    tokens: list[int]  # before the words
    end: int  # the first token after them
    space: str  # that the template writes before the words, if their first token includes it


class UserTemplate:
    """A chat template as the frame of a user turn, which the target fills; raises ValueError if that is impossible."""

    def __init__(self, template: ChatTemplate, data: DataSection) -> None:
        if not template.exists:
            needs = f"data.prompts: {SELF} given, which needs a chat template, and the target's tokenizer has none"
            raise ValueError(f"{needs}; choose the chat version of the model, or add its chat_template.jinja; {REMEDY}")
        if not isinstance(template.tokenizer, FastTokenizer):
            slow = "the target's tokenizer is written in Python, which does not give the offsets of tokens in a text"
            raise ValueError(f"data.prompts: {SELF} given, but {slow}; {REMEDY}")
        self.template, self.tokenizer, self.chat = template, template.tokenizer, ChatMasks(template)
        self.opening = cache(self._opening)  # by system prompt
        for system in data.self_system_prompts or (None,):
            used = len(self.opening(system).tokens)
            if used >= data.prompt_tokens:
                remedy = f"raise it, as {used} tokens stand before the user's words"
                raise wrong_value("data.prompt_tokens", data.prompt_tokens, f"{used + 1} or more are", remedy)

    def _opening(self, system: str | None) -> Opening:
        try:
            return self._around_words(system)
        except BadRow as error:
            reason = error
        field, value, remedy = "data.self_system_prompts", repr(system), "remove it"
        if system is None:
            field, value, remedy = "data.prompts", SELF, f"choose a target with another template; {REMEDY}"
        raise ValueError(f"{field}: {value} given, which the chat template rules out: {reason}; {remedy}")

    def _around_words(self, system: str | None) -> Opening:
        """The tokens around the user's words; raises BadRow if the template shows the words changed or not at all."""
        hidden = "it does not show the user's words unchanged and once, between tokens of its own"
        steering = [] if system is None else [{"role": "system", "content": system}]
        text = self.chat.render(Conversation([*steering, {"role": "user", "content": STAND_IN}]), ask=True)
        before, _, after = text.partition(STAND_IN)
        if not after or STAND_IN in after:
            raise BadRow("chat template", hidden)
        start, end = len(before), len(before) + len(STAND_IN)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, places = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        first = next((number for number, (_, stop) in enumerate(places) if stop > start), len(tokens))
        last = next((number for number, (begin, _) in enumerate(places) if begin >= end), len(tokens))
        space = text[places[first - 1][1] : start] if first else ""
        if first == 0 or last == len(tokens) or places[last - 1][1] > end or space.strip():
            raise BadRow("chat template", hidden)
        return Opening(tokens[:first], tokens[last], space)

    def prompt(self, words: str) -> list[int]:
        """The tokens after which the target answers a user with these words."""
        return self.chat.prompt(Conversation([{"role": "user", "content": words}]))


@dataclass(frozen=True)
class CandidateWriter:
    """Writes candidates with a function that carries out requests."""

    recipe: Recipe
    template: UserTemplate
    write: Write
    end_tokens: Sequence[int]  # the target's
    vocab_size: int  # the target's
    with_defaults: Callable[[Request], Request] = lambda request: request  # adds the target's default sampling

    def candidates(self, numbers: Iterable[int]) -> list[Json]:
        """The candidates of these numbers, finished or rejected; the system prompts are used in turn."""
        systems = self.recipe.data.self_system_prompts or (None,)
        work = [(number, self.template.opening(systems[number % len(systems)])) for number in numbers]
        written = self.write([self._request(number, opening) for number, opening in work])
        return [self._candidate(*each, generation) for each, generation in zip(work, written, strict=True)]

    def _request(self, number: int, opening: Opening) -> Request:
        data = self.recipe.data
        seed = zlib.crc32(f"{self.recipe.seed} {number} 0 user".encode())
        request = Request(
            opening.tokens,
            min(data.self_prompt_tokens, data.prompt_tokens - len(opening.tokens)),
            Sampling(data.self_temperature, seed=seed),
            end_tokens=(opening.end, *self.end_tokens),
        )
        return self.with_defaults(request)

    def _candidate(self, number: int, opening: Opening, generation: Generation) -> Json:
        written = generation.tokens[:-1] if generation.finish == "end" else generation.tokens
        words = str(self.template.tokenizer.decode(written, clean_up_tokenization_spaces=False))
        words = words.removeprefix(opening.space)
        rejected, tokens = None, list[int]()
        if generation.finish != "end":
            rejected = CUT
        elif self.template.template.special.search(words):
            rejected = MARKS
        elif sum(map(str.isalpha, words)) < LETTERS_MIN:
            rejected = TOO_SHORT
        elif len(prompt := self.template.prompt(words)) > self.recipe.data.prompt_tokens:
            rejected = TOO_LONG
        elif max(prompt) >= self.vocab_size:
            rejected = MARKS
        else:
            tokens = prompt
        return {"candidate": number, "turns": [words], "tokens": tokens, "rejected": rejected}


def read_candidates(folder: Path) -> dict[int, Json]:
    """The candidates written so far, by number."""
    paths = [folder / CANDIDATES, *sorted(folder.glob(f"{rank_file('*')}"))]
    return {row["candidate"]: row for path in paths for row in read_growing_jsonl(path)}


def rank_file(rank: str) -> str:
    return CANDIDATES.replace(".", f"-{rank}.")


def write_candidates(
    recipe: Recipe,
    stage: Stage,
    template: UserTemplate,
    start_selection: Callable[[], Selection],
    load: Callable[[], TargetModel],
) -> None:
    """Write candidates on all ranks until the main rank has selected enough; raises ValueError if it gives up."""
    state, folder = PartialState(), stage.folder
    if state.is_main_process and not stage.was_complete():  # complete prompts stay valid until there are more
        stage.claim()
    state.wait_for_everyone()
    journal = folder / rank_file(f"{state.process_index:05d}")
    resume_jsonl(journal)  # removes an incomplete last line
    selection = start_selection() if state.is_main_process else None
    while True:
        [(numbers, label)] = broadcast_object_list([None if selection is None else next_candidates(recipe, selection)])
        if not numbers:
            break
        target = load()
        max_batch = texts_together(recipe, target, recipe.data.prompt_tokens)
        work = partial(write_share, recipe, template, target, target.ranks.share(numbers), journal, label)
        target.ranks.carry_out(partial(generate_batch, target, max_batch=max_batch), work)
        state.wait_for_everyone()
    if state.is_main_process:
        merge(folder)
    state.wait_for_everyone()


def write_share(
    recipe: Recipe,
    template: UserTemplate,
    target: TargetModel,
    numbers: Sequence[int],
    journal: Path,
    label: str,
    write: Write,
) -> None:
    """Append this rank's candidates to its journal."""
    with_defaults, size = TargetDefaults.of(target).applied, BATCHES_TOGETHER * recipe.data.generate_batch
    writer = CandidateWriter(recipe, template, write, target.end_tokens, target.config.vocab_size, with_defaults)
    with Progress(label, len(numbers), "candidates", active=PartialState().is_main_process) as progress:
        for start in range(0, len(numbers), size):
            rows = writer.candidates(numbers[start : start + size])
            append_jsonl(journal, rows)
            progress.advance(len(rows))


def next_candidates(recipe: Recipe, selection: Selection) -> tuple[list[int], str]:
    """Take the written candidates; then the numbers to write next, with a label. None if there are enough prompts."""
    written = read_candidates(recipe.prompts_dir)
    selection.take_all(written)
    if not selection.missing:
        return [], ""
    share = USABLE_SHARE_AT_START
    if selection.next:
        share = max(sum(selection.recent) / len(selection.recent), 1 / RECENT_CANDIDATES)
    size = max(math.ceil(selection.missing / share * SPARE_FACTOR), recipe.data.generate_batch)
    if not selection.next or share < 2 * RECENT_USABLE_MIN / RECENT_CANDIDATES:  # it may give up after these
        size = min(size, RECENT_CANDIDATES)
    missing = (number for number in count(selection.next) if number not in written)
    return list(islice(missing, size)), f"prompts ({selection.accepted:,} of {selection.wanted:,} kept)"


def merge(folder: Path) -> None:
    """Put the candidates of all ranks into one file."""
    parts = list(folder.glob(rank_file("*")))
    if parts:
        write_jsonl(folder / CANDIDATES, [row for _, row in sorted(read_candidates(folder).items())])
    for part in parts:
        remove(part)
