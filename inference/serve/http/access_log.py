"""One line of JSON for each request: who, what, how long, how many tokens. Never any text of a prompt or an answer."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from headstart.inference.serve.exchange import Exchange
from headstart.inference.serve.requests.answers import seconds

# Asked every few seconds, or by the chat page; told only if they fail.
QUIET = frozenset({"/health", "/ready", "/ping", "/metrics", "/v1/models", "/", "/style.css", "/page.js"})


def to_stdout(line: str) -> None:
    print(line, file=sys.stdout, flush=True)


@dataclass
class LogEntry:
    """What is known about a request so far."""

    request_id: str
    method: str
    path: str
    client: str | None
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None  # None: the client left before an answer
    fields: dict[str, Any] = field(default_factory=dict)

    def add(self, exchange: Exchange) -> None:
        """What the engine did for the request."""
        stats = [choice.stats for choice in exchange.choices if choice.stats is not None]
        steps, tokens = sum(each.steps for each in stats), sum(each.tokens for each in stats)
        self.fields |= {
            "stream": exchange.wanted.stream,
            "choices": len(exchange.choices),
            "prompt_tokens": sum(map(len, exchange.wanted.prompts)),
            "completion_tokens": sum(len(choice.tokens) for choice in exchange.choices),
            "finish": [choice.finish or "abort" for choice in exchange.choices],
            "acceptance_length": round(tokens / steps, 3) if steps else None,
            "draft_tokens": sum(each.drafted for each in stats),
            "accepted_draft_tokens": sum(sum(each.accepted_at_depth) for each in stats),
            **{name: None if span is None else round(span, 4) for name, span in seconds(exchange.times).items()},
        }

    def write(self, write: Callable[[str], None]) -> None:
        if self.path in QUIET and self.status in (200, 304):
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path[:200],
            "client": self.client,
            "status": self.status,
            "seconds": round(time.perf_counter() - self.started, 4),
            **self.fields,
        }
        write(json.dumps(line))
