"""The answer to a request as it grows: its choices, what each step adds to them, and the times of its stages."""

import asyncio
import time
from dataclasses import dataclass, field

from headstart.inference.core.request import Alternatives, DecodeStats, EmittedTokens, Request, TokenScores
from headstart.inference.core.verify import Accepted
from headstart.inference.serve.api.encode import Encoded
from headstart.inference.serve.api.errors import ApiError
from headstart.inference.serve.api.text import ToolCall, ToolCallParser, WrittenText, joined
from headstart.inference.show import TokenText


@dataclass(frozen=True)
class Update:
    """The tokens that one step of the decode loop added to a choice."""

    block: EmittedTokens
    logprobs: list[float]  # one for each token; empty unless the request asks for them
    alternatives: list[Alternatives]  # to each token; empty unless the request asks for them
    cached: int  # tokens of the prompt that an earlier text left in the cache
    seconds: float  # since prefill began
    at: float  # time.perf_counter() after the step
    is_first: bool = False  # of its choice
    prompt: TokenScores | None = None  # of the prompt's tokens but the first, with the first update and if asked for


@dataclass(frozen=True)
class End:
    """A choice has ended; no update follows."""

    finish: str  # as in Generation
    stats: DecodeStats


Event = Update | End | ApiError  # after an error no event follows


@dataclass(frozen=True)
class TokenLogprob:
    token: int
    logprob: float | None  # None for the first token of a prompt
    alternatives: Alternatives  # the likeliest tokens at its position
    offset: int  # where its text begins; for a part of a character, where the character begins


@dataclass
class Output:
    """What a step adds to a choice, or all of a choice so far."""

    parts: list[TokenText | ToolCall] = field(default_factory=list)  # in the order in which they were written
    logprobs: list[TokenLogprob] = field(default_factory=list)
    count: int = 0  # tokens, including those whose text is empty or held back
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


class Choice:
    """One choice of a request, and its output so far."""

    def __init__(self, index: int, request: Request, encoded: Encoded, events: "EventQueue") -> None:
        self.index, self.request, self.encoded, self.events = index, request, encoded, events
        self.number: int | None = None  # of the request in the decode loop; used in the worker's thread only
        self.latest = time.perf_counter()  # when it was submitted, then its last update
        self.has_begun = False  # whether it has its first token
        include_stop, calls = encoded.fields.include_stop_str_in_output, encoded.calls
        echo = None if encoded.echoes is None else encoded.echoes[index // encoded.fields.n]
        self.written = WrittenText(encoded.text, request.prompt, request.stop, include_stop, echo)
        self.parser = ToolCallParser(calls.schemas, calls.only_one) if calls.schemas else None
        self.output, self.tokens = Output(), list[int]()
        self.cached = 0  # as in Update
        self.finish: str | None = None  # in OpenAI's words; None until the choice has ended
        self.stop_reason: str | int | None = None
        self.stats: DecodeStats | None = None  # once it has ended

    @property
    def is_over(self) -> bool:
        """Whether nothing may be added, even if the decode loop writes more."""
        has_stopped = self.written.stopped is not None or (self.parser is not None and self.parser.is_done)
        return has_stopped or self.encoded.fields.max_tokens == 0

    def grow(self, update: Update) -> Output:
        """Take in a step; returns what it adds to the output."""
        self.cached = update.cached
        added = Output(count=len(update.block.tokens), tree=update.block.tree, seconds=update.seconds)
        if update.is_first:
            added.parts += [TokenText(self.written.echo, None)] if self.written.echo else []
            added.logprobs += [] if update.prompt is None else self._prompt_logprobs(update.prompt)
        for position, (token, depth) in enumerate(zip(update.block.tokens, update.block.depths, strict=True)):
            if self.is_over:
                break
            self.tokens.append(token)
            if update.logprobs:
                alternatives = update.alternatives[position] if update.alternatives else []
                offset = self.written.offset(token)
                added.logprobs.append(TokenLogprob(token, update.logprobs[position], alternatives, offset))
            if token not in (self.request.end_tokens or ()):
                added.parts += self._without_calls(self.written.add(token, depth))
        self.output.add(added)
        return added

    def end(self, event: End) -> Output:
        """Take in the end; returns the text that was held back until now."""
        self.stats = event.stats
        added = Output(self._without_calls(self.written.end(), is_end=True), seconds=event.stats.seconds)
        self.output.add(added)
        fields = self.encoded.fields
        self.finish = {"end": "stop", "cancelled": "abort"}.get(event.finish, event.finish)
        if self.is_over:
            self.finish, self.stop_reason = "length" if fields.max_tokens == 0 else "stop", self.written.stopped
        elif event.finish == "end" and self.tokens[-1] in fields.stop_token_ids:
            self.stop_reason = self.tokens[-1]
        if self.output.calls and self.finish == "stop" and not self.encoded.calls.is_named:
            self.finish = "tool_calls"
        return added

    def _without_calls(self, fresh: list[TokenText], is_end: bool = False) -> list[TokenText | ToolCall]:
        """The text with each tool call in it as an object of its own."""
        return [*fresh] if self.parser is None else self.parser.add(fresh, is_end)

    def _prompt_logprobs(self, scores: TokenScores) -> list[TokenLogprob]:
        """The log-probabilities of the prompt's tokens, whose text is the echo."""
        echo, logprobs = WrittenText(self.encoded.text, []), []
        alternatives: list[Alternatives] = scores.alternatives or [[] for _ in scores.chosen]
        scored = zip(self.request.prompt, [None, *scores.chosen], [[], *alternatives], strict=True)
        for token, logprob, likeliest in scored:
            logprobs.append(TokenLogprob(token, logprob, likeliest, echo.offset(token)))
            echo.add(token, None)
        return logprobs


EventQueue = asyncio.Queue[tuple[Choice, Event]]


class RequestProgress:
    """A request, its choices, and the time.perf_counter() of each stage, None until the stage is reached."""

    def __init__(self, encoded: Encoded, arrived: float) -> None:
        self.encoded, self.arrived = encoded, arrived
        self.events: EventQueue = asyncio.Queue()
        self.choices = [Choice(index, request, encoded, self.events) for index, request in enumerate(encoded.requests)]
        self.prefill: float | None = None  # the start of prefill
        self.first: float | None = None  # the first token of any choice
        self.last: float | None = None  # the last token so far
        self.ended: float | None = None  # the last choice

    @property
    def is_over(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(map(len, self.encoded.prompts))

    @property
    def num_new_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    def seconds(self) -> dict[str, float | None]:
        """How long the request waited, and how long its prefill and its decoding took; None for stages not reached."""
        spans = {
            "queue_seconds": (self.arrived, self.prefill),
            "prefill_seconds": (self.prefill, self.first),
            "decode_seconds": (self.first, self.last),
            "time_to_first_token_seconds": (self.arrived, self.first),
        }
        return {
            name: None if start is None or end is None else max(end - start, 0.0)
            for name, (start, end) in spans.items()
        }
