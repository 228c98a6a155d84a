"""The law of the server under load: whatever arrives and leaves together, each text is the one written alone."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from matrix import slow
from server_run import NAME, Running, alone, running, with_loop

from headstart.inference.core.sampling import Sampling
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.service import Served
from headstart.recipes.sampling import SamplingFields

CLIENTS = 8
ASCII = range(20, 90)  # a prompt must not end within a character
Body = dict[str, Any]


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Running]:
    with running(with_loop(served, max_batch=5, prefix_memory=2**22), ServerSettings((NAME,), max_batch=5)) as found:
        yield found


def draw_body(draw: random.Random, shared: list[int]) -> Body:
    prompt = [*(shared if draw.random() < 0.5 else []), *(draw.choice(ASCII) for _ in range(draw.randint(1, 30)))]
    fields: Body = {"max_tokens": draw.randint(1, 40), "temperature": draw.choice([0.0, 0.0, 0.7, 1.2])}
    fields |= draw.choice([{}, {"top_k": 30}, {"repetition_penalty": 1.3}, {"top_p": 0.8, "min_p": 0.02}, {}])
    fields |= draw.choice([{}, {}, {"speculative": False}, {"priority": 1}])
    return {"prompt": prompt, "seed": draw.randrange(1000), "stream": draw.random() < 0.2, **fields}


def ask(server: Running, body: Body) -> str | None:
    """The text of the answer; None of one that is streamed, as its client leaves within or after it."""
    if not body["stream"]:
        found = server.http.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        return str(found.json()["choices"][0]["text"])
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        for _ in zip(range(body["seed"] % 8), answer.iter_lines(), strict=False):
            pass
    return None


@pytest.mark.parametrize(("seed", "count"), [(0, 24), *(slow((seed, 200)) for seed in range(5))])
def test_every_text_of_many_is_the_one_written_alone(server: Running, seed: int, count: int) -> None:
    draw = random.Random(seed)
    shared = [draw.choice(ASCII) for _ in range(40)]
    bodies = [draw_body(draw, shared) for _ in range(count)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        texts = [*clients.map(lambda body: ask(server, body), bodies)]
    for body, text in zip(bodies, texts, strict=True):
        if text is not None:
            sampling = {name: value for name, value in body.items() if name in SamplingFields.model_fields}
            assert text == alone(server, body["prompt"], body["max_tokens"], Sampling(**sampling))
    service = server.service
    while service.open:  # the engine lets go of the last ones after its step
        pass
    assert service.running == service.waiting == 0
    assert service.worker.prefixes[1] > 0
