"""Laws of `headstart serve`: its command line says what is wrong, signals end it with every request answered, it
answers whom it may, and what Prometheus reads adds up."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from bad_inputs import Says, Typed, assert_refused, table
from server_run import NAME, Running, running
from tiny_run import build_target, quiet_environment

from headstart.inference.core.request import EmittedTokens
from headstart.inference.core.verify import BONUS
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.serve import command
from headstart.inference.serve.api.output import Update
from headstart.inference.serve.metrics import WATCHED_STEPS, AcceptanceWatch, promised_length
from headstart.inference.serve.options import ServerSettings, serve_options
from headstart.inference.serve.service import Served
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


def test_options_and_keys_of_the_environment_reach_the_settings(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setenv("HEADSTART_API_KEY", "one,two")
    assert serve_options(None, ["--target", "x"]).settings.api_keys == ("one", "two")
    assert serve_options(None, ["--target", "x", "--api-key", "three"]).settings.api_keys == ("three",)
    monkeypatch.setenv("HEADSTART_API_KEY", "one, two")
    refused = typed("serve", "--target", "x")
    assert_refused(refused, Says("HEADSTART_API_KEY", "with spaces", "visible ASCII characters", "change"))
    monkeypatch.delenv("HEADSTART_API_KEY")
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


LOCAL = serve_options(None, ["--target", "x", "--allowed-host", "Box.example"]).settings


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Running]:
    with running(served, replace(LOCAL, names=(NAME,), body_timeout=0.5)) as found:
        yield found


OWN = {"Host": ["LOCALHOST", "chat.localhost", "[::1]:9", "127.8.8.8", "box.example:80"]}
OWN["Origin"] = ["http://localhost:3000", "https://box.example"]
OTHERS = {"Host": ["localhost.evil.example", "10.0.0.1", "[::1"], "Origin": ["https://evil.example", "null"]}
HEADERS: list[tuple[dict[str, str], int]] = [({}, 200), ({"Host": "evil.example", "Origin": "http://localhost"}, 403)]
HEADERS += [({name: value}, 200) for name, values in OWN.items() for value in values]
HEADERS += [({name: value}, 403) for name, values in OTHERS.items() for value in values]


@pytest.mark.parametrize(("headers", "status"), HEADERS)
def test_pages_of_other_sites_reached_the_server_by_dns_rebinding(server, headers, status) -> None:
    for path in ("/", "/v1/models", "/metrics"):
        found = server.http.get(path, headers=headers)
        assert found.status_code == status, found.text
        assert status == 200 or "--allowed-host" in found.json()["error"]["message"]


def test_a_server_for_other_machines_answers_to_any_name_unless_names_are_given() -> None:
    host = ["--target", "x", "--host", "0.0.0.0"]
    assert serve_options(None, host).settings.is_own("box.example")
    named = serve_options(None, [*host, "--allowed-host", "a.example"]).settings
    assert [named.is_own(name) for name in ("a.example", "box.example", "127.0.0.1")] == [True, False, True]


def test_head_is_get_without_a_body_and_a_wrong_method_is_told_the_right_one(server: Running) -> None:
    for path in ("/", "/style.css", f"/v1/models/{NAME}", "/health", "/metrics"):
        answer, full = server.http.head(path), server.http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers.get("content-type") == full.headers.get("content-type")
    for method, path, allowed in (("HEAD", "/v1/completions", {"POST"}), ("PUT", "/", {"GET", "HEAD"})):
        answer = server.http.request(method, path)
        assert answer.status_code == 405
        assert {*answer.headers["allow"].split(", ")} == allowed


@pytest.fixture(scope="module")
def counted(served: Served) -> Iterator[Running]:
    with running(served, ServerSettings((NAME,), max_batch=4)) as found:
        for seed in range(3):
            body = {"prompt": "a draft", "max_tokens": 30, "seed": seed, "ignore_eos": True, "stream": seed == 1}
            found.http.post("/v1/completions", json=body, timeout=60)
        yield found


def figures(counted: Running) -> dict[str, float]:
    lines = counted.http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def total(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


def test_tokens_are_accepted_drafts_plus_one_per_step_and_the_first(counted: Running) -> None:
    found = figures(counted)
    drafts = total(found, "vllm:spec_decode_num_drafts_total")
    accepted = total(found, "vllm:spec_decode_num_accepted_tokens_total")
    assert total(found, "vllm:generation_tokens_total") == 90
    # The last step of a text may draft nothing, or accept more than fits.
    assert 90 - 3 - 3 <= accepted + drafts <= 90 - 3 + 3
    assert total(found, "vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert accepted <= total(found, "vllm:spec_decode_num_draft_tokens_total")
    assert total(found, "vllm:request_success_total") == 3
    assert total(found, "vllm:time_to_first_token_seconds_count") == 3
    assert total(found, "vllm:request_generation_tokens_sum") == 90
    assert total(found, "vllm:num_requests_running") == total(found, "vllm:num_requests_waiting") == 0
    assert total(found, "vllm:kv_cache_usage_perc") == 0
    assert total(found, "headstart:acceptance_length") == pytest.approx(1 + accepted / drafts)


def test_the_dashboard_asks_for_metrics_that_exist_and_each_has_one_name(counted: Running) -> None:
    known = {key.partition("{")[0] for key in figures(counted)} | {"headstart:promised_acceptance_length"}
    board = json.loads((ROOT / "docs/grafana/headstart.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 8
    asked = {name for query in queries for name in re.findall(r"(?:headstart|vllm):\w+", query)}
    assert not asked - known - {"vllm:admission_rejections_total"}
    names = {key.partition("{")[0] for key in figures(counted)}
    assert len({name.partition(":")[2] for name in names}) == len(names) > 30


def step(accepted: int, is_end: bool = False) -> Update:
    """A step with 8 draft tokens; at the end of a text, the draft holds the end token, and no bonus token follows."""
    depths = [*range(1, accepted + 1), accepted + 1 if is_end else BONUS]
    return Update(EmittedTokens(0, [5] * len(depths), depths, 8, accepted), [], [], 0, 1.0, 1.0)


# The head's acceptance lengths at temperatures 0 and 1, the steps, and the measured length that is reported.
WATCHED: dict[str, tuple[float, float, list[Update], float | None]] = {
    "as promised": (4.1, 3.0, [step(2)], None),
    "far below, and reported once": (4.1, 3.0, [step(1)], 2.0),
    "drafts that hold the end of short answers": (4.1, 4.0, [step(1, is_end=True)], None),
    "as promised at temperature 1, but far below that at 0": (2.93, 2.05, [step(1)], None),
}


@pytest.mark.parametrize("case", WATCHED)
def test_acceptance_far_below_the_heads_promise_is_reported_once(case: str, tmp_path: Path) -> None:
    at_0, at_1, steps, reported = WATCHED[case]
    config = {"headstart": {"acceptance_length": {"0": at_0, "1": at_1}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines: list[str] = []
    watch = AcceptanceWatch(promised_length(tmp_path), lines.append)
    for update in steps * (3 * WATCHED_STEPS):
        watch.count(update)
    assert len(lines) == (reported is not None)
    for line in lines:
        assert all(fact in line for fact in (f"is {reported:.2f}", f"promises {at_1:.2f}", "headstart doctor"))


def test_a_head_without_a_measured_length_promises_nothing(tmp_path: Path) -> None:
    assert promised_length(None) is None
    (tmp_path / "config.json").write_text("{}")
    assert promised_length(tmp_path) is None
    bundled = ROOT / "assets/smollm2_head"
    lengths = json.loads((bundled / "config.json").read_text())["headstart"]["acceptance_length"]
    assert promised_length(bundled) == lengths["1"] < lengths["0"]
