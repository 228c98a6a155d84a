"""Errors in OpenAI's shape. What a client sent is never repeated beyond a few words of it."""

import reprlib
from typing import Any

LONGEST = 600  # characters of a message
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer that is an error; `param` names the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message if len(message) <= LONGEST else f"{message[:LONGEST]}..."
        self.status, self.param, self.headers = status, param, headers or {}

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "APIError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def stopping() -> ApiError:
    """The answer to a request that a server on its way out does not begin."""
    return ApiError(503, "the server is stopping; send the request to another one", headers={"Retry-After": "5"})


def wrong(name: str, given: Any, allowed: str, remedy: str) -> ApiError:
    """A field of the request with a value that is not allowed."""
    return ApiError(400, f"{name}: {reprlib.repr(given)} given, {allowed} allowed; {remedy}", name)
