"""Prometheus metrics under our own names, and under vLLM's, which dashboards and load tools read."""

import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headstart.heads.files import read_config
from headstart.inference.serve.exchange import Exchange
from headstart.inference.serve.traffic import Adaptation
from headstart.inference.serve.worker import Update, Worker

LABELS = ("model_name", "engine")
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

COUNTERS = {
    "spec_decode_num_drafts": "Target steps that verified draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens (nodes of trees) that the target verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that became text.",
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "New tokens.",
    "prefix_cache_queries": "Tokens of prompts that were looked up among earlier texts.",
    "prefix_cache_hits": "Tokens of prompts that were not read again, as an earlier text begins with them.",
    "num_preemptions": "Requests whose cache was given up for others; always 0 here.",
}
GAUGES = {
    "num_requests_running": "Choices whose first token was written, and whose last was not.",
    "num_requests_waiting": "Choices that wait for their first token.",
    "kv_cache_usage_perc": "Share (0 to 1) of --memory that texts reserve; without it, of the rows at their longest.",
}
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", LONG),
    "inter_token_latency_seconds": ("Between the steps that added to a choice; a step adds several tokens.", SHORT),
    "request_time_per_output_token_seconds": ("Time after the first token, divided by the tokens after it.", SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", LONG),
    "request_queue_time_seconds": ("Until the engine read the prompt.", LONG),
    "request_prefill_time_seconds": ("Reading the prompt.", LONG),
    "request_decode_time_seconds": ("From the first token to the last.", LONG),
    "request_prompt_tokens": ("Tokens of a request's prompts.", TOKENS),
    "request_generation_tokens": ("New tokens of a request.", TOKENS),
    "iteration_tokens_total": ("Tokens that a step added to a choice.", STEP_TOKENS),
}
WINDOW = 512  # drafting steps that are compared with the head's promise
SHARE = 0.7  # of the promised draft tokens per step; below it something is wrong, such as another chat template


