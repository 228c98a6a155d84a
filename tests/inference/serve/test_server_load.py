"""The law of the server under load: whatever arrives and leaves together, each text is the one written alone."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from server_run import NAME, Running, alone, running, with_loop

from headstart.inference.core.sampling import Sampling
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.service import Served
from headstart.recipes.sampling import SamplingFields

CLIENTS = 8
ASCII = range(20, 90)  # a prompt must not end within a character


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Running]:
    with running(with_loop(served, max_batch=5, prefix_memory=2**22), ServerSettings((NAME,), max_batch=5)) as found:
        yield found


@dataclass(frozen=True)
class Wish:
    """One request, and the step after which its client leaves, if it does."""

    prompt: list[int]
    fields: dict[str, Any]
    leaves_after: int | None


def draw_wish(draw: random.Random, shared: list[int]) -> Wish:
    prompt = [*(shared if draw.random() < 0.5 else []), *(draw.choice(ASCII) for _ in range(draw.randint(1, 30)))]
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "temperature": draw.choice([0.0, 0.0, 0.7, 1.2])}
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_every_text_of_hundreds_is_the_one_written_alone(server: Running, seed: int) -> None:
    draw = random.Random(seed)
    shared = [draw.choice(ASCII) for _ in range(40)]
    wishes = [draw_wish(draw, shared) for _ in range(200)]
    found = asyncio.run(ask_all(server.url, wishes, draw))
    for wish, text in zip(wishes, found, strict=True):
        if wish.leaves_after is None:
            sampling = Sampling(
                **{name: value for name, value in wish.fields.items() if name in SamplingFields.model_fields}
            )
            assert text == alone(server, wish.prompt, wish.fields["max_tokens"], sampling)
    service = server.service
    while service.open:  # the engine lets go of the last ones after its step
        pass
    assert service.running == service.waiting == 0
    assert service.worker.prefixes[1] > 0
