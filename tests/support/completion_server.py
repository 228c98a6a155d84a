"""A server with OpenAI's completions, in a thread: what `data.server` names, small enough for tests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(BaseHTTPRequestHandler):
    """Completions in vLLM's form: the response to a prompt is its tokens in reverse order.

    `failures` are the statuses of the next requests, 0 for success.
    """

    model = "tiny"
    seen: list[dict[str, Any]]
    failures: Iterator[int] = iter([])
    together: threading.Barrier | None = None
    odd: object = None
    dies_after: int | None = None  # it is gone after this many answers

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": self.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.dies_after is not None and len(self.seen) >= self.dies_after:
            self.server.shutdown()
            return self.server.server_close()  # and no answer
        if status := next(self.failures, 0):
            return self.answer(status, {"error": "busy"})
        if self.together is not None:
            self.together.wait(timeout=10)
        if self.odd is not None:
            return self.answer(200, self.odd)
        self.seen.append(body)
        tokens = self.response(body)
        choice: dict[str, Any] = {"text": "", "finish_reason": "length", "token_ids": tokens}
        more = self.more(body, choice)
        return self.answer(200, {"choices": [choice], **more})

    def response(self, body: dict[str, Any]) -> list[int]:
        return list(body["prompt"][::-1][: body["max_tokens"]])

    def more(self, body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        """Other fields of the answer; its choice may be changed."""
        return {}

    def answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class Patient(ThreadingHTTPServer):
    request_queue_size = 200  # connections that may wait to be accepted


@contextmanager
def serving(kind: type[BaseHTTPRequestHandler] = Server, **fields: Any) -> Iterator[tuple[str, Any]]:
    """A running server's URL, and its handler's class, whose `fields` the test may change."""
    handler = type("Fresh", (kind,), {"seen": [], **fields})
    running = Patient(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", handler
    finally:
        running.shutdown()
        running.server_close()
