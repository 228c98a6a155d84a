"""Candidates for prompts, written by the target itself (data.prompts self): Magpie, arXiv 2406.08464.

The target reads its chat template up to where a user's words begin, and writes on until it ends them. Candidate i has
its own random numbers, so it does not depend on batch, rank or resume. What is wrong with a candidate alone is found
here; self_selection.py compares candidates with each other.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headstart.data_pipelines.prompts.language import Languages
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.prompts.self_written.template import Opening, UserTemplate, opening_messages, user_turn
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import Sampling
from headstart.recipes import Recipe

Write = Callable[[list[Request]], list[Generation]]
MIN_LETTERS = 10  # of a user turn; fewer hold no question

# Why a candidate gives no prompt.
CUT = "no end within data.self_prompt_tokens"
TOO_LONG = "too long"
TOO_SHORT = "too short"
MARKS = "template marks"
OTHER_LANGUAGE = "other language"
BAD_ANSWER = "unusable answer"


@dataclass
class Candidate:
    """A conversation that the target writes, up to its last user turn."""

    number: int
    num_turns: int  # user turns that it shall have
    system: str | None  # steers the user turns; neither the answers nor the finished prompt hold it
    temperature: float  # of the answers between user turns
    messages: list[Json] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of the finished prompt
    rejected: str | None = None

    @classmethod
    def plan(cls, recipe: Recipe, number: int) -> "Candidate":
        """Candidate `number`; all combinations of turns, system prompt and temperature are used in turn."""
        data, systems = recipe.data, recipe.data.self_system_prompts or (None,)
        rest, turns = divmod(number, data.self_turns)
        rest, system = divmod(rest, len(systems))
        return cls(number, turns + 1, systems[system], data.temperatures[rest % len(data.temperatures)])

    @property
    def steered(self) -> list[Json]:
        """The messages that the target sees when it writes a user turn."""
        return opening_messages(self.system) + self.messages

    def to_json(self) -> Json:
        words = [message["content"] for message in self.messages]
        return {"candidate": self.number, "turns": words, "tokens": self.tokens, "rejected": self.rejected}


class CandidateWriter:
    """Writes candidates with a function that carries out requests; `end_tokens` are the target's."""

    def __init__(self, recipe: Recipe, template: UserTemplate, write: Write, end_tokens: Sequence[int]) -> None:
        self.recipe, self.template, self.write, self.end_tokens = recipe, template, write, tuple(end_tokens)
        self.languages = None if recipe.data.self_language is None else Languages(recipe.data.self_language)

    def candidates(self, numbers: Iterable[int]) -> list[Json]:
        """The candidates of these numbers, finished or rejected."""
        found = [Candidate.plan(self.recipe, number) for number in numbers]
        for turn in range(max((each.num_turns for each in found), default=0)):
            if turn:
                self._answer([each for each in found if each.num_turns > turn and each.rejected is None], turn)
            self._ask([each for each in found if each.num_turns > turn and each.rejected is None], turn)
        for each in found:
            if each.rejected is None:
                each.tokens = self.template.prompt(each.messages)
                if len(each.tokens) > self.recipe.data.prompt_tokens:
                    each.rejected, each.tokens = TOO_LONG, []
        return [each.to_json() for each in found]

    def _ask(self, candidates: list[Candidate], turn: int) -> None:
        """Let the target write the next user turn of each."""
        openings = [self._opening(each, turn) for each in candidates]
        work = [(each, opening) for each, opening in zip(candidates, openings, strict=True) if opening is not None]
        data = self.recipe.data
        requests = [
            Request(
                opening.tokens,
                min(data.self_prompt_tokens, data.prompt_tokens - len(opening.tokens)),
                Sampling(data.self_temperature, top_p=data.self_top_p, seed=self._seed(each, turn, "user")),
                end_tokens=(opening.end, *self.end_tokens),
            )
            for each, opening in work
        ]
        for (each, opening), generation in zip(work, self._written(requests), strict=True):
            words = self._words(generation).removeprefix(opening.space)
            each.rejected = self._flaw(generation, words)
            each.messages.append(user_turn(words))

    def _opening(self, candidate: Candidate, turn: int) -> Opening | None:
        """What the target reads before the user turn; None, with the candidate rejected, if it leaves no room."""
        if turn == 0:
            return self.template.first(candidate.system)
        try:
            opening = self.template.opening(candidate.steered)
        except BadRow:
            opening = None
        if opening is None:
            candidate.rejected = BAD_ANSWER
        elif len(opening.tokens) >= self.recipe.data.prompt_tokens:
            candidate.rejected, opening = TOO_LONG, None
        return opening

    def _flaw(self, generation: Generation, words: str) -> str | None:
        """Why a user turn is unusable, if it is."""
        if generation.finish != "end":
            return CUT
        if self.template.chat.special.search(words):
            return MARKS
        if sum(map(str.isalpha, words)) < MIN_LETTERS:
            return TOO_SHORT
        if self.languages is not None and not self.languages.has(words):
            return OTHER_LANGUAGE
        return None

    def _answer(self, candidates: list[Candidate], turn: int) -> None:
        """Let the target answer each, as a server would: without the system prompt that steers the user turns."""
        data = self.recipe.data
        work = []
        for each in candidates:
            prompt = self.template.prompt(each.messages)
            room = min(data.response_tokens, data.prompt_tokens - len(prompt))
            if room < 1:
                each.rejected = TOO_LONG
            else:
                sampling = Sampling(each.temperature, seed=self._seed(each, turn, "answer"))
                work.append((each, Request(prompt, room, sampling)))
        for (each, _), generation in zip(work, self._written([request for _, request in work]), strict=True):
            words = self._words(generation)
            if generation.finish != "end":
                each.rejected = TOO_LONG
            elif not words.strip() or self.template.chat.special.search(words):
                each.rejected = BAD_ANSWER
            each.messages.append({"role": "assistant", "content": words})

    def _written(self, requests: list[Request]) -> list[Generation]:
        return self.write(requests) if requests else []

    def _words(self, generation: Generation) -> str:
        """What was written, without the token that ended it."""
        tokens = generation.tokens[:-1] if generation.finish == "end" else generation.tokens
        return str(self.template.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def _seed(self, candidate: Candidate, turn: int, role: str) -> int:
        return zlib.crc32(f"{self.recipe.seed} {candidate.number} {turn} {role}".encode())
