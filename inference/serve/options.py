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

PACKAGES = ("llguidance", "prometheus_client", "starlette", "uvicorn")
KEYS = "HEADSTART_API_KEY"
MEBIBYTE, GIBIBYTE = 2**20, 2**30


@dataclass(frozen=True)
class ServerSettings:
    """A server's names, access and limits; not how it decodes."""

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
    hosts: frozenset[str] | None = None  # names of this server besides loopback names; None: any name
    image_hosts: frozenset[str] = frozenset()  # from which pictures in requests are fetched

    def is_own(self, host: str | None) -> bool:
        """Whether a request may have this host, without its port, in Host or Origin.

        Another site can point its own name at 127.0.0.1 (DNS rebinding); browsers then send that name.
        """
        if self.hosts is None or host is None or host in self.hosts:
            return True
        return is_loopback(host) or host == "localhost" or host.endswith(".localhost")


def is_loopback(host: str) -> bool:
    """Whether this is an address of this machine."""
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
    memory: int | None  # bytes of the cache; None: enough for all rows
    prefix_memory: int | None  # bytes for prefixes of earlier texts; None: they are dropped
    always_draft: bool
    adapt_memory: int | None  # bytes for finished requests; None: they are dropped
    adapt_keep: float  # seconds until a finished request is dropped


def serve_options(doc: str | None, argv: Sequence[str] | None = None) -> ServeOptions:
    """Parse the command line; `doc` is the description in --help. Errors exit with status 2."""
    parser = own_parser(doc)
    add_model(
        parser,
        target="folder or hub name of the model, instead of a recipe",
        head="folder of its draft head (without one: drafts by prompt lookup)",
    )
    add_names(parser)
    add_limits(parser)
    arguments = parser.parse_args(argv)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        needed = f"all of {', '.join(PACKAGES)} are needed to serve"
        parser.error(f"{', '.join(missing)}: not installed, {needed}; pip install -e '.[serve]'")
    if arguments.recipe is None and arguments.target is None:
        parser.error("--target: missing, a RECIPE or the folder of a model is needed; write one of them")
    model = model_options(parser, arguments)
    source = KEYS if arguments.api_key is None else "--api-key"
    keys = arguments.api_key or [key for key in os.environ.get(KEYS, "").split(",") if key]
    if any(not re.fullmatch("[!-~]+", key) for key in keys):
        wrong = "an empty key, or a key with spaces or non-ASCII characters given"
        parser.error(f"{source}: {wrong}, visible ASCII characters are allowed, as in HTTP headers; change it")
    if any(not name for name in arguments.served_model_name or ()):
        parser.error("--served-model-name: '' given, a name is allowed; write one, or leave it out")
    for host in arguments.image_host or ():
        if not re.fullmatch(r"[\w.-]+|[0-9a-fA-F]*:[0-9a-fA-F:]+", host):
            parser.error(
                f"--image-host: {host!r} given, a host's name such as images.example.org is allowed; correct it"
            )
    if arguments.adapt_memory is not None and model.head is None:
        drafts = f"--adapt-memory: {arguments.adapt_memory:g} given, but drafts by {model.drafts} cannot be trained"
        parser.error(f"{drafts}, a head is needed; give --head, or leave --adapt-memory out")
    if arguments.max_batch is not None:
        model = replace(model, decode=model.decode.model_copy(update={"max_batch": arguments.max_batch}))
    return ServeOptions(
        model,
        arguments.host,
        arguments.port,
        ServerSettings(
            names=tuple(arguments.served_model_name or [Path(str(model.target)).name]),
            api_keys=tuple(keys),
            max_batch=model.decode.max_batch,
            max_queue=arguments.max_queue,
            max_body=int(arguments.max_body * MEBIBYTE),
            queue_timeout=arguments.queue_timeout or None,
            request_timeout=arguments.request_timeout or None,
            busy_status=arguments.busy_status,
            hosts=own_hosts(arguments.host, arguments.allowed_host or ()),
            image_hosts=frozenset(name.lower() for name in arguments.image_host or ()),
        ),
        arguments.shutdown_timeout,
        None if arguments.memory is None else int(arguments.memory * GIBIBYTE),
        int(arguments.prefix_memory * GIBIBYTE) or None,
        arguments.always_draft,
        None if arguments.adapt_memory is None else int(arguments.adapt_memory * GIBIBYTE),
        arguments.adapt_keep * 3600,
    )


