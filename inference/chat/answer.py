"""One answer, streamed: its text in pieces, each with the draft depth it came from, and the time it took."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from headstart.inference.colours import BONUS
from headstart.inference.decode import DecodeLoop
from headstart.inference.drafter import Drafter
from headstart.inference.request import DecodeStats, Detokenize, Request
from headstart.inference.target.model import TargetModel
from headstart.inference.text_stream import TextStream

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
        self.loop = DecodeLoop(target, [request], drafter, max_batch=1)
        self.generation = self.loop.generations[0]
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
        for block, depths in self.blocks():
            shown = len(block) - (self.generation.finish == "end")
            for token, depth in zip(block[:shown], depths, strict=False):
                yield Piece(stream.piece(token), depth)
        yield Piece(stream.rest(), None)

    def blocks(self) -> Iterator[tuple[list[int], list[int | None]]]:
        """The tokens of the prompt's pass, then of each step, with the draft depth of each token."""
        accepted = drafted = 0
        with closing(self.loop.run()) as steps:
            started = None  # the pass over the prompt is no step
            for _, block in steps:
                if started is not None:
                    self.step_seconds.append(time.perf_counter() - started)
                new = sum(self.stats.accepted_at_depth) - accepted
                yield block, draft_depths(len(block), new, self.stats.drafted > drafted)
                if self.stopped:
                    break
                accepted, drafted = accepted + new, self.stats.drafted
                started = time.perf_counter()

    def whole_text(self) -> str:
        """All text so far."""
        tokens = self.generation.tokens
        return self.text(tokens[:-1] if self.generation.finish == "end" else tokens)


def draft_depths(count: int, accepted: int, has_drafts: bool) -> list[int | None]:
    """The draft depth of each token that a step added; a text that ends early keeps fewer than the step accepted."""
    if not has_drafts:
        return [None] * count
    return [depth if depth <= accepted else BONUS for depth in range(1, count + 1)]


def plain_tokens_per_second(target: TargetModel, request: Request, text: Detokenize) -> float:
    """The speed of plain decoding, from the median time of a few steps after the request's prompt."""
    answer = Answer(target, None, request, text)
    for _ in answer.blocks():
        if len(answer.step_seconds) == WARMUP_STEPS + MEASURED_STEPS:
            break
    return 1 / median(answer.step_seconds[WARMUP_STEPS:])
