"""One request on its way through the engine: its choices as they grow, its times and counts."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from headstart.inference.core.request import Alternatives, DecodeStats, TokenScores
from headstart.inference.core.verify import Accepted
from headstart.inference.serve.api.encode import Wanted
from headstart.inference.serve.api.errors import ApiError, stopping
from headstart.inference.serve.api.text import ToolCall, ToolCallParser, WrittenText, joined
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.worker import End, Engine, Event, Job, Update, own_failure
from headstart.inference.show import TokenText


@dataclass(frozen=True)
class TokenLogprob:
    token: int
    logprob: float | None  # None for the first token of a prompt
    alternatives: Alternatives  # the likeliest tokens in its place
    offset: int  # where its text begins; for a part of a character, where that one begins


@dataclass
class Output:
    """The additions of a step to a choice, or all of a choice so far."""

    parts: list[TokenText | ToolCall] = field(default_factory=list)  # in the order in which they were written
    logprobs: list[TokenLogprob] = field(default_factory=list)
    count: int = 0  # tokens, those without text and those of held text included
    tree: Accepted | None = None  # the step's
    seconds: float = 0.0  # decoding time so far

    def add(self, other: "Output") -> None:
        self.parts += other.parts
        self.logprobs += other.logprobs

    @property
    def shown(self) -> list[TokenText]:
        return [part for part in self.parts if isinstance(part, TokenText)]

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if not isinstance(part, TokenText)]

    @property
    def text(self) -> str:
        return joined(self.shown)


@dataclass(eq=False, kw_only=True)
class Choice(Job):
    """A choice and its output so far."""

    wanted: Wanted
    written: WrittenText
    parser: ToolCallParser | None
    output: Output = field(default_factory=Output)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # tokens of the prompt that were not read again
    finish: str | None = None  # in OpenAI's words; None until the choice has ended
    stop_reason: str | int | None = None
    stats: DecodeStats | None = None  # once it has ended

    @property
    def is_over(self) -> bool:
        """Whether nothing may be added any more, whatever the engine still writes."""
        has_stopped = self.written.stopped is not None or (self.parser is not None and self.parser.is_done)
        return has_stopped or self.wanted.fields.max_tokens == 0

    def grow(self, update: Update) -> Output:
        """Take in a step; returns what it adds to the output."""
        self.cached = update.cached
        found = Output(count=len(update.block.tokens), tree=update.block.tree, seconds=update.seconds)
        if update.is_first:
            found.parts += [TokenText(self.written.echo, None)] if self.written.echo else []
            found.logprobs += [] if update.prompt is None else self.prompt_logprobs(update.prompt)
        for place, (token, depth) in enumerate(zip(update.block.tokens, update.block.depths, strict=True)):
            if self.is_over:
                break
            self.tokens.append(token)
            if update.logprobs:
                alternatives = update.alternatives[place] if update.alternatives else []
                found.logprobs.append(
                    TokenLogprob(token, update.logprobs[place], alternatives, self.written.offset(token))
                )
            if token not in (self.request.end_tokens or ()):
                self.show(found, self.written.add(token, depth))
        self.output.add(found)
        return found

    def show(self, found: Output, fresh: list[TokenText], is_end: bool = False) -> None:
        """Add text to an output, tool calls apart."""
        found.parts += fresh if self.parser is None else self.parser.add(fresh, is_end)

    def prompt_logprobs(self, scores: TokenScores) -> list[TokenLogprob]:
        """Those of the prompt's tokens, whose text is the echo."""
        echo, found = WrittenText(self.wanted.text, []), []
        alternatives: list[Alternatives] = scores.alternatives or [[] for _ in scores.chosen]
        scored = zip(self.request.prompt, [None, *scores.chosen], [[], *alternatives], strict=True)
        for token, logprob, likeliest in scored:
            found.append(TokenLogprob(token, logprob, likeliest, echo.offset(token)))
            echo.add(token, None)
        return found

    def end(self, event: End) -> Output:
        """Take in the end; returns what was held back until now."""
        self.stats = event.stats
        found = Output(seconds=event.stats.seconds)
        self.show(found, self.written.end(), is_end=True)
        self.output.add(found)
        fields = self.wanted.fields
        self.finish = {"end": "stop", "cancelled": "abort"}.get(event.finish, event.finish)
        if self.is_over:
            self.finish, self.stop_reason = "length" if fields.max_tokens == 0 else "stop", self.written.stopped
        elif event.finish == "end" and self.tokens[-1] in fields.stop_token_ids:
            self.stop_reason = self.tokens[-1]
        if self.output.calls and self.finish == "stop" and not self.wanted.calls.is_named:
            self.finish = "tool_calls"
        return found


