"""A server on a tiny random target, in a thread of this process and on a port of its own."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from scripted import noisy_copy
from tiny_run import ENDS, build_target

from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.engine.loop import DecodeLoop, generate
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.serve.app import build_app
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.service import Served, Service
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import load_tokenizer, visible_text_of
from headstart.recipes.schema import TargetSection

NAME = "tiny"


def load_served(folder: Path) -> Served:
    """A tiny target, drafting with a copy of it whose weights are a little off: often right, and often wrong."""
    if not folder.exists():
        build_target(folder, num_layers=1)
    target = TargetModel.load(TargetSection(path=str(folder), dtype="float32", device="cpu"), ())
    drafter = ModelDrafter(noisy_copy(target, 0.03), Dynamic(3, 2, 5), target)
    drafts = {"drafter": "prompt_lookup", "growth": "dynamic", "dtype": "float32", "device": "cpu"}
    return Served(
        target=target,
        template=ChatTemplate(load_tokenizer(folder)),
        make_loop=partial(DecodeLoop, target, drafter, max_batch=4),
        defaults=TargetDefaults.of(target),
        max_depth=3,
        about={"target": NAME, "head": None, **drafts, "folder": str(folder)},
        thread=ThreadPoolExecutor(1),
    )


def with_loop(served: Served, **options: Any) -> Served:
    make_loop: Any = served.make_loop
    return replace(served, make_loop=partial(make_loop, **options))


@dataclass
class Running:
    """A server that is up."""

    url: str
    service: Service
    http: httpx.Client
    lines: list[str] = field(default_factory=list)  # of its log


@contextmanager
def running(served: Served, settings: ServerSettings) -> Iterator[Running]:
    lines: list[str] = []
    served = replace(served, thread=ThreadPoolExecutor(1))  # several servers of one test share a loaded target
    app, service = build_app(served, settings, lines.append)
    config = uvicorn.Config(app, http="h11", lifespan="on", port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    made = threading.Event()  # a loop that is being made runs the target, and so may the test
    service.worker.orders.put(made.set)
    assert made.wait(20)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        # Loading certificates takes 60 ms; the server closes idle connections after 5 seconds.
        limits = httpx.Limits(keepalive_expiry=2)
        with httpx.Client(base_url=url, timeout=60, verify=False, limits=limits) as http:
            yield Running(url, service, http, lines)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def holds(work: Callable[[], object]) -> list[float]:
    """The CPU seconds for which a thread with this work keeps the interpreter's lock each time, whatever else runs."""
    clocks, begins = list[int](), threading.Barrier(2)

    def run() -> None:
        clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        begins.wait()
        work()

    thread, found, before = threading.Thread(target=run), list[float](), 0.0
    thread.start()
    gc.disable()  # as the server does for a large body
    begins.wait()
    while thread.is_alive():
        time.sleep(0)
        with suppress(OSError):  # it has just ended
            now = time.clock_gettime(clocks[0])
            found.append(now - before)
            before = now
    gc.enable()
    thread.join()
    return found


def tokens_of(server: Running, text: str, special: bool = True) -> list[int]:
    return list(server.service.served.tokenizer(text, add_special_tokens=special)["input_ids"])


def alone(server: Running, prompt: list[int], count: int, sampling: Sampling) -> str:
    """The text that the target writes plainly, without a server."""
    served = server.service.served
    return visible_text_of(served.tokenizer, without(generate(served.target, prompt, count, sampling).tokens))


def without(tokens: Sequence[int], ends: Sequence[int] = ENDS) -> list[int]:
    """The tokens of a text that is shown: no end token."""
    return list(tokens[:-1]) if tokens and tokens[-1] in ends else list(tokens)
