"""Laws of the server's figures: what Prometheus reads adds up, and a head that disappoints is reported."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_run import NAME, Running, running

from headstart.inference.core.request import EmittedTokens
from headstart.inference.core.verify import BONUS
from headstart.inference.serve.api.output import Update
from headstart.inference.serve.metrics import WATCHED_STEPS, AcceptanceWatch, promised_length
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.service import Served

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "docs/grafana/headstart.json"


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Running]:
    with running(served, ServerSettings((NAME,), max_batch=4)) as found:
        for seed in range(3):
            body = {"prompt": "a draft", "max_tokens": 30, "seed": seed, "ignore_eos": True, "stream": seed == 1}
            found.http.post("/v1/completions", json=body, timeout=60)
        yield found


def figures(server: Running) -> dict[str, float]:
    lines = server.http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def total(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


def test_tokens_are_accepted_drafts_plus_one_per_step_and_the_first(server: Running) -> None:
    found = figures(server)
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


def test_the_dashboard_asks_for_metrics_that_exist(server: Running) -> None:
    known = {key.partition("{")[0] for key in figures(server)} | {"headstart:promised_acceptance_length"}
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 8
    asked = {name for query in queries for name in re.findall(r"(?:headstart|vllm):\w+", query)}
    assert not asked - known - {"vllm:admission_rejections_total"}


def test_each_figure_has_one_name(server: Running) -> None:
    names = {key.partition("{")[0] for key in figures(server)}
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
