"""Serve a target and its draft head over HTTP, as OpenAI's API does, with a chat page that shows the drafts.

    headstart serve recipes/tiny.yaml
    headstart serve --target assets/demo_target --head assets/demo_head
    headstart serve --target models/SmolLM2-135M-Instruct --port 8080 --api-key secret

OpenAI clients use http://127.0.0.1:8000/v1 as base_url; the chat page is http://127.0.0.1:8000/. Requests decode
together, and each gets the same text as alone and without drafts. /metrics is for Prometheus. Unsupported and wrong
fields are refused by name; docs/serving.md lists all fields and limits.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from headstart.common.errors import NOT_BEGUN
from headstart.inference.core.drafter import Drafter
from headstart.inference.drafters.build import build_drafter, growth_for, load_drafting_head
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.engine.speculation import speculation_for
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.generate.loading import load_model
from headstart.inference.images.prompts import image_prompts
from headstart.inference.serve.app import build_app
from headstart.inference.serve.metrics import promised_length
from headstart.inference.serve.options import ServeOptions
from headstart.inference.serve.service import Served, Service
from headstart.inference.serve.traffic import Adaptation, Traffic
from headstart.inference.targets.cuda_graph import SpareSteps
from headstart.inference.targets.model import TargetModel

LAST_BYTES_SECONDS = 5  # for clients to read the ends of their answers


def main(options: ServeOptions) -> None:
    with listen(options.host, options.port) as listening:
        thread = ThreadPoolExecutor(1, "worker")
        try:
            served = thread.submit(load, options, thread).result()
        except KeyboardInterrupt:
            print(f"\n{NOT_BEGUN}", file=sys.stderr, flush=True)
            os._exit(130)  # a normal exit would wait for the thread to load the target
        app, service = build_app(served, options.settings, partial(print, flush=True))
        try:
            asyncio.run(HttpServer(app, service, options).serve(sockets=[listening]))
        finally:
            service.worker.stop()


def load(options: ServeOptions, thread: Executor) -> Served:
    """Load the target and its drafter, in the `thread` that will decode; ValueError for a head that does not fit."""
    adapts = options.adapt_memory is not None
    model, template, section = load_model(options.model, last_hidden=adapts)
    assert model.drafter is not None
    decode, target = options.model.decode, model.target
    traffic = None if options.adapt_memory is None else Traffic(options.adapt_memory, options.adapt_keep, target.taps)

    def loop_with(drafter: Drafter) -> Callable[[], DecodeLoop]:
        switch = None if options.always_draft else speculation_for(decode, target, drafter)
        return partial(
            ready_loop,
            target,
            drafter,
            options.settings.max_batch,
            memory=options.memory,
            prefix_memory=options.prefix_memory,
            speculation=switch,
            record=None if traffic is None else traffic.add,
        )

    def loop_with_head(folder: Path) -> Callable[[], DecodeLoop]:
        drafter = build_drafter(decode, target, section, load_drafting_head(folder, target))
        target.tap_columns(drafter.taps)  # refuses a head that reads other hidden states
        return loop_with(drafter)

    head, images = options.model.head, image_prompts(section, template, target)
    if target.passes.reads_images:
        print(
            f"{section.path}: {f'images are refused: {images}' if isinstance(images, str) else 'images are read'}",
            flush=True,
        )
    return Served(
        target=target,
        template=template,
        make_loop=loop_with(model.drafter),
        defaults=TargetDefaults.of(target),
        max_depth=model.drafter.depth,
        about={
            "target": Path(section.path).name,
            "head": None if head is None else str(head),
            "drafter": decode.drafter,
            "growth": str(growth_for(decode, target)),
            "dtype": section.dtype,
            "device": str(target.device),
            "images": not isinstance(images, str),
        },
        promised=promised_length(head),
        thread=thread,
        adaptation=None if traffic is None or head is None else Adaptation(traffic, head.resolve(), loop_with_head),
        images=images,
    )


def ready_loop(target: TargetModel, *options: Any, **more: Any) -> DecodeLoop:
    """A decode loop with its CUDA graphs captured, so that the first requests do not wait for it."""
    target.singleton(SpareSteps).clear()  # they belong to the previous head
    loop = DecodeLoop(target, *options, **more)
    loop.capture_ahead()
    return loop


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound before the target is loaded; raises ValueError if the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        taken = f"--port: {port} given, but {host}:{port} cannot be opened ({error.strerror or error})"
        remedy = "give another --port (0 takes a free one), or end the server that uses it"
        raise ValueError(f"{taken}, a free port is needed; {remedy}") from None


class HttpServer(uvicorn.Server):
    """uvicorn with other signal handling: the first lets running requests end, the second ends the process."""

    def __init__(self, app: Any, service: Service, options: ServeOptions) -> None:
        quiet: Any = {"log_level": "warning", "access_log": False, "server_header": False}
        super().__init__(
            uvicorn.Config(app, http="h11", lifespan="on", timeout_graceful_shutdown=LAST_BYTES_SECONDS, **quiet)
        )
        self.service, self.options = service, options
        self.ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.end, number)
        await super().startup(sockets)
        assert sockets is not None
        print(introduction(sockets[0], self.options, self.service), flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `end`, because uvicorn would close the connections first."""
        yield

    def end(self, number: int) -> None:
        """Handle a signal."""
        if self.ending is not None:
            print("ending at once; running requests are lost", file=sys.stderr, flush=True)
            os._exit(128 + number)
        waiting = f"{len(self.service.open)} requests get up to {self.options.shutdown_timeout:g} seconds to end"
        print(json.dumps({"shutdown": f"{waiting}; a second signal ends at once"}), flush=True)
        self.ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self.service.drain(self.options.shutdown_timeout)
        self.should_exit = True


def introduction(listening: socket.socket, options: ServeOptions, service: Service) -> str:
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    about = service.served.about
    return (
        f"http://{shown}:{port}/  chat page; the API is below /v1; model {options.settings.names[0]}, drafts by "
        f"{options.model.drafts} ({about['growth']}), {about['dtype']} on {about['device']}"
    )
