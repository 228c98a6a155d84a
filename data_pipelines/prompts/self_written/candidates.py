"""Candidates for prompts, written by the target itself (data.prompts self): Magpie, arXiv 2406.08464.

The target reads its chat template up to where a user's words begin, and writes until it ends them. Candidate i has its
own random numbers, so it does not depend on batch, rank or resume. What is wrong with a candidate alone is found here;
selection.py compares candidates with each other.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from headstart.data_pipelines.prompts.chat_masks import ChatTemplate
from headstart.data_pipelines.prompts.conversations import Conversation
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.targets.tokenizer import Tokenizer
from headstart.recipes import Recipe
from headstart.recipes.schema import SELF, DataSection

Write = Callable[[list[Request]], list[Generation]]
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
    """A tokenizer's chat template as the frame of a user turn, which the target fills.

    Raises ValueError if the tokenizer has no template, or the template does not show a user's words as they are.
    """

    def __init__(self, tokenizer: Tokenizer, data: DataSection) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(
                f"data.prompts: {SELF} given, which needs a chat template that says where a user's words begin, and "
                "the target's tokenizer has none (it is a base model, or its chat_template.jinja is missing); choose "
                "the chat version of the model, or name a file of prompts in data.prompts"
            )
        self.tokenizer, self.chat = tokenizer, ChatTemplate(tokenizer)
        self.opening = cache(self._opening)  # by system prompt
        for system in data.self_system_prompts or (None,):
            used = len(self.opening(system).tokens)
            if used >= data.prompt_tokens:
                raise ValueError(
                    f"data.prompt_tokens: {data.prompt_tokens} given, but {used} tokens stand before the user's words; "
                    f"{used + 1} or more are allowed: raise it"
                )

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
        raise ValueError(
            f"data.self_system_prompts: {system!r} given, which the chat template rules out: {why}; remove it"
        )

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


class CandidateWriter:
    """Writes candidates with a function that carries out requests; `end_tokens` are the target's."""

    def __init__(self, recipe: Recipe, template: UserTemplate, write: Write, end_tokens: Sequence[int]) -> None:
        self.recipe, self.template, self.write, self.end_tokens = recipe, template, write, tuple(end_tokens)

    def candidates(self, numbers: Iterable[int]) -> list[Json]:
        """The candidates of these numbers, finished or rejected; the system prompts are used in turn."""
        systems = self.recipe.data.self_system_prompts or (None,)
        work = [(number, self.template.opening(systems[number % len(systems)])) for number in numbers]
        written = self.write([self._request(number, opening) for number, opening in work])
        return [self._candidate(*each, generation) for each, generation in zip(work, written, strict=True)]

    def _request(self, number: int, opening: Opening) -> Request:
        data = self.recipe.data
        seed = zlib.crc32(f"{self.recipe.seed} {number} 0 user".encode())
        return Request(
            opening.tokens,
            min(data.self_prompt_tokens, data.prompt_tokens - len(opening.tokens)),
            Sampling(data.self_temperature, seed=seed),
            end_tokens=(opening.end, *self.end_tokens),
        )

    def _candidate(self, number: int, opening: Opening, generation: Generation) -> Json:
        written = generation.tokens[:-1] if generation.finish == "end" else generation.tokens
        words = str(self.template.tokenizer.decode(written, clean_up_tokenization_spaces=False))
        words = words.removeprefix(opening.space)
        rejected = self._flaw(generation, words)
        tokens = self.template.prompt(words) if rejected is None else []
        if len(tokens) > self.recipe.data.prompt_tokens:
            rejected, tokens = TOO_LONG, []
        return {"candidate": number, "turns": [words], "tokens": tokens, "rejected": rejected}

    def _flaw(self, generation: Generation, words: str) -> str | None:
        """Why the user's words are unusable, if they are."""
        if generation.finish != "end":
            return CUT
        if self.template.chat.special.search(words):
            return MARKS
        return TOO_SHORT if sum(map(str.isalpha, words)) < MIN_LETTERS else None
