"""Candidates for prompts, written by the target itself (data.prompts self): Magpie, arXiv 2406.08464.

The target reads its chat template up to the user's words, and writes until it ends them. With data.self_pictures every
second user turn begins with a picture. Candidate i has its own random numbers, so it does not depend on batch, rank or
resume. This file rejects candidates that are unusable by themselves; selection.py compares candidates with each other.

prompts/candidates.jsonl holds every candidate. Until all are written, each rank appends to a file of its own, so a
killed run continues after the last candidate, on any number of ranks.
"""

import math
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, islice
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from headstart.common.errors import wrong_value
from headstart.common.files import append_jsonl, read_growing_jsonl, remove, resume_jsonl, write_jsonl
from headstart.common.progress import Progress
from headstart.data_pipelines.prompts.chat_masks import ChatMasks, MaskedTokens, with_images
from headstart.data_pipelines.prompts.conversations import Conversation
from headstart.data_pipelines.prompts.row_report import TOO_LONG
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.prompts.selection import (
    PICTURE,
    RECENT_CANDIDATES,
    Selection,
    shows_picture,
)
from headstart.data_pipelines.stages.shard_work import texts_together
from headstart.data_pipelines.stages.stage import Json, Stage
from headstart.inference.core.request import Generation, Images, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.images.kept import ROUNDS_IN_MEMORY, KeptPictures
from headstart.inference.images.pictures import SUFFIXES
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import FastTokenizer
from headstart.recipes import Recipe
from headstart.recipes.schema import SELF, DataSection

Write = Callable[[list[Request]], list[Generation]]
CANDIDATES = "candidates.jsonl"
BATCHES_TOGETHER = 16  # batches of data.generate_batch candidates that are appended together
USABLE_SHARE_AT_START = 0.8  # to guess how many candidates give the missing prompts
LETTERS_MIN = 10  # in a user turn; fewer letters are not a question

# Rendered in place of the user's words, to find the text around them; common words, tokenized as usual.
STAND_IN = "What this user asks comes here"
REMEDY = "or name a file of prompts in data.prompts"

# Reasons to reject a candidate.
CUT = "no end within data.self_prompt_tokens"
TOO_SHORT = "too short"
MARKS = "template marks"


@dataclass(frozen=True)
class Opening:
    """The tokens around the words of a user turn."""

    tokens: list[int]  # before the words
    end: int  # the first token after them
    space: str  # that the template writes before the words, if their first token includes it
    text: str  # the tokens as text, with one mark in place of a picture


