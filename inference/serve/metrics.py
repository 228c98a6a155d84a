"""Prometheus metrics. Figures that vLLM has carry its names, because dashboards and load tools read them."""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headstart.heads.files import read_config
from headstart.inference.core.verify import BONUS
from headstart.inference.serve.api.output import Update
from headstart.inference.serve.exchange import Exchange

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# vLLM's names and meanings; after the text the name of a counter's label, or the buckets of a histogram.
COUNTERS: dict[str, tuple[str, ...]] = {
    "spec_decode_num_drafts": ("Target steps that verified draft tokens.",),
    "spec_decode_num_draft_tokens": ("Draft tokens (nodes of trees) that the target verified.",),
    "spec_decode_num_accepted_tokens": ("Draft tokens that became text.",),
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted draft tokens by depth, from 0.", "position"),
    "prompt_tokens": ("Tokens of prompts.",),
    "generation_tokens": ("New tokens.",),
    "prefix_cache_queries": ("Tokens of prompts that were looked up among earlier texts.",),
    "prefix_cache_hits": ("Tokens of prompts that an earlier text had left in the cache.",),
    "num_preemptions": ("Requests whose cache was given up for others; always 0 here.",),
    "request_success": ("Choices that ended, by finish reason.", "finished_reason"),
    "admission_rejections": ("Requests that were refused, by reason.", "reason"),
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
GAUGES = {
    "vllm:num_requests_running": "Choices that have their first token and not their last.",
    "vllm:num_requests_waiting": "Choices that wait for their first token.",
    "vllm:kv_cache_usage_perc": (
        "Share (0 to 1) of --memory that texts reserve; without it, of the rows at their longest."
    ),
    "headstart:acceptance_length": (
        "Mean number of tokens that a drafting step adds, bonus token included, since the start."
    ),
    "headstart:engine_failures": "Steps that ended in an error.",
    "headstart:promised_acceptance_length": (
        "The acceptance length in the head's config.json, the lowest over its temperatures."
    ),
    "headstart:head_swaps": "Times that another head was loaded since the start.",
    "headstart:head_version": "Number of the served head of headstart adapt, or 0.",
    "headstart:traffic_bytes": "Bytes of finished requests in memory.",
}
WATCHED_STEPS = 512  # drafting steps that are compared with the promised acceptance length
PROMISED_SHARE_MIN = 0.7  # of the promised draft tokens per step; below, something is wrong, such as the chat template


class Metrics:
    """All figures of one server, in a registry of its own."""

    def __init__(self, model: str, gauges: Mapping[str, Callable[[], float]]) -> None:
        """`gauges`: the function that returns the present value, for each name in GAUGES that this server shows."""
        self.registry, labels = CollectorRegistry(), ("model_name", "engine")
        self.values = model, "0"  # of the labels
        self.drafts = self.accepted = 0
        self.prefixes = 0, 0
        self.counters = {
            name: Counter(f"vllm:{name}", text, (*labels, *label), registry=self.registry)
            for name, (text, *label) in COUNTERS.items()
        }
        for name, (_, *label) in COUNTERS.items():
            if not label:
                self.count(name, 0)  # so that it is shown
        self.histograms = {
            name: Histogram(f"vllm:{name}", text, labels, buckets=buckets, registry=self.registry).labels(*self.values)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        for name, value in {**gauges, "headstart:acceptance_length": self.acceptance_length}.items():
            Gauge(name, GAUGES[name], labels, registry=self.registry).labels(*self.values).set_function(value)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    def count(self, name: str, amount: int = 1, *label: str) -> None:
        """Add to a counter; `label` is the value of its own label, if it has one."""
        self.counters[name].labels(*self.values, *label).inc(amount)

    def set_prefixes(self, queries: int, hits: int) -> None:
        """Take over the worker's totals, which restart at 0 after an error."""
        before = self.prefixes if queries >= self.prefixes[0] else (0, 0)
        self.count("prefix_cache_queries", queries - before[0])
        self.count("prefix_cache_hits", hits - before[1])
        self.prefixes = queries, hits

    def count_update(self, update: Update, since_last: float) -> None:
        """Count what a step added to a choice, `since_last` seconds after the choice's previous step."""
        block = update.block
        self.count("generation_tokens", len(block.tokens))
        self.histograms["iteration_tokens_total"].observe(len(block.tokens))
        if block.drafted is not None:
            self.histograms["inter_token_latency_seconds"].observe(since_last)
        if not block.drafted:
            return
        self.count("spec_decode_num_drafts")
        self.count("spec_decode_num_draft_tokens", block.drafted)
        self.count("spec_decode_num_accepted_tokens", block.accepted)
        for position in range(block.accepted):
            self.count("spec_decode_num_accepted_tokens_per_pos", 1, str(position))
        self.drafts, self.accepted = self.drafts + 1, self.accepted + block.accepted

    def count_request(self, exchange: Exchange) -> None:
        """Count a request that has ended, for any reason."""
        for choice in exchange.choices:
            self.count("request_success", 1, choice.finish or "abort")
        arrived, first, last = exchange.arrived, exchange.first, exchange.last
        if first is None or last is None:
            return
        spans, written = exchange.seconds(), exchange.num_new_tokens
        observed: dict[str, float | None] = {
            "time_to_first_token_seconds": spans["time_to_first_token_seconds"],
            "request_queue_time_seconds": spans["queue_seconds"],
            "request_prefill_time_seconds": spans["prefill_seconds"],
            "request_decode_time_seconds": spans["decode_seconds"],
            "e2e_request_latency_seconds": (exchange.ended or last) - arrived,
            "request_prompt_tokens": exchange.num_prompt_tokens,
            "request_generation_tokens": written,
        }
        if len(exchange.choices) == 1 and written > 1:
            observed["request_time_per_output_token_seconds"] = (last - first) / (written - 1)
        for name, value in observed.items():
            assert value is not None
            self.histograms[name].observe(value)


class AcceptanceWatch:
    """Warns when the last steps accept far fewer drafts than the head promises; again only after a recovery."""

    def __init__(self, promised: float | None, log: Callable[[str], None]) -> None:
        self.promised, self.log = promised, log
        self.steps: deque[int] = deque(maxlen=WATCHED_STEPS)
        self.warned = False

    def count(self, update: Update) -> None:
        """Take in a step. Steps without drafts, and steps whose draft contains the end of the text, do not count."""
        block = update.block
        if self.promised is None or not block.drafted or block.depths[-1] != BONUS:
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
