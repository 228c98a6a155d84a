"""One request on its way through the engine: its choices as they grow, its times and counts."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headstart.inference.core.request import Alternatives, DecodeStats, DraftTree
from headstart.inference.serve.engine import End, Engine, Event, Failure, Job, Update
from headstart.inference.serve.errors import ApiError
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.requests.reading import Wanted
from headstart.inference.serve.requests.text import ToolCall, ToolCallParser, WrittenText, joined
from headstart.inference.show.text_stream import TokenText


@dataclass(frozen=True)
class TokenLogprob:
    token: int
    logprob: float
    alternatives: Alternatives  # the likeliest tokens in its place


@dataclass(frozen=True)
class Delta:
    """What a step added to a choice; the last one of a choice has a finish reason."""

    index: int
    shown: list[TokenText]
    calls: list[ToolCall]
    seconds: float  # of decoding so far
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    tree: DraftTree | None = None  # of the step
    count: int = 0  # tokens that the step added, those without text and those of held text included

    @property
    def text(self) -> str:
        return joined(self.shown)


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


class Exchange:
    """Submits the choices of a request, and yields what becomes certain until all have ended."""

    def __init__(self, wanted: Wanted, engine: Engine, settings: ServerSettings) -> None:
        self.wanted, self.engine, self.settings = wanted, engine, settings
        self.times = Times(time.perf_counter())
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.choices = []
        for index, request in enumerate(wanted.requests):
            include_stop = wanted.fields.include_stop_str_in_output
            written = WrittenText(wanted.text, request.prompt, request.stop, include_stop)
            parser = ToolCallParser() if wanted.tools else None
            self.choices.append(Choice(Job(index, request, self.events), written, parser))
        self.left = len(self.choices)  # choices that have not ended in the engine
        self.too_late = False
        for choice in self.choices:
            engine.submit(choice.job)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What each step adds to each choice; raises ApiError if the engine or a time limit ends the request."""
        while self.left:
            event = await self._next_event()
            delta = self._take(event)
            if isinstance(event, Failure):
                raise event.error
            assert delta is not None
            yield delta

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
            self._take(await self.events.get())

    async def _next_event(self) -> Event:
        """The next event; after the time limit of a request its choices are cancelled, and their ends follow."""
        is_waiting = self.times.first is None
        limit = self.settings.queue_timeout if is_waiting else self.settings.request_timeout
        if limit is None or self.too_late:
            return await self.events.get()
        rest = self.times.submitted + limit - time.perf_counter()
        try:
            return await asyncio.wait_for(self.events.get(), max(rest, 0.001))
        except TimeoutError:
            if is_waiting:
                message = (
                    f"no token within {limit:g} seconds, the server's --queue-timeout; send the request again later"
                )
                raise ApiError(503, message, headers={"Retry-After": "10"}) from None
        self.too_late = True
        self.cancel()
        return await self.events.get()

    def _take(self, event: Event) -> Delta | None:
        choice = self.choices[event.index]
        if isinstance(event, Update):
            return self._grown(choice, event)
        self.left -= 1
        if isinstance(event, End):
            return self._ended(choice, event)
        choice.failed = True
        return None

    def _grown(self, choice: Choice, update: Update) -> Delta:
        if self.times.first is None:
            self.times.first, self.times.read = update.at, update.at - update.seconds
        self.times.last, choice.cached = update.at, update.cached
        ends, shown, logprobs = choice.job.request.end_tokens or (), [], []
        for place, (token, depth) in enumerate(zip(update.block.tokens, update.block.depths, strict=True)):
            if choice.written.stopped is not None:
                break
            choice.tokens.append(token)
            if update.logprobs:
                alternatives = update.alternatives[place] if update.alternatives else []
                logprobs.append(TokenLogprob(token, update.logprobs[place], alternatives))
            if token not in ends:
                shown += choice.written.add(token, depth)
        if choice.written.stopped is not None:
            self.engine.cancel(choice.job)  # if the loop has not found the stop string itself
        calls: list[ToolCall] = []
        if choice.parser is not None:
            shown, calls = choice.parser.add(shown)
        return Delta(
            update.index,
            shown,
            calls,
            update.seconds,
            logprobs,
            tree=update.block.tree,
            count=len(update.block.tokens),
        )

    def _ended(self, choice: Choice, event: End) -> Delta:
        choice.stats, self.times.ended = event.stats, event.at
        shown, calls = choice.written.end(), list[ToolCall]()
        if choice.parser is not None:
            shown, calls = choice.parser.add(shown)
            rest, more = choice.parser.end()
            shown, calls = shown + rest, calls + more
        choice.finish = {"end": "stop", "cancelled": "abort"}.get(event.finish, event.finish)
        if choice.written.stopped is not None:
            choice.finish, choice.stop_reason = "stop", choice.written.stopped
        elif event.finish == "end" and choice.tokens[-1] in self.wanted.fields.stop_token_ids:
            choice.stop_reason = choice.tokens[-1]
        if choice.parser is not None and choice.parser.calls and choice.finish == "stop":
            choice.finish = "tool_calls"
        return Delta(event.index, shown, calls, event.stats.seconds, finish=choice.finish)
