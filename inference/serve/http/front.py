"""Every HTTP request before and after its route: an id, the API key, errors, one line in the log."""

import hmac
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.inference.serve.errors import ApiError
from headstart.inference.serve.exchange import Exchange
from headstart.inference.serve.http.transport import limited
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.requests.answers import seconds

ENTRY = "headstart.log"  # the key of the request's log entry in its scope
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
GUARDED = ("/v1", "/tokenize", "/detokenize", "/adapt")
# Requested every few seconds, or by the chat page; logged only if they fail.
QUIET = frozenset({"/health", "/ready", "/ping", "/metrics", "/v1/models", "/adapt", "/", "/style.css", "/page.js"})


def figures(exchange: Exchange) -> dict[str, Any]:
    """The engine's figures for a request, for the log: never any text of a prompt or an answer."""
    stats = [choice.stats for choice in exchange.choices if choice.stats is not None]
    steps, tokens = sum(each.steps for each in stats), sum(each.tokens for each in stats)
    return {
        "stream": exchange.wanted.fields.stream,
        "choices": len(exchange.choices),
        "prompt_tokens": sum(map(len, exchange.wanted.prompts)),
        "completion_tokens": sum(len(choice.tokens) for choice in exchange.choices),
        "finish": [choice.finish or "abort" for choice in exchange.choices],
        "acceptance_length": round(tokens / steps, 3) if steps else None,
        "draft_tokens": sum(each.drafted for each in stats),
        "accepted_draft_tokens": sum(sum(each.accepted_at_depth) for each in stats),
        **{name: None if span is None else round(span, 4) for name, span in seconds(exchange).items()},
    }


class Front:
    """Wraps the routes. Every request becomes one line in the log."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, log: Callable[[str], None]) -> None:
        self.app, self.settings, self.log = app, settings, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given, client = headers.get("x-request-id", ""), scope.get("client")
        started = time.perf_counter()
        entry = scope[ENTRY] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": given if REQUEST_ID.fullmatch(given) else uuid4().hex,
            "method": scope["method"],
            "path": scope["path"][:200],
            "client": client[0] if client else None,
            "status": None,  # the client left before an answer
        }

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = entry["request_id"]
            await send(message)

        try:
            self.check(scope, headers)
            await self.app(scope, limited(receive, self.settings), answer)
        except ApiError as error:
            await error_response(error)(scope, receive, answer)
        except Exception:
            traceback.print_exc(file=sys.stderr)  # the client has an error with status 500 already
        finally:
            entry["seconds"] = round(time.perf_counter() - started, 4)
            if entry["path"] not in QUIET or entry["status"] not in (200, 304):
                self.log(json.dumps(entry))

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError for another server's name, without a right key, which is compared in full with each, and for a
        body of another type."""
        for name in ("Host", "Origin"):
            given = headers.get(name, "")
            if not self.settings.is_own(host_in(given)):
                allowed = "localhost, loopback addresses and names given by --allowed-host are allowed"
                raise ApiError(403, f"{name}: {given[:100]!r} given, {allowed}; restart the server with the name")
        keys = self.settings.api_keys if scope["path"].startswith(GUARDED) and scope["method"] != "OPTIONS" else ()
        scheme, _, token = headers.get("authorization", "").partition(" ")
        right = [hmac.compare_digest(token.strip().encode(), key.encode()) for key in keys]
        if keys and (scheme.lower() != "bearer" or not any(right)):
            allowed = "`Bearer KEY` is needed; send one that the server was started with"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, f"Authorization: no valid API key given, {allowed}", headers=challenge)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            allowed = "application/json is allowed; send it with that header"
            raise ApiError(415, f"Content-Type: {kind[:60]!r} given, {allowed}")


def host_in(given: str) -> str | None:
    """The host in a Host or Origin header, without its port; None without a header, "" for one that has no host."""
    try:
        return (urlsplit(given if "//" in given else f"//{given}").hostname or "") if given else None
    except ValueError:
        return ""


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


def log_entry(request: Request) -> dict[str, Any]:
    """The request's line in the log, to which its route may add."""
    entry: dict[str, Any] = request.scope[ENTRY]
    return entry
