"""Does a server stay right, and the same size, whatever its clients do? Starts one and tries to break it.

    python benchmarks/soak.py -- --target models/SmolLM2-135M-Instruct --head assets/smollm2_head --dtype float32

What follows `--` goes to `headstart serve`. In this order:

texts       200 mixed requests of 16 clients (greedy and seeded, stop strings, schemas, shared beginnings, clients that
            leave); each finished text is asked for again, alone and without drafts, and must be the same.
schemas     100 answers under a JSON schema, with drafts and without: all valid, and the same text.
drops       1,000 connections that break off at random moments: rows, waiting requests and open files as before.
memory      minutes of mixed load: the growth of the process's memory from the first third of them to the last.
shutdown    SIGTERM while 16 clients stream: each gets its whole answer or an error, and the process ends with code 0.

Exit code 1 if a check fails. --only names the parts to run.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Literal

import httpx
import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

CLIENTS = 16
PATIENCE = 900.0  # seconds for one answer
MOST_GROWTH = 0.02  # of the memory under load
UNLIMITED = httpx.Limits(max_connections=None)
WORDS = ("river", "stone", "lamp", "garden", "engine", "violet", "thunder", "paper", "harbour", "winter", "copper")
QUESTIONS = (
    "Why is the sky blue?",
    "Name three uses of copper.",
    "Write a haiku about winter.",
    "What is 17 times 3?",
    "Explain a lighthouse to a child.",
)


class Animal(BaseModel):
    """What the answers under a schema must be."""

    model_config = ConfigDict(extra="forbid")  # else a small model may add keys until its tokens are used up

    name: str = Field(min_length=1, max_length=16)
    kind: Literal["bird", "fish", "mammal"]
    legs: int = Field(ge=0, le=8)
    tags: list[Literal["wild", "tame", "small", "large"]] = Field(max_length=3)


HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "animal", "schema": Animal.model_json_schema()}}


@dataclass(frozen=True)
class Answer:
    status: int
    text: str = ""
    finish: str | None = None
    length: float | None = None  # acceptance length, with drafts
    error: bool = False
    cached: int = 0  # tokens of the prompt that were not read again


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    checks: list[bool] = field(default_factory=list)

    @property
    def memory(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def open_files(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def check(self, what: str, seen: str, allowed: str, held: bool) -> None:
        self.checks.append(held)
        print(f"{'ok' if held else 'FAILED':6} {what}: {seen} (allowed: {allowed})", flush=True)


def start(options: list[str]) -> Server:
    command = [sys.executable, "-m", "headstart.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"(http://\S+?)/ ", line):
            return Server(process, found[1])
    raise ValueError(f"headstart serve {' '.join(options)} ended before it listened; its message is above")


async def ask(http: httpx.AsyncClient, body: dict[str, Any], leave_after: float | None = None) -> Answer | None:
    """One streamed answer; None for a client that leaves after so many seconds."""
    started, text, finish, metrics, error, cached = time.perf_counter(), "", None, None, False, 0
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return Answer(answer.status_code, error=True)
        async for line in answer.aiter_lines():
            if leave_after is not None and time.perf_counter() - started > leave_after:
                return None
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            error |= "error" in chunk
            metrics = chunk.get("metrics") or metrics
            cached = ((chunk.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens", cached)
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                text, finish = text + piece, choice.get("finish_reason") or finish
    drafts = (metrics or {}).get("speculative_decoding") or {}
    return Answer(200, text, finish, drafts.get("mean_acceptance_length"), error, cached)


def draw_body(draw: random.Random, most_tokens: int = 40) -> dict[str, Any]:
    """A request as clients send them: no two alike, some with a beginning that others have, too."""
    messages = [{"role": "user", "content": f"{draw.choice(QUESTIONS)} Use the word {draw.choice(WORDS)}."}]
    if draw.random() < 0.5:
        messages.insert(0, {"role": "system", "content": f"You are a helpful {draw.choice(WORDS[:3])} merchant. " * 6})
    body: dict[str, Any] = {"messages": messages, "max_tokens": draw.randint(1, most_tokens)}
    body |= {"temperature": draw.choice([0, 0, 0.7, 1.2]), "seed": draw.randrange(1000)}
    body |= draw.choice([{}, {"top_k": 30}, {"repetition_penalty": 1.3}, {"top_p": 0.8, "min_p": 0.02}, {}])
    body |= draw.choice([{}, {}, {"stop": [draw.choice(["the", ". ", "\n", "e a"])]}, {"speculative": False}])
    body |= draw.choice([{}, {}, {}, {"response_format": SCHEMA}, {"priority": 1}])
    return body


async def in_parallel(jobs: Sequence[Callable[[], Awaitable[Any]]], clients: int = CLIENTS) -> list[Any]:
    """The results of all jobs, `clients` of them at a time."""
    found: list[Any] = [None] * len(jobs)
    left = iter(enumerate(jobs))

    async def client() -> None:
        for place, job in left:
            found[place] = await job()

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def same_texts(server: Server, http: httpx.AsyncClient, count: int) -> None:
    draw = random.Random(0)
    bodies = [draw_body(draw) for _ in range(count)]
    leaves = [draw.random() * 3 if draw.random() < 0.2 else None for _ in bodies]

    async def job(body: dict[str, Any], leave: float | None, pause: float) -> Answer | None:
        await asyncio.sleep(pause)
        return await ask(http, body, leave)

    jobs = [partial(job, body, leave, draw.random() * 0.2) for body, leave in zip(bodies, leaves, strict=True)]
    found = await in_parallel(jobs)
    same = finished = cached = 0
    for body, answer in zip(bodies, found, strict=True):
        if answer is None:
            continue
        alone = await ask(http, {**body, "speculative": False})
        assert alone is not None
        finished, cached = finished + 1, cached + bool(answer.cached)
        alike = (answer.status, answer.text, answer.finish) == (alone.status, alone.text, alone.finish)
        same += alike and answer.status == 200
        if not alike:
            print(json.dumps({"body": body, "together": answer.text, "alone": alone.text}), flush=True)
    left = sum(answer is None for answer in found)
    seen = f"{same} of {finished} equal; {left} clients left, {cached} answers began with a reused prefix"
    server.check("texts under load, alone again", seen, "all equal", same == finished)


async def schemas_hold(server: Server, http: httpx.AsyncClient, count: int) -> None:
    fields = {"max_tokens": 160, "temperature": 0.7, "response_format": SCHEMA}
    asked = [f"Describe animal {number} of the {WORDS[number % 11]} as JSON." for number in range(count)]
    bodies = [{**fields, "seed": at, "messages": [{"role": "user", "content": each}]} for at, each in enumerate(asked)]
    with_drafts, without = [
        await in_parallel([lambda body=body, extra=extra: ask(http, {**body, **extra}) for body in bodies], 4)  # type: ignore[misc]
        for extra in ({}, {"speculative": False})
    ]
    valid = sum(map(is_valid, with_drafts)), sum(map(is_valid, without))
    equal = sum(a.text == b.text for a, b in zip(with_drafts, without, strict=True))
    length = fmean(answer.length for answer in with_drafts if answer.length is not None)
    seen = (
        f"valid {valid[0]} with drafts, {valid[1]} without; {equal} equal; {length:.2f} tokens per target step, then 1"
    )
    server.check(f"{count} answers under a schema", seen, "all", {*valid, equal} == {count})


def is_valid(answer: Answer) -> bool:
    try:
        Animal.model_validate_json(answer.text)
    except ValidationError:
        return False
    return True


async def dropped_connections(server: Server, http: httpx.AsyncClient, count: int) -> None:
    draw = random.Random(0)
    await idle(http)
    files, memory = server.open_files, server.memory
    host, port = server.url.removeprefix("http://").rsplit(":", 1)

    async def drop() -> None:
        content = json.dumps({**draw_body(draw, 200), "stream": draw.random() < 0.5})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n"
        whole = (head + "Content-Type: application/json\r\n\r\n" + content).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole[: draw.choice([1, 30, len(whole) - 3, len(whole), len(whole), len(whole)])])
        await writer.drain()
        await asyncio.sleep(draw.random() * draw.choice([0.02, 0.3, 2.0]))
        writer.close()

    await in_parallel([drop] * count)
    await idle(http)
    await asyncio.sleep(2)
    after = server.open_files
    server.check(
        f"open files after {count} dropped connections", f"{files} before, {after} after", "no more", after <= files
    )
    grown = server.memory / memory - 1
    seen = f"{memory / 2**20:.0f} MiB before, {server.memory / 2**20:.0f} MiB after"
    server.check(f"memory after {count} dropped connections", seen, "5 % more", grown <= 0.05)


async def idle(http: httpx.AsyncClient) -> None:
    """Wait until no request runs or waits; raises TimeoutError if one stays."""
    async with asyncio.timeout(120):
        while True:
            page = (await http.get("/metrics")).text
            counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", page, re.MULTILINE)
            assert len(counts) == 2, page
            if not any(map(float, counts)):
                return
            await asyncio.sleep(0.2)


async def memory_stays(server: Server, http: httpx.AsyncClient, minutes: float) -> None:
    ends, samples, sent, refused = time.monotonic() + 60 * minutes, [], 0, 0

    async def client(number: int) -> None:
        nonlocal sent, refused
        draw = random.Random(number)
        while time.monotonic() < ends:
            answer = await ask(http, draw_body(draw, 120), draw.random() * 5 if draw.random() < 0.2 else None)
            sent, refused = sent + 1, refused + (answer is not None and answer.status != 200)

    async def watch() -> None:
        while time.monotonic() < ends:
            await asyncio.sleep(5)
            samples.append(server.memory)

    await asyncio.gather(watch(), *(client(number) for number in range(8)))
    third = len(samples) // 3
    early, late = max(samples[third : 2 * third]), max(samples[2 * third :])
    seen = f"{early / 2**20:.0f} MiB, then {late / 2**20:.0f} MiB; {sent} requests, {refused} of them refused"
    what = f"most memory in the second and last third of {minutes:g} minutes"
    server.check(what, seen, f"{MOST_GROWTH:.0%} more", late / early - 1 <= MOST_GROWTH and not refused)


async def shutdown_under_load(server: Server, http: httpx.AsyncClient) -> None:
    draw = random.Random(1)
    running = [asyncio.create_task(ask(http, draw_body(draw, 60))) for _ in range(CLIENTS)]
    await asyncio.sleep(2)
    server.process.send_signal(signal.SIGTERM)
    found = await asyncio.gather(*running, return_exceptions=True)
    whole = sum(isinstance(each, Answer) and each.finish is not None for each in found)
    told = sum(isinstance(each, Answer) and each.finish is None and each.error for each in found)
    seen = f"{whole} whole, {told} with an error"
    server.check("requests that SIGTERM met", seen, f"{CLIENTS} in all", whole + told == CLIENTS)
    code = await asyncio.to_thread(server.process.wait, 60)
    server.check("exit code after SIGTERM", str(code), "0", code == 0)


async def run(server: Server, arguments: argparse.Namespace) -> None:
    parts: dict[str, Callable[[httpx.AsyncClient], Awaitable[None]]] = {
        "texts": lambda http: same_texts(server, http, arguments.texts),
        "schemas": lambda http: schemas_hold(server, http, arguments.schemas),
        "drops": lambda http: dropped_connections(server, http, arguments.drops),
        "memory": lambda http: memory_stays(server, http, arguments.minutes),
        "shutdown": lambda http: shutdown_under_load(server, http),
    }
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=UNLIMITED) as http:
        await refuse_silent_server(http)
        for name in arguments.only:
            await parts[name](http)


async def refuse_silent_server(http: httpx.AsyncClient) -> None:
    """Every part would hold on a server that answers nothing, such as one whose target has no chat template."""
    answer = await http.post("/v1/chat/completions", json={**HELLO, "max_tokens": 4})
    if answer.status_code != 200:
        raise SystemExit(f"status {answer.status_code}: {answer.text[:200]}; name a target with a chat template")


PARTS = ("texts", "schemas", "drops", "memory", "shutdown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--texts", type=int, default=200, help="mixed requests (default: %(default)s)")
    parser.add_argument("--schemas", type=int, default=100, help="answers under a schema (default: %(default)s)")
    parser.add_argument("--drops", type=int, default=1000, help="connections that break off (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="minutes of mixed load (default: %(default)s)")
    parser.add_argument("serve", nargs="+", metavar="-- OPTION", help="options of headstart serve")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server must not outlive this process
    server = start(arguments.serve)
    # The access log must not fill the pipe.
    pump = subprocess.Popen(["cat"], stdin=server.process.stdout, stdout=subprocess.DEVNULL)
    try:
        asyncio.run(run(server, arguments))
    finally:
        if server.process.poll() is None:
            os.kill(server.process.pid, signal.SIGKILL)
        pump.wait()
    sys.exit(not all(server.checks))


if __name__ == "__main__":
    main()
