"""The state that all routes share: the engine, who is admitted, and the metrics."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.serve.api.encode import PromptReader, RequestReader, Wanted
from headstart.inference.serve.api.errors import ApiError, stopping
from headstart.inference.serve.exchange import Exchange
from headstart.inference.serve.metrics import AcceptanceWatch, Metrics
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.traffic import Adaptation
from headstart.inference.serve.transport import figures
from headstart.inference.serve.worker import End, Engine, Event, Job, Update
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import Tokenizer

Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Served:
    """The target and its decode loop, and how they are presented."""

    target: TargetModel
    template: ChatTemplate
    make_loop: Callable[[], DecodeLoop]
    defaults: TargetDefaults  # for what a request does not say
    most_depth: int  # draft tokens that a step may accept
    about: dict[str, str | bool | None]  # shown by the chat page: head, dtype, device
    thread: Executor  # one thread, in which the target was loaded
    promised: float | None = None  # the acceptance length in the head's config.json
    adaptation: Adaptation | None = None  # with --adapt-memory

    @property
    def tokenizer(self) -> Tokenizer:
        return self.template.tokenizer


class Service:
    """One target behind HTTP. Everything here runs in the thread of asyncio."""

    def __init__(self, served: Served, settings: ServerSettings, log: Callable[[str], None]) -> None:
        self.served, self.settings = served, settings
        self.engine = Engine(served.thread, served.make_loop, self.observe)
        self.metrics = Metrics(settings.names[0], self.engine, served.promised)
        if served.adaptation is not None:
            self.metrics.show_adaptation(served.adaptation)
        self.acceptance = AcceptanceWatch(served.promised, log)
        target = served.target
        self.prompts = PromptReader(served.template, target.config.vocab_size, target.max_positions)
        self.most_choices = settings.max_batch + settings.max_queue  # that may decode or wait
        self.reader = RequestReader(target, self.prompts, served.defaults, self.most_choices)
        self.one_reader = asyncio.Lock()
        self.fingerprint = f"headstart-{version('headstart')}"
        self.running = self.waiting = 0  # choices in the engine
        self.open: set[Exchange] = set()  # requests whose answer is being written
        self.mean_seconds = 1.0  # mean time of a choice, the recent ones weighing most
        self.draining = False

    @property
    def ready(self) -> bool:
        return self.engine.alive and not self.draining

    def check_model(self, name: str | None) -> str:
        """The model's name as a request gives it; raises ApiError for another model's."""
        names = self.settings.names
        if name is not None and name not in names:
            allowed = f"{', '.join(names)} is allowed; GET /v1/models lists it"
            raise ApiError(404, f"model: {name[:100]!r} given, {allowed}", "model")
        return name or names[0]

    def admit(self, count: int) -> None:
        """Raise ApiError unless `count` more choices may decode or wait."""
        if not self.ready:
            self.metrics.reject("stopping")
            raise stopping()
        if self.running + self.waiting + count > self.most_choices:
            self.metrics.reject("queue_full")
            turns = self.waiting / self.settings.max_batch + 1 / max(self.running, 1)
            seconds = min(max(math.ceil(self.mean_seconds * turns), 1), 60)  # until a place should be free
            allowed = f"at most {self.most_choices} are allowed (--max-batch and --max-queue)"
            full = f"{self.running} choices are decoded and {self.waiting} wait, {allowed}; retry later"
            raise ApiError(self.settings.busy_status, full, headers={"Retry-After": str(seconds)})

    async def in_thread(self, read: Callable[[Given], Found], given: Given) -> Found:
        """Read a request in another thread, as tokenizing a long prompt takes a while."""
        try:
            async with self.one_reader:
                return await asyncio.to_thread(read, given)
        except ValueError as error:
            field = str(error).partition(":")[0]
            raise ApiError(400, str(error), None if " " in field else field) from None

    def begin(self, wanted: Wanted) -> Exchange:
        """Hand a request to the engine."""
        self.admit(len(wanted.requests))
        self.metrics.count_prompts(sum(map(len, wanted.prompts)))
        exchange = Exchange(wanted, self.engine, self.settings)
        self.waiting += len(wanted.requests)
        self.metrics.set_load(self.running, self.waiting)
        self.open.add(exchange)
        return exchange

    async def finish(self, exchange: Exchange, entry: dict[str, Any]) -> None:
        """Let go of a request, ended or not, and record it."""
        await exchange.settle()
        self.open.discard(exchange)
        self.metrics.count_request(exchange)
        entry |= figures(exchange)

    def observe(self, job: Job, event: Event) -> None:
        """Count an event of the engine."""
        if isinstance(event, Update):
            if not job.started:
                job.started = True
                self.waiting, self.running = self.waiting - 1, self.running + 1
            self.metrics.count_update(event, event.at - job.latest)
            self.acceptance.count(event)
            job.latest = event.at
        elif job.started:
            self.running -= 1
            if isinstance(event, End):
                self.mean_seconds += 0.1 * (event.stats.seconds - self.mean_seconds)
        else:
            self.waiting -= 1
        self.metrics.set_load(self.running, self.waiting)
        self.metrics.set_prefixes(*self.engine.prefixes)

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, let those that are open end, and end them after `timeout` seconds."""
        self.draining = True
        waited = 0.0
        while self.open and waited < timeout:
            await asyncio.sleep(0.05)
            waited += 0.05
        for exchange in list(self.open):
            exchange.cancel()
