"""The state that all routes share: the worker, admission and the metrics."""

import asyncio
import gc
import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.images.prompts import ImagePrompts
from headstart.inference.serve.api.encode import Encoded, PromptEncoder, RequestEncoder
from headstart.inference.serve.api.errors import ApiError, as_api_error, stopping
from headstart.inference.serve.api.fields import ChatRequest, CompletionRequest, read_fields
from headstart.inference.serve.api.output import Choice, End, Event, Update
from headstart.inference.serve.api.responses import ResponsesRequest, with_field_names
from headstart.inference.serve.exchange import Exchange
from headstart.inference.serve.metrics import AcceptanceWatch, Metrics
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.traffic import Adaptation
from headstart.inference.serve.transport import figures
from headstart.inference.serve.worker import Worker
from headstart.inference.targets.chat_template import LARGE, ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import Tokenizer

Result = TypeVar("Result")


@dataclass(frozen=True)
class Served:
    """The target and its decode loop, and how they are presented."""

    target: TargetModel
    template: ChatTemplate
    make_loop: Callable[[], DecodeLoop]
    defaults: TargetDefaults  # for fields that a request leaves out
    max_depth: int  # of a draft tree
    about: dict[str, str | bool | None]  # shown by the chat page: head, dtype, device
    thread: Executor  # one thread, in which the target was loaded
    promised: float | None = None  # the acceptance length in the head's config.json
    adaptation: Adaptation | None = None  # with --adapt-memory
    images: ImagePrompts | str = "the target reads text alone"  # how to encode pictures, or why they are refused

    @property
    def tokenizer(self) -> Tokenizer:
        return self.template.tokenizer


class Service:
    """One target behind HTTP. Everything here runs in the thread of asyncio."""

    def __init__(self, served: Served, settings: ServerSettings, log: Callable[[str], None]) -> None:
        self.served, self.settings = served, settings
        self.worker = Worker(served.thread, served.make_loop, self.observe)
        self.metrics = Metrics(settings.names[0], self._gauges())
        self.acceptance = AcceptanceWatch(served.promised, log)
        target = served.target
        sizes = target.config.vocab_size, target.max_positions
        self.prompts = PromptEncoder(served.template, *sizes, log, served.images, settings.image_hosts)
        self.max_choices = settings.max_batch + settings.max_queue  # that may decode or wait
        self.requests = RequestEncoder(target, self.prompts, served.defaults, self.max_choices)
        self.encoding = {is_large: asyncio.Lock() for is_large in (False, True)}  # small bodies overtake large ones
        self.fingerprint = f"headstart-{version('headstart')}"
        self.running = self.waiting = 0  # choices with and without their first token
        self.open: set[Exchange] = set()  # requests whose answer is not complete
        self.mean_seconds = 1.0  # of a choice, as a moving average
        self.draining = False

    def _gauges(self) -> dict[str, Callable[[], float]]:
        gauges: dict[str, Callable[[], float]] = {
            "vllm:num_requests_running": lambda: self.running,
            "vllm:num_requests_waiting": lambda: self.waiting,
            "vllm:kv_cache_usage_perc": lambda: self.worker.cache_usage,
            "headstart:engine_failures": lambda: self.worker.failures,
        }
        if (promised := self.served.promised) is not None:
            gauges["headstart:promised_acceptance_length"] = lambda: promised
        if (adaptation := self.served.adaptation) is not None:
            gauges["headstart:head_swaps"] = lambda: adaptation.swaps
            gauges["headstart:head_version"] = lambda: adaptation.version
            gauges["headstart:traffic_bytes"] = lambda: adaptation.traffic.num_bytes
        return gauges

    @property
    def ready(self) -> bool:
        return self.worker.alive and not self.draining

    def check_model(self, name: str | None) -> str:
        """The model's name as in the request, by default the first; raises ApiError for any other name."""
        names = self.settings.names
        if name is not None and name not in names:
            allowed = f"{', '.join(names)} is allowed; GET /v1/models lists it"
            raise ApiError(404, f"model: {name[:100]!r} given, {allowed}", "model")
        return name or names[0]

    def admit(self, count: int) -> None:
        """Raise ApiError unless `count` more choices may decode or wait."""
        if not self.ready:
            self.metrics.count("admission_rejections", 1, "stopping")
            raise stopping()
        if self.running + self.waiting + count > self.max_choices:
            self.metrics.count("admission_rejections", 1, "queue_full")
            turns = self.waiting / self.settings.max_batch + 1 / max(self.running, 1)
            seconds = min(max(math.ceil(self.mean_seconds * turns), 1), 60)  # until a choice is expected to end
            allowed = f"at most {self.max_choices} are allowed (--max-batch and --max-queue)"
            full = f"{self.running} choices are being decoded and {self.waiting} wait, {allowed}; retry later"
            raise ApiError(self.settings.busy_status, full, headers={"Retry-After": str(seconds)})

    async def in_thread(self, read: Callable[[bytes], Result], body: bytes) -> Result:
        """Read a body in another thread, as this takes a while for a long one; a large one after the other."""
        is_large = len(body) > LARGE or (bool(self.settings.image_hosts) and b"image" in body)
        async with self.encoding[is_large]:
            if is_large:  # a collection of its many new objects would hold the interpreter's lock, and find nothing
                gc.disable()
            try:
                with as_api_error():
                    return await asyncio.to_thread(read, body)
            finally:
                if is_large:
                    gc.enable()

    def encode(self, kind: type[ChatRequest | CompletionRequest | ResponsesRequest], body: bytes) -> Encoded:
        """The request in a body with the fields of this kind. Raises ApiError."""
        fields = read_fields(kind, body)
        self.check_model(fields.model)
        if not isinstance(fields, ResponsesRequest):
            return self.requests.encode(fields)
        try:
            with as_api_error():
                return replace(self.requests.encode(fields.as_chat()), original=fields)
        except ApiError as error:
            raise with_field_names(error) from None

    def begin(self, encoded: Encoded, arrived: float) -> Exchange:
        """Submit a request, whose body arrived at this time.perf_counter(), to the worker."""
        self.admit(len(encoded.requests))
        exchange = Exchange(encoded, arrived, self.worker, self.settings)
        self.metrics.count("prompt_tokens", exchange.num_prompt_tokens)
        self.waiting += len(encoded.requests)
        self.open.add(exchange)
        return exchange

    async def finish(self, exchange: Exchange, entry: dict[str, Any]) -> None:
        """Cancel a request unless it has ended, and record it."""
        await exchange.settle()
        self.open.discard(exchange)
        self.metrics.count_request(exchange)
        entry |= figures(exchange)

    def observe(self, choice: Choice, event: Event) -> None:
        """Count an event of the worker."""
        if isinstance(event, Update):
            if not choice.has_begun:
                choice.has_begun = True
                self.waiting, self.running = self.waiting - 1, self.running + 1
            self.metrics.count_update(event, event.at - choice.latest)
            self.acceptance.count(event)
            choice.latest = event.at
        elif choice.has_begun:
            self.running -= 1
            if isinstance(event, End):
                self.mean_seconds += 0.1 * (event.stats.seconds - self.mean_seconds)
        else:
            self.waiting -= 1
        self.metrics.set_prefixes(*self.worker.prefixes)

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, wait up to `timeout` seconds for the open ones to end, then cancel them."""
        self.draining = True
        waited = 0.0
        while self.open and waited < timeout:
            await asyncio.sleep(0.05)
            waited += 0.05
        for exchange in list(self.open):
            exchange.cancel()
