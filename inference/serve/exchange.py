"""One request on its way through the engine: its choices as they grow, its times and counts."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headstart.inference.core.request import Alternatives, DecodeStats, DraftTree
from headstart.inference.serve.engine import End, Engine, Event, Failure, Job, Update
from headstart.inference.serve.errors import ApiError
from headstart.inference.serve.requests.fields import Wanted
from headstart.inference.serve.requests.tool_calls import ToolCall, ToolCallParser
from headstart.inference.serve.requests.written import Piece, WrittenText


@dataclass(frozen=True)
class ToldToken:
    """A token as logprobs tell it."""

    token: int
    logprob: float
    alternatives: Alternatives  # the likeliest tokens in its place


@dataclass(frozen=True)
class Delta:
    """What a step added to a choice; the last one of a choice has a finish reason."""

    index: int
    pieces: list[Piece] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    told: list[ToldToken] = field(default_factory=list)
    finish: str | None = None
    tree: DraftTree | None = None  # of the step
    count: int = 0  # tokens that the step added, those without text and those of held text included
    seconds: float | None = None  # of decoding so far

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass
class Choice:
    """What is known about a choice so far."""

    job: Job
    written: WrittenText
    parser: ToolCallParser | None
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # tokens of the prompt that were not read again
    finish: str | None = None  # in OpenAI's words
    stop_reason: str | int | None = None
    stats: DecodeStats | None = None  # once it has ended
    failed: bool = False


@dataclass
class Times:
    """time.perf_counter() at each event; None until it has happened."""

    submitted: float
    read: float | None = None  # the engine began to read the prompt
    first: float | None = None  # the first token of any choice
    last: float | None = None  # the last token so far
    ended: float | None = None


@dataclass(frozen=True)
class Limits:
    """How long a request may take, in seconds; None is any time."""

    queue: float | None
    request: float | None


class Exchange:
    """Submits the choices of a request, and yields what becomes certain until all have ended."""

    def __init__(self, wanted: Wanted, engine: Engine, limits: Limits) -> None:
        self.wanted, self.engine, self.limits = wanted, engine, limits
        self.times = Times(time.perf_counter())
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.choices = []
        for index, request in enumerate(wanted.requests):
            job = Job(index, request, self.events)
            written = WrittenText(wanted.text, request.prompt, wanted.stops, wanted.include_stop)
            self.choices.append(Choice(job, written, ToolCallParser() if wanted.tools else None))
        self.left = len(self.choices)  # choices that have not ended in the engine
        self.too_late = False
        for choice in self.choices:
            engine.submit(choice.job)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What each step adds to each choice; raises ApiError if the engine or a time limit ends the request."""
        while self.left:
            event = await self._next_event()
            choice = self.choices[event.index]
            if isinstance(event, Failure):
                self.left -= 1
                choice.failed = True
                raise event.error
            if isinstance(event, End):
                yield self._ended(choice, event)
            else:
                yield self._grown(choice, event)

    def cancel(self) -> None:
        """End in the engine whatever has not ended there."""
        for choice in self.choices:
            if choice.stats is None and not choice.failed:
                self.engine.cancel(choice.job)

    async def settle(self) -> None:
        """Cancel what has not ended, and wait until the engine has let go of it."""
        if self.left and self.engine.alive:
            self.cancel()
        while self.left and (self.engine.alive or not self.events.empty()):
            event = await self.events.get()
            choice = self.choices[event.index]
            if isinstance(event, End):
                self._ended(choice, event)
            elif isinstance(event, Failure):
                self.left -= 1
            else:
                self._grown(choice, event)

    async def _next_event(self) -> Event:
        """The next event; after the time limit of a request its choices are cancelled, and their ends follow."""
        while True:
            limit = self.limits.request if self.times.first is not None else self.limits.queue
            if limit is None or self.too_late:
                return await self.events.get()
            rest = self.times.submitted + limit - time.perf_counter()
            try:
                return await asyncio.wait_for(self.events.get(), max(rest, 0.001))
            except TimeoutError:
                if self.times.first is None:
                    raise ApiError(
                        503,
                        f"no token within {limit:g} seconds, the server's --queue-timeout; send the request again "
                        f"later",
                        headers={"Retry-After": "10"},
                    ) from None
                self.too_late = True
                self.cancel()

    def _grown(self, choice: Choice, update: Update) -> Delta:
        if self.times.first is None:
            self.times.first, self.times.read = update.at, update.at - update.seconds
        self.times.last, choice.cached = update.at, update.cached
        ends, pieces, told = choice.job.request.end_tokens or (), [], []
        for place, token in enumerate(update.tokens):
            if choice.written.stopped is not None:
                break
            choice.tokens.append(token)
            if update.logprobs:
                alternatives = update.alternatives[place] if update.alternatives else []
                told.append(ToldToken(token, update.logprobs[place], alternatives))
            if token not in ends:
                pieces += choice.written.add(token, update.depths[place])
        if choice.written.stopped is not None:
            self.engine.cancel(choice.job)  # if the loop has not found the stop string itself
        calls: list[ToolCall] = []
        if choice.parser is not None:
            pieces, calls = choice.parser.add(pieces)
        return Delta(
            update.index, pieces, calls, told, tree=update.tree, count=len(update.tokens), seconds=update.seconds
        )

    def _ended(self, choice: Choice, event: End) -> Delta:
        self.left -= 1
        choice.stats, self.times.ended = event.stats, event.at
        pieces = choice.written.end()
        calls: list[ToolCall] = []
        if choice.parser is not None:
            pieces, calls = choice.parser.add(pieces)
            rest, more = choice.parser.end()
            pieces, calls = pieces + rest, calls + more
        last = choice.tokens[-1] if choice.tokens else None
        if choice.written.stopped is not None:
            choice.finish, choice.stop_reason = "stop", choice.written.stopped
        elif event.finish == "end":
            choice.finish = "stop"
            choice.stop_reason = last if last in self.wanted.stop_tokens else None
        else:
            choice.finish = {"cancelled": "abort"}.get(event.finish, event.finish)
        if choice.parser is not None and choice.parser.calls and choice.finish == "stop":
            choice.finish = "tool_calls"
        return Delta(event.index, pieces, calls, finish=choice.finish, seconds=event.stats.seconds)
