"""An S3 server on loopback for tests and benchmarks, and a proxy before it that fails as stores and networks do."""

import http.client
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from completion_server import serving

BUCKET = "bucket"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
ENVIRONMENT |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
Fault = Callable[["Forward"], bool]  # answers a request in its own way; False leaves it to the store


@contextmanager
def moto_server() -> Iterator[str]:
    """The URL of a server of moto's with an empty bucket, in threads of this process."""
    from moto.server import ThreadedMotoServer  # which a machine without the extra `dev` lacks

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        request(f"http://{host}:{port}", "POST", "/moto-api/reset")  # all of a process's servers share their buckets
        request(f"http://{host}:{port}", "PUT", f"/{BUCKET}")
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def request(server: str, method: str, path: str, body: bytes = b"", headers: Any = None) -> tuple[int, Any, bytes]:
    """The status, headers and body of a server's answer."""
    connection = http.client.HTTPConnection(urlsplit(server).netloc, timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


class Forward(BaseHTTPRequestHandler):
    """Passes requests on to a server, unless a fault answers them."""

    protocol_version = "HTTP/1.1"
    store: str
    fault: Fault

    def handle_request(self) -> None:
        self.sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not type(self).fault(self):
            self.answer(*self.forwarded())

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def forwarded(self) -> tuple[int, dict[str, str], bytes]:
        return request(self.store, self.command, self.path, self.sent, dict(self.headers.items()))

    def answer(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        """Send an answer that says it is `length` bytes long, by default as long as it is."""
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        told = headers.get("Content-Length", "0") if is_head else str(len(body) if length is None else length)
        self.send_header("Content-Length", told)
        self.end_headers()
        self.wfile.write(body)
        if length is not None and length != len(body):
            self.close_connection = True

    def refuse(self, status: int, code: str) -> bool:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.answer(status, {"Content-Type": "application/xml"}, b"" if self.command == "HEAD" else body)
        return True

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def proxy(store: str, fault: Fault) -> Iterator[str]:
    """The URL of a proxy before a server."""
    with serving(Forward, store=store, fault=staticmethod(fault)) as (url, _):
        yield url


def every(number: int, fault: Fault) -> Fault:
    """The fault for one of every `number` requests that it could answer."""
    counter = count(1)
    return lambda handler: next(counter) % number == 0 and fault(handler)
