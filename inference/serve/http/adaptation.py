"""The routes of `headstart adapt`, for processes on the server's own machine; absent without --adapt-memory."""

import asyncio
import ipaddress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from headstart.inference.serve.errors import ApiError
from headstart.inference.serve.metrics import promised_length
from headstart.inference.serve.requests.fields import HeadRequest
from headstart.inference.serve.service import Service
from headstart.inference.serve.traffic import Adaptation, Traffic

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
LOOK = 10.0  # seconds between looks for requests that are too old


def add_adaptation(app: FastAPI, service: Service, adaptation: Adaptation) -> None:
    @app.get("/adapt")
    async def facts(request: Request) -> dict[str, Any]:
        refuse_others(request)
        return adaptation.facts()

    @app.get("/adapt/traffic")
    async def traffic(request: Request, since: int = 0) -> Response:
        refuse_others(request)
        page = await asyncio.to_thread(adaptation.traffic.page, since)
        return Response(page, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    @app.post("/adapt/head")
    async def head(fields: HeadRequest, request: Request) -> dict[str, Any]:
        refuse_others(request)
        folder = Path(fields.folder)
        try:
            changed = service.engine.change_loop(partial(adaptation.load, folder))
            await asyncio.wrap_future(changed)
        except (OSError, ValueError) as error:
            raise ApiError(400, f"folder: {error}", "folder") from None
        adaptation.head, adaptation.swaps = folder, adaptation.swaps + 1
        service.served.about["head"] = str(folder)
        service.acceptance.promised = promised_length(folder)
        return adaptation.facts()


def refuse_others(request: Request) -> None:
    """Raise ApiError unless the request comes from this machine, and from no other through a proxy on it.

    Whoever may read the traffic may read the prompts of all clients, so a client's API key is not enough.
    """
    client = request.client.host if request.client is not None else ""
    try:
        is_local = ipaddress.ip_address(client).is_loopback
    except ValueError:
        is_local = False
    if not is_local or any(name in request.headers for name in FORWARDED):
        allowed = "a process on the server's own machine is allowed; run headstart adapt there"
        raise ApiError(403, f"{request.url.path}: asked from another machine, {allowed}")


async def drop_old_traffic(traffic: Traffic) -> None:
    """Drop old requests also while nobody asks for anything."""
    while True:
        await asyncio.sleep(min(LOOK, traffic.keep))
        traffic.drop_old()
