"""What happens to every HTTP request before and after its route: an id, the API key, errors, the access log."""

import hmac
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.inference.serve.errors import ApiError
from headstart.inference.serve.http.access_log import LogEntry

ENTRY = "headstart.log"  # the key of the request's log entry in its scope
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
GUARDED = ("/v1", "/tokenize", "/detokenize")


class Front:
    """Wraps the routes. Whatever fails inside becomes an error in OpenAI's shape, and one line in the log."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], log: Callable[[str], None]) -> None:
        self.app, self.log = app, log
        self.api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        client = scope.get("client")
        entry = LogEntry(
            given if REQUEST_ID.fullmatch(given) else uuid4().hex,
            scope["method"],
            scope["path"],
            client[0] if client else None,
        )
        scope[ENTRY] = entry

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = entry.request_id
            await send(message)

        try:
            self._check_key(scope, headers)
            await self.app(scope, receive, answer)
        except ApiError as error:
            await error_response(error)(scope, receive, answer)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            if entry.status is None:
                failed = ApiError(500, f"the server failed; its log has the reason for request {entry.request_id}")
                await error_response(failed)(scope, receive, answer)
        finally:
            entry.write(self.log)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError without the right key; every key is compared in full, whatever was given."""
        if not self.api_keys or scope["method"] == "OPTIONS" or not scope["path"].startswith(GUARDED):
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        right = [hmac.compare_digest(token.strip().encode(), key) for key in self.api_keys]
        if scheme.lower() != "bearer" or not any(right):
            raise ApiError(
                401,
                "Authorization: no valid API key given, `Bearer KEY` is needed; send one that the server was started "
                "with",
                headers={"WWW-Authenticate": "Bearer"},
            )


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


def log_entry(request: Request) -> LogEntry:
    entry: LogEntry = request.scope[ENTRY]
    return entry
