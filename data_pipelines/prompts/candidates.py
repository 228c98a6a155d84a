"""Candidates for prompts, written by the target itself (data.prompts self): Magpie, arXiv 2406.08464.

The target reads its chat template up to where a user's words begin, and writes until it ends them. Candidate i has its
own random numbers, so it does not depend on batch, rank or resume. What is wrong with a candidate alone is found here;
selection.py compares candidates with each other.

prompts/candidates.jsonl holds every candidate. While candidates are written, each rank appends its own to a file of
its own, so a killed run continues after the last one, with another number of ranks if you like.
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
from headstart.data_pipelines.prompts.selection import FEWEST, WINDOW, Selection
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
BATCHES = 16  # candidates written and appended together, in units of data.generate_batch
FIRST_SHARE, MORE = 0.8, 1.02  # share of the first candidates expected to be usable; factor for those that are not
MIN_LETTERS = 10  # in a user turn; fewer hold no question

# Rendered in place of the user's words, to find what surrounds them; common words, tokenized as a user's would be.
STAND_IN = "What this user asks comes here"
REMEDY = "choose a target with such a template, or name a file of prompts in data.prompts"

# Why a candidate gives no prompt.
CUT = "no end within data.self_prompt_tokens"
TOO_LONG = "too long"
TOO_SHORT = "too short"
MARKS = "template marks"


@dataclass(frozen=True)
class Opening:
    """The tokens up to the place where the user's words begin, and the first token after these words.

    `space` is what the template writes before the words, if the first token of the words holds it.
    """

    tokens: list[int]
    end: int
    space: str


class UserTemplate:
    """A chat template as the frame of a user turn, which the target fills; raises ValueError if it cannot serve."""

    def __init__(self, template: ChatTemplate, data: DataSection) -> None:
        if not template.exists:
            needs = f"data.prompts: {SELF} given, which needs a chat template, and the target's tokenizer has none"
            advice = "choose the chat version of the model, add its chat_template.jinja, or name a file of prompts"
            raise ValueError(f"{needs}; {advice} in data.prompts")
        if not isinstance(template.tokenizer, FastTokenizer):
            found = "the target's tokenizer is one in Python, which does not give the places of tokens in a text"
            raise ValueError(f"data.prompts: {SELF} given, but {found}; name a file of prompts in data.prompts")
        self.template, self.tokenizer, self.chat = template, template.tokenizer, ChatMasks(template)
        self.opening = cache(self._opening)  # by system prompt
        for system in data.self_system_prompts or (None,):
            used = len(self.opening(system).tokens)
            if used >= data.prompt_tokens:
                remedy = f"raise it, as {used} tokens stand before the user's words"
                raise wrong_value("data.prompt_tokens", data.prompt_tokens, f"{used + 1} or more are", remedy)

    def _opening(self, system: str | None) -> Opening:
        try:
            opening = self._around_words(system)
            if opening is not None:
                return opening
            why = "it does not show the user's words once, as they are, between tokens of its own"
        except BadRow as error:
            why = str(error)
        if system is None:
            raise ValueError(f"data.prompts: {SELF} given, which the chat template rules out: {why}; {REMEDY}")
        raise ValueError(f"data.self_system_prompts: {system!r} given, which the template rules out: {why}; remove it")

    def _around_words(self, system: str | None) -> Opening | None:
        """The tokens around the user's words; None if the template shows the words changed or not at all."""
        steering = [] if system is None else [{"role": "system", "content": system}]
        text = self.chat.render(Conversation([*steering, {"role": "user", "content": STAND_IN}]), ask=True)
        before, _, after = text.partition(STAND_IN)
        if not after or STAND_IN in after:
            return None
        start, end = len(before), len(before) + len(STAND_IN)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, places = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        first = next((number for number, (_, stop) in enumerate(places) if stop > start), len(tokens))
        last = next((number for number, (begin, _) in enumerate(places) if begin >= end), len(tokens))
        if first == 0 or last == len(tokens) or places[last - 1][1] > end:
            return None
        space = text[places[first - 1][1] : start]
        return None if space.strip() else Opening(tokens[:first], tokens[last], space)

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
    complete: Callable[[Request], Request] = lambda request: request  # adds the target's own settings

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
        return self.complete(request)

    def _candidate(self, number: int, opening: Opening, generation: Generation) -> Json:
        written = generation.tokens[:-1] if generation.finish == "end" else generation.tokens
        words = str(self.template.tokenizer.decode(written, clean_up_tokenization_spaces=False))
        words = words.removeprefix(opening.space)
        rejected = self._flaw(generation, words)
        tokens = self.template.prompt(words) if rejected is None else []
        if len(tokens) > self.recipe.data.prompt_tokens:
            rejected, tokens = TOO_LONG, []
        elif tokens and max(tokens) >= self.vocab_size:
            rejected, tokens = MARKS, []
        return {"candidate": number, "turns": [words], "tokens": tokens, "rejected": rejected}

    def _flaw(self, generation: Generation, words: str) -> str | None:
        """Why the user's words are unusable, if they are."""
        if generation.finish != "end":
            return CUT
        if self.template.template.special.search(words):
            return MARKS
        return TOO_SHORT if sum(map(str.isalpha, words)) < MIN_LETTERS else None


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
    if state.is_main_process and not stage.was_complete():  # else its prompts stay what they are until there are more
        stage.claim()
    state.wait_for_everyone()
    own = folder / rank_file(f"{state.process_index:05d}")
    resume_jsonl(own)  # removes an incomplete last line
    selection = start_selection() if state.is_main_process else None
    while True:
        found, what = ([], "") if selection is None else next_candidates(recipe, selection)
        [numbers] = broadcast_object_list([found])  # the main rank's
        if not numbers:
            break
        target = load()
        share = target.ranks.share(numbers)

        def work(write: Write, share: Sequence[int] = share, what: str = what, target: TargetModel = target) -> None:
            complete, vocab_size = TargetDefaults.of(target).applied, target.config.vocab_size
            writer = CandidateWriter(recipe, template, write, target.end_tokens, vocab_size, complete)
            with Progress(what, len(share), "candidates", active=state.is_main_process) as progress:
                size = BATCHES * recipe.data.generate_batch
                for start in range(0, len(share), size):
                    rows = writer.candidates(share[start : start + size])
                    append_jsonl(own, rows)
                    progress.advance(len(rows))

        max_batch = texts_together(recipe, target, recipe.data.prompt_tokens)
        target.ranks.carry_out(partial(generate_batch, target, max_batch=max_batch), work)
        state.wait_for_everyone()
    if state.is_main_process:
        merge(folder)
    state.wait_for_everyone()


def next_candidates(recipe: Recipe, selection: Selection) -> tuple[list[int], str]:
    """Take what is written; then the numbers of the candidates to write next, none if there are enough prompts."""
    known = read_candidates(recipe.prompts_dir)
    while selection.missing and selection.next in known:
        selection.take(known[selection.next])
    if not selection.missing:
        return [], ""
    share = max(sum(selection.recent) / len(selection.recent), 1 / WINDOW) if selection.next else FIRST_SHARE
    size = max(math.ceil(selection.missing / share * MORE), recipe.data.generate_batch)
    if not selection.next or share < 2 * FEWEST / WINDOW:  # the selection may give up after these
        size = min(size, WINDOW)
    unknown = (number for number in count(selection.next) if number not in known)
    return list(islice(unknown, size)), f"prompts ({selection.accepted:,} of {selection.wanted:,} kept)"


def merge(folder: Path) -> None:
    """Put the candidates of all ranks into one file."""
    parts = list(folder.glob(rank_file("*")))
    if parts:
        write_jsonl(folder / CANDIDATES, [row for _, row in sorted(read_candidates(folder).items())])
    for part in parts:
        remove(part)
