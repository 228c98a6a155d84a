"""The server's routes. Routes for `headstart adapt` exist only if asked for, and answer only this machine."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headstart.inference.serve.api.answers import Answer, ChatAnswer, CompletionAnswer
from headstart.inference.serve.api.errors import ApiError, wrong
from headstart.inference.serve.api.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    HeadRequest,
    TokenizeRequest,
    read_fields,
)
from headstart.inference.serve.api.output import Choice, Output
from headstart.inference.serve.api.responses import ResponsesAnswer, ResponsesRequest
from headstart.inference.serve.exchange import Exchange
from headstart.inference.serve.metrics import promised_length
from headstart.inference.serve.options import ServerSettings, is_loopback
from headstart.inference.serve.service import Served, Service
from headstart.inference.serve.traffic import Adaptation, Traffic
from headstart.inference.serve.transport import (
    CLIENT_GONE,
    KEEP_ALIVE,
    EventStream,
    Front,
    error_response,
    event,
    log_entry,
    unless_gone,
)
from headstart.inference.targets.tokenizer import text_of

LONG = 64  # log-probabilities; shaping more takes long enough to delay other requests
PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html", "/style.css": "style.css", "/page.js": "page.js"}
# The page may only load from and connect to this server.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def build_app(served: Served, settings: ServerSettings, log: Callable[[str], None]) -> tuple[ASGIApp, Service]:
    """The server as an ASGI application, and the state of its routes. The worker starts with the application."""
    service, adaptation = Service(served, settings, log), served.adaptation

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        cleaning = None if adaptation is None else asyncio.create_task(drop_old_traffic(adaptation.traffic))
        yield
        if cleaning is not None:
            cleaning.cancel()
        service.worker.stop()

    routes = [*completions(service), *tokens(service), *state(service)]
    if adaptation is not None:
        routes += adaptation_routes(service, adaptation)
    routes += [Route(path, partial(page_file, name)) for path, name in FILES.items()]
    kinds: tuple[type[Exception], ...] = (ApiError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, answer_error), lifespan=lifespan)
    return Front(app, settings, log), service


def completions(service: Service) -> list[Route]:
    kinds: dict[str, tuple[type[Any], type[Answer]]] = {
        "/v1/chat/completions": (ChatRequest, ChatAnswer),
        "/v1/completions": (CompletionRequest, CompletionAnswer),
        "/v1/responses": (ResponsesRequest, ResponsesAnswer),
    }
    return [Route(path, partial(complete, service, *kind), methods=["POST"]) for path, kind in kinds.items()]


async def complete(service: Service, kind: type[Any], shape: type[Answer], request: Request) -> Response:
    """Answer a request for text, in one piece or as a stream; its body has the fields of this kind."""
    service.admit(1)  # before its body is read
    body, arrived = await request.body(), time.perf_counter()
    encoded = await unless_gone(service.in_thread(partial(service.encode, kind), body), request.receive)
    exchange = service.begin(encoded, arrived)
    name = service.check_model(encoded.fields.model)
    answer = shape(exchange, name, service.fingerprint, service.served.tokenizer, service.served.max_depth)
    if encoded.fields.stream:
        return EventStream(stream(request, service, exchange, answer))
    try:
        await unless_gone(gather(exchange), request.receive)
        return await asyncio.to_thread(lambda: JSONResponse(answer.full()))
    finally:
        await service.finish(exchange, log_entry(request))


async def gather(exchange: Exchange) -> None:
    async for _ in exchange.outputs():
        pass


async def stream(request: Request, service: Service, exchange: Exchange, answer: Answer) -> AsyncGenerator[str, None]:
    """The events of an answer. The first comes with the first token, so that an earlier error has its own status."""
    begun = opened = False
    try:
        async for addition in exchange.outputs(service.settings.keep_alive):
            begun = True
            if addition is None:
                yield KEEP_ALIVE
                continue
            shape = partial(events_of, answer, addition, opened)
            is_long = len(addition[1].logprobs) > LONG
            for each in await asyncio.to_thread(shape) if is_long else shape():
                yield each
            opened = True
        yield answer.last
    except ApiError as error:
        if not begun:
            raise
        yield event(answer.failed(error))
        yield answer.last
    finally:
        await service.finish(exchange, log_entry(request))


def events_of(answer: Answer, addition: tuple[Choice, Output], opened: bool) -> list[str]:
    """The events of a step."""
    return [event(chunk) for chunk in [*([] if opened else answer.opening()), *answer.chunks(*addition)]]


def tokens(service: Service) -> list[Route]:
    tokenizer = service.served.tokenizer

    def tokenize(body: bytes) -> Response:
        fields = read_fields(TokenizeRequest, body)
        service.check_model(fields.model)
        tokens = service.prompts.tokenize(fields)
        texts = tokenizer.convert_ids_to_tokens(tokens) if fields.return_token_strs else None
        most = service.served.target.max_positions
        return JSONResponse({"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": texts})

    def detokenize(body: bytes) -> Response:
        fields = read_fields(DetokenizeRequest, body)
        service.check_model(fields.model)
        if len(fields.tokens) > (most := service.served.target.max_positions):
            allowed = f"at most {most} (the context length) are"
            raise wrong("tokens", f"{len(fields.tokens)} tokens", allowed, "send them in parts")
        service.prompts.check_tokens("tokens", fields.tokens)
        return JSONResponse({"prompt": text_of(tokenizer, fields.tokens)})

    async def in_thread(answer: Callable[[bytes], Response], request: Request) -> Response:
        return await service.in_thread(answer, await request.body())

    paths = {"/tokenize": tokenize, "/detokenize": detokenize}
    return [Route(path, partial(in_thread, answer), methods=["POST"]) for path, answer in paths.items()]


def state(service: Service) -> list[Route]:
    created = int(time.time())

    async def models(_: Request) -> Response:
        cards = [card(service, name, created) for name in service.settings.names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        return JSONResponse(card(service, service.check_model(request.path_params["name"]), created))

    async def health(_: Request) -> Response:
        return Response(status_code=200 if service.worker.alive else 503)

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if service.ready else 503)

    async def own_version(_: Request) -> Response:
        return JSONResponse({"version": version("headstart")})

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    paths = {"/v1/models": models, "/v1/models/{name:path}": model, "/health": health, "/ping": health, "/ready": ready}
    return [Route(path, answer) for path, answer in {**paths, "/version": own_version, "/metrics": metrics}.items()]


FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
EXPIRY_SECONDS = 10.0  # between checks for requests that are too old


def adaptation_routes(service: Service, adaptation: Adaptation) -> list[Route]:
    async def facts(request: Request) -> Response:
        refuse_others(request)
        return JSONResponse(adaptation.facts())

    async def traffic(request: Request) -> Response:
        refuse_others(request)
        since = request.query_params.get("since", "0")
        if not since.isdecimal():
            raise wrong("since", since, "a whole number is", "correct it")
        page = await asyncio.to_thread(adaptation.traffic.page, int(since))
        return Response(page, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    async def head(request: Request) -> Response:
        refuse_others(request)
        folder = Path(read_fields(HeadRequest, await request.body()).folder)
        try:
            changed = service.worker.change_loop(partial(adaptation.load, folder))
            await asyncio.wrap_future(changed)
        except (OSError, ValueError) as error:
            raise ApiError(400, f"folder: {error}", "folder") from None
        adaptation.head, adaptation.swaps = folder, adaptation.swaps + 1
        service.served.about["head"] = str(folder)
        service.acceptance.promised = promised_length(folder)
        return JSONResponse(adaptation.facts())

    return [
        Route("/adapt", facts),
        Route("/adapt/traffic", traffic),
        Route("/adapt/head", head, methods=["POST"]),
    ]


def refuse_others(request: Request) -> None:
    """Raise ApiError unless the request comes from this machine, and not through a proxy on it.

    The traffic holds the prompts of all clients, so a client's API key is not enough.
    """
    is_local = request.client is not None and is_loopback(request.client.host)
    if not is_local or any(name in request.headers for name in FORWARDED):
        allowed = "a process on the server's own machine is allowed; run headstart adapt there"
        raise ApiError(403, f"{request.url.path}: requested from another machine, {allowed}")


async def drop_old_traffic(traffic: Traffic) -> None:
    """Expire stored requests even when the server is idle."""
    while True:
        await asyncio.sleep(min(EXPIRY_SECONDS, traffic.keep))
        traffic.drop_old()


def card(service: Service, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headstart",
        "root": service.settings.names[0],
        "parent": None,
        "max_model_len": service.served.target.max_positions,
        "headstart": {**service.served.about, "chat_template": service.prompts.template.exists},
    }


async def page_file(name: str, _: Request) -> Response:
    return FileResponse(PAGE / name, headers=PAGE_HEADERS)


async def answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error_response(error)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        reasons = {404: "there is no such path", 405: f"method not allowed; allowed: {headers.get('Allow')}"}
        message = f"{request.method} {request.url.path[:100]}: {reasons.get(error.status_code, error.detail)}"
        return error_response(ApiError(error.status_code, message, headers=headers))
    request_id = log_entry(request)["request_id"]  # the error is raised again and logged
    return error_response(ApiError(500, f"the server failed; its log has the reason, under request {request_id}"))
