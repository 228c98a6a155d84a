"""The routes of the server."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from headstart.inference.serve.errors import ApiError, wrong
from headstart.inference.serve.exchange import Exchange
from headstart.inference.serve.http.access_log import to_stdout
from headstart.inference.serve.http.front import Front, error_response, log_entry
from headstart.inference.serve.http.transport import (
    CLIENT_GONE,
    DONE,
    ClientGoneError,
    EventStream,
    event,
    read_body,
    unless_gone,
)
from headstart.inference.serve.requests.answers import Answer, ChatAnswer, CompletionAnswer
from headstart.inference.serve.requests.body import Body
from headstart.inference.serve.requests.fields import Wanted
from headstart.inference.serve.requests.prompts import read_tools
from headstart.inference.serve.service import Served, Service
from headstart.inference.serve.settings import ServerSettings
from headstart.inference.targets.tokenizer import text_of

PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html", "/style.css": "style.css", "/page.js": "page.js"}
# The page may load and ask this server alone.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def build_app(
    served: Served, settings: ServerSettings, log: Callable[[str], None] = to_stdout
) -> tuple[ASGIApp, Service]:
    """The server as an ASGI application, and what its routes share. Its engine starts with the application."""
    service = Service(served, settings, log)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.engine.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, answer_error)
    app.add_exception_handler(HTTPException, answer_no_route)
    app.add_exception_handler(Exception, answer_failure)
    add_completions(app, service)
    add_tokens(app, service)
    add_state(app, service)
    for route, name in FILES.items():
        app.get(route)(page_file(PAGE / name))
    return Front(app, settings.api_keys, log), service


def add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await complete(request, service, service.reader.chat, ChatAnswer)

    @app.post("/v1/completions")
    async def completion(request: Request) -> Response:
        return await complete(request, service, service.reader.completion, CompletionAnswer)


async def complete(request: Request, service: Service, read: Callable[[Body], Wanted], shape: type[Answer]) -> Response:
    """Answer a request for text, in one piece or as a stream."""
    service.admit(1)  # before any work is done for it
    body = await read_body(request, service.settings)
    model = service.check_model(body)
    wanted = await service.read(read, body)
    answer = shape(wanted, model, service.fingerprint, service.served.tokenizer, service.served.most_depth)
    exchange = service.begin(wanted)
    if wanted.stream:
        return EventStream(stream(request, service, exchange, answer), service.settings.keep_alive)
    try:
        await unless_gone(gather(exchange, answer), request.receive)
        return JSONResponse(answer.whole(exchange))
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    finally:
        await service.finish(exchange, log_entry(request))


async def gather(exchange: Exchange, answer: Answer) -> None:
    async for delta in exchange.deltas():
        answer.take(delta)


async def stream(request: Request, service: Service, exchange: Exchange, answer: Answer) -> AsyncGenerator[str, None]:
    """The events of an answer. The first one comes with the first token, so that a refusal has a status of its own."""
    try:
        begun = False
        async for delta in exchange.deltas():
            if not begun:
                for choice in exchange.choices:
                    for chunk in answer.opening(choice.job.index, exchange):
                        yield event(chunk)
                begun = True
            for chunk in answer.chunks(delta, exchange):
                yield event(chunk)
        yield DONE
    finally:
        await service.finish(exchange, log_entry(request))


def add_tokens(app: FastAPI, service: Service) -> None:
    prompts = service.prompts

    def tokens_of(body: Body) -> list[int]:
        if body.take("messages") is not None:
            return prompts.from_chat(body, read_tools(body.take("tools")))
        text, special = body.text("prompt"), body.flag("add_special_tokens", default=True)
        if text is None:
            raise ApiError(400, "prompt: missing; a text, or messages in its place, is needed; write one", "prompt")
        return prompts.from_text(text, "prompt", special)

    def text_of_tokens(body: Body) -> str:
        tokens = body.take("tokens")
        if not isinstance(tokens, list) or not all(type(each) is int for each in tokens):
            raise wrong("tokens", tokens, "a list of token ids is", "write one")
        prompts.check_tokens("tokens", tokens)
        return text_of(service.served.tokenizer, tokens)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, service.settings)
        service.check_model(body)
        with_texts = body.flag("return_token_strs")
        tokens = await service.read(tokens_of, body)
        body.refuse_rest()
        texts = service.served.tokenizer.convert_ids_to_tokens(tokens) if with_texts else None
        most = service.served.target.max_positions
        return JSONResponse({"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": texts})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, service.settings)
        service.check_model(body)
        text = await service.read(text_of_tokens, body)
        body.refuse_rest()
        return JSONResponse({"prompt": text})


def add_state(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(
            {"object": "list", "data": [card(service, name, created) for name in service.settings.names]}
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in service.settings.names:
            raise ApiError(404, f"model: {name[:100]!r} is not served here; GET /v1/models lists what is", "model")
        return JSONResponse(card(service, name, created))

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        return Response(status_code=200 if service.engine.alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if service.ready else 503)

    @app.get("/version")
    async def tell_version() -> Response:
        return JSONResponse({"version": version("headstart")})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)


def card(service: Service, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headstart",
        "root": service.settings.names[0],
        "parent": None,
        "max_model_len": service.served.target.max_positions,
        "headstart": {**service.served.about, "chat_template": service.prompts.has_template},
    }


def page_file(path: Path) -> Callable[[], Any]:
    async def read() -> Response:
        return FileResponse(path, headers=PAGE_HEADERS)

    return read


async def answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def answer_failure(request: Request, _: Exception) -> Response:
    """The error itself goes on to the log."""
    return error_response(
        ApiError(500, f"the server failed; its log has the reason for request {log_entry(request).request_id}")
    )


async def answer_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:100]}"
    says = {404: "there is no such path here", 405: "this path has another method"}
    return error_response(ApiError(error.status_code, f"{what}: {says.get(error.status_code, error.detail)}"))