def own_hosts(host: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """The names that `is_own` allows: any, unless the server listens only to this machine or names are given."""
    is_local = is_loopback(host) or host == "localhost"
    return frozenset(name.lower() for name in (*allowed, host)) if allowed or is_local else None


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add the options that are not numbers."""
    add = parser.add_argument
    name = "name that requests may give as `model`; repeatable (default: the last part of the target's path)"
    add("--served-model-name", action="append", metavar="NAME", help=name)
    key = "key that requests must send as `Authorization: Bearer KEY`; repeatable"
    no_key = f"default: the comma-separated keys in {KEYS}; without any, no key is required"
    add("--api-key", action="append", metavar="KEY", help=f"{key} ({no_key})")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 accepts other machines")
    only = "host name, besides localhost, by which clients and web pages may reach the server; repeatable"
    name_or_any = "default: none with a loopback --host, else any"
    add("--allowed-host", action="append", metavar="NAME", help=f"{only} ({name_or_any})")
    fetched = "host name from which pictures that requests name by address are fetched; repeatable"
    add("--image-host", action="append", metavar="NAME", help=f"{fetched} (default: none; data URLs are always read)")
    always = "draft at any load; by default a drafter drafts only while that pays, by this machine's step times"
    add("--always-draft", action="store_true", help=always)
    status = "HTTP status of refusals while the queue is full; clients retry after both (default: %(default)s)"
    add("--busy-status", type=int, choices=(503, 429), default=DEFAULTS.busy_status, help=status)


def add_limits(parser: argparse.ArgumentParser) -> None:
    add, forever = partial(add_number, parser), (0, 10**6)
    add("--port", int, (0, 65535), 8000, "0 picks a free one")
    add("--max-batch", int, (1, 4096), None, "texts that decode together (default: from the recipe, or 16)")
    fits = "requests wait until they fit (default: enough for --max-batch texts of the requested lengths)"
    add("--memory", float, (0.001, 10**6), None, f"GiB for the cache; {fits}")
    again = "so that a repeated conversation or system prompt skips prefill; 0 drops them"
    add("--prefix-memory", float, forever, 0.5, f"GiB for prefixes of earlier texts, {again}")
    queue = "texts that may wait in addition; more are refused with --busy-status"
    memory = "GiB of this process's memory, never disk, for finished requests that headstart adapt trains the head on"
    add("--adapt-memory", float, (0.001, 10**6), None, f"{memory} (default: they are dropped)")
    add("--adapt-keep", float, (0.001, 8760), 24.0, "hours until --adapt-memory drops a finished request")
    add("--max-queue", int, forever, DEFAULTS.max_queue, queue)
    add("--max-body", float, (0.001, 1024), DEFAULTS.max_body / MEBIBYTE, "largest request body in MiB")
    waiting = "seconds until a request without a first token is refused; 0: never"
    add("--queue-timeout", float, forever, DEFAULTS.queue_timeout, waiting)
    running = "seconds until a request ends with the text so far, finish_reason abort; 0: never"
    add("--request-timeout", float, forever, 0.0, running)
    ending = "seconds for running requests to end after SIGTERM or Ctrl-C; a second signal ends them at once"
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

    def parsed(value: str) -> float | int:
        try:
            number = kind(value)
        except ValueError:
            number = math.nan
        if low <= number <= high:
            return number
        raise argparse.ArgumentTypeError(f"{value} given, {low} to {high} is allowed; correct it or leave it out")

    shown = "" if default is None else " (default: %(default)g)"
    parser.add_argument(name, type=parsed, default=default, metavar="NUMBER", help=f"{text}{shown}")
