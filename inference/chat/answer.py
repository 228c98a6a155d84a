"""One streamed answer: its text with the draft depth of each token, and the time that it took."""

import time
from collections.abc import Iterator
from contextlib import closing

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import DecodeStats, Detokenize, EmittedTokens, Request
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.show.text_stream import TextStream, TokenText
from headstart.inference.targets.model import TargetModel


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
