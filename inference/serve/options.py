"""The command line of `headstart serve`, readable without torch."""

import argparse
import ipaddress
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from headstart.inference.generate.options import ModelOptions, add_model, model_options
from headstart.recipes.command_line import own_parser

PACKAGES = ("fastapi", "llguidance", "prometheus_client", "uvicorn")
KEYS = "HEADSTART_API_KEY"
MEBIBYTE, GIBIBYTE = 2**20, 2**30


@dataclass(frozen=True)
class ServerSettings:
    """How a server presents itself and what it allows, apart from what it decodes with."""

    names: tuple[str, ...]  # names of the model; the first one is in answers
    api_keys: tuple[str, ...] = ()  # none: no key is required
    max_batch: int = 16  # choices that decode together
    max_queue: int = 64  # choices that may wait in addition to them
    max_body: int = 8 * MEBIBYTE  # bytes
    queue_timeout: float | None = 600.0  # seconds until the first token
    request_timeout: float | None = None  # seconds until the last one
    body_timeout: float = 60.0  # seconds until a request has arrived
    keep_alive: float = 15.0  # seconds of silence after which a stream gets a comment
    busy_status: int = 503  # where the queue is full
    hosts: frozenset[str] | None = None  # names of this server apart from those of loopback; None: any name

    def is_own(self, host: str | None) -> bool:
        """May a request name this server so, in Host or Origin? `host` comes without a port.

        A page of another site can point its own name at 127.0.0.1 (DNS rebinding), and its browser then sends that one.
        """
        if self.hosts is None or host is None or host in self.hosts:
            return True
        return is_loopback(host) or host == "localhost" or host.endswith(".localhost")


def is_loopback(host: str) -> bool:
    """Whether this is an address of the machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


DEFAULTS = ServerSettings(())


@dataclass(frozen=True)
class ServeOptions:
    """The model to serve, the address, and the limits."""

    model: ModelOptions
    host: str
    port: int
    settings: ServerSettings
    shutdown_timeout: float
    memory: int | None  # bytes of the cache; None: what all rows may need
    prefix_memory: int | None  # bytes for prefixes of earlier texts; None: none are kept
    always_draft: bool
    adapt_memory: int | None  # bytes for finished requests; None: none are kept
    adapt_keep: float  # seconds that one is kept


def serve_options(doc: str | None, argv: Sequence[str] | None = None) -> ServeOptions:
    """Read the command line; `doc` opens --help. Mistakes go to stderr and end the process with status 2."""
    parser = own_parser(doc)
    add_model(
        parser,
        target="folder or hub name of the model, in place of a recipe",
        head="folder of its draft head (without one: drafts by prompt lookup)",
    )
    add_names(parser)
    add_limits(parser)
    given = parser.parse_args(argv)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        needed = f"all of {', '.join(PACKAGES)} are needed to serve"
        parser.error(f"{', '.join(missing)}: not installed, {needed}; pip install -e '.[serve]'")
    if given.recipe is None and given.target is None:
        parser.error("--target: missing, a RECIPE or the folder of a model is needed; write one of them")
    model = model_options(parser, given)
    source = KEYS if given.api_key is None else "--api-key"
    keys = given.api_key or [key for key in os.environ.get(KEYS, "").split(",") if key]
    if any(not re.fullmatch("[!-~]+", key) for key in keys):
        wrong = "an empty key or one with spaces or characters beyond ASCII given"
        parser.error(f"{source}: {wrong}, visible ASCII characters are allowed, as in HTTP headers; change it")
    if any(not name for name in given.served_model_name or ()):
        parser.error("--served-model-name: '' given, a name is allowed; write one, or leave it out")
    if given.adapt_memory is not None and model.head is None:
        drafts = f"--adapt-memory: {given.adapt_memory:g} given, but drafts by {model.drafts} learn nothing"
        parser.error(f"{drafts}, a head is needed; give --head, or leave --adapt-memory out")
    if given.max_batch is not None:
        model = replace(model, decode=model.decode.model_copy(update={"max_batch": given.max_batch}))
    return ServeOptions(
        model,
        given.host,
        given.port,
        ServerSettings(
            names=tuple(given.served_model_name or [Path(str(model.target)).name]),
            api_keys=tuple(keys),
            max_batch=model.decode.max_batch,
            max_queue=given.max_queue,
            max_body=int(given.max_body * MEBIBYTE),
            queue_timeout=given.queue_timeout or None,
            request_timeout=given.request_timeout or None,
            busy_status=given.busy_status,
            hosts=own_hosts(given.host, given.allowed_host or ()),
        ),
        given.shutdown_timeout,
        None if given.memory is None else int(given.memory * GIBIBYTE),
        int(given.prefix_memory * GIBIBYTE) or None,
        given.always_draft,
        None if given.adapt_memory is None else int(given.adapt_memory * GIBIBYTE),
        given.adapt_keep * 3600,
    )


def own_hosts(host: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """The names that `is_own` allows: any, unless only this machine is listened to or names are given."""
    is_local = is_loopback(host) or host == "localhost"
    return frozenset(name.lower() for name in (*allowed, host)) if allowed or is_local else None


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add the options that are no numbers."""
    add = parser.add_argument
    name = "name that requests give as `model`; repeat it for several (default: the last part of the target's path)"
    add("--served-model-name", action="append", metavar="NAME", help=name)
    key = "key that requests must send as `Authorization: Bearer KEY`; repeat it for several"
    no_key = f"default: those in {KEYS}, separated by commas; without it no key is required"
    add("--api-key", action="append", metavar="KEY", help=f"{key} ({no_key})")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets other machines in")
    only = "name by which clients and web pages may reach the server, besides localhost; repeat it for several"
    name_or_any = "default: none at a loopback --host, else any"
    add("--allowed-host", action="append", metavar="NAME", help=f"{only} ({name_or_any})")
    always = "draft at every load; by default a head drafts only while that pays, by this machine's step times"
    add("--always-draft", action="store_true", help=always)
    status = "HTTP status of a refusal while the queue is full; clients retry after both (default: %(default)s)"
    add("--busy-status", type=int, choices=(503, 429), default=DEFAULTS.busy_status, help=status)


