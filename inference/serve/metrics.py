"""Prometheus metrics. Figures that vLLM has carry its names, because dashboards and load tools read them."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headstart.heads.files import read_config
from headstart.inference.serve.exchange import Exchange
from headstart.inference.serve.traffic import Adaptation
from headstart.inference.serve.worker import Update, Worker

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# vLLM's names and meanings:
COUNTERS = {
    "spec_decode_num_drafts": "Target steps that verified draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens (nodes of trees) that the target verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that became text.",
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "New tokens.",
    "prefix_cache_queries": "Tokens of prompts that were looked up among earlier texts.",
    "prefix_cache_hits": "Tokens of prompts that an earlier text had left in the cache.",
    "num_preemptions": "Requests whose cache was given up for others; always 0 here.",
}
COUNTERS_BY_LABEL = {
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted draft tokens by depth, from 0.", "position"),
    "request_success": ("Choices that ended, by finish reason.", "finished_reason"),
    "admission_rejections": ("Requests that were refused, by reason.", "reason"),
}
GAUGES = {
    "num_requests_running": "Choices that have their first token and not their last.",
    "num_requests_waiting": "Choices that wait for their first token.",
    "kv_cache_usage_perc": "Share (0 to 1) of --memory that texts reserve; without it, of the rows at their longest.",
}
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", LONG),
    "inter_token_latency_seconds": ("Between the steps that added to a choice; a step adds several tokens.", SHORT),
    "request_time_per_output_token_seconds": ("Time after the first token, per further token.", SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", LONG),
    "request_queue_time_seconds": ("From a request's arrival to its prefill.", LONG),
    "request_prefill_time_seconds": ("From the start of prefill to the first token.", LONG),
    "request_decode_time_seconds": ("From the first token to the last.", LONG),
    "request_prompt_tokens": ("Tokens of a request's prompts.", TOKENS),
    "request_generation_tokens": ("New tokens of a request.", TOKENS),
    "iteration_tokens_total": ("Tokens that a step added to a choice.", STEP_TOKENS),
}
VLLMS = {*COUNTERS, *GAUGES, *HISTOGRAMS}
# Figures that vLLM does not have:
OWN_GAUGES = {
    "acceptance_length": "Mean number of tokens that a drafting step adds, bonus token included, since the start.",
    "engine_failures": "Steps that ended in an error.",
}
WATCHED_STEPS = 512  # drafting steps that are compared with the promised acceptance length
PROMISED_SHARE_MIN = 0.7  # of the promised draft tokens per step; below, something is wrong, such as the chat template


class Metrics:
    """All figures of one server, in a registry of its own."""

    def __init__(self, model: str, worker: Worker, promised: float | None = None) -> None:
        """`promised` is the acceptance length in the head's config.json."""
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model, "engine": "0"}
        self.counters = {name: self._labelled(Counter, name, text) for name, text in COUNTERS.items()}
        self.gauges = {name: self._labelled(Gauge, name, text) for name, text in {**GAUGES, **OWN_GAUGES}.items()}
        self.histograms = {
            name: self._labelled(Histogram, name, text, buckets=buckets) for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.by_label = {
            name: Counter(f"vllm:{name}", text, (*self.labels, label), registry=self.registry)
            for name, (text, label) in COUNTERS_BY_LABEL.items()
        }
        self.drafts = self.accepted = 0
        self.prefixes = 0, 0
        if promised is not None:
            about = "The acceptance length in the head's config.json, the lowest over its temperatures."
            self._labelled(Gauge, "promised_acceptance_length", about).set(promised)
        self.gauges["engine_failures"].set_function(lambda: worker.failures)
        self.gauges["kv_cache_usage_perc"].set_function(lambda: worker.cache_usage)

    def show_adaptation(self, adaptation: Adaptation) -> None:
        """Add the figures of a server whose traffic a head may learn from."""
        figures: dict[str, tuple[str, Callable[[], float]]] = {
            "head_swaps": ("Times that another head was loaded since the start.", lambda: adaptation.swaps),
            "head_version": (
                "Number of the served head of headstart adapt, or 0.",
                lambda: adaptation.version,
            ),
            "traffic_bytes": ("Bytes of finished requests in memory.", lambda: adaptation.traffic.num_bytes),
        }
        for name, (text, value) in figures.items():
            self._labelled(Gauge, name, text).set_function(value)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def set_load(self, running: int, waiting: int) -> None:
        self.gauges["num_requests_running"].set(running)
        self.gauges["num_requests_waiting"].set(waiting)

    def reject(self, reason: str) -> None:
        self._count_by_label("admission_rejections", reason)

    def count_prompts(self, tokens: int) -> None:
        self._add("prompt_tokens", tokens)

    def set_prefixes(self, queries: int, hits: int) -> None:
        """Take over the worker's totals, which restart at 0 after an error."""
        before = self.prefixes if queries >= self.prefixes[0] else (0, 0)
        self._add("prefix_cache_queries", queries - before[0])
        self._add("prefix_cache_hits", hits - before[1])
        self.prefixes = queries, hits

    def count_update(self, update: Update, since_last: float) -> None:
        """Count what a step added to a choice, `since_last` seconds after the choice's previous step."""
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
            self._count_by_label("spec_decode_num_accepted_tokens_per_pos", str(position))
        self.drafts, self.accepted = self.drafts + 1, self.accepted + block.accepted
        self.gauges["acceptance_length"].set(1 + self.accepted / self.drafts)

    def count_request(self, exchange: Exchange) -> None:
        """Count a request that has ended, for any reason."""
        written = exchange.num_new_tokens
        for choice in exchange.choices:
            self._count_by_label("request_success", choice.finish or "abort")
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

    def _count_by_label(self, name: str, value: str) -> None:
        _, label = COUNTERS_BY_LABEL[name]
        self.by_label[name].labels(**self.labels, **{label: value}).inc()

    def _labelled(self, kind: type, name: str, text: str, **options: object) -> Any:
        prefix = "vllm" if name in VLLMS else "headstart"
        metric = kind(f"{prefix}:{name}", text, [*self.labels], registry=self.registry, **options)
        return metric.labels(**self.labels)


class AcceptanceWatch:
    """Warns when the last steps accept far fewer drafts than the head promises; again only after a recovery."""

    def __init__(self, promised: float | None, log: Callable[[str], None]) -> None:
        self.promised, self.log = promised, log
        self.steps: deque[int] = deque(maxlen=WATCHED_STEPS)
        self.warned = False

    def count(self, update: Update) -> None:
        """Take in a step. Steps without drafts, and steps whose draft contains the end of the text, do not count."""
        block = update.block
        if self.promised is None or not block.drafted or block.accepted == len(block.tokens):
            return
        self.steps.append(block.accepted)
        if len(self.steps) < WATCHED_STEPS:
            return
        measured = 1 + sum(self.steps) / WATCHED_STEPS
        is_low = measured - 1 < PROMISED_SHARE_MIN * (self.promised - 1)
        if is_low and not self.warned:
            self.log(json.dumps({"warning": self.message(measured)}))
        self.warned = is_low

    def message(self, measured: float) -> str:
        return (
            f"the acceptance length of the last {WATCHED_STEPS} drafting steps is {measured:.2f}; the head promises "
            f"{self.promised:.2f}. High temperatures and other kinds of text lower it; so do another chat template and "
            f"another target than the head was trained for: headstart doctor HEAD TARGET"
        )


def promised_length(head: Path | None) -> float | None:
    """The lowest acceptance length, over the temperatures in a head's config.json; None if it has none.

    The lowest, so that requests at temperature 1, where the fewest drafts are accepted, cause no warning.
    """
    config = {} if head is None else read_config(head)
    return min(config.get("headstart", {}).get("acceptance_length", {}).values(), default=None)
