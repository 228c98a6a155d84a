"""Laws of `headstart serve`: its command line says what is wrong, and signals end it with every request answered."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from bad_inputs import Says, Typed, assert_refused, table
from tiny_run import build_target, quiet_environment

from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.serve import command
from headstart.inference.serve.options import serve_options
from headstart.inference.serve.worker import Worker

ROOT = Path(__file__).resolve().parents[3]

# The options of a command line, then the option, its value, what is allowed and what to do.
WRONG = table("""
a recipe and a target | recipes/tiny.yaml --target x => --target | x given with the recipe | one of the two
a folder without a head | --target assets/demo_target --head docs => --head | docs holds no head
no rows | --target x --max-batch 0 => --max-batch | 0 | 1 to 4096 | correct it
a key that no header holds | --target x --api-key schlüssel => --api-key | non-ASCII | visible ASCII characters | change
an address of pictures | --target x --image-host https://a.b/c => --image-host | https://a.b/c | host's name | correct
an empty name | --target x --served-model-name= => --served-model-name | '' | a name | leave it out
""")


@pytest.mark.parametrize("symptom", WRONG)
def test_a_wrong_command_line_is_refused(symptom: str, monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    (options,), facts = WRONG[symptom]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    port = [] if "--port" in options else ["--port", "0"]
    assert_refused(typed("serve", *options.split(), *port), facts)


def test_a_port_that_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.chdir(ROOT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = typed("serve", "--target", "assets/demo_target", "--port", port)
    assert_refused(outcome, Says("--port", port, "a free port", "another --port"))


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setenv("HEADSTART_API_KEY", "one,two")
    assert serve_options(None, ["--target", "x"]).settings.api_keys == ("one", "two")
    assert serve_options(None, ["--target", "x", "--api-key", "three"]).settings.api_keys == ("three",)
    monkeypatch.setenv("HEADSTART_API_KEY", "one, two")
    refused = typed("serve", "--target", "x")
    assert_refused(refused, Says("HEADSTART_API_KEY", "with spaces", "visible ASCII characters", "change"))


def test_options_reach_the_settings() -> None:
    assert serve_options(None, ["--target", "org/model"]).settings.names == ("model",)
    named = serve_options(None, ["--target", "x", "--served-model-name", "a", "--served-model-name", "b"])
    assert named.settings.names == ("a", "b")
    options = serve_options(None, ["--target", "x", "--max-batch", "3"])  # trees are costed for this batch
    assert (options.settings.max_batch, options.model.decode.max_batch) == (3, 3)
    assert options.settings.image_hosts == frozenset()
    options = serve_options(None, ["--target", "x", "--image-host", "Example.org", "--image-host", "::1"])
    assert options.settings.image_hosts == {"example.org", "::1"}


@contextmanager
def serving(folder: Path, *options: str, requests: int) -> Iterator[tuple[subprocess.Popen[str], list[httpx.Response]]]:
    target = build_target(folder / "target", num_layers=2)
    command = [sys.executable, "-m", "headstart.cli", "serve", "--target", str(target), "--port", "0"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command += ["--dtype", "float32", *options]
    with subprocess.Popen(command, cwd=ROOT, env=quiet_environment(ROOT), **pipes) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0].rstrip("/")
        found: list[httpx.Response] = []
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "n": requests}

        def ask() -> None:
            with suppress(httpx.HTTPError):
                found.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        while "num_requests_running{engine" not in (text := httpx.get(f"{url}/metrics").text) or (
            'vllm:num_requests_running{engine="0",model_name="target"} 0.0' in text
        ):
            assert thread.is_alive()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert "shutdown" in process.stdout.readline()
        yield process, found
        process.wait(30)
        thread.join(60)


@pytest.mark.slow
def test_sigterm_lets_a_request_end_and_then_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, requests=8) as (process, found):
        assert process.wait(60) == 0
    assert [choice["finish_reason"] for choice in found[0].json()["choices"]] == ["length"] * 8


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-batch", "1", requests=60) as (process, found):
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
        assert process.stderr is not None
        assert "ending at once; running requests are lost" in process.stderr.read()
    assert not found


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setattr("headstart.inference.serve.options.PACKAGES", ("uvicorn", "no_such_package"))
    outcome = typed("serve", "--target", "x")
    assert_refused(outcome, Says("no_such_package", "not installed", "needed to serve", "pip install -e '.[serve]'"))


def test_the_thread_that_loads_the_target_also_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = build_target(tmp_path / "target"), []
    from_folders = SpeculativeModel.from_folders

    def note(*given: object, **fields: object) -> object:
        seen.append(threading.get_ident())
        return from_folders(*given, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(SpeculativeModel, "from_folders", note)
    thread = ThreadPoolExecutor(1)
    options = serve_options(None, ["--target", str(folder), "--dtype", "float32"])
    served = thread.submit(command.load, options, thread).result()

    def make_loop() -> object:
        seen.append(threading.get_ident())
        return served.make_loop()

    async def run() -> None:
        worker = Worker(served.thread, make_loop, lambda job, event: None)  # type: ignore[arg-type]
        assert not worker.alive
        worker.start()
        assert worker.alive
        worker.stop()
        assert not worker.alive
        with pytest.raises(RuntimeError):  # a second worker on an ended thread would wait forever
            Worker(served.thread, make_loop, lambda job, event: None).start()

    asyncio.run(run())
    assert len(seen) == 2
    assert seen[0] == seen[1] != threading.get_ident()