def add_limits(parser: argparse.ArgumentParser) -> None:
    add, forever = partial(add_number, parser), (0, 10**6)
    add("--port", int, (0, 65535), 8000, "0 takes a free one")
    add("--max-batch", int, (1, 4096), None, "texts that decode together (default: the recipe's, or 16)")
    fits = "requests wait until they fit (default: what --max-batch texts of the requested lengths need)"
    add("--memory", float, (0.001, 10**6), None, f"GiB that the cache may take; {fits}")
    again = "so that a conversation or a system prompt that comes again is not read again; 0 keeps none"
    add("--prefix-memory", float, forever, 0.5, f"GiB for prefixes of earlier texts, {again}")
    queue = "texts that may wait in addition to those; more are refused with --busy-status"
    kept = "GiB of this process's memory for finished requests, which headstart adapt trains the head on; on no disk"
    add("--adapt-memory", float, (0.001, 10**6), None, f"{kept} (default: none are kept)")
    add("--adapt-keep", float, (0.001, 8760), 24.0, "hours that a finished request is kept with --adapt-memory")
    add("--max-queue", int, forever, DEFAULTS.max_queue, queue)
    add("--max-body", float, (0.001, 1024), DEFAULTS.max_body / MEBIBYTE, "largest body of a request in MiB")
    waiting = "seconds after which a request without a first token is refused; 0: never"
    add("--queue-timeout", float, forever, DEFAULTS.queue_timeout, waiting)
    running = "seconds after which a request ends with what it has, finish_reason abort; 0: never"
    add("--request-timeout", float, forever, 0.0, running)
    ending = "seconds that running requests get to end after SIGTERM or Ctrl-C; a second signal ends them at once"
    add("--shutdown-timeout", float, forever, 30.0, ending)


def add_number(
    parser: argparse.ArgumentParser,
    name: str,
    kind: type[int] | type[float],
    allowed: tuple[float | int, float | int],
    default: float | int | None,
    text: str,
) -> None:
    low, high = allowed

    def read(given: str) -> float | int:
        try:
            number = kind(given)
        except ValueError:
            number = math.nan
        if low <= number <= high:
            return number
        raise argparse.ArgumentTypeError(f"{given} given, {low} to {high} is allowed; correct it or leave it out")

    shown = "" if default is None else " (default: %(default)g)"
    parser.add_argument(name, type=read, default=default, metavar="NUMBER", help=f"{text}{shown}")
