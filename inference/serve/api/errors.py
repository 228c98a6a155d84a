"""Errors in OpenAI's shape. They repeat at most a few words of the client's input."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headstart.common.errors import wrong_value

MESSAGE_MAX = 600  # characters
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
    """An error as an answer; `param` names the wrong field."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MESSAGE_MAX else f"{message[:MESSAGE_MAX]}..."
        self.status, self.param, self.headers = status, param, headers or {}

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "APIError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def stopping() -> ApiError:
    """The answer to a request that arrives while the server is stopping."""
    return ApiError(503, "the server is stopping; send the request to another one", headers={"Retry-After": "5"})


def wrong(name: str, value: Any, allowed: str, remedy: str) -> ApiError:
    """The error for a field with a wrong value."""
    return ApiError(400, str(wrong_value(name, reprlib.repr(value), allowed, remedy)), name)


@contextmanager
def as_api_error() -> Iterator[None]:
    """Raise a ValueError from inside, whose message begins with a field, as an ApiError for this field."""
    try:
        yield
    except ValueError as error:
        field = str(error).partition(":")[0]
        raise ApiError(400, str(error), None if " " in field else field) from None