class Exchange:
    """Submits the choices of a request, and yields what becomes certain until all have ended."""

    def __init__(self, wanted: Wanted, engine: Engine, settings: ServerSettings) -> None:
        self.wanted, self.engine, self.settings = wanted, engine, settings
        self.events: asyncio.Queue[tuple[Job, Event]] = asyncio.Queue()
        # time.perf_counter() at each event; None until it has happened
        self.submitted = time.perf_counter()
        self.read: float | None = None  # the engine began to read the prompt
        self.first: float | None = None  # the first token of any choice
        self.last: float | None = None  # the last token so far
        self.ended: float | None = None  # the last choice
        fields = wanted.fields
        self.choices = [
            Choice(
                index,
                request,
                self.events,
                wanted=wanted,
                written=WrittenText(
                    wanted.text, request.prompt, request.stop, fields.include_stop_str_in_output, wanted.echoes
                ),
                parser=ToolCallParser(wanted.calls.schemas, wanted.calls.only_one) if wanted.calls.schemas else None,
            )
            for index, request in enumerate(wanted.requests)
        ]
        self.running = set(self.choices)  # choices that have not ended in the engine
        self.too_late = False
        for choice in self.choices:
            engine.submit(choice)

    async def outputs(self, pause: float | None = None) -> AsyncIterator[tuple[Choice, Output] | None]:
        """The additions of each step; None after `pause` silent seconds. ApiError if the engine or a limit ends it."""
        while self.running:
            yield await self._next(pause)

    def cancel(self) -> None:
        """End in the engine whatever has not ended there."""
        for choice in self.running:
            self.engine.cancel(choice)

    async def settle(self) -> None:
        """Cancel what has not ended, and wait until the engine has let go of it."""
        if self.engine.alive:
            self.cancel()
        while self.running and (self.engine.alive or not self.events.empty()):
            with suppress(ApiError):
                self._take(*await self.events.get())

    async def _next(self, pause: float | None) -> tuple[Choice, Output] | None:
        """The additions of the next event; a request's time limit cancels its choices, and their ends follow."""
        limit = self.settings.queue_timeout if self.first is None else self.settings.request_timeout
        left = None if limit is None or self.too_late else max(self.submitted + limit - time.perf_counter(), 0.001)
        waits = [seconds for seconds in (pause, left) if seconds is not None]
        try:
            async with asyncio.timeout(min(waits, default=None)):
                return self._take(*await self.events.get())
        except TimeoutError:
            if left is None or left > min(waits):
                return None
        if self.first is None:
            message = f"no token within {limit:g} seconds, the server's --queue-timeout; send the request again later"
            raise ApiError(503, message, headers={"Retry-After": "10"})
        self.too_late = True
        self.cancel()
        return None

    def _take(self, job: Job, event: Event) -> tuple[Choice, Output]:
        assert isinstance(job, Choice)
        if isinstance(event, Update):
            if self.first is None:
                self.first, self.read = event.at, event.at - event.seconds
            self.last = event.at
        else:
            self.running.discard(job)
            self.ended = time.perf_counter()
        if isinstance(event, ApiError):
            job.finish = "error"
            raise event
        if self.first is None and isinstance(event, End) and event.finish == "cancelled":
            raise stopping()  # the server; its client has nothing yet
        try:
            output = job.grow(event) if isinstance(event, Update) else job.end(event)
        except Exception as error:  # such as in the text of its tokens
            job.finish = "error"
            raise own_failure(error) from error
        if isinstance(event, Update) and job.is_over:
            self.engine.cancel(job)  # if the loop has not found the end itself
        return job, output
