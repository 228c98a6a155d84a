"""Laws of who may ask and how: names of the server, keys, methods."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from server_run import NAME, Running, running

from headstart.inference.serve.options import serve_options
from headstart.inference.serve.service import Served

LOCAL = serve_options(None, ["--target", "x", "--allowed-host", "Box.example"]).settings


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Running]:
    with running(served, replace(LOCAL, names=(NAME,), body_timeout=0.5)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> httpx.Client:
    return server.http


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "chat.localhost"}, 200),
        ({"Host": "[::1]:9"}, 200),
        ({"Host": "127.8.8.8"}, 200),
        ({"Host": "box.example:80"}, 200),
        ({"Host": "evil.example", "Origin": "http://localhost"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "10.0.0.1"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://box.example"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_reached_the_server_by_dns_rebinding(
    client: httpx.Client, headers: dict[str, str], status: int
) -> None:
    for path in ("/", "/v1/models", "/metrics"):
        found = client.get(path, headers=headers)
        assert found.status_code == status, found.text
        assert status == 200 or "--allowed-host" in found.json()["error"]["message"]


def test_a_server_for_other_machines_answers_to_any_name_unless_names_are_given() -> None:
    host = ["--target", "x", "--host", "0.0.0.0"]
    assert serve_options(None, host).settings.is_own("box.example")
    named = serve_options(None, [*host, "--allowed-host", "a.example"]).settings
    assert [named.is_own(name) for name in ("a.example", "box.example", "127.0.0.1")] == [True, False, True]


def test_head_is_get_without_a_body(client: httpx.Client) -> None:
    for path in ("/", "/style.css", f"/v1/models/{NAME}", "/health", "/metrics"):
        answer, full = client.head(path), client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers.get("content-type") == full.headers.get("content-type")


def test_a_wrong_method_is_told_the_right_one(client: httpx.Client) -> None:
    for method, path, allowed in (("HEAD", "/v1/completions", {"POST"}), ("PUT", "/", {"GET", "HEAD"})):
        answer = client.request(method, path)
        assert answer.status_code == 405
        assert {*answer.headers["allow"].split(", ")} == allowed
