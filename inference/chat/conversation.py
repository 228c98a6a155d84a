"""A conversation: the prompt of its next answer, cut to fit the target's positions, and the answer as it streams."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import DecodeStats, Detokenize, EmittedTokens, Request
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.show import TextStream, TokenText
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel

Turn = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """The question with the turns before it that fit."""

    tokens: list[int]
    turns: list[Turn]  # the question last
    dropped: int  # questions that were dropped with their answers, the oldest first, so that the rest fits


class Conversation:
    """The questions and answers so far. Without a chat template the target only continues text, and keeps none."""

    def __init__(self, template: ChatTemplate, max_positions: int, max_new_tokens: int) -> None:
        """The prompt and `max_new_tokens` of answer must fit `max_positions`."""
        self.template = template
        self.max_positions, self.max_new_tokens = max_positions, max_new_tokens
        self.turns: list[Turn] = []

    @property
    def has_template(self) -> bool:
        return self.template.exists

    def ask(self, question: str) -> Prompt:
        """The prompt for the answer, without old turns that do not fit; ValueError if the question alone does not."""
        question = question.encode(errors="replace").decode()  # a terminal may give bytes that are not UTF-8
        turns = [*self.turns, {"role": "user", "content": question}]
        whole = len(turns)
        room = self.max_positions - self.max_new_tokens
        while len(tokens := self.as_tokens(turns)) > room and len(turns) > 1:
            turns = turns[2:]
        if not 0 < len(tokens) <= room:
            kept = f"the answer may take {self.max_new_tokens} of the target's {self.max_positions} positions"
            allowed = f"1 to {max(room, 0)} are allowed, because {kept}"
            remedy = "ask a shorter question, or lower --max-new-tokens"
            raise ValueError(f"the question is {len(tokens)} tokens long; {allowed}; {remedy}")
        return Prompt(tokens, turns, dropped=(whole - len(turns)) // 2)

    def answered(self, prompt: Prompt, answer: str) -> None:
        """Continue from this prompt and its answer."""
        self.turns = [*prompt.turns, {"role": "assistant", "content": answer}] if self.has_template else []

    def as_tokens(self, turns: list[Turn]) -> list[int]:
        return self.template.tokens(turns) if self.has_template else self.template.encode_text(turns[-1]["content"])


class Answer:
    """An answer that is written while `shown` or `blocks` is read."""

    def __init__(self, target: TargetModel, drafter: Drafter | None, request: Request, text: Detokenize) -> None:
        self.request, self.text = request, text
        self.loop = DecodeLoop(target, drafter, max_batch=1)
        self.generation = self.loop.generations[self.loop.submit(request)]
        self.step_seconds: list[float] = []  # time of each target step after the prompt was read
        self.stopped = False

    @property
    def stats(self) -> DecodeStats:
        return self.generation.stats

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second of the target's steps; None before the first step."""
        return self.stats.tokens / sum(self.step_seconds) if self.step_seconds else None

    def stop(self) -> None:
        """End the answer with the step that is running."""
        self.stopped = True

    def shown(self) -> Iterator[TokenText]:
        """The text as it becomes certain, without the end token."""
        stream = TextStream(self.text, self.request.prompt)
        for block in self.blocks():
            count = len(block.tokens) - (self.generation.finish == "end")
            for token, depth in zip(block.tokens[:count], block.depths, strict=False):
                yield TokenText(stream.piece(token), depth)
        yield TokenText(stream.rest(), None)

    def blocks(self) -> Iterator[EmittedTokens]:
        """The first token, from the prompt's pass, then the tokens of each step."""
        with closing(self.loop.run()) as blocks:
            started = None  # the pass over the prompt is no step
            for block in blocks:
                if started is not None:
                    self.step_seconds.append(time.perf_counter() - started)
                yield block
                if self.stopped:
                    break
                started = time.perf_counter()

    def whole_text(self) -> str:
        """All text so far."""
        tokens = self.generation.tokens
        return self.text(tokens[:-1] if self.generation.finish == "end" else tokens)
