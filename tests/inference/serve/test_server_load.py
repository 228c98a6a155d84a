"""The law of the server under load: whatever arrives and leaves together, each text is the one written alone."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from server_run import NAME, Running, load_served, running, without

from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import generate
from headstart.inference.serve.options import ServerSettings
from headstart.inference.targets.tokenizer import visible_text_of

CLIENTS = 8
ASCII = range(20, 90)  # a prompt must not end within a character


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    served = load_served(tmp_path_factory.mktemp("served") / "target", max_batch=5, prefix_memory=2**22)
    with running(served, ServerSettings((NAME,), max_batch=5)) as found:
        yield found


@dataclass(frozen=True)
class Wish:
    """One request, and the step after which its client leaves, if it does."""

    prompt: list[int]
    fields: dict[str, Any]
    leaves_after: int | None


def draw_wish(draw: random.Random, shared: list[int]) -> Wish:
    prompt = [*(shared if draw.random() < 0.5 else []), *(draw.choice(ASCII) for _ in range(draw.randint(1, 30)))]
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "temperature": draw.choice([0, 0, 0.7, 1.2])}
    fields["seed"] = draw.randrange(1000)
    fields |= draw.choice([{}, {"top_k": 30}, {"repetition_penalty": 1.3}, {"top_p": 0.8, "min_p": 0.02}, {}])
    fields |= draw.choice([{}, {}, {"speculative": False}, {"priority": 1}])
    return Wish(prompt, fields, draw.randint(0, 3) if draw.random() < 0.2 else None)


async def ask(http: httpx.AsyncClient, wish: Wish) -> str | None:
    """The text of the answer; None if the client has left before its end."""
    body = {"prompt": wish.prompt, **wish.fields}
    if wish.leaves_after is None:
        found = await http.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        return str(found.json()["choices"][0]["text"])
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        seen = 0
        async for line in answer.aiter_lines():
            seen += line.startswith("data: ")
            if seen > wish.leaves_after:
                return None
    return None


async def ask_all(url: str, wishes: list[Wish], draw: random.Random) -> list[str | None]:
    found: list[str | None] = [None] * len(wishes)
    left = iter(enumerate(wishes))

    async def client(http: httpx.AsyncClient) -> None:
        for place, wish in left:
            await asyncio.sleep(draw.random() * 0.02)
            found[place] = await ask(http, wish)

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return found


def alone(server: Running, wish: Wish) -> str:
    served, own = server.service.served, {"seed": wish.fields["seed"], "temperature": float(wish.fields["temperature"])}
    own |= {
        name: wish.fields[name] for name in ("top_k", "repetition_penalty", "top_p", "min_p") if name in wish.fields
    }
    tokens = generate(served.target, wish.prompt, wish.fields["max_tokens"], Sampling(**own)).tokens
    return visible_text_of(served.tokenizer, without(tokens))


def check(server: Running, count: int, seed: int) -> None:
    draw = random.Random(seed)
    shared = [draw.choice(ASCII) for _ in range(40)]
    wishes = [draw_wish(draw, shared) for _ in range(count)]
    found = asyncio.run(ask_all(server.url, wishes, draw))
    for wish, text in zip(wishes, found, strict=True):
        if wish.leaves_after is None:
            assert text == alone(server, wish)
    service = server.service
    while service.open:  # the engine lets go of the last ones after its step
        pass
    assert service.running == service.waiting == 0
    assert service.worker.prefixes[1] > 0


@pytest.mark.slow
def test_every_text_is_the_one_written_alone(server: Running) -> None:
    check(server, 40, seed=0)


@pytest.mark.slow
def test_every_text_of_hundreds_is_the_one_written_alone(server: Running) -> None:
    for seed in range(1, 6):
        check(server, 200, seed)
