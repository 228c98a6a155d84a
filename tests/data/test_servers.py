"""Laws of several servers in data.server: together they write what one writes, as long as one of them is left."""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from completion_server import Server, serving
from tiny_run import VOCAB_SIZE, contents, tiny_recipe

from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.prompts.completion_client import CompletionClient, completion
from headstart.inference.core.sampling import Sampling

GONE = "http://127.0.0.1:9"


class Sampler(Server):
    """The response depends on all that a request says, as the target's does."""

    def response(self, body: dict[str, Any]) -> list[int]:
        draw = random.Random(f"{body['prompt']} {body['seed']} {body['temperature']}")
        return [draw.randrange(1, VOCAB_SIZE) for _ in range(draw.randint(3, body["max_tokens"]))]


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.data_pipelines.prompts.completion_client.RETRIES", 0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_three_servers_of_which_one_dies_write_the_texts_of_one(
    harvested: Path, tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, _ = stack.enter_context(serving(Sampler))
    wanted = tiny_recipe(harvested, f"run_dir={tmp_path / 'one'}", f"data.server={alone}", "data.online=[auto]")
    harvest(wanted)
    three = [stack.enter_context(serving(Sampler)) for _ in range(3)]
    (dying, dead), *others = three
    dead.dies_after = 2
    capsys.readouterr()
    servers = f"data.server=[{', '.join(url for url, _ in three)}]"
    found = tiny_recipe(
        harvested, f"run_dir={tmp_path / 'three'}", servers, "data.generate_batch=2", "data.online=[auto]"
    )
    harvest(found)
    assert contents(found.responses_dir) == contents(wanted.responses_dir)
    assert len(dead.seen) == 2
    assert all(handler.seen for _, handler in others)
    assert sum(len(handler.seen) for _, handler in three) == 16  # each sample was answered once
    assert capsys.readouterr().out.count(f"data.server: {dying}/v1/completions gave no answer") == 1


def test_a_request_goes_to_the_server_with_the_fewest_in_flight(stack: ExitStack) -> None:
    """The slow server answers nothing until the fast one has answered all the rest."""
    rest_is_done = threading.Event()

    class Slow(Server):
        def response(self, body: dict[str, Any]) -> list[int]:
            assert rest_is_done.wait(timeout=10)
            return [1]

    class Fast(Server):
        def response(self, body: dict[str, Any]) -> list[int]:
            if len(self.seen) == 10:
                rest_is_done.set()
            return [1]

    (slow_url, slow), (fast_url, fast) = (stack.enter_context(serving(kind)) for kind in (Slow, Fast))
    client = CompletionClient([slow_url, fast_url])
    assert len(dict(client.each([completion([1, 2], Sampling(), 4)] * 12, 2))) == 12
    assert (len(slow.seen), len(fast.seen)) == (2, 10)


def test_a_server_that_is_gone_from_the_start_is_named_and_the_others_go_on(
    stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = stack.enter_context(serving())
    client = CompletionClient([GONE, url])
    assert len(dict(client.each([completion([1, 2], Sampling(), 4)] * 5, 2))) == len(handler.seen) == 5
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert f"data.server: {GONE}/v1/models gave no answer" in printed
    assert "1 of 2 servers remain" in printed


def test_when_all_servers_are_gone_each_is_named_and_finished_responses_are_kept(
    harvested: Path, tmp_path: Path, stack: ExitStack
) -> None:
    two = [stack.enter_context(serving(Sampler, dies_after=3)) for _ in range(2)]
    run = f"run_dir={tmp_path}", "data.online=[auto]", "data.generate_batch=1"
    recipe = tiny_recipe(harvested, f"data.server=[{', '.join(url for url, _ in two)}]", *run)
    with pytest.raises(ValueError, match="run the command again; finished responses are kept") as error:
        harvest(recipe)
    assert all(f"{url}/v1/completions gave no answer" in str(error.value) for url, _ in two)
    url, handler = stack.enter_context(serving(Sampler))
    harvest(tiny_recipe(harvested, f"data.server={url}", *run))
    assert len(handler.seen) == 16 - 6


def test_no_connection_to_a_server_outlives_its_client(stack: ExitStack) -> None:
    """Python warned of sockets that nobody had closed, in whatever ran when it collected them."""
    url, _ = stack.enter_context(serving())
    client = CompletionClient([url])
    connections = client.client
    del client
    assert connections.is_closed


def test_a_server_of_another_model_is_refused_by_name(stack: ExitStack) -> None:
    right, wrong = (stack.enter_context(serving(model=model))[0] for model in ("tiny", "other"))
    with pytest.raises(ValueError, match=rf"{right} serves tiny, but {wrong} serves other; servers of one model"):
        CompletionClient([right, wrong])
