"""How a server presents itself and what it allows, apart from what it decodes with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    names: tuple[str, ...]  # of the model; the first one is told in answers
    api_keys: tuple[str, ...] = ()  # none: no key is asked for
    max_batch: int = 16  # choices that decode together
    max_queue: int = 64  # choices that may wait beside them
    max_body: int = 8 * 2**20  # bytes
    queue_timeout: float | None = 600.0  # seconds until the first token
    request_timeout: float | None = None  # seconds until the last one
    body_timeout: float = 60.0  # seconds until a request has arrived
    keep_alive: float = 15.0  # seconds of silence after which a stream gets a comment
    busy_status: int = 503  # where the queue is full