class UserTemplate:
    """A chat template as the frame of a user turn, which the target fills; raises ValueError if that is impossible."""

    def __init__(self, template: ChatTemplate, data: DataSection, pictures: KeptPictures | None = None) -> None:
        if not template.exists:
            needs = f"data.prompts: {SELF} given, which needs a chat template, and the target's tokenizer has none"
            raise ValueError(f"{needs}; choose the chat version of the model, or add its chat_template.jinja; {REMEDY}")
        if not isinstance(template.tokenizer, FastTokenizer):
            slow = "the target's tokenizer is written in Python, which does not give the offsets of tokens in a text"
            raise ValueError(f"data.prompts: {SELF} given, but {slow}; {REMEDY}")
        self.template, self.tokenizer, self.data = template, template.tokenizer, data
        self.pictures, self.chat = pictures, ChatMasks(template, pictures)
        self.paths = [] if data.self_pictures is None else pictures_in(data.self_pictures)
        self.around_words = cache(self._around_words)  # by system prompt and kind
        for number in range(2 * len(data.self_system_prompts or (None,))):
            used = len(self.opening(number).tokens)
            if used >= data.prompt_tokens:
                remedy = f"raise it, as {used} tokens stand before the user's words"
                raise wrong_value("data.prompt_tokens", data.prompt_tokens, f"{used + 1} or more are", remedy)

    def opening(self, number: int) -> Opening:
        """The turn of a candidate up to its words; the system prompts are used in turn."""
        systems, is_seen = self.data.self_system_prompts or (None,), shows_picture(self.data, number)
        system = systems[number // (2 if self.paths else 1) % len(systems)]
        try:
            return self.around_words(system, is_seen)
        except ValueError as error:
            reason = error
        field, value, remedy = "data.self_system_prompts", repr(system), "remove it"
        if system is None:
            field, value, remedy = "data.prompts", SELF, f"choose a target with another template; {REMEDY}"
        if is_seen:
            field, value, remedy = "data.self_pictures", str(self.data.self_pictures), "leave the field out"
        raise ValueError(f"{field}: {value} given, which the chat template rules out: {reason}; {remedy}")

    def _around_words(self, system: str | None, is_seen: bool) -> Opening:
        """The tokens around the user's words; raises BadRow if the template shows the words changed or not at all."""
        hidden = "it does not show the user's words unchanged and once, between tokens of its own"
        steering = [] if system is None else [{"role": "system", "content": system}]
        text = self.chat.render(Conversation([*steering, user_turn(STAND_IN, is_seen)]), ask=True)
        before, _, after = text.partition(STAND_IN)
        if not after or STAND_IN in after:
            raise BadRow("chat template", hidden)
        if is_seen and self.pictures is not None and before.count(self.pictures.prompts.place) != 1:
            raise BadRow("chat template", "it does not show the picture once, before the user's words")
        start, end = len(before), len(before) + len(STAND_IN)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, places = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        first = next((number for number, (_, stop) in enumerate(places) if stop > start), len(tokens))
        last = next((number for number, (begin, _) in enumerate(places) if begin >= end), len(tokens))
        space = text[places[first - 1][1] : start] if first else ""
        if first == 0 or last == len(tokens) or places[last - 1][1] > end or space.strip():
            raise BadRow("chat template", hidden)
        return Opening(tokens[:first], tokens[last], space, before[: start - len(space)])

    def keep(self, number: int) -> Path | None:
        """Keep the picture that a candidate shows; raises ValueError if it cannot be read."""
        if self.pictures is None or not shows_picture(self.data, number):
            return None
        path = self.paths[number // 2 % len(self.paths)]
        return self.pictures.folder / self.pictures.keep(f"data.self_pictures: {path.name}", str(path), path.parent)

    def images(self, number: int) -> Images | None:
        """The picture of a candidate, for the target to read before the words; raises BadRow if it cannot be read."""
        try:
            if (kept := self.keep(number)) is None or self.pictures is None:
                return None
            return self.pictures.read({"text": self.opening(number).text, "pictures": [kept.name]})
        except ValueError as error:
            raise BadRow(PICTURE, str(error)) from error

    def prompt(self, words: str, number: int = 0) -> MaskedTokens:
        """The prompt of a user who says these words, about the picture of a candidate if that shows one."""
        pictures = tuple(path for path in [self.keep(number)] if path is not None)
        return self.chat.asked(Conversation([user_turn(words, bool(pictures))], pictures=pictures))


def user_turn(words: str, is_seen: bool) -> Json:
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}] if is_seen else words}


