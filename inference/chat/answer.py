"""One answer, streamed: its text in pieces, each with the draft depth it came from, and the time it took."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Block, DecodeStats, Detokenize, Request
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.show.text_stream import TextStream
from headstart.inference.targets.model import TargetModel

WARMUP_STEPS = 4
MEASURED_STEPS = 16


@dataclass(frozen=True)
class Piece:
    """Some text of an answer and the draft depth of its token: BONUS for a bonus token, None if nothing was drafted."""

    text: str
    depth: int | None


class Answer:
    """An answer that is written while `pieces` is read."""

    def __init__(self, target: TargetModel, drafter: Drafter | None, request: Request, text: Detokenize) -> None:
        self.request, self.text = request, text
        self.loop = DecodeLoop(target, drafter, max_batch=1)
        self.generation = self.loop.generations[self.loop.submit(request)]
        self.step_seconds: list[float] = []  # of each target step after the prompt was read
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

    def pieces(self) -> Iterator[Piece]:
        """The text as it becomes certain, without the end token."""
        stream = TextStream(self.text, self.request.prompt)
        for block in self.blocks():
            shown = len(block.tokens) - (self.generation.finish == "end")
            for token, depth in zip(block.tokens[:shown], block.depths, strict=False):
                yield Piece(stream.piece(token), depth)
        yield Piece(stream.rest(), None)

    def blocks(self) -> Iterator[Block]:
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


def plain_tokens_per_second(target: TargetModel, request: Request, text: Detokenize) -> float:
    """The speed of plain decoding, from the median time of a few steps after the request's prompt."""
    answer = Answer(target, None, request, text)
    for _ in answer.blocks():
        if len(answer.step_seconds) == WARMUP_STEPS + MEASURED_STEPS:
            break
    return 1 / median(answer.step_seconds[WARMUP_STEPS:])
