"""HTTP around the routes: request ids, API keys, limits and the log; event streams; clients that disconnect."""

import asyncio
import hmac
import json
import re
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.inference.core.request import DecodeStats
from headstart.inference.serve.api.errors import ApiError
from headstart.inference.serve.exchange import Exchange
from headstart.inference.serve.options import ServerSettings

Result = TypeVar("Result")
KEEP_ALIVE = ": keep-alive\n\n"  # a comment, which clients skip
CLIENT_GONE = 499  # as in nginx; it appears only in the log
ENTRY = "headstart.log"  # the key of the request's log entry in its scope
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
GUARDED = ("/v1", "/tokenize", "/detokenize", "/adapt")
# Requested every few seconds, or by the chat page: logged only if they fail.
QUIET = frozenset({"/health", "/ready", "/ping", "/metrics", "/v1/models", "/adapt", "/", "/style.css", "/page.js"})


def figures(exchange: Exchange) -> dict[str, Any]:
    """A request's figures for the log, which never holds text of a prompt or an answer."""
    stats = DecodeStats.sum_of(choice.stats for choice in exchange.choices if choice.stats is not None)
    return {
        "stream": exchange.encoded.fields.stream,
        "choices": len(exchange.choices),
        "prompt_tokens": exchange.num_prompt_tokens,
        "completion_tokens": exchange.num_new_tokens,
        "finish": [choice.finish or "abort" for choice in exchange.choices],
        "acceptance_length": round(stats.acceptance_length, 3) if stats.steps else None,
        "draft_tokens": stats.drafted,
        "accepted_draft_tokens": sum(stats.accepted_at_depth),
        **{name: None if span is None else round(span, 4) for name, span in exchange.seconds().items()},
    }


class Front:
    """Wraps the routes; writes one line to the log for every request."""

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
            "status": None,  # remains None if the client disconnects before an answer
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
            traceback.print_exc(file=sys.stderr)  # the client has received status 500
        finally:
            entry["seconds"] = round(time.perf_counter() - started, 4)
            if entry["path"] not in QUIET or entry["status"] not in (200, 304):
                self.log(json.dumps(entry))

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError for another host's name, a missing or wrong API key, and a body that is not JSON."""
        for name in ("Host", "Origin"):
            given = headers.get(name, "")
            if not self.settings.is_own(host_in(given)):
                allowed = "localhost, loopback addresses and names given by --allowed-host are allowed"
                raise ApiError(403, f"{name}: {given[:100]!r} given, {allowed}; restart the server with the name")
        keys = self.settings.api_keys if scope["path"].startswith(GUARDED) and scope["method"] != "OPTIONS" else ()
        scheme, _, token = headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(token.strip().encode(), key.encode()) for key in keys]  # in constant time
        if keys and (scheme.lower() != "bearer" or not any(matches)):
            allowed = "`Bearer KEY` is needed; send one that the server was started with"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, f"Authorization: no valid API key given, {allowed}", headers=challenge)
        if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
            both = "Transfer-Encoding with Content-Length or HTTP/1.0 given, by which a proxy may see another request"
            raise ApiError(
                400, f"{both}; one of the two is allowed; leave the other out", headers={"Connection": "close"}
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            allowed = "application/json is allowed; send it with that header"
            raise ApiError(415, f"Content-Type: {kind[:60]!r} given, {allowed}")


def host_in(header: str) -> str | None:
    """The host in a Host or Origin header, without its port; None without a header, "" for a header without a host."""
    try:
        return (urlsplit(header if "//" in header else f"//{header}").hostname or "") if header else None
    except ValueError:
        return ""


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


def log_entry(request: Request) -> dict[str, Any]:
    """The request's line in the log; its route may add to it."""
    return request.scope[ENTRY]


def limited(receive: Receive, settings: ServerSettings) -> Receive:
    """`receive`, with an ApiError for a body that is too large or too slow.

    A body that is too large is still received, up to eight times the limit, so that the client reads the error.
    """
    most, end = settings.max_body, time.monotonic() + settings.body_timeout
    size, is_complete = 0, False

    async def receive_some() -> Message:
        nonlocal size, is_complete
        if is_complete:
            return await receive()
        while True:
            try:
                message = await asyncio.wait_for(receive(), end - time.monotonic())
            except TimeoutError:
                late = f"the body did not arrive within {settings.body_timeout:g} seconds; send it faster"
                raise ApiError(408, late) from None
            size += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if size <= most:
                return message
            if is_complete or size > 8 * most:
                large = f"the body has more than {most} bytes, at most {most} are allowed; send a smaller one"
                raise ApiError(413, large)

    return receive_some


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of the work; cancels it and raises ClientDisconnect if the client disconnects first."""
    working, gone = asyncio.create_task(work), asyncio.create_task(until_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. The generator is closed at once when the client disconnects.

    An ApiError before the first event becomes an answer with its status.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.begun = events, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._write(send), receive)
        except ClientDisconnect:
            if not self.begun:
                raise
        finally:
            await self.events.aclose()  # if the client disconnected before the first event

    async def _write(self, send: Send) -> None:
        async with aclosing(self.events):
            async for each in self.events:
                if not self.begun:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    self.begun = True
                await send({"type": "http.response.body", "body": each.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: dict[str, Any]) -> str:
    """An object as an event, which is named after the object's type if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n"