def pictures_in(folder: Path) -> list[Path]:
    """The pictures of a folder and of those in it, shuffled, as their names may sort them by what they show."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        allowed = f"a folder with pictures ({', '.join(SUFFIXES)}) is"
        raise wrong_value("data.self_pictures", folder, allowed, "put some there, or leave the field out")
    random.Random(0).shuffle(paths)
    return paths


@dataclass(frozen=True)
class CandidateWriter:
    """Makes requests for candidates, and candidates of what the target has written."""

    recipe: Recipe
    template: UserTemplate
    end_tokens: Sequence[int]  # the target's
    vocab_size: int  # the target's
    with_defaults: Callable[[Request], Request] = lambda request: request  # adds the target's default sampling

    def write_all(self, numbers: Sequence[int], journal: Path, label: str, write: Write) -> None:
        """Append the candidates of these numbers to a journal, by a function that carries out requests."""
        size = (ROUNDS_IN_MEMORY if self.template.paths else BATCHES_TOGETHER) * self.recipe.data.generate_batch
        with Progress(label, len(numbers), "candidates", active=PartialState().is_main_process) as progress:
            for start in range(0, len(numbers), size):
                rows = self.candidates(numbers[start : start + size], write)
                append_jsonl(journal, rows)
                progress.advance(len(rows))

    def candidates(self, numbers: Iterable[int], write: Write) -> list[Json]:
        """The candidates of these numbers, finished or rejected."""
        rejected, requests = list[Json](), dict[int, Request]()
        for number in numbers:
            try:
                requests[number] = self._request(number)
            except BadRow as error:
                rejected.append({"candidate": number, "turns": [str(error)], "tokens": [], "rejected": error.kind})
        return rejected + [self._candidate(*each) for each in zip(requests, write([*requests.values()]), strict=True)]

    def _request(self, number: int) -> Request:
        """Raises BadRow for a picture that cannot be read, or is too large."""
        data, opening, images = self.recipe.data, self.template.opening(number), self.template.images(number)
        seed = zlib.crc32(f"{self.recipe.seed} {number} 0 user".encode())
        tokens = opening.tokens if images is None else images.prompt(self.vocab_size)
        if len(tokens) >= data.prompt_tokens:
            raise BadRow(TOO_LONG, f"{len(tokens)} tokens before the user's words")
        request = Request(
            tokens,
            min(data.self_prompt_tokens, data.prompt_tokens - len(tokens)),
            Sampling(data.self_temperature, seed=seed),
            end_tokens=(opening.end, *self.end_tokens),
            images=images,
        )
        return self.with_defaults(request)

    def _candidate(self, number: int, generation: Generation) -> Json:
        opening, kept = self.template.opening(number), MaskedTokens([], [])
        written = generation.tokens[:-1] if generation.finish == "end" else generation.tokens
        words = str(self.template.tokenizer.decode(written, clean_up_tokenization_spaces=False))
        words = words.removeprefix(opening.space)
        rejected = None
        if generation.finish != "end":
            rejected = CUT
        elif self.template.template.special.search(words):
            rejected = MARKS
        elif sum(map(str.isalpha, words)) < LETTERS_MIN:
            rejected = TOO_SHORT
        elif len((prompt := self.template.prompt(words, number)).tokens) > self.recipe.data.prompt_tokens:
            rejected = TOO_LONG
        elif max(prompt.tokens) >= self.vocab_size:
            rejected = MARKS
        else:
            kept = prompt
        return {"candidate": number, "turns": [words], "tokens": kept.tokens, "rejected": rejected, **with_images(kept)}


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
        if state.is_main_process:
            keep_pictures(template, numbers)
        state.wait_for_everyone()
        target = load()
        max_batch = texts_together(recipe, target, recipe.data.prompt_tokens)
        defaults, vocab_size = TargetDefaults.of(target), target.config.vocab_size
        writer = CandidateWriter(recipe, template, target.end_tokens, vocab_size, defaults.applied)
        work = partial(writer.write_all, target.ranks.share(numbers), journal, label)
        target.ranks.carry_out(partial(generate_batch, target, max_batch=max_batch), work)
        state.wait_for_everyone()
    if state.is_main_process:
        merge(folder)
    state.wait_for_everyone()


def keep_pictures(template: UserTemplate, numbers: Sequence[int]) -> None:
    """Keep the pictures of these candidates, before several ranks look for the same one."""
    with Progress("pictures", len(numbers), "candidates", active=bool(template.paths)) as progress:
        for number in numbers:
            with suppress(ValueError):  # the candidate will say why
                template.keep(number)
            progress.advance(1)


def next_candidates(recipe: Recipe, selection: Selection) -> tuple[list[int], str]:
    """Take the written candidates; then the numbers to write next, with a label. None if there are enough prompts."""
    written = read_candidates(recipe.prompts_dir)
    selection.take_all(written)
    if not selection.missing:
        return [], ""
    # As after RECENT_CANDIDATES others.
    share = (selection.accepted + USABLE_SHARE_AT_START * RECENT_CANDIDATES) / (selection.next + RECENT_CANDIDATES)
    size = max(math.ceil(selection.missing / share), recipe.data.generate_batch)
    if not selection.next:  # it may give up after these
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