class Metrics:
    """All figures of one server, in a registry of its own."""

    def __init__(self, model: str, worker: Worker, promised: float | None = None) -> None:
        """`promised` is the acceptance length in the head's config.json."""
        self.registry, self.own = CollectorRegistry(), CollectorRegistry()  # under both names, under ours only
        self.labels = {"model_name": model, "engine": "0"}
        self.counters = {name: self._labelled(Counter, name, text) for name, text in COUNTERS.items()}
        self.gauges = {name: self._labelled(Gauge, name, text) for name, text in GAUGES.items()}
        self.histograms = {
            name: self._labelled(Histogram, name, text, buckets=buckets) for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth, from 0.", "position"
        )
        self.successes = self._counter("request_success", "Choices that ended, by how.", "finished_reason")
        self.rejections = self._counter("admission_rejections", "Requests that were turned away, by why.", "reason")
        about = "Tokens that a drafting step adds on average, the bonus token included, since the start."
        self.length = self._own_gauge("acceptance_length", about)
        self.drafts = self.accepted = 0
        self.prefixes = 0, 0
        if promised is not None:
            about = "The acceptance length in the head's config.json, the lowest over its temperatures."
            self._own_gauge("promised_acceptance_length", about).set(promised)
        failures = self._own_gauge("engine_failures", "Steps that ended in an error.")
        failures.set_function(lambda: worker.failures)
        self.gauges["kv_cache_usage_perc"].set_function(lambda: worker.cache_usage)

    def show_adaptation(self, adaptation: Adaptation) -> None:
        """Add the figures of a server whose traffic a head may learn from."""
        swaps = self._own_gauge("head_swaps", "How often another head took over since the start.")
        swaps.set_function(lambda: adaptation.swaps)
        version = self._own_gauge("head_version", "Number of the served head among those of headstart adapt, or 0.")
        version.set_function(lambda: adaptation.version)
        kept = self._own_gauge("traffic_bytes", "Bytes of finished requests that are kept in memory.")
        kept.set_function(lambda: adaptation.traffic.num_bytes)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        ours = generate_latest(self.registry)
        vllms = re.sub(rb"^(# \w+ )?headstart:", rb"\1vllm:", ours, flags=re.MULTILINE)
        return ours + vllms + generate_latest(self.own)

    def set_load(self, running: int, waiting: int) -> None:
        self.gauges["num_requests_running"].set(running)
        self.gauges["num_requests_waiting"].set(waiting)

    def reject(self, reason: str) -> None:
        self.rejections.labels(**self.labels, reason=reason).inc()

    def count_prompts(self, tokens: int) -> None:
        self._add("prompt_tokens", tokens)

    def set_prefixes(self, queries: int, hits: int) -> None:
        """The worker's totals, which begin anew after an error."""
        before = self.prefixes if queries >= self.prefixes[0] else (0, 0)
        self._add("prefix_cache_queries", queries - before[0])
        self._add("prefix_cache_hits", hits - before[1])
        self.prefixes = queries, hits

    def count_update(self, update: Update, since_last: float) -> None:
        """Count a step's part in a choice; `since_last` are the seconds since the choice's last step."""
        block = update.block
        self._add("generation_tokens", len(block.tokens))
        self._observe("iteration_tokens_total", len(block.tokens))
        if block.drafted is not None:
            self._observe("inter_token_latency_seconds", since_last)
        if not block.drafted:
            return
        self._add("spec_decode_num_drafts", 1)
        self._add("spec_decode_num_draft_tokens", block.drafted)
        self._add("spec_decode_num_accepted_tokens", block.accepted)
        for position in range(block.accepted):
            self.per_position.labels(**self.labels, position=str(position)).inc()
        self.drafts, self.accepted = self.drafts + 1, self.accepted + block.accepted
        self.length.set(1 + self.accepted / self.drafts)

    def count_request(self, exchange: Exchange) -> None:
        """Count a request that has ended, in whatever way."""
        written = exchange.num_new_tokens
        for choice in exchange.choices:
            self.successes.labels(**self.labels, finished_reason=choice.finish or "abort").inc()
        submitted, prefill, first, last = exchange.submitted, exchange.prefill, exchange.first, exchange.last
        if first is None or prefill is None or last is None:
            return
        self._observe("time_to_first_token_seconds", first - submitted)
        self._observe("request_queue_time_seconds", prefill - submitted)
        self._observe("request_prefill_time_seconds", first - prefill)
        self._observe("request_decode_time_seconds", last - first)
        self._observe("e2e_request_latency_seconds", (exchange.ended or last) - submitted)
        self._observe("request_prompt_tokens", exchange.num_prompt_tokens)
        self._observe("request_generation_tokens", written)
        if len(exchange.choices) == 1 and written > 1:
            self._observe("request_time_per_output_token_seconds", (last - first) / (written - 1))

    def _add(self, name: str, count: int) -> None:
        self.counters[name].inc(count)

    def _observe(self, name: str, value: int | float) -> None:
        self.histograms[name].observe(value)

    def _own_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"headstart:{name}", text, LABELS, registry=self.own).labels(**self.labels)

    def _labelled(self, kind: type, name: str, text: str, **options: object) -> Any:
        return kind(f"headstart:{name}", text, LABELS, registry=self.registry, **options).labels(**self.labels)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"headstart:{name}", text, (*LABELS, label), registry=self.registry)


class AcceptanceWatch:
    """Warns once when the last steps accept far fewer drafts than the head promises; again only after a recovery."""

    def __init__(self, promised: float | None, log: Callable[[str], None]) -> None:
        self.promised, self.log = promised, log
        self.steps: deque[int] = deque(maxlen=WINDOW)
        self.warned = False

    def count(self, update: Update) -> None:
        """Take in a step; steps without drafts do not count, nor those whose draft holds the end of the text."""
        block = update.block
        if self.promised is None or not block.drafted or block.accepted == len(block.tokens):
            return
        self.steps.append(block.accepted)
        if len(self.steps) < WINDOW:
            return
        measured = 1 + sum(self.steps) / WINDOW
        is_low = measured - 1 < SHARE * (self.promised - 1)
        if is_low and not self.warned:
            self.log(json.dumps({"warning": self.message(measured)}))
        self.warned = is_low

    def message(self, measured: float) -> str:
        return (
            f"the acceptance length of the last {WINDOW} drafting steps is {measured:.2f}; the head promises "
            f"{self.promised:.2f}. Sampling at a high temperature and text of another kind lower it; so do another "
            f"chat template and another target than the head was trained for: headstart doctor HEAD TARGET"
        )


def promised_length(head: Path | None) -> float | None:
    """The lowest acceptance length, over the temperatures in a head's config.json; None if it has none.

    The lowest, because requests may have any temperature: at 1, where drafts are accepted least, nothing is wrong.
    """
    config = {} if head is None else read_config(head)
    return min(config.get("headstart", {}).get("acceptance_length", {}).values(), default=None)
