"""Loads running servers with 1, 2, 4, 8 and 16 clients, with drafts and without, and prints what users would wait for.

    headstart serve --target models/SmolLM2-135M-Instruct --dtype bfloat16
    python benchmarks/serve.py http://127.0.0.1:8000

Every client sends its next request when its last one has ended. Several servers take turns at each number of clients,
such as one with --always-draft and `transformers serve`, whose model has the name of its folder:

    python benchmarks/serve.py "by load=http://127.0.0.1:8000" "always=http://127.0.0.1:8001" \
        "transformers=http://127.0.0.1:8002#models/SmolLM2-135M-Instruct"

The first one also answers without drafts. Every server first meets each number of clients once and then rests: what it
compiles in the background, it compiles then. With --rounds 3 they take turns three times, so that a machine whose speed
varies slows all of them down alike; *over the first* is the ratio of their tokens/s to the first server's, with the
lowest and the highest of the rounds. Times per token come from `usage`, since a chunk of a speculative server holds
several tokens. *tokens/s* and *per user*, from the first token on, are aiperf's Output Token Throughput and Output
Token Throughput Per User: their pairs are the curve of a server.
"""

import argparse
import asyncio
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

TIMES = ("TTFT p50 (s)", "p95", "ms per token p50", "p95")
COLUMNS = ("clients", "server", "tokens/s", "per user", "over the first", "by round", *TIMES)
SERVER = re.compile(r"(?:([^=]*)=)?(https?://[^#]+)(?:#(.+))?")
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that checks whether a word is a palindrome.",
    "Explain to a child how bees make honey.",
    "List five tips for learning a language.",
    "Summarise how a refrigerator works.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a lake and a pond?",
    "Give me a recipe for pancakes.",
)


@dataclass(frozen=True)
class Served:
    """One answer: when it came, and how long it is."""

    seconds: float
    first: float  # seconds until the first text
    tokens: int

    @property
    def per_token(self) -> float | None:
        return (self.seconds - self.first) / (self.tokens - 1) if self.tokens > 1 else None


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> Served:
    """Stream one answer; raises ValueError for a refusal."""
    started, first, tokens = time.perf_counter(), None, 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"the server answered {answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ValueError(f"the server answered {chunk['error']}")
            if first is None and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - started
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    seconds = time.perf_counter() - started
    return Served(seconds, seconds if first is None else first, tokens)


async def load(http: httpx.AsyncClient, bodies: Iterator[dict[str, Any]], clients: int, count: int) -> list[Served]:
    """Send `count` requests, `clients` at a time."""
    left = iter(range(count))

    async def client() -> list[Served]:
        return [await ask(http, next(bodies)) for _ in left]

    return [each for answers in await asyncio.gather(*(client() for _ in range(clients))) for each in answers]


def bodies(arguments: argparse.Namespace, model: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Requests without end, each with another seed."""
    for number, question in enumerate(itertools.cycle(read_questions(arguments.prompts))):
        yield {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": arguments.max_tokens,
            "temperature": arguments.temperature,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }


def read_questions(path: Path | None) -> list[str]:
    """The questions of a JSONL file with rows of `prompt`, or our own."""
    if path is None:
        return list(QUESTIONS)
    return [row["prompt"] for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()) if "prompt" in row]


@dataclass(frozen=True)
class Round:
    """What one server answered at one number of clients, and the seconds from the first request to the last answer."""

    served: list[Served]
    wall: float

    @property
    def speed(self) -> float:
        """Tokens per second of all clients."""
        return sum(each.tokens for each in self.served) / self.wall


def cells(rounds: list[Round], first: list[Round]) -> list[str]:
    served = [each for found in rounds for each in found.served]
    per_token = [each.per_token * 1000 for each in served if each.per_token is not None]
    firsts = [each.first for each in served]
    ratios = [ours.speed / other.speed for ours, other in zip(rounds, first, strict=True)]
    return [
        f"{together(rounds).speed:.1f}",
        f"{mean(1000 / each for each in per_token):.1f}",
        f"{together(rounds).speed / together(first).speed:.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
        f"{median(firsts):.3f}",
        f"{high(firsts):.3f}",
        f"{median(per_token):.1f}",
        f"{high(per_token):.1f}",
    ]


def together(rounds: list[Round]) -> Round:
    return Round([each for found in rounds for each in found.served], sum(found.wall for found in rounds))


def high(values: list[float]) -> float:
    """The 95th percentile."""
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


@dataclass(frozen=True)
class Measured:
    """A server, and the fields that its requests have beyond those of OpenAI."""

    name: str
    http: httpx.AsyncClient
    model: str
    fields: dict[str, Any]


async def servers(arguments: argparse.Namespace, stack: AsyncExitStack) -> list[Measured]:
    """The servers of the command line, the first one once more without drafts if it is ours."""
    found = []
    for place, given in enumerate(arguments.servers):
        parts = SERVER.fullmatch(given)
        if parts is None:
            raise SystemExit(f"{given!r} is not a server: write [NAME=]URL[#MODEL], such as http://127.0.0.1:8000")
        name, url, model = parts.groups()
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=None))
        model = model or (await http.get("/v1/models")).json()["data"][0]["id"]
        found.append(Measured(name or "with drafts", http, model, {}))
        if place == 0 and "headstart:" in (await http.get("/metrics")).text:
            found.append(Measured("without drafts", http, model, {"speculative": False}))
    return found


async def measure(arguments: argparse.Namespace) -> None:
    table = Table(*COLUMNS)
    async with AsyncExitStack() as stack:
        measured = await servers(arguments, stack)
        for each in measured:
            for clients in arguments.clients:
                print(f"{each.name} warms up with {clients} clients", file=sys.stderr)
                await load(each.http, bodies(arguments, each.model, each.fields), clients, 2 * clients)
                await asyncio.sleep(arguments.rest)
        for clients in arguments.clients:
            requests = max(arguments.requests, 2 * clients)
            rounds: list[list[Round]] = [[] for _ in measured]
            for number in range(arguments.rounds):
                turns = list(zip(measured, rounds, strict=True))
                for each, found in turns if number % 2 == 0 else reversed(turns):
                    started = time.perf_counter()
                    served = await load(each.http, bodies(arguments, each.model, each.fields), clients, requests)
                    found.append(Round(served, time.perf_counter() - started))
                    said = f"{clients} clients, round {number + 1}: {each.name} {found[-1].speed:.1f} tokens/s"
                    print(said, file=sys.stderr)
            for each, found in zip(measured, rounds, strict=True):
                table.add_row(str(clients), each.name, *cells(found, rounds[0]))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="[NAME=]URL[#MODEL]", help="such as http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="how many at a time")
    parser.add_argument(
        "--requests", type=int, default=16, help="requests for each number of clients and round, or two per client"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often the servers take turns")
    parser.add_argument("--rest", type=float, default=20.0, help="seconds for a server after each part of its warm-up")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=Path, help="JSONL file with rows of `prompt`; default: eight questions")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
